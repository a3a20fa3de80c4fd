"""Match the arrays of a state dict with those of a network, and convert them to its layout and to its images.

The network defines the names in a state dict (`jaxddp.models.network`). The order of axes depends on the kind of
array, and some shapes depend on the size and the channels of the images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxddp.config.layers import HEADS, NO_LAYERS, Layers
from jaxddp.core.errors import InputError, Key, counted, listed, nearest
from jaxddp.models.interface import PARAMS, ImageShape, selects
from jaxddp.models.network import Naming, PositionGrid
from jaxddp.weights.foreign import Arrays, Shapes, nearest_array

_RENAMING = ("define rename(name) in the recipe, for names as `jaxddp weights inspect FILE RECIPE` lists them",)
_PUBLISHED_CHANNELS = (1, 3)
"""The numbers of channels of weights that can be converted."""
# torchvision's layer scales of ConvNeXt are [C, 1, 1], to match images of [C, H, W].
_IMAGE_SHAPED = "layer_scale"


def namings_of(model: Any, library: str | None = None) -> tuple[Naming, ...]:
    """Return the namings of a model or an adapted module: those of published libraries, then `dotted_path`.

    `dotted_path` is used to read and write networks without published weights. With `library`, only its are returned.
    """
    published: Any = getattr(getattr(model, "module", model), "published_names", tuple)
    namings = (*published(), dotted_path)
    return tuple(each for each in namings if library is None or library in getattr(each, "library", "").split())


def unwrapped(names: Mapping[str, str], shapes: Shapes, namings: Sequence[Naming]) -> dict[str, str]:
    """Return names without the prefix of a module that holds the network, such as "model.".

    `names` are by the name in the file. Raises: InputError if the network is below several prefixes.
    """
    given, own = {*names.values()}, {naming(path) for naming in namings for path in shapes}
    prefixes = sorted({"", *(f"{name.partition('.')[0]}." for name in given if "." in name)})
    counts = [sum(prefix + name in given for name in own) for prefix in prefixes]
    prefix, *others = (prefix for prefix, count in zip(prefixes, counts, strict=True) if count == max(counts))
    if prefix and others and 2 * max(counts) > len(shapes):
        advice = "define rename(name) in the recipe, which returns None for the others"
        raise InputError(f"the network is below {prefix!r} and {others[0]!r}", advice=advice)
    # Another array may have the name of the network's.
    kept = {name: new for name, new in names.items() if new.startswith(prefix) or prefix + new not in given}
    return {name: new.removeprefix(prefix) for name, new in kept.items()}


def has_published_names(model: Any) -> bool:
    """Return whether torchvision or timm publish a network with the arrays of a model or an adapted module."""
    return len(namings_of(model)) > 1


def dotted_path(path: str) -> str:
    """Return an array's path with dots, such as "params.layer1_0.conv1.kernel"."""
    return path.replace("/", ".")


def to_published(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """Convert an array to PyTorch's layout: kernels from HWIO to OIHW, and from IO to OI."""
    return _converted(path, name, array, (3, 2, 0, 1), (-1, 1, 1))


def from_published(path: str, name: str, array: np.ndarray) -> np.ndarray:
    """Convert an array from PyTorch's layout; the inverse of `to_published`."""
    return _converted(path, name, array, (2, 3, 1, 0), (-1,))


def _converted(path: str, name: str, array: np.ndarray, axes: Sequence[int], scale: Sequence[int]) -> np.ndarray:
    """Return a kernel with its axes in another order, a layer scale in another shape, and any other array unchanged."""
    if name == dotted_path(path):
        return array
    if path.endswith("/kernel") and array.ndim in (2, 4):
        return array.T if array.ndim == 2 else array.transpose(axes)
    return array.reshape(scale) if name.endswith(_IMAGE_SHAPED) else array


def published(arrays: Arrays, naming: Naming) -> dict[str, np.ndarray]:
    """Return the state dict of the arrays, a dict by path."""
    return {naming(path): to_published(path, naming(path), array) for path, array in arrays.items()}


@dataclass(frozen=True)
class Conversion:
    """A conversion of one array.

    Attributes:
        description: the conversion in words, for the log.
        convert: a function of the array, which returns an array with the shape of the network's.
    """

    description: str
    convert: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class ImageArrays:
    """The arrays of a network that depend on the images.

    Attributes:
        channels: the number of channels of the network's images.
        positions: the grids of the network's position embeddings, by path.
        stored_positions: the grids of the weights' position embeddings, if they are known. A grid that is not known is
            square.
    """

    channels: int
    positions: Mapping[str, PositionGrid] = field(default_factory=dict)
    stored_positions: Mapping[str, PositionGrid] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any, image_shape: ImageShape, stored_shape: ImageShape | None = None) -> "ImageArrays":
        """Return the arrays of a model or an adapted module for images [H, W, C].

        Args:
            stored_shape: the shape of the images on which the weights were trained, if it is known.
        """
        grids: Any = getattr(getattr(model, "module", model), "position_grids", lambda height, width: {})
        *size, channels = image_shape
        return cls(channels, grids(*size), grids(*stored_shape[:2]) if stored_shape else {})


def conversions(shapes: Shapes, arrays: Arrays, images: ImageArrays) -> dict[str, Conversion]:
    """Return the conversions of arrays with another shape than the network's, by path.

    Args:
        shapes: the shapes of the network's arrays, by path.
        arrays: the arrays of the weights in the layout of the network, by path.
    """
    others = [path for path, array in arrays.items() if array.shape != shapes[path]]
    kernels = [path for path in others if _differs_in_channels(shapes[path], arrays[path].shape, images.channels)]
    # If several kernels differ like this, their inputs are not images.
    found = {path: _of_channels(arrays[path].shape[2], images.channels) for path in kernels if len(kernels) == 1}
    for path, grid in images.positions.items():
        stored = _stored_grid(arrays[path].shape, grid, images.stored_positions.get(path)) if path in others else None
        if stored is not None and arrays[path].shape[2:] == shapes[path][2:]:
            found[path] = _of_positions(stored, grid)
    return found


def _differs_in_channels(shape: tuple[int, ...], stored: tuple[int, ...], channels: int) -> bool:
    """Return whether two shapes are those of a first convolution, HWIO, for other channels."""
    is_first = len(shape) == len(stored) == 4 and shape[2] == channels and stored[2] in _PUBLISHED_CHANNELS
    return is_first and (*shape[:2], shape[3]) == (*stored[:2], stored[3])


def _of_channels(stored: int, channels: int) -> Conversion:
    """Return the conversion of a first kernel to another number of channels, as timm's `adapt_input_conv`.

    For one channel the kernels of all channels are summed, so a gray image has the same result as an image whose
    channels are all equal to it. For other numbers the channels are repeated, and scaled to keep the size of the sum.
    """
    if channels == 1:
        text = f"the sum of its {counted(stored, 'channel')}, for gray images"
        return Conversion(text, lambda kernel: kernel.astype(np.float64).sum(2, keepdims=True))
    text = f"its {counted(stored, 'channel')} repeated to {channels}, times {stored}/{channels}"
    chosen = np.arange(channels) % stored
    return Conversion(text, lambda kernel: kernel.astype(np.float64)[:, :, chosen] * (stored / channels))


def _stored_grid(shape: tuple[int, ...], grid: PositionGrid, known: PositionGrid | None) -> PositionGrid | None:
    """Return the grid of stored position embeddings [1, tokens, D]; None if their number is not that of a grid."""
    count = shape[1] - grid.class_tokens if len(shape) == 3 else -1
    if known is None:
        side = math.isqrt(max(count, 0))
        known = replace(grid, rows=side, columns=side)
    return known if known.rows * known.columns == count > 0 else None


def _of_positions(stored: PositionGrid, grid: PositionGrid) -> Conversion:
    """Return the conversion of position embeddings [1, tokens, D] to another grid, as timm's `resample_abs_pos_embed`.

    The interpolation is bicubic, with antialiasing if the grid becomes smaller, in float32. Class tokens are unchanged.
    """

    def convert(table: np.ndarray) -> np.ndarray:
        from PIL import Image

        table = table.astype(np.float32)
        at_patches = table[0, grid.class_tokens :].reshape(stored.rows, stored.columns, -1)
        size, method = (grid.columns, grid.rows), Image.Resampling.BICUBIC
        features = [Image.fromarray(np.ascontiguousarray(feature)) for feature in np.moveaxis(at_patches, 2, 0)]
        resized = np.stack([np.asarray(feature.resize(size, method)) for feature in features], axis=-1)
        return np.concatenate([table[0, : grid.class_tokens], resized.reshape(-1, table.shape[2])])[None]

    grids = f"{stored.rows}x{stored.columns} patches to {grid.rows}x{grid.columns}"
    return Conversion(f"interpolated from {grids}", convert)


@dataclass(frozen=True)
class WeightMatch:
    """The result of matching a state dict with a network.

    Attributes:
        arrays: the arrays by path: all of the network's except those in `new` and `head`.
        new: the paths of new layers other than the head, which keep their initialization.
        head: the paths of a new head, or of a head for another number of classes.
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
    state_dict: Arrays,
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
        images: the network's arrays that depend on the images, which are then converted from those for other images.

    Raises: InputError if an array outside the new layers and the head is missing or has another shape (the message
    lists such arrays), or if there is to be a new head, and no layer is known to be the head.
    """
    naming = max(namings, key=lambda naming: sum(naming(path) in state_dict for path in shapes))
    names = {path: naming(path) for path in shapes}
    arrays = {path: from_published(path, name, state_dict[name]) for path, name in names.items() if name in state_dict}
    layers = {path.split("/")[1]: path for path in shapes if path.startswith(PARAMS)}
    new = tuple(path for path in shapes if selects(new_layers, path, layers))
    others = {path: array for path, array in arrays.items() if path not in new}
    converted = {} if images is None else conversions(shapes, others, images)
    unmatched = [path for path, shape in shapes.items() if path not in arrays or arrays[path].shape != shape]
    unmatched = [path for path in unmatched if path not in {*new, *converted}]
    fresh = [path for path in shapes if path not in new] if new_head else unmatched
    head = _head(shapes, fresh, num_classes) or _head(shapes, new, num_classes)
    if faults := [path for path in unmatched if path not in head]:
        choice = "choose the network of these weights (", Key("model.name"), ", width and stem), or "
        if len(namings) == 1:
            choice = (*_RENAMING, ", or ") if any(names[path] not in state_dict for path in faults) else ()
        anew = "initialize these layers anew (", Key("model.new_layers"), ")"
        advice = ("give weights of this network for such images, ", *choice, *anew)
        raise InputError(_describe_faults(faults, names, shapes, state_dict), advice=advice)
    if needs_head and unmatched:
        faults = _describe_faults(unmatched, names, shapes, state_dict)
        raise InputError(faults, advice="give weights and data with the same classes")
    if new_head and not (head or new):
        raise InputError("the head for other classes is not known", advice=("name it in ", Key("model.new_layers")))
    left_over = tuple(sorted(state_dict.keys() - {*names.values()}))
    matched = {path: array for path, array in arrays.items() if path not in {*new, *head}}
    return WeightMatch(matched, tuple(path for path in new if path not in head), head, left_over, converted)


def _head(shapes: Shapes, paths: Sequence[str], num_classes: int) -> tuple[str, ...]:
    """Return the paths of the head's kernel and bias, if they are among `paths`.

    The head is the only layer with as many outputs as there are classes, or the only one of them with its name.
    """
    layers = dict.fromkeys(path.rpartition("/")[0] for path in paths)
    heads = [layer for layer in layers if shapes.get(f"{layer}/kernel", ())[1:] == (num_classes,)]
    heads = [layer for layer in heads if layer.rpartition("/")[2] in HEADS] or heads
    # A head is replaced as a whole: a bias of other weights does not fit a new kernel.
    return tuple(path for path in shapes if path.rpartition("/")[0] == heads[0]) if len(heads) == 1 else ()


def _describe_faults(faults: Sequence[str], names: Mapping[str, str], shapes: Shapes, state_dict: Arrays) -> str:
    """Describe the arrays that are missing or have another shape."""
    absent = [path for path in faults if names[path] not in state_dict]
    differences, clauses = [], []
    missing = [names[path] for path in absent]
    for path in faults:
        if (name := names[path]) in state_dict:
            shape = to_published(path, name, np.broadcast_to(0, shapes[path])).shape
            differences.append(f"{name} is {list(state_dict[name].shape)} in the file and {list(shape)} in the network")
    if missing:
        used = set(names.values())
        others = {name: array for name, array in state_dict.items() if name not in used}
        hint, name = nearest(missing[0], others), nearest_array(absent[0], shapes[absent[0]], others)
        if not hint and name is not None:
            hint = f" (the nearest in the file is {name!r}, {list(others[name].shape)})"
        of_all = f"{len(missing)} of the network's {counted(len(shapes), 'array')}"
        clauses.append(f"{of_all} missing: {listed(missing, most=2)}{hint}")
    if differences:
        clauses.append(f"{len(differences)} with another shape: {listed(differences, '; ', most=2)}")
    return "; ".join(clauses)
