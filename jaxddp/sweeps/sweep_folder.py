"""The folder of a sweep: `sweep.json` with its trials, and the claims of trials that a sweep runs.

Several hosts that share the folder may work on one sweep. A lock protects the changes of the file, and a host claims a
trial before it starts it.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Option, Unreachable
from jaxddp.core.wording import show
from jaxddp.sweeps.trials import Trial
from jaxddp.workdir.lock import is_locked, try_lock

SWEEP_FILE = "sweep.json"
_LOCK, _CLAIMS = ".sweep.lock", ".claims"
_LOCK_SECONDS, _RETRY_SECONDS = 60.0, 0.05
_VERSION = 1


@dataclass
class TrialRecord:
    """A trial in `sweep.json`.

    Attributes:
        ended: "pruned" or "failed", if the sweep does not continue the trial for this reason; else None.
        finished_words: the arguments with which the sweep last saw the trial finish. With other arguments, such as a
            longer duration, the trial is started again.
    """

    name: str
    values: dict[str, str]
    words: list[str]
    ended: Literal["pruned", "failed"] | None = None
    finished_words: list[str] | None = None

    @property
    def trial(self) -> Trial:
        return Trial(self.name, self.values, tuple(self.words))


@dataclass
class SweepFile:
    """The content of `sweep.json`: the config, and the trials of all commands so far in the order of their creation."""

    config: str
    records: dict[str, TrialRecord] = field(default_factory=dict)

    def add(self, trial: Trial) -> None:
        """Add a trial, or give a known trial its present arguments."""
        record = self.records.setdefault(trial.name, TrialRecord(trial.name, {}, []))
        record.values, record.words = dict(trial.values), list(trial.words)

    def to_json(self) -> bytes:
        trials = [{key: value for key, value in vars(record).items() if value} for record in self.records.values()]
        content = {"version": _VERSION, "config": self.config, "trials": trials}
        return (json.dumps(content, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, content: bytes) -> "SweepFile":
        """Read the result of `to_json`. Raises: ValueError, KeyError, TypeError or AttributeError for other content."""
        saved: Mapping[str, Any] = files.parse_json(content, dict)
        if saved["version"] != _VERSION:
            raise ValueError(f"version {saved['version']} instead of {_VERSION}")
        records = [TrialRecord(**trial) for trial in saved["trials"]]
        for record in records:
            texts = [saved["config"], record.name, *record.values, *record.values.values(), *record.words]
            if not all(isinstance(text, str) for text in [*texts, *(record.finished_words or ())]):
                raise ValueError(f"trial {show(record.name)} has other values than texts")
            if record.ended not in (None, "pruned", "failed"):
                raise ValueError(f"trial {show(record.name)} has ended as {show(record.ended)}")
        return cls(saved["config"], {record.name: record for record in records})


class SweepFolder:
    """The folder of a sweep of one config.

    Args:
        config: the absolute path of the config's file, or the name of a built-in config.
    """

    def __init__(self, directory: Path, config: str):
        self.directory, self._config = directory, config
        self._claims: dict[str, BinaryIO] = {}

    @property
    def path(self) -> Path:
        return self.directory / SWEEP_FILE

    @contextlib.contextmanager
    def changed(self) -> Iterator[SweepFile]:
        """Yield the content of the file, and write it after the block if the block changed it. Other hosts wait.

        Raises:
            InputError: the file is damaged, or belongs to a sweep of another config.
            Unreachable: another process holds the lock for a minute.
        """
        files.create(self.directory)
        with self._locked():
            content = self.read()
            before = content.to_json()
            yield content
            after = content.to_json()
            if after != before or not self.path.exists():
                files.replace(self.path, after)

    def read(self) -> SweepFile:
        """Return the content of the file; without trials if there is no file. Raises: InputError."""
        try:
            content = SweepFile.from_json(files.read(self.path))
        except FileNotFoundError:
            return SweepFile(self._config)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read ({error.strerror}); restore it") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            advice = ("restore it, or give another ", Option("workdir"))
            raise InputError(f"{self.path}: is not the file of a sweep ({error})", advice=advice) from None
        if content.config != self._config:
            advice = ("give another ", Option("workdir"))
            raise InputError(f"{self.path}: is a sweep of {content.config}, not of {self._config}", advice=advice)
        return content

    def update(self, name: str, **changes: Any) -> None:
        """Change fields of a trial's record."""
        with self.changed() as content:
            for key, value in changes.items():
                setattr(content.records[name], key, value)

    def claim(self, name: str) -> bool:
        """Claim a trial for this process, and return True; False if another process runs it.

        A claim ends by `release` or with the process.
        """
        if self.is_claimed(name) or is_locked(self.directory / name):
            return False
        path = files.create(self.directory / _CLAIMS) / name
        with files.readable_errors(path):
            file = files.open_regular(path, "ab")
        if not try_lock(file):
            file.close()
            return False
        self._claims[name] = file
        return True

    def is_claimed(self, name: str) -> bool:
        """Return whether this process has claimed a trial."""
        return name in self._claims

    def release(self, name: str) -> None:
        """End the claim of a trial."""
        self._claims.pop(name).close()

    def close(self) -> None:
        """End all claims."""
        for name in [*self._claims]:
            self.release(name)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        path, deadline = self.directory / _LOCK, time.monotonic() + _LOCK_SECONDS
        with files.readable_errors(path):
            lock = files.open_regular(path, "ab")
        with lock:
            while not try_lock(lock):
                if time.monotonic() > deadline:
                    problem = f"{path}: another process has locked it for {_LOCK_SECONDS:g} s"
                    raise Unreachable(f"{problem}; end that process")
                time.sleep(_RETRY_SECONDS)
            yield


def of_earlier(content: SweepFile, trials: Sequence[Trial]) -> list[str]:
    """Return the names of the trials in the file that are not among these."""
    return [name for name in content.records if name not in {trial.name for trial in trials}]
