"""Decides which trial is next: those of a grid in their order, or for a search what Optuna suggests after all others.

Each suggestion is made from a new study in memory, so `sweep.json` and the files of the runs are the only state: a
search that is resumed, or that several hosts share, continues with the same suggestions. The sampler is Optuna's TPE
(Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization"; Akiba et al. 2019, arXiv:1907.10902), and the
pruner its `MedianPruner`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxddp.core.errors import InputError, Key, counted, requires
from jaxddp.core.log import say
from jaxddp.reports.tables import NOTHING
from jaxddp.sweeps.folder import SweepFolder
from jaxddp.sweeps.trials import Space, Trial, TrialEnd, Values

MakeTrial = Callable[[Values], Trial]
_ATTEMPTS = 20
"""The number of suggestions after which a search has no new values."""


class GridQueue:
    """The trials of a grid, in their order: finished ones are left out, and those of another process are skipped.

    It writes the trials into the file of the sweep.

    Attributes:
        folder: the folder of the sweep.
        earlier: the names of the trials in the file of the sweep that are not in this grid.
        total: the number of trials.
        error: the reason why the sweep ended early; None if it did not.
    """

    _keeps_ends = False
    """Whether the next command leaves out trials that failed or were pruned."""

    def __init__(self, folder: SweepFolder, trials: Sequence[Trial]):
        self.folder, self._names = folder, [trial.name for trial in trials]
        self.total, self._ended = len(trials), set[str]()
        self.error: InputError | None = None
        with folder.changed() as known:
            self.earlier = [name for name in known if name not in self._names]
            for trial in trials:
                # The options, or the recipe file, may have changed. `jaxddp train` then decides what is left.
                record = known.get(trial.name, trial)
                finished_words = record.finished_words if record.recipe == trial.recipe else None
                known[trial.name] = replace(trial, ended=record.ended, finished_words=finished_words)

    def summary(self) -> str:
        """Return the number of trials, and how many have finished."""
        return counted(self.total, "trial") + (f" ({n} finished)" if (n := self.num_finished()) else "")

    def unfinished(self) -> list[Trial]:
        """Return the trials that have not finished, and those that this process runs."""
        trials = self._own(self.folder.read())
        return [trial for trial in trials if trial.name in self.folder.claims or self._state(trial) == "running"]

    def next(self) -> Trial | None:
        """Return the trial to start next; None if there is none at present."""
        others = (trial for trial in self.unfinished() if trial.name not in self._ended)
        return next((trial for trial in others if self.folder.claim(trial.name)), None)

    def record_end(self, trial: Trial, end: TrialEnd) -> None:
        """Record and print the end of a trial that `next` returned. The error of a failed trial is already printed."""
        with self.folder.changed() as known:
            if end == "done":
                known[trial.name].finished_words = trial.words
            elif self._keeps_ends and end in ("failed", "pruned"):
                known[trial.name].ended = end
        self._ended.add(trial.name)
        self.folder.release(trial.name)
        if end == "elsewhere":
            say(f"{trial.name}: another process trains it")
        elif end not in ("failed", "bad input"):
            best = self.folder.result(trial).best or NOTHING
            say(f"{trial.name}: {end}, {best} ({self.num_finished()} of {self.total})")

    def should_prune(self, trial: Trial) -> bool:
        """Return whether a running trial is to be pruned."""
        return False

    def _own(self, known: Mapping[str, Trial]) -> list[Trial]:
        """Return the trials of this command among those of the file."""
        return [known[name] for name in self._names]

    def _state(self, trial: Trial) -> str:
        """Return "done", "pruned", "failed", or "running" for a trial that is to be started or runs."""
        ended = trial.ended if self._keeps_ends else None
        return "done" if self.folder.is_finished(trial) else ended or "running"

    def num_finished(self) -> int:
        """Return the number of trials that are not left to be started or run."""
        return len(self._own(self.folder.read())) - len(self.unfinished())


class Search(NamedTuple):
    """The suggestions of Optuna, which are functions of these values and of the trials so far (`FrozenTrial`s).

    Attributes:
        spaces: the values of each key.
        lowest: whether a lower value of the metric is better.
        seed: the seed of the suggestions.
    """

    spaces: Mapping[str, Space]
    lowest: bool
    seed: int = 0

    def suggestion(self, tried: Sequence[Any], attempt: int = 0) -> dict[str, str]:
        """Return a word for each key.

        Args:
            tried: the trials so far (see `record`), in the order of their creation.
            attempt: the number of earlier suggestions after the same trials.
        """
        # A generator that began again with the seed after a restart would repeat its first numbers.
        state = np.random.SeedSequence([self.seed, len(tried), attempt]).generate_state(1)
        params = self._study(tried, int(state[0])).ask(self._distributions()).params
        return {key: space.word(params[key]) for key, space in self.spaces.items()}

    def should_prune(self, others: Sequence[Any], values: Values, measured: Sequence[float], checked: int = 0) -> bool:
        """Return whether a running trial is to be pruned at one of its validations after the first `checked` ones.

        It is pruned if its best validation so far is worse than the median of the finished trials at the same number of
        validations. The first five trials are never pruned.
        """
        import optuna

        study, pruner = self._study(others), optuna.pruners.MedianPruner()
        # Validations may follow each other faster than this function is called.
        parts = (self.record(values, "running", measured[:n]) for n in range(checked + 1, len(measured) + 1))
        return any(pruner.prune(study, part) for part in parts)

    def record(self, values: Values, state: str, measured: Sequence[float] = (), best: float | None = None) -> Any:
        """Return Optuna's record of a trial.

        Args:
            values: the word of each key.
            state: "running", "done", "pruned" or "failed".
            measured: the values of the metric at each validation so far, the oldest first.
            best: the value at the best validation; None if there is none.
        """
        from optuna.trial import TrialState, create_trial

        # Optuna needs a value for a finished trial.
        is_done = state == "done" and best is not None
        states = {"running": TrialState.RUNNING, "pruned": TrialState.PRUNED}
        return create_trial(
            state=TrialState.COMPLETE if is_done else states.get(state, TrialState.FAIL),
            value=best if is_done else None,
            params={key: space.param(values[key]) for key, space in self.spaces.items()},
            distributions=self._distributions(),
            intermediate_values=dict(enumerate(measured)),
        )

    def _study(self, tried: Sequence[Any], seed: int = 0) -> Any:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        sampler = optuna.samplers.TPESampler(seed=seed)
        study = optuna.create_study(direction="minimize" if self.lowest else "maximize", sampler=sampler)
        study.add_trials(tried)
        return study

    def _distributions(self) -> dict[str, Any]:
        return {key: space.distribution() for key, space in self.spaces.items()}


class SearchQueue(GridQueue):
    """The trials of a search. One that another process began and did not finish comes before a new suggestion.

    Args:
        search: the values of each key. Trials in the file of the sweep with values outside them are not used.
        make_trial: returns the trial for the word of each key.
        total: the number of trials, over all hosts and all starts of the sweep.
        prune: whether trials are ended early by their validations.

    Raises: InputError if Optuna is not installed, or the file of the sweep belongs to another config.
    """

    _keeps_ends = True

    def __init__(self, folder: SweepFolder, search: Search, make_trial: MakeTrial, total: int, *, prune: bool = False):
        with requires("sweep", "optuna", "search"):
            import optuna  # noqa: F401
        self._search, self._make_trial, self._prune = search, make_trial, prune
        self._is_exhausted = False
        # The number of validations of each trial that were compared with those of the other trials.
        self._checked = dict[str, int]()
        super().__init__(folder, [make_trial(trial.values) for trial in self._own(folder.read())])
        self.total = total

    def next(self) -> Trial | None:
        if (trial := super().next()) is not None or self._is_exhausted or self.error is not None:
            return trial
        with self.folder.changed() as known:
            if len(own := self._own(known)) >= self.total:
                return None
            tried = [*map(self._tried, own)]
            for attempt in range(_ATTEMPTS):
                try:
                    trial = self._make_trial(self._search.suggestion(tried, attempt))
                except InputError as error:
                    # Each value was checked beside the first values of the other keys, not beside these.
                    say(f"jaxddp sweep: a suggestion is left out: {error}")
                    continue
                if trial.name not in known:
                    self.folder.claim(trial.name)
                    known[trial.name] = trial
                    return trial
            self._is_exhausted = True
            say(f"jaxddp sweep: after {counted(len(tried), 'trial')}, the search suggests no new values")
        return None

    def record_end(self, trial: Trial, end: TrialEnd) -> None:
        best = self.folder.result(trial).best
        if end == "done" and self.error is None:
            # The search cannot compare such a trial with others.
            if best is None:
                problem = "was not validated; a search compares trials by their validations"
                self.error = InputError(f"{trial.name}: {problem}")
            elif best.lowest != self._search.lowest:
                self.error = InputError(Key("checkpoint.best"), f": {trial.name} measured only {best.metric}")
        super().record_end(trial, end)

    def should_prune(self, trial: Trial) -> bool:
        measured = self.folder.result(trial).measured if self._prune else []
        checked, self._checked[trial.name] = self._checked.get(trial.name, 0), len(measured)
        if len(measured) <= checked:  # The files of the other trials are read only after a validation.
            return False
        others = [self._tried(other) for other in self._own(self.folder.read()) if other.name != trial.name]
        return self._search.should_prune(others, trial.values, measured, checked)

    def _own(self, known: Mapping[str, Trial]) -> list[Trial]:
        """Return the trials whose values are within the present intervals and lists."""
        spaces = self._search.spaces
        of_keys = [trial for trial in known.values() if trial.values.keys() == spaces.keys()]
        return [trial for trial in of_keys if all(trial.values[key] in space for key, space in spaces.items())]

    def _tried(self, trial: Trial) -> Any:
        result = self.folder.result(trial)
        return self._search.record(trial.values, self._state(trial), result.measured, result.best and result.best.value)
