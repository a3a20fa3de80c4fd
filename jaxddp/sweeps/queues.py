"""Decides which trial is next: those of a grid in their order, or for a search what Optuna suggests after all others.

Each suggestion is made from a new study in memory, so `sweep.json` and the files of the runs are the only state: a
search that is resumed, or that several hosts share, continues with the same suggestions. The sampler is Optuna's TPE
(Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization"; Akiba et al. 2019, arXiv:1907.10902), and the
pruner its `MedianPruner`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxddp.core.errors import InputError, Key
from jaxddp.core.log import say
from jaxddp.core.wording import counted, not_installed
from jaxddp.sweeps.folder import SweepFile, SweepFolder, TrialRecord, is_finished, result_of
from jaxddp.sweeps.trials import Space, Trial, TrialEnd

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

SearchState = Literal["running", "done", "pruned", "failed"]
_ATTEMPTS = 20
"""The number of suggestions after which a search has no new values."""


class GridQueue:
    """The trials of a grid, in their order: finished ones are left out, and those of another process are skipped.

    It writes the trials into the file of the sweep.

    Attributes:
        folder: the folder of the sweep.
        earlier: the names of the trials in the file of the sweep that are not in this grid.
        error: the reason why the sweep ended early; None if it did not.
    """

    def __init__(self, folder: SweepFolder, trials: Sequence[Trial] = ()):
        self.folder, self._trials = folder, {trial.name: trial for trial in trials}
        self._ended = set[str]()
        self.error: InputError | None = None
        with folder.changed() as content:
            self.earlier = [name for name in content.records if name not in self._trials]
            for trial in trials:
                content.add(trial)

    def summary(self) -> str:
        """Return the number of trials, and how many have finished."""
        finished = len(self._trials) - len(self.unfinished())
        return f"{counted(len(self._trials), 'trial')}" + (f" ({finished} finished)" if finished else "")

    def unfinished(self) -> list[Trial]:
        """Return the trials that have not finished, and those that this process runs."""
        records = self.folder.read().records

        def is_open(trial: Trial) -> bool:
            name = trial.name
            return self.folder.is_claimed(name) or not is_finished(self.folder.directory / name, records[name])

        return [*filter(is_open, self._trials.values())]

    def next(self) -> Trial | None:
        """Return the trial to start next; None if there is none at present."""
        for trial in self.unfinished():
            if trial.name not in self._ended and self.folder.claim(trial.name):
                return trial
        return None

    def record_end(self, trial: Trial, end: TrialEnd) -> None:
        """Record and print the end of a trial that `next` returned. The error of a failed trial is already printed."""
        if end == "done":
            self.folder.update(trial.name, finished_words=list(trial.words))
        self._ended.add(trial.name)
        self.folder.release(trial.name)
        if end == "elsewhere":
            say(f"{trial.name}: another process trains it")
        elif end not in ("failed", "bad input"):
            say(f"{trial.name}: {end}, {result_of(self.folder.directory / trial.name)} ({self._progress()})")

    def should_prune(self, trial: Trial) -> bool:
        """Return whether a running trial is to be pruned."""
        return False

    def _progress(self) -> str:
        return f"{len(self._trials) - len(self.unfinished())} of {len(self._trials)}"


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


@dataclass(frozen=True)
class Tried:
    """A trial of a search.

    Attributes:
        values: the word of each key.
        measured: the values of the metric at each validation so far, the oldest first.
        best: the value at the best validation; None if there is none, or if the trial runs.
    """

    values: Mapping[str, str]
    state: SearchState
    measured: Sequence[float] = ()
    best: float | None = None


class SearchQueue(GridQueue):
    """The trials of a search. One that another process began and did not finish comes before a new suggestion.

    Attributes:
        earlier: the names of the trials in the file of the sweep whose values are outside the present spaces.

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
        try:
            import optuna  # noqa: F401
        except ModuleNotFoundError as error:
            raise InputError(f"sweep: {not_installed(str(error.name), 'search')}") from None
        self.folder, self._spaces, self._make_trial = folder, spaces, make_trial
        self._options, self._lowest, self._is_exhausted = options, lowest, False
        # The number of validations of each trial that were compared with those of the other trials.
        self._checked = dict[str, int]()
        # The options of the command may have changed since the trials were suggested.
        super().__init__(folder, [make_trial(record.values) for record in self._records(folder.read())])

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

    def record_end(self, trial: Trial, end: TrialEnd) -> None:
        if end == "done":
            self.error = self.error or self._fault(trial)
        elif end in ("pruned", "failed"):
            self.folder.update(trial.name, ended=end)
        super().record_end(trial, end)

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

    def _state(self, record: TrialRecord) -> SearchState:
        return "done" if is_finished(self.folder.directory / record.name, record) else record.ended or "running"

    def _progress(self) -> str:
        records = [each for each in self._records(self.folder.read()) if not self.folder.is_claimed(each.name)]
        return f"{sum(self._state(record) != 'running' for record in records)} of {self._options.trials}"

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


def suggestion(
    spaces: Mapping[str, Space], tried: Sequence[Tried], *, lowest: bool, seed: int, attempt: int = 0
) -> dict[str, str]:
    """Return a word for each key, a function of the arguments.

    Args:
        spaces: the values of each key.
        tried: the trials so far, in the order of their creation, with values within `spaces`.
        lowest: whether a lower value of the metric is better.
        seed: the seed of the search.
        attempt: the number of earlier suggestions after the same trials.
    """
    # A generator that began again with the seed after a restart would repeat its first numbers.
    state = np.random.SeedSequence([seed, len(tried), attempt]).generate_state(1)
    params = _study(spaces, tried, lowest=lowest, seed=int(state[0])).ask(_distributions(spaces)).params
    return {key: space.word(params[key]) for key, space in spaces.items()}


def should_prune(
    spaces: Mapping[str, Space], others: Sequence[Tried], trial: Tried, *, lowest: bool, checked: int = 0
) -> bool:
    """Return whether a running trial is to be pruned at one of its validations after the first `checked` ones.

    It is pruned if its best validation so far is worse than the median of the finished trials at the same number of
    validations. The first five trials are never pruned.
    """
    import optuna

    if len(trial.measured) <= checked:
        return False
    study, pruner = _study(spaces, others, lowest=lowest), optuna.pruners.MedianPruner()
    # Validations may follow each other faster than this function is called.
    counts = range(checked + 1, len(trial.measured) + 1)
    return any(pruner.prune(study, _frozen(spaces, replace(trial, measured=trial.measured[:n]))) for n in counts)


def _study(spaces: Mapping[str, Space], tried: Sequence[Tried], *, lowest: bool, seed: int = 0) -> "Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="minimize" if lowest else "maximize", sampler=sampler)
    for trial in tried:
        # Optuna needs a value for a finished trial.
        is_without_value = trial.state == "done" and trial.best is None
        study.add_trial(_frozen(spaces, replace(trial, state="failed") if is_without_value else trial))
    return study


def _frozen(spaces: Mapping[str, Space], trial: Tried) -> "FrozenTrial":
    from optuna.trial import TrialState, create_trial

    return create_trial(
        state=TrialState[{"done": "COMPLETE", "failed": "FAIL"}.get(trial.state, trial.state.upper())],
        value=trial.best if trial.state == "done" else None,
        params={key: space.param(trial.values[key]) for key, space in spaces.items()},
        distributions=_distributions(spaces),
        intermediate_values=dict(enumerate(trial.measured)),
    )


def _distributions(spaces: Mapping[str, Space]) -> dict[str, Any]:
    return {key: space.distribution() for key, space in spaces.items()}
