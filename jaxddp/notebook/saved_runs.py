"""What Python asks of a run by its work directory: its network, and how good it is."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxddp.config import Config
from jaxddp.core.files import check_path
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.job.environment import find_job
from jaxddp.mesh import Device, Topology
from jaxddp.notebook.arguments import words_of_arguments
from jaxddp.overrides import checked, plain
from jaxddp.setup.joining import join_job
from jaxddp.tasks.run_evaluation import evaluate
from jaxddp.workdir.saved_state import recipe_of_run


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
    peers = join_job(find_job(), Config().parallel)
    return restore_run(directory, _which(step), Topology.create(devices, peers), model)


@words_of_arguments({"data.path": "data", "eval.batch_size": "batch_size"})
def evaluate_run(
    workdir: str | Path, step: str | int = "latest", *, data: str | Path | None = None, batch_size: int | None = None
) -> dict[str, float]:
    """The validation metrics of a run's checkpoint, on all devices: what `jaxddp eval RUN` prints.

    Args:
        workdir: where the run wrote its checkpoints; its network must be one that a config or a recipe file says.
        step: "latest", "best", or a checkpoint's step.
        data: where the run's data lie, if they were moved.
        batch_size: the global batch, divided among the devices; the run's own where absent.

    Raises:
        InputError: there is no such run or checkpoint, or no such data.
    """
    directory = Path(check_path(workdir, "workdir")).expanduser()
    file = recipe_of_run(directory)
    # On what it ran is not part of the recipe.
    changes: dict[str, dict[str, Any]] = {"parallel": plain(Config().parallel)}
    if data is not None:
        changes["data"] = {"path": str(check_path(data, "data")), "name": None}
    if batch_size is not None:
        changes["eval"] = {"batch_size": batch_size}
    return evaluate(dataclasses.replace(file, config=file.config.replace(**changes)), directory, _which(step))


def _which(step: str | int) -> str:
    return step if isinstance(step, str) else str(checked(step, int, "step"))
