"""The weights that a run starts from, of a file or of another run."""

import logging
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxddp.core.errors import about
from jaxddp.core.wording import counted
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.sections.layers import NO_LAYERS, Layers
from jaxddp.weights.match import Shapes, listed, match
from jaxddp.weights.state_dict import read
from jaxddp.weights.torch_layout import namings_of, own_name
from jaxddp.workdir.saved_state import read_run
from jaxddp.workdir.signature import Signature

_log = logging.getLogger("jaxddp.experiment")


def initial_weights(
    path: Path,
    model: Model,
    shapes: Shapes,
    num_classes: int,
    topology: Topology,
    new_layers: Layers = NO_LAYERS,
    class_ids: Sequence[str] = (),
) -> dict[str, np.ndarray]:
    """Arrays by path, from a file or from a run's work directory, for a network of these shapes.

    Where part of the network stays as it was initialized (`new_layers`, and a head for other classes), or part of the
    file has no place in it, a line says so. A run knows its classes, and its head is taken for `class_ids` alone.

    Raises:
        InputError: they cannot be read, or are of another network; lists what is missing or of another shape. Or the
            processes read different ones.
    """
    if os.path.isdir(path):  # which says no of a name that is too long, too
        _, arrays = read_run(path, "best", topology)
        found, namings = {own_name(each): array for each, array in arrays.items()}, (own_name,)
        signature = Signature.read(path)
        others = signature is not None and bool(class_ids) and signature.class_ids != tuple(class_ids)
    else:
        found, namings, others = read(path), namings_of(model), False
    with about(path):
        matched = match(shapes, found, namings, num_classes, new_layers, new_head=others)
    topology.peers.agree({"the weights to start from": _checksum(matched.arrays)})
    said = [f"{len(matched.arrays)} of the network's {counted(len(shapes), 'array')}"]
    if matched.new:
        said.append(f"new: {listed(matched.new)}")
    if matched.head:
        classes = counted(num_classes, "other class" if others else "class")
        said.append(f"a new head for {classes}: {listed(matched.head)}")
    if matched.left_over:
        said.append(f"left over: {listed(matched.left_over)}")
    if topology.peers.is_first and len(said) > 1:
        _log.info(f"{path}: {'; '.join(said)}")
    return matched.arrays


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    crc = 0
    for path, array in sorted(arrays.items()):
        crc = zlib.crc32(np.ascontiguousarray(array).tobytes(), zlib.crc32(path.encode(), crc))
    return f"{crc:08x}"
