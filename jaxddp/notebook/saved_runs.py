"""Loads and evaluates trained runs from their work directories."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxddp.core.files as files
from jaxddp.config import Config
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.job.environment import find_job
from jaxddp.mesh import Device, Topology
from jaxddp.notebook.arguments import errors_name_arguments
from jaxddp.overrides import checked, plain
from jaxddp.setup.joining import join_job
from jaxddp.tasks.run_evaluation import evaluate
from jaxddp.workdir.saved_state import recipe_of_run


@errors_name_arguments()
def load_run(
    workdir: str | Path, step: str | int = "best", *, model: Any = None, devices: int | Sequence[Device] | None = None
) -> TrainedRun:
    """Load a trained run for inference: `load_run("runs/cats").predict("photos")`.

    Args:
        workdir: the work directory of the run. The training data are not needed.
        step: "best" (the latest if the run was not validated), "latest", or the step of a checkpoint.
        model: the network of a run of the Python API. The work directory of such a run does not name its network.
        devices: the number of this job's devices to use, or a list of devices; None for all.

    Returns:
        The trained run, with methods for predictions.

    Raises:
        InputError: there is no such run or checkpoint, or the checkpoint is of another model.
    """
    directory = Path(files.check_path(workdir, "workdir"))
    peers = join_job(find_job(), Config().parallel)
    return restore_run(directory, _which(step), Topology.create(devices, peers), model)


@errors_name_arguments({"data.path": "data", "eval.batch_size": "batch_size"})
def evaluate_run(
    workdir: str | Path, step: str | int = "latest", *, data: str | Path | None = None, batch_size: int | None = None
) -> dict[str, float]:
    """Validate a checkpoint of a run on all devices, like `jaxddp eval RUN`.

    Args:
        workdir: the work directory of the run. Its network must come from a config or a recipe file.
        step: "latest", "best", or the step of a checkpoint.
        data: the path of the run's data, if they were moved.
        batch_size: the global batch size, which is divided among the devices. Default: the run's `eval.batch_size`.

    Returns:
        The metrics by name, with `count` and `step`.

    Raises:
        InputError: there is no such run or checkpoint, or no such data.
    """
    directory = files.expanded(files.check_path(workdir, "workdir"))
    file = recipe_of_run(directory)
    # The devices of the run are not part of its recipe.
    changes: dict[str, dict[str, Any]] = {"parallel": plain(Config().parallel)}
    if data is not None:
        changes["data"] = {"path": str(files.check_path(data, "data")), "name": None}
    if batch_size is not None:
        changes["eval"] = {"batch_size": batch_size}
    return evaluate(dataclasses.replace(file, config=file.config.replace(**changes)), directory, _which(step))


def _which(step: str | int) -> str:
    return step if isinstance(step, str) else str(checked(step, int, "step"))
