"""Optuna's suggestions for the next trial, and its decisions to prune, as functions of all trials so far.

Each call makes a new study in memory from the trials, so `sweep.json` and the files of the runs are the only state: a
search that is resumed, or that several hosts share, continues with the same suggestions.

The sampler is Optuna's TPE (Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization"; Akiba et al. 2019,
arXiv:1907.10902), and the pruner its `MedianPruner`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.ranges import real_number, whole_number
from jaxddp.core.wording import not_installed
from jaxddp.sweeps.spaces import Choices, Space

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import FrozenTrial

State = Literal["running", "done", "pruned", "failed"]


@dataclass(frozen=True)
class Tried:
    """A trial of a search.

    Attributes:
        values: the word of each key.
        measured: the values of the metric at each validation so far, the oldest first.
        best: the value at the best validation; None if there is none, or if the trial runs.
    """

    values: Mapping[str, str]
    state: State
    measured: Sequence[float] = ()
    best: float | None = None


def check_optuna() -> None:
    """Raise `InputError` if Optuna is not installed."""
    try:
        import optuna  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"sweep: {not_installed(str(error.name), 'search')}") from None


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
    import optuna

    # A generator that began again with the seed after a restart would repeat its first numbers.
    state = np.random.SeedSequence([seed, len(tried), attempt]).generate_state(1)
    study = _study(spaces, tried, lowest=lowest, sampler=optuna.samplers.TPESampler(seed=int(state[0])))
    params = study.ask(_distributions(spaces)).params
    return {key: _word(space, params[key]) for key, space in spaces.items()}


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
    study = _study(spaces, others, lowest=lowest, sampler=optuna.samplers.TPESampler(seed=0))
    pruner = optuna.pruners.MedianPruner()
    # Validations may follow each other faster than this function is called.
    counts = range(checked + 1, len(trial.measured) + 1)
    return any(pruner.prune(study, _frozen(spaces, replace(trial, measured=trial.measured[:n]))) for n in counts)


def _study(spaces: Mapping[str, Space], tried: Sequence[Tried], *, lowest: bool, sampler: Any) -> "Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize" if lowest else "maximize", sampler=sampler)
    for trial in tried:
        # Optuna needs a value for a finished trial.
        is_without_value = trial.state == "done" and trial.best is None
        study.add_trial(_frozen(spaces, replace(trial, state="failed") if is_without_value else trial))
    return study


def _frozen(spaces: Mapping[str, Space], trial: Tried) -> "FrozenTrial":
    from optuna.trial import TrialState, create_trial

    states = {
        "running": TrialState.RUNNING,
        "done": TrialState.COMPLETE,
        "pruned": TrialState.PRUNED,
        "failed": TrialState.FAIL,
    }
    return create_trial(
        state=states[trial.state],
        value=trial.best if trial.state == "done" else None,
        params={key: _param(space, trial.values[key]) for key, space in spaces.items()},
        distributions=_distributions(spaces),
        intermediate_values=dict(enumerate(trial.measured)),
    )


def _distributions(spaces: Mapping[str, Space]) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def distribution(space: Space) -> Any:
        if isinstance(space, Choices):
            return CategoricalDistribution(space.words)
        if space.whole:
            return IntDistribution(int(space.low), int(space.high), log=space.log)
        return FloatDistribution(space.low, space.high, log=space.log)

    return {key: distribution(space) for key, space in spaces.items()}


def _param(space: Space, word: str) -> str | float:
    if isinstance(space, Choices):
        return word
    return whole_number(word) if space.whole else real_number(word)


def _word(space: Space, param: Any) -> str:
    return str(param) if isinstance(space, Choices) else space.word(param)
