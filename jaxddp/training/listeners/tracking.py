"""The base class of loggers for tracking services; it records the run's id, config, versions and commit."""

import importlib.util
import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import jaxddp.core.files as files
from jaxddp.config import Config, LogConfig
from jaxddp.core.errors import InputError, Key
from jaxddp.core.libraries import installed_version
from jaxddp.core.wording import not_installed
from jaxddp.overrides import flatten
from jaxddp.training.events import RunStart
from jaxddp.training.listeners.metric_rows import RowListener
from jaxddp.training.progress.lines import count_parameters
from jaxddp.training.validation.predicted_images import DEFAULT_SHOWN, images_to_show

PROJECT = "jaxddp"
"""The default project, or experiment."""
_PACKAGES = ("jaxddp", "jax", "jaxlib", "flax", "optax")
_GIT_SECONDS = 5
"""On a network file system git may take long, and a run should not wait for it."""


class TrackingLogger(RowListener, ABC):
    """A logger for a service. All processes share one run of the service; a resumed run continues it.

    Args:
        directory: the work directory; `LIBRARY.json` in it holds the id of the run.
        images: how many validation images to show at each evaluation.
        log: the `log` section of the config, with the project, the name, and values to record besides the config.
    """

    library: ClassVar[str]
    """The name of the logger, of its library, and of the package's extra that installs it."""

    def __init__(self, directory: Path, images: int = DEFAULT_SHOWN, log: LogConfig | None = None):
        self._directory, self._log = directory, log or LogConfig()
        self.wants_predictions = images

    @classmethod
    def of(cls, config: Config, workdir: Path) -> Self:
        """Return the logger of a config. Raises: InputError if its library is not installed."""
        if importlib.util.find_spec(cls.library) is None:
            missing = not_installed(cls.library, cls.library)
            raise InputError(Key.plain("log.to", cls.library), f": the package {missing}")
        return cls(workdir, images_to_show(config), config.log)

    def start(self, run: RunStart) -> None:
        file, recorded = self._directory / f"{self.library}.json", self._log.recorded | provenance(run)
        run_id = self.open(saved_id(file, run), recorded)
        save_id(file, run_id)
        self.finish_open(recorded)

    @abstractmethod
    def open(self, saved_id: str | None, recorded: Mapping[str, Any]) -> str:
        """Open the service's run with a saved id, or create a run if the id is None. Returns the id of the run."""

    @abstractmethod
    def finish_open(self, recorded: Mapping[str, Any]) -> None:
        """Finish the setup after the id of the run is saved, and print the address of the run."""

    @property
    def default_name(self) -> str:
        """The default name of the run: the name of its work directory."""
        return self._directory.absolute().name


def saved_id(path: Path, run: RunStart) -> str | None:
    """Return the id in the file at `path`; None for a run from step 0, or if there is no such file.

    Raises: InputError if the file holds no id.
    """
    if run.start_step == 0 or not path.exists():
        return None
    advice = "remove it to log to a new run"
    with files.reading(path, advice):
        content = files.read(path)
    try:
        return str(files.parse_json(content)["id"])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: holds no id of a run; {advice}") from None


def save_id(path: Path, run_id: str) -> None:
    """Save the id of a run for when it is resumed. Raises: InputError if the file cannot be written."""
    files.create(path.parent)
    files.replace(path, (json.dumps({"id": run_id}) + "\n").encode())


def provenance(run: RunStart, folder: Path | None = None) -> dict[str, Any]:
    """Return the config by dotted names, together with the entries `run.…`, `versions.…` and `code.…`.

    `code.…` describes the repository around `folder`, by default the current directory.
    """
    sections = {
        "run": {
            "devices": run.devices,
            "device_kind": run.device_kind,
            "processes": run.processes,
            "parameters": None if run.params is None else count_parameters(run.params),
            "examples": run.num_examples,
            "steps": run.total_steps,
        },
        "versions": {package: installed_version(package) for package in _PACKAGES},
        "code": code_version(folder or Path.cwd()),
    }
    return flatten({**run.config, **sections})


def code_version(folder: Path) -> dict[str, Any]:
    """Return the `commit` of the repository around a folder, and whether its files are `dirty` (differ from it).

    The result is empty if git is missing, there is no repository, or git takes longer than seconds.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": _git(folder, "status", "--porcelain", "--untracked-files=no") != ""}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(folder: Path, *arguments: str) -> str:
    # `git status` must not lock a repository in which somebody works.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    return result.stdout.strip()
