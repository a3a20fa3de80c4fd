"""Match the arrays of a state dict with those of a network."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import counted, nearest
from jaxddp.models.published import Naming
from jaxddp.sections.layers import NO_LAYERS, Layers
from jaxddp.weights.conversion import Conversion, ImageArrays, conversions
from jaxddp.weights.torch_layout import from_published, to_published

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a network's arrays by path, such as "params/fc/kernel" or "batch_stats/bn1/mean"."""
_LISTED = 6


@dataclass(frozen=True)
class WeightMatch:
    """The result of matching a state dict with a network.

    Attributes:
        arrays: the arrays by path: all of the network's except those in `new` and `head`.
        new: the paths of new layers, which keep their initialization.
        head: the paths of a head for another number of classes, which also keeps its initialization.
        left_over: the names in the state dict that the network does not use.
        conversions: the conversions that arrays of another shape still need, by path.
    """

    arrays: dict[str, np.ndarray]
    new: tuple[str, ...]
    head: tuple[str, ...]
    left_over: tuple[str, ...]
    conversions: Mapping[str, Conversion] = field(default_factory=dict)

    def converted(self) -> dict[str, np.ndarray]:
        """Return the arrays by path, with the shapes of the network's."""
        return self.arrays | {path: each.convert(self.arrays[path]) for path, each in self.conversions.items()}


def match(
    shapes: Shapes,
    state_dict: Mapping[str, np.ndarray],
    namings: Sequence[Naming],
    num_classes: int,
    new_layers: Layers = NO_LAYERS,
    *,
    new_head: bool = False,
    needs_head: bool = False,
    images: ImageArrays | None = None,
) -> WeightMatch:
    """Match the arrays of a network, by path, with those of a state dict.

    A naming maps a path to a name in the state dict. The naming with the most matches is used.

    Args:
        new_layers: layers that keep their initialization.
        new_head: whether the head keeps its initialization too.
        needs_head: whether a head for another number of classes is an error.
        images: the network's arrays that depend on the images, which are converted from those for other images. None
            if no array is converted.

    Raises:
        InputError: an array outside the new layers and the head is missing or has another shape. The message lists such
            arrays.
    """
    naming = max(namings, key=lambda naming: sum(naming(path) in state_dict for path in shapes))
    names = {path: naming(path) for path in shapes}
    arrays = {path: from_published(path, name, state_dict[name]) for path, name in names.items() if name in state_dict}
    new = tuple(path for path in shapes if new_layers.selects(path, path.partition("/")[2]))
    others = {path: array for path, array in arrays.items() if path not in new}
    converted = {} if images is None else conversions(shapes, others, images)
    unmatched = [path for path, shape in shapes.items() if path not in arrays or arrays[path].shape != shape]
    unmatched = [path for path in unmatched if path not in {*new, *converted}]
    head = _head(shapes, [path for path in shapes if path not in new] if new_head else unmatched, num_classes)
    if faults := [path for path in unmatched if path not in head]:
        advice = (
            *("give weights of this network for such images, choose the network of these weights (", Key("model.name")),
            *(", width and stem), or initialize these layers anew (", Key("model.new_layers"), ")"),
        )
        raise InputError(_describe_faults(faults, names, shapes, state_dict), advice=advice)
    if needs_head and (others := [path for path in unmatched if path in head]):
        faults = _describe_faults(others, names, shapes, state_dict)
        raise InputError(faults, advice="give weights and data with the same classes")
    used = set(names.values())
    left_over = tuple(sorted(name for name in state_dict if name not in used))
    matched = {path: array for path, array in arrays.items() if path not in {*new, *head}}
    return WeightMatch(matched, new, head, left_over, converted)


def _head(shapes: Shapes, paths: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Return the paths of the head's kernel and bias, if they are among `paths`.

    The head is the only layer with as many outputs as there are classes.
    """
    layers = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    heads = [layer for layer in layers if shapes.get(f"{layer}/kernel", ())[1:] == (num_classes,)]
    # A head is replaced as a whole: a bias of other weights does not fit a new kernel.
    return tuple(path for path in shapes if path.rpartition("/")[0] == heads[0]) if len(heads) == 1 else ()


def _describe_faults(
    faults: Sequence[str],
    names: Mapping[str, str],
    shapes: Shapes,
    state_dict: Mapping[str, np.ndarray],
) -> str:
    """Describe the arrays that are missing or have another shape."""
    missing = [names[path] for path in faults if names[path] not in state_dict]
    mismatched = [path for path in faults if names[path] in state_dict]
    clauses = []
    if missing:
        hint = nearest(missing[0], set(state_dict) - set(names.values()))
        of_all = f"{len(missing)} of the network's {counted(len(shapes), 'array')}"
        clauses.append(f"{of_all} missing: {listed(missing, most=2)}{hint}")
    if mismatched:
        differences = []
        for path in mismatched:
            name = names[path]
            shape = to_published(path, name, np.broadcast_to(0, shapes[path])).shape
            differences.append(f"{name} is {list(state_dict[name].shape)} in the file and {list(shape)} in the network")
        clauses.append(f"{len(mismatched)} with another shape: {listed(differences, '; ', most=2)}")
    return "; ".join(clauses)


def listed(names: Iterable[str], between: str = ", ", most: int = _LISTED) -> str:
    """List the first `most` names, and the number of the others."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return between.join(names[:most]) + more
