"""Which arrays of a state dict go where in a network, and what does not fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import counted, nearest
from jaxddp.models.published import Naming
from jaxddp.sections.layers import NO_LAYERS, Layers
from jaxddp.weights.torch_layout import from_published, to_published

Shapes = Mapping[str, tuple[int, ...]]
"""Of a network's arrays by path: "params/fc/kernel", "batch_stats/bn1/mean"."""
_LISTED = 6


@dataclass(frozen=True)
class Matched:
    """What a state dict gives to a network.

    Attributes:
        arrays: by path; every array of the network but those of `fresh`.
        new: paths of the new layers, which stay as they were initialized.
        head: paths of a head for another number of classes, which stays so, too.
        left_over: names of the file that the network has no place for.
    """

    arrays: dict[str, np.ndarray]
    new: tuple[str, ...]
    head: tuple[str, ...]
    left_over: tuple[str, ...]


def match(
    shapes: Shapes,
    state_dict: Mapping[str, np.ndarray],
    namings: Sequence[Naming],
    num_classes: int,
    new_layers: Layers = NO_LAYERS,
    *,
    new_head: bool = False,
) -> Matched:
    """Match the arrays of a network, by path, with those of a state dict, in the naming that most of them fit.

    Args:
        new_layers: take nothing from it.
        new_head: the head takes nothing either, whatever its shape.

    Raises:
        InputError: any but theirs and those of the head is missing, or of another shape; lists them.
    """
    naming = max(namings, key=lambda each: sum(each(path) in state_dict for path in shapes))
    names = {path: naming(path) for path in shapes}
    arrays = {path: from_published(path, name, state_dict[name]) for path, name in names.items() if name in state_dict}
    new = tuple(path for path in shapes if new_layers.holds(path, path.partition("/")[2]))
    unfit = [path for path, shape in shapes.items() if path not in arrays or arrays[path].shape != shape]
    unfit = [path for path in unfit if path not in new]
    head = _head(shapes, [path for path in shapes if path not in new] if new_head else unfit, num_classes)
    if faults := [path for path in unfit if path not in head]:
        advice = (
            *("give weights of this network for such images, say of which network they are (", Key("model.name")),
            *(", width and stem), or leave these layers new (", Key("model.new_layers"), ")"),
        )
        raise InputError(_told(faults, names, shapes, state_dict), advice=advice)
    used = set(names.values())
    left_over = tuple(sorted(name for name in state_dict if name not in used))
    return Matched({path: array for path, array in arrays.items() if path not in {*new, *head}}, new, head, left_over)


def _head(shapes: Shapes, paths: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Kernel and bias of the one layer that makes as many logits as there are classes, if it is among these."""
    layers = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    heads = [layer for layer in layers if shapes.get(f"{layer}/kernel", ())[1:] == (num_classes,)]
    # Half of a head of other weights is no head: its bias belongs to its kernel.
    return tuple(path for path in shapes if path.rpartition("/")[0] == heads[0]) if len(heads) == 1 else ()


def _told(
    faults: Sequence[str],
    names: Mapping[str, str],
    shapes: Shapes,
    state_dict: Mapping[str, np.ndarray],
) -> str:
    missing = [names[path] for path in faults if names[path] not in state_dict]
    other = [path for path in faults if names[path] in state_dict]
    parts = []
    if missing:
        near = nearest(missing[0], set(state_dict) - set(names.values()))
        of_all = f"{len(missing)} of the network's {counted(len(shapes), 'array')}"
        parts.append(f"{of_all} missing: {listed(missing, most=2)}{near}")
    if other:
        shown = []
        for path in other:
            name = names[path]
            ours = to_published(path, name, np.broadcast_to(0, shapes[path])).shape
            shown.append(f"{name} is {list(state_dict[name].shape)} there and {list(ours)} here")
        parts.append(f"{len(other)} of another shape: {listed(shown, '; ', most=2)}")
    return "; ".join(parts)


def listed(names: Iterable[str], between: str = ", ", most: int = _LISTED) -> str:
    """The first few of them, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return between.join(every[:most]) + more
