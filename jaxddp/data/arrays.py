"""`ArrayTable`: images and labels in memory."""

import hashlib
import logging
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.core.errors import InputError, Key, counted, refused, shaped
from jaxddp.data.batch import Batch
from jaxddp.data.faults import check_distinct
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard, check_order, columns
from jaxddp.data.source import FLOATS, ClassSelection, Record, Substitutes, float_labels, labels_of, one_line_repr

_UINT16_MAX = 65_535
_CHUNK = 1024
"""The number of images that are hashed or converted at a time, to bound the memory."""
_log = logging.getLogger("jaxddp.data")
FloatKind = Literal["unit", "normalized"]
"""The meaning of floats: numbers from 0 to 1, or images that are already normalized."""


@dataclass(frozen=True, eq=False)
class ArrayTable:
    """Images and labels held in memory.

    Args:
        images: uint8 or uint16 [N, H, W, C], not normalized. A memory map (`np.load(mmap_mode="r")`) is possible: a
            batch reads only its own rows, and the fingerprint reads all rows. Float images are converted to these
            dtypes here, unless `pixels` is "normalized"; see `jaxddp.data.arrays.from_floats`.
        labels: integers [N], dense class indices 0..K-1, or -1 if the class is unknown; stored as int32. If an image
            may have several classes or none, multi-hot [N, K] of 0 and 1; stored as uint8. For shares of the classes
            or numbers to predict, floats [N, K]; stored as float32.
        class_names: the names of the K classes, or of the K numbers.
        pixels: the meaning of float images. "unit": all numbers are from 0 to 1. "normalized": the images are the input
            of the network, and are kept as float32; they are augmented, but `data.mean` and `data.std` are not used.
            None: numbers from 0 to 1, or whole numbers. After a conversion to integers, the attribute is None.
        label_form: "shares" or "numbers", for labels that are floats. None for other labels.
        weights: floats [N] above 0, the weight of each example in the loss of training. None: all are equal.

    Raises:
        InputError: `as_pixels`, `check_labels` or `check_class_names` rejects an argument.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    pixels: FloatKind | None = None
    reading: str = ""
    """How the arrays were found, for the start of a run."""
    label_form: Literal["shares", "numbers"] | None = None
    weights: np.ndarray | None = None

    verified = None

    def __post_init__(self) -> None:
        check_class_names(self.class_names)
        images, labels = as_pixels(_array("images", self.images), self.pixels), _array("labels", self.labels)
        if self.label_form is not None:
            labels = labels.reshape(len(images), -1) if labels.ndim == 1 else labels
            check_rows(labels, len(images), len(self.class_names), self.label_form)
            labels = float_labels(labels, self.label_form)
        else:
            check_labels(labels, len(images), len(self.class_names))
            labels = labels.astype(np.int32 if labels.ndim == 1 else np.uint8)
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels)
        if self.weights is not None:
            weights = _array("weights", self.weights)
            if weights.shape != (len(images),) or not (np.isfinite(weights) & (weights > 0)).all():
                raise refused("weights", weights, f"give {counted(len(images), 'finite number')} above 0")
            object.__setattr__(self, "weights", weights.astype(np.float32))
        object.__setattr__(self, "class_names", tuple(self.class_names))
        object.__setattr__(self, "pixels", "normalized" if images.dtype == np.float32 else None)

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        return one_line_repr(self, shaped(self.images))

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def class_ids(self) -> tuple[str, ...]:
        return self.class_names

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256, in hex, of pixels, labels and class names; equal on every machine."""
        digest = hashlib.sha256(repr((self.images.shape, self.class_names)).encode())
        for _, chunk in _chunks(self.images):
            digest.update(np.ascontiguousarray(chunk).data)
        digest.update(self.labels.astype("<i4").tobytes() if self.labels.ndim == 1 else self.labels.tobytes())
        digest.update(b"" if self.weights is None else self.weights.tobytes())
        return digest.hexdigest()

    def select(self, classes: ClassSelection) -> "ArrayTable":
        if classes is None:
            return self
        rows, labels = labels_of(self).select(classes, self.name(0))
        return replace(self.rows(rows), labels=labels.values, class_names=labels.names)

    def take(self, limit: int) -> "ArrayTable":
        rows = labels_of(self).share(limit)
        return self if len(rows) == len(self) else self.rows(rows)

    def rows(self, rows: np.ndarray) -> "ArrayTable":
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, images=self.images[rows], labels=self.labels[rows], weights=weights)

    def without_labels(self) -> "ArrayTable":
        return ArrayTable(self.images, np.full(len(self), -1), (), self.pixels)

    def default_data(self) -> DataConfig:
        """Return a config without flips, because images in memory are often digits."""
        return DataConfig(augment=AugmentConfig(flip=False))

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        return self.pixel_shape

    def image_dtype(self, data: DataConfig) -> np.dtype:
        """The dtype of the pixels: uint8 or uint16; float32 for normalized images."""
        return self.images.dtype

    def check(self, data: DataConfig) -> None:
        default, (height, width, channels) = DataConfig(), self.pixel_shape
        for key in ("mean", "std") if self.pixels == "normalized" else ():
            if (value := getattr(data, key)) != getattr(default, key):
                fault = ": these images are already normalized, and no mean or deviation is used"
                advice = "leave ", Key(f"data.{key}"), ' out, or give pixels="unit"'
                raise InputError(Key(f"data.{key}", value), fault, advice=advice)
        if height != width:
            raise InputError(f"these images are {height}x{width}, in memory; make them square, or put them into files")
        bits = 8 * self.images.dtype.itemsize
        _check_fixed("channels", data.channels, channels, default.channels)
        _check_fixed("bits", data.bits, bits, default.bits)
        _check_fixed("image_size", data.image_size, height)
        _check_fixed("crop", data.crop, "whole")

    def check_evaluation(self, data: DataConfig) -> None:
        _check_fixed("eval_size", data.eval_size, self.pixel_shape[0], None)

    def check_resident(self, data: DataConfig) -> None: ...

    def substitutes(self, data: DataConfig) -> None: ...

    def train_batches(
        self, order: Order, data: DataConfig, steps: range, shard: Shard = WHOLE, substitutes: Substitutes | None = None
    ) -> Iterator[Batch]:
        return self._batches(order, steps, shard)

    def eval_batches(self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE) -> Iterator[Batch]:
        return self._batches(order, range(order.num_batches), shard)

    @property
    def pixel_shape(self) -> tuple[int, int, int]:
        return self.images.shape[1:]

    def read(self, row: int) -> bytes:
        return self.images[row].tobytes()

    def name(self, row: int) -> str:
        return f"row {row}"

    def record(self, row: int) -> Record:
        return Record(row)

    def _batches(self, order: Order, steps: range, shard: Shard) -> Iterator[Batch]:
        check_order(self, order, shard)

        def with_images(batch: Batch) -> Batch:
            images = self.images[batch.row]
            images[batch.mask == 0] = 0
            return batch._replace(image=images)

        return (with_images(columns(self, order, step, shard)) for step in steps)


def _check_fixed(key: str, wanted: object, *allowed: object) -> None:
    """Raise `InputError` if a key asks for other images than those in memory; the first allowed value is theirs."""
    if wanted not in allowed:
        advice, key_of_image = ("set ", Key(f"data.{key}"), f" {allowed[0]}"), Key.plain(f"data.{key}", str(wanted))
        raise InputError(key_of_image, ": images in memory are used as they are", advice=advice)


def _array(name: str, values: Any) -> np.ndarray:
    if np.ma.is_masked(values):
        raise InputError(f"{name}: a masked array with masked values; leave those examples out")
    try:
        return np.asarray(values)
    except ValueError as error:
        raise InputError(f"{name}: not an array ({error}); give all rows the same shape") from None


def check_class_names(names: Any) -> None:
    """Raise `InputError` if class names are not a list of strings, or if two different names look alike."""
    is_list = isinstance(names, Collection) and not isinstance(names, str | set | frozenset)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise refused("class_names", names, "give a list of the classes' names, each of them text")
    check_distinct(names, lambda name: "class_names")


def as_pixels(images: np.ndarray, pixels: FloatKind | None = None) -> np.ndarray:
    """Return images as uint8 or uint16 [N, H, W, C]. Floats are converted; images of these dtypes are not read.

    Normalized images are returned as float32.

    Raises:
        InputError: there are no images, or they have another shape or dtype, such as [N, 3, H, H], or the floats cannot
            be converted, or are not of the kind `pixels`.
    """
    _check_float_kind(images, pixels)
    if images.ndim != 4 or not images.size:
        advice = "give [N, H, W, C], with C = 1 for gray; a data set needs at least one example and one pixel"
        raise InputError(f"images of shape {images.shape}: {advice}")
    if images.shape[1] in (1, 3, 4) and images.shape[2] == images.shape[3] > 4:
        advice = "give [N, H, W, C], such as images.transpose(0, 2, 3, 1)"
        raise InputError(f"images of shape {images.shape}: the channels are first; {advice}")
    if pixels == "normalized":
        return images.astype(np.float32, copy=False)
    if np.issubdtype(images.dtype, np.floating):
        return from_floats(images)
    if images.dtype not in (np.uint8, np.uint16):
        advice = "give uint8 from 0 to 255, uint16 from 0 to 65535 in this machine's byte order, or floats from 0 to 1"
        raise InputError(f"images of {images.dtype}: {advice}; the device normalizes")
    return images


def check_labels(labels: np.ndarray, num_examples: int, num_classes: int) -> None:
    """Check labels.

    Raises:
        InputError: the labels are neither integers [N] in -1..num_classes-1 nor multi-hot [N, K] of 0 and 1.
    """
    if labels.shape not in ((num_examples,), (num_examples, num_classes)):
        several = f"if images may have several labels, a row of {num_classes} numbers per image, one per class"
        images = counted(num_examples, "image")
        raise InputError(f"labels of shape {labels.shape} for {images}: give one label per image, or, {several}")
    if labels.ndim == 1 and not np.issubdtype(labels.dtype, np.integer):
        advice = 'give integers, dense class indices from 0, or label_form="numbers" for numbers to predict'
        raise InputError(f"labels of {labels.dtype}: {advice}")
    wrong = (labels != 0) & (labels != 1) if labels.ndim == 2 else (labels < -1) | (labels >= num_classes)
    if wrong.any():
        row, *columns = np.argwhere(wrong)[0].tolist()
        allowed = f"{num_classes} class names allow 0..{num_classes - 1}, and -1 where the class is unknown"
        advice = f"give 1 if the image is of class {columns[0]}, else 0, or set label_form" if columns else allowed
        raise InputError(f"label {labels[row, *columns]} of row {row}: {advice}")


def check_rows(labels: np.ndarray, num_examples: int, num_columns: int, form: str) -> None:
    """Raise `InputError` if labels are not shares or numbers [N, K]: their shape differs, or a number is wrong."""
    if form not in FLOATS:
        raise refused("label_form", form, f"give {' or '.join(FLOATS)}")
    if labels.shape != (num_examples, num_columns):
        fault = f"labels of shape {labels.shape} for {counted(num_examples, 'image')}"
        raise InputError(f"{fault}: give {counted(num_columns, 'number')} for each")
    wrong = ~np.isfinite(labels).all(1)
    if form == "shares":
        wrong |= (labels < 0).any(1) | ~labels.any(1)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(f"labels {labels[row].tolist()} of row {row}: give {FLOATS[form]}")


def _check_float_kind(images: np.ndarray, pixels: FloatKind | None) -> None:
    """Raise `InputError` if there is no such kind, or an image [H, W, C] is not of this kind; name the first row."""
    if pixels is None:
        return
    if pixels not in ("unit", "normalized"):
        raise refused("pixels", pixels, 'give "unit" for floats from 0 to 1, "normalized", or None')
    if not np.issubdtype(images.dtype, np.floating):
        raise InputError(f"pixels={pixels!r}: is for floats, and the images are {images.dtype}; leave pixels out")
    expected = "finite numbers" if pixels == "normalized" else "numbers from 0 to 1"
    for start, chunk in _chunks(images):
        wrong = ~np.isfinite(chunk) if pixels == "normalized" else ~((chunk >= 0) & (chunk <= 1))
        if wrong.any():
            row, *place = np.argwhere(wrong)[0]
            value = chunk[row, *place]
            raise InputError(f"pixels={pixels!r}: row {start + row} has the value {value:g}; give {expected}")


def _chunks(images: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row of each part of the images, and the part."""
    return ((start, images[start : start + _CHUNK]) for start in range(0, len(images), _CHUNK))


def from_floats(images: np.ndarray) -> np.ndarray:
    """Convert images [N, H, W, C] of floats to uint8 or uint16, without loss where possible.

    Numbers from 0 to 1 become uint8 if all are multiples of 1/255, as in an image divided by 255. Otherwise they become
    uint16, rounded to multiples of 1/65,535; a warning is logged if that changes a number. If a number is above 1, all
    numbers must be whole, and they keep their values.

    Raises:
        InputError: a number is negative, infinite, NaN or above 65,535, or the largest number is above 1 and not all
            are whole.
    """
    lowest = float(min(chunk.min() for _, chunk in _chunks(images)))
    highest = float(max(chunk.max() for _, chunk in _chunks(images)))
    span = f"images of {images.dtype} from {lowest:g} to {highest:g}"
    if not (lowest >= 0 and np.isfinite(highest)):
        advice = ("do not normalize the images; the device does, with ", Key("data.mean"), " and ", Key("data.std"))
        raise InputError(f"{span}: give floats from 0 to 1, or uint8 from 0 to 255", advice=advice)
    scales = (1,) if highest > 1 else (255, _UINT16_MAX)
    scale = next((scale for scale in scales if all(_are_multiples(chunk, scale) for _, chunk in _chunks(images))), None)
    if highest > _UINT16_MAX or (highest > 1 and scale is None):
        advice = f"give floats from 0 to 1, for example images / {highest:g}"
        raise InputError(f"{span}, which are not whole numbers up to {_UINT16_MAX:,}: {advice}")
    if scale is None:
        scale, rounded = _UINT16_MAX, f"each number rounded by at most {0.5 / _UINT16_MAX:.1e}"
        _log.warning(f"images: {images.dtype} that are not multiples of 1/255 are kept as uint16, {rounded}")
    pixels = np.empty(images.shape, np.uint16 if scale == _UINT16_MAX or highest > 255 else np.uint8)
    for start, chunk in _chunks(images):
        pixels[start : start + _CHUNK] = np.rint(chunk.astype(np.float64) * scale)
    return pixels


def _are_multiples(chunk: np.ndarray, scale: int) -> bool:
    """Return whether all numbers are multiples of 1 / scale, within the rounding error of a division."""
    wide = chunk.astype(np.float64)
    return bool((np.abs(wide - np.rint(wide * scale) / scale) <= 2 * np.spacing(chunk)).all())
