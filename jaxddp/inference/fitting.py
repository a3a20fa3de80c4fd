"""Fits the arrays of a checkpoint to a network, and describes the data of runs of old releases."""

from pathlib import Path

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.data.opening import open_splits
from jaxddp.engine.initial_state import replace_by_weights
from jaxddp.engine.state import TrainState
from jaxddp.models.interface import Model
from jaxddp.models.variables import by_path, trees_of
from jaxddp.workdir.signature import SIGNATURE_FILE, Signature


def fitted(network: Model, saved: TrainState, image_shape: tuple[int, int, int], place: Path) -> TrainState:
    """Return a checkpoint's state for evaluation, with the tree structure of the network for images [H, W, C].

    Raises: InputError if the arrays do not fit the network.
    """
    trees = trees_of(network, image_shape)
    arrays = by_path(saved.eval_params, saved.model_state)
    of_checkpoint, of_network = (
        {path: list(array.shape) for path, array in tree.items()} for tree in (arrays, by_path(*trees))
    )
    for path in sorted(of_checkpoint.keys() | of_network.keys()):
        if of_checkpoint.get(path) != of_network.get(path):
            found, expected = of_checkpoint.get(path, "absent"), of_network.get(path, "absent")
            raise InputError(
                f"{place}: the checkpoint is of another architecture: {path} is {found} in the checkpoint and "
                f"{expected} in the model; give the model that was trained"
            )
    params, model_state = replace_by_weights(*trees, arrays)
    return TrainState(saved.step, params, model_state, ())


def signature_of_data(place: Path, config: Config) -> Signature:
    """Return the signature of the data of a run. Runs of old releases have no file with a signature."""
    try:
        return Signature.of(open_splits(config.data)["train"], config.data)
    except InputError as error:
        raise InputError(
            f"{place}: has no {SIGNATURE_FILE}, and the data of the run cannot be opened ({error})"
        ) from error
