"""The trials of a search: each new trial gets the values that `jaxddp.sweeps.study` suggests after the earlier ones."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jaxddp.cluster.process_output import say
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted
from jaxddp.sweeps.grid_queue import say_end
from jaxddp.sweeps.spaces import Space
from jaxddp.sweeps.study import State, Tried, check_optuna, should_prune, suggestion
from jaxddp.sweeps.sweep_folder import SweepFile, SweepFolder, TrialRecord
from jaxddp.sweeps.trial_process import End
from jaxddp.sweeps.trial_result import is_finished, result_of
from jaxddp.sweeps.trials import Trial

_ATTEMPTS = 20
"""The number of suggestions after which a search has no new values."""


@dataclass(frozen=True)
class SearchOptions:
    """How a search suggests trials.

    Attributes:
        trials: the number of trials, over all hosts and all starts of the sweep.
        seed: the seed of the suggestions.
        prune: whether trials are ended early by their validations.
    """

    trials: int
    seed: int = 0
    prune: bool = False


class SearchQueue:
    """The source of the trials of a search; see `jaxddp.sweeps.runner.TrialSource`.

    A trial that another process began and did not finish is continued before a new trial is suggested.

    Attributes:
        folder: the folder of the sweep.
        earlier: the names of the trials in the file of the sweep whose values are outside the present spaces.
        error: the reason why the search ended early; None if it did not.

    Args:
        make_trial: returns the trial for the word of each key.
        lowest: whether a lower value of the metric is better.

    Raises:
        InputError: Optuna is not installed, or the file of the sweep belongs to another config.
    """

    def __init__(
        self,
        folder: SweepFolder,
        spaces: Mapping[str, Space],
        make_trial: Callable[[Mapping[str, str]], Trial],
        options: SearchOptions,
        *,
        lowest: bool,
    ):
        check_optuna()
        self.folder, self._spaces, self._make_trial = folder, spaces, make_trial
        self._options, self._lowest = options, lowest
        self._ended, self._is_exhausted = set[str](), False
        self.error: InputError | None = None
        # The number of validations of each trial that were compared with those of the other trials.
        self._checked = dict[str, int]()
        # The options of the command may have changed since the trials were suggested.
        self._trials = {record.name: make_trial(record.values) for record in self._records(folder.read())}
        with folder.changed() as content:
            for trial in self._trials.values():
                content.add(trial)
            self.earlier = [name for name in content.records if name not in self._trials]

    def summary(self) -> str:
        """Return the number of trials, and how many were suggested before."""
        suggested = len(self._records(self.folder.read()))
        return f"{counted(self._options.trials, 'trial')}" + (f" ({suggested} suggested before)" if suggested else "")

    def unfinished(self) -> list[Trial]:
        """Return the trials that were suggested and have not ended."""
        return [self._trial(record) for record in self._records(self.folder.read()) if self._state(record) == "running"]

    def next(self) -> Trial | None:
        with self.folder.changed() as content:
            records = self._records(content)
            for record in records:
                is_open = record.name not in self._ended and self._state(record) == "running"
                if is_open and self.folder.claim(record.name):
                    return self._trial(record)
            is_complete = len(records) >= self._options.trials
            if is_complete or self._is_exhausted or self.error is not None:
                return None
            return self._new_trial(content, records)

    def record_end(self, trial: Trial, end: End) -> None:
        if end == "done":
            self.folder.update(trial.name, finished_words=list(trial.words))
            self.error = self.error or self._fault(trial)
        elif end in ("pruned", "failed"):
            self.folder.update(trial.name, ended=end)
        self._ended.add(trial.name)
        self.folder.release(trial.name)
        records = self._records(self.folder.read())
        ended = [record for record in records if self._has_ended(record)]
        say_end(end, self.folder, trial, f"{len(ended)} of {self._options.trials}")

    def should_prune(self, trial: Trial) -> bool:
        if not self._options.prune:
            return False
        result = result_of(self.folder.directory / trial.name)
        others = [self._tried(record) for record in self._records(self.folder.read()) if record.name != trial.name]
        running = Tried(trial.values, "running", result.values)
        checked, self._checked[trial.name] = self._checked.get(trial.name, 0), len(result.values)
        return should_prune(self._spaces, others, running, lowest=self._lowest, checked=checked)

    def _new_trial(self, content: SweepFile, records: list[TrialRecord]) -> Trial | None:
        tried = [self._tried(record) for record in records]
        for attempt in range(_ATTEMPTS):
            values = suggestion(self._spaces, tried, lowest=self._lowest, seed=self._options.seed, attempt=attempt)
            try:
                trial = self._make_trial(values)
            except InputError as error:
                # Each value was checked beside the first values of the other keys, not beside these.
                say(f"jaxddp sweep: a suggestion is left out: {error}")
                continue
            if trial.name not in content.records:
                self.folder.claim(trial.name)
                content.add(trial)
                self._trials[trial.name] = trial
                return trial
        self._is_exhausted = True
        say(f"jaxddp sweep: after {counted(len(records), 'trial')}, the search suggests no new values")
        return None

    def _records(self, content: SweepFile) -> list[TrialRecord]:
        """Return the trials whose values are within the present intervals and lists."""

        def is_within(record: TrialRecord) -> bool:
            same_keys = record.values.keys() == self._spaces.keys()
            return same_keys and all(record.values[key] in space for key, space in self._spaces.items())

        return [record for record in content.records.values() if is_within(record)]

    def _trial(self, record: TrialRecord) -> Trial:
        """Return the trial of a record. Another host may have suggested it."""
        if record.name not in self._trials:
            self._trials[record.name] = self._make_trial(record.values)
        return self._trials[record.name]

    def _state(self, record: TrialRecord) -> State:
        if is_finished(self.folder.directory / record.name, record):
            return "done"
        return "running" if record.ended is None else record.ended

    def _has_ended(self, record: TrialRecord) -> bool:
        return not self.folder.is_claimed(record.name) and self._state(record) != "running"

    def _tried(self, record: TrialRecord) -> Tried:
        state, result = self._state(record), result_of(self.folder.directory / record.name)
        return Tried(record.values, state, result.values, result.best if state == "done" else None)

    def _fault(self, trial: Trial) -> InputError | None:
        """Return the error of a finished trial that a search cannot compare with others; None if there is none."""
        result = result_of(self.folder.directory / trial.name)
        if result.metric is None:
            return InputError(f"{trial.name}: was not validated; a search compares trials by their validations")
        if result.lowest != self._lowest:
            return InputError(Key("checkpoint.best"), f": {trial.name} measured only {result.metric}")
        return None
