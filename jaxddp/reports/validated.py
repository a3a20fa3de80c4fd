"""What a checkpoint of a run says of the run's validation data."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from jaxddp.config import DataConfig
from jaxddp.data.opening import open_unchecked
from jaxddp.data.source import Source
from jaxddp.engine.program_cache import keep_compiled_programs
from jaxddp.inference.outcome import Outcome
from jaxddp.inference.trained import restore_run
from jaxddp.mesh import Topology


class Validated(NamedTuple):
    """An outcome, and the images that it is of."""

    outcome: Outcome
    source: Source
    data: DataConfig


def validated(directory: Path, which: str, data_path: str | None = None) -> Validated:
    """The predictions of a checkpoint ("latest", "best" or a step) on all devices of this machine.

    They are of the validation data that the run measured: the first `eval.limit`, where it has one. The data lie where
    the run says, or at `data_path`. "best" is the latest where nothing was validated. An image that cannot be used has
    NaN.

    Raises:
        InputError: the run does not say its network, its data or its checkpoint cannot be read, or its data have other
            classes now.
    """
    keep_compiled_programs()
    run = restore_run(directory, which, Topology.create())
    data = run.config.data if data_path is None else replace(run.config.data, path=data_path, name=None)
    # Those that the run measured, and in its order.
    _, source = open_unchecked(data, run.config.eval.limit)
    return Validated(run.outcome(source), source, run.data_of(source))
