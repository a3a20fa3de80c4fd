"""Match the names of a foreign checkpoint with the arrays of a user's network, and convert their layouts.

A name fits the array at a path if both are equal after these changes, which `comparable` makes: dots between modules;
`layer_0` as `layer.0`; no name of the collection; and `weight`, `running_mean` and `running_var`, as PyTorch calls
them, for Flax's `kernel`, `scale` or `embedding`, `mean` and `var`. So "params/blocks_0/conv/kernel" is
"blocks.0.conv.weight". For other names a recipe defines `rename`.
"""

import difflib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from jaxddp.core.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a network's arrays by path, such as "params/fc/kernel" or "batch_stats/bn1/mean"."""
Arrays = Mapping[str, np.ndarray]
Rename = Callable[[str], str | None]
"""A recipe's function of a name in a file, which returns the name in the network, or None for an array to leave out."""
_OWN = "kernel"
_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "mean": "running_mean", "var": "running_var"}
_COLLECTIONS = ("params", "batch_stats")
_AXES = {2: ("[O, I]", "[I, O]"), 3: ("[O, I, W]", "[W, I, O]"), 4: ("[O, I, H, W]", "[H, W, I, O]")}
_SIMILAR = 0.3


class Foreign(NamedTuple):
    """The arrays of a foreign checkpoint in terms of a network.

    Attributes:
        arrays: the arrays: by the network's paths with dots, in Flax's layout; the others by their names in the file.
        names: the name in the file of each array of the network that has one, by path.
        layouts: the change of the layout of these arrays in words, by path; no entry without a change.
    """

    arrays: dict[str, np.ndarray]
    names: dict[str, str]
    layouts: dict[str, str]

    @property
    def told(self) -> list[str]:
        """The number of arrays of each change of the layout."""
        return [f"{count} {layout}" for layout, count in sorted(Counter(self.layouts.values()).items())]


def comparable(name: str) -> str:
    """Return the name or the path of an array in the form in which names are compared; see the module."""
    parts = re.sub(r"_([0-9]+)(?=[./]|$)", r".\1", name).replace("/", ".").split(".")
    parts = parts[1:] if parts[0] in _COLLECTIONS else parts
    return ".".join((*parts[:-1], _LEAVES.get(parts[-1], parts[-1])))


def renamed(stored: Arrays, rename: Rename | None) -> dict[str, str]:
    """Return the names that a recipe's `rename` gives to those in a file, by the latter; without it, the names.

    Raises: InputError if the result is no name.
    """
    names = {name: name if rename is None else rename(name) for name in stored}
    for name, new in names.items():
        if not isinstance(new, str | None):
            raise InputError(f"rename: returned {new!r} for {name!r}; return the name in the network, or None")
    return {name: new for name, new in names.items() if new is not None}


def in_terms_of(shapes: Shapes, stored: Arrays, rename: Rename | None = None) -> Foreign:
    """Give the arrays of a checkpoint the names and the layouts of a network.

    Args:
        shapes: the shapes of the network's arrays, by path.

    Raises: InputError if two arrays of the file have the name of one array of the network; see also `renamed`.
    """
    paths, names, layouts = {comparable(path): path for path in shapes}, dict[str, str](), dict[str, str]()
    if len(paths) < len(shapes):  # Without the names of collections, or with other digits, two paths are equal.
        paths = {path.replace("/", "."): path for path in shapes}
    arrays, new_names = dict[str, np.ndarray](), renamed(stored, rename)
    for name, array in stored.items():
        new = new_names.get(name, "")
        path = paths.get(comparable(new)) or paths.get(new.replace("/", "."))
        if path is None:
            arrays[name] = array
            continue
        if path in names:
            both = f"{names[path]!r} and {name!r}"
            raise InputError(f"both {both} are {path} of the network; give each another name, or None, in rename")
        names[path] = name
        arrays[path.replace("/", ".")], layout = _in_layout(array, shapes[path], path, name)
        if layout:
            layouts[path] = layout
    return Foreign(arrays, names, layouts)


def _in_layout(array: np.ndarray, shape: tuple[int, ...], path: str, name: str) -> tuple[np.ndarray, str]:
    """Return an array in Flax's layout, and the change in words; empty for none.

    A kernel is in PyTorch's layout, unless the file calls it a kernel too. If its shape fits only in the other layout,
    it has that one. Axes of length 1 may be missing, and Flax's attention has two axes for PyTorch's one.
    """
    as_it_is, leaf = (array, ""), re.split("[./]", path)[-1]
    readings = [as_it_is]
    if leaf == _OWN and array.ndim > 1:
        moved = array.transpose(*range(2, array.ndim), 1, 0)
        before, after = _AXES.get(array.ndim, ("PyTorch's axes", "Flax's axes"))
        readings = [(moved, f"from {before} to {after}"), as_it_is]
        if name.endswith(_OWN):
            readings.reverse()
    for read, layout in readings:
        if read.shape == shape:
            return read, layout
    for read, layout in readings:
        if read.size == math.prod(shape) and (len(shape) > read.ndim or _long(read.shape) == _long(shape)):
            return read.reshape(shape), f"{layout}, reshaped".removeprefix(", ")
    return readings[0]


def _long(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def nearest_array(path: str, shape: tuple[int, ...], others: Arrays) -> str | None:
    """Return the name that is most similar to a path, of an array with as many elements if there is one; else None."""
    wanted, size = comparable(path), math.prod(shape)
    fitting: Iterable[str] = [name for name, array in others.items() if array.size == size] or others
    found = difflib.get_close_matches(wanted, {comparable(name): name for name in fitting}, 1, _SIMILAR)
    return next((name for name in fitting if comparable(name) in found), None)
