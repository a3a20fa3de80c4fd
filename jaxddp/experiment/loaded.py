"""The network of a run that Python asks for by its work directory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxddp.config import Config
from jaxddp.experiment.arguments import words_of_arguments
from jaxddp.experiment.resources import join_job
from jaxddp.experiment.trained import TrainedRun, restore_run
from jaxddp.files import check_path
from jaxddp.job.environment import find_job
from jaxddp.mesh import Device, Topology
from jaxddp.overrides import checked


@words_of_arguments()
def load_run(
    workdir: str | Path, step: str | int = "best", *, model: Any = None, devices: int | Sequence[Device] | None = None
) -> TrainedRun:
    """The network of a run's checkpoint, to predict with: `load_run("runs/cats").predict("photos")`.

    Args:
        workdir: where the run wrote its checkpoints; its data need not be there.
        step: "best", which without validation is the latest, "latest", or a checkpoint's step.
        model: of a run that came from Python, whose work directory does not say its network.
        devices: how many of this job's devices predict, or which; None for all.

    Raises:
        InputError: there is no such run or checkpoint, or the model is not the one that was trained.
    """
    directory = Path(check_path(workdir, "workdir"))
    which = step if isinstance(step, str) else str(checked(step, int, "step"))
    join_job(find_job(), Config().parallel)
    return restore_run(directory, which, Topology.create(devices), model)
