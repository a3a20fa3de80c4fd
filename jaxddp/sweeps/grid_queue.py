"""The trials of a grid, in their order: a finished trial is left out, and a trial of another process is skipped."""

from collections.abc import Sequence

from jaxddp.cluster.process_output import say
from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted
from jaxddp.sweeps.sweep_folder import SweepFolder, of_earlier
from jaxddp.sweeps.trial_process import End
from jaxddp.sweeps.trial_result import is_finished, result_of
from jaxddp.sweeps.trials import Trial


class GridQueue:
    """The source of the trials of a grid; see `jaxddp.sweeps.runner.TrialSource`.

    It writes the trials into the file of the sweep.

    Attributes:
        folder: the folder of the sweep.
        earlier: the names of the trials in the file of the sweep that are not in this grid.
        error: always None; a grid needs no metric.
    """

    def __init__(self, folder: SweepFolder, trials: Sequence[Trial]):
        self.folder, self._trials = folder, trials
        self._ended = set[str]()
        self.error: InputError | None = None
        with folder.changed() as content:
            self.earlier = of_earlier(content, trials)
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

        return [*filter(is_open, self._trials)]

    def next(self) -> Trial | None:
        for trial in self.unfinished():
            if trial.name not in self._ended and self.folder.claim(trial.name):
                return trial
        return None

    def record_end(self, trial: Trial, end: End) -> None:
        if end == "done":
            self.folder.update(trial.name, finished_words=list(trial.words))
        self._ended.add(trial.name)
        self.folder.release(trial.name)
        total = len(self._trials)
        say_end(end, self.folder, trial, f"{total - len(self.unfinished())} of {total}")

    def should_prune(self, trial: Trial) -> bool:
        return False


def say_end(end: End, folder: SweepFolder, trial: Trial, progress: str) -> None:
    """Print how a trial ended, and the progress of the sweep. The error of a failed trial is already printed."""
    if end == "elsewhere":
        say(f"{trial.name}: another process trains it")
    elif end not in ("failed", "bad input"):
        say(f"{trial.name}: {end}, {result_of(folder.directory / trial.name)} ({progress})")
