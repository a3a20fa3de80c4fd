"""`signature.json`: the classes and the images of a run's network, so inference needs no training data."""

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Option
from jaxddp.core.ranges import Range
from jaxddp.core.wording import counted, shaped, show, some
from jaxddp.data.arrays import as_pixels, widened
from jaxddp.data.labels import LabelKind, labels_of
from jaxddp.data.source import Source, image_dtype
from jaxddp.overrides import checked
from jaxddp.recipe_file import RUN_ID
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import RunIdentity

SIGNATURE_FILE = "signature.json"
_FILE_CHANNELS = (1, 3, 4)
_Side = Annotated[int, Range(1, 1_000_000)]


NORMALIZED = "float32"
"""The dtype of images that were normalized before the run."""


@dataclass(frozen=True)
class Signature:
    """The classes of a run, in the order of its logits, and the format of its images."""

    class_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    image_shape: tuple[int, int, int]
    """(H, W, C) of the network's images."""
    dtype: str
    """The dtype of pixels before normalization: "uint8" or "uint16"; "float32" for normalized images."""
    in_memory: bool
    """Whether the images were arrays, which are not resized, instead of files."""
    multi_label: bool = False
    """Whether an image may have several labels, so each class has an independent probability."""

    def __repr__(self) -> str:
        classes = f"{counted(len(self.class_names), 'class')} ({some(self.class_names)})"
        return f"Signature({classes}, {self.dtype}{list(self.image_shape)})"

    @classmethod
    def of(cls, source: Source, data: DataConfig) -> "Signature":
        """Return the signature of a run that trains on a source. It describes the images as they are evaluated."""
        data = data.of_evaluation
        dtype, arrays = image_dtype(source, data).name, source.pixel_shape is not None
        labels = labels_of(source)
        return cls(labels.ids, labels.names, source.image_shape(data), dtype, arrays, labels.several)

    @property
    def labels(self) -> LabelKind:
        """The kind of the labels."""
        return LabelKind(len(self.class_ids), self.multi_label)

    @classmethod
    def read(cls, directory: Path) -> "Signature | None":
        """Read the signature of a work directory; None if an older release trained the run without a signature.

        Raises:
            InputError: the file is damaged, or belongs to another run than config.json.
        """
        path = directory / SIGNATURE_FILE
        if not path.exists():
            return None
        with files.reading(path, "make it readable"):
            content = files.read(path)
        try:
            entries: dict[str, Any] = files.parse_json(content)
            names = {key: checked(entries[key], tuple[str, ...], key) for key in ("class_ids", "class_names")}
            shape = checked(entries["image_shape"], tuple[_Side, _Side, _Side], "image_shape")
            if len({*map(len, names.values())}) > 1:
                raise ValueError("there are more ids than names of classes, or fewer")
            dtype = checked(entries["dtype"], Literal["uint8", "uint16", "float32"], "dtype")
            # Older releases do not write `multi_label`.
            flags = {"in_memory": entries["in_memory"], "multi_label": entries.get("multi_label", False)}
            checked_flags = {key: checked(value, bool, key) for key, value in flags.items()}
            run_id, run = entries.get(RUN_ID), RunIdentity.in_workdir(directory)
            if run_id is not None and run is not None and run_id != run.id:
                raise ValueError(f"it belongs to run {show(run_id)}, and {CONFIG_FILE} names run {run.id}")
            return cls(**names, image_shape=shape, dtype=dtype, **checked_flags)
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: is damaged ({error}); remove it to use the run's data instead") from None

    def check_resumed(self, directory: Path) -> None:
        """Check that the run in a work directory has the same names of classes; its fingerprints cover only the ids.

        A damaged file is ignored, because the run writes it again. Raises: InputError if a class has another name.
        """
        before = None
        with suppress(InputError):
            before = Signature.read(directory)
        if before is None or before.class_ids != self.class_ids:
            return
        for class_id, name, new_name in zip(self.class_ids, before.class_names, self.class_names, strict=True):
            if name != new_name:
                raise InputError(
                    f"{directory / SIGNATURE_FILE}: class {show(class_id)} was called {show(name)} and is now "
                    f"{show(new_name)}",
                    advice=("restore the name in the data set, or start in another ", Option("workdir")),
                )

    def write(self, directory: Path, run_id: str | None) -> None:
        """Write the file into the work directory of a run. Raises InputError if this fails."""
        content = {RUN_ID: run_id, **dataclasses.asdict(self)}
        files.replace(directory / SIGNATURE_FILE, (json.dumps(content, indent=2) + "\n").encode())

    def pixels(self, images: np.ndarray) -> np.ndarray:
        """Convert arrays [N, H, W, C] to pixels of this dtype.

        Raises:
            InputError: the arrays have another shape or dtype; see also `as_pixels`.
        """
        dtype, images = images.dtype, as_pixels(images, "normalized" if self.dtype == NORMALIZED else None)
        if dtype != images.dtype and images.dtype == np.uint8 and self.dtype == "uint16":
            images = widened(images)
        if dtype != images.dtype and images.dtype == np.uint16 and self.dtype == "uint8":
            raise InputError(
                f"images: {dtype} that are no multiples of 1/255, and the network was trained on uint8; give "
                "np.rint(images * 255).astype(np.uint8)"
            )
        if images.shape[1:] != self.image_shape or images.dtype != self.dtype:
            shape = ", ".join(map(str, self.image_shape))
            raise InputError(
                f"images: {shaped(images)} was given; give {self.dtype}[N, {shape}], as the network was trained on"
            )
        return images

    def data(self, data: DataConfig) -> DataConfig:
        """Return the config that reads images of this format from files.

        Raises:
            InputError: image files cannot have this shape.
        """
        height, width, channels = self.image_shape
        if channels not in _FILE_CHANNELS or height != width or self.dtype == NORMALIZED:
            raise InputError(
                f"the run was trained on arrays of {height}x{width} pixels with {channels} channels, which files "
                f"cannot have; give an array, {self.dtype}[N, {height}, {width}, {channels}]"
            )
        size: dict[str, Any] = {"image_size": height, "channels": channels, "bits": 8 * np.dtype(self.dtype).itemsize}
        # Images in memory were not cropped.
        resize = height if self.in_memory else data.resize
        return dataclasses.replace(data, **size, eval_size=None, resize=resize)
