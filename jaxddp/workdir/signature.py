"""`signature.json`: the classes and the images of a run's network, so inference needs no training data.

A run that starts from the weights of another takes over the settings of its network and its images.
"""

import dataclasses
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np

import jaxddp.core.files as files
from jaxddp.config import DataConfig
from jaxddp.config.data_section import IMAGE_KEYS, RESIZING_KEYS
from jaxddp.config.tree import NETWORK_KEYS
from jaxddp.config.values import checked, differing, plain
from jaxddp.core.errors import InputError, Key, Option, counted, shaped, show, some
from jaxddp.core.ranges import Range
from jaxddp.data.arrays import as_pixels
from jaxddp.data.source import LabelForm, Source, image_dtype, labels_of
from jaxddp.data.storage.root import absolute
from jaxddp.data.united import class_counts
from jaxddp.recipe.file import RUN_ID, RecipeFile, read_config
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import RunIdentity
from jaxddp.weights import places
from jaxddp.weights.download import SCHEME, HubFile
from jaxddp.weights.state_dict import read

_Side = Annotated[int, Range(1, 1_000_000)]
NORMALIZED = "float32"
"""The dtype of images that were normalized before the run."""


@dataclasses.dataclass(frozen=True)
class Signature:
    """The classes of a run, in the order of its logits, and the format of its images."""

    class_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    image_shape: tuple[_Side, _Side, _Side]
    """(H, W, C) of the network's images."""
    dtype: str
    """The dtype of pixels before normalization: "uint8" or "uint16"; "float32" for normalized images."""
    in_memory: bool
    """Whether the images were arrays, which are not resized, instead of files."""
    label_form: LabelForm = "one label"
    """The form of the labels, on which the probabilities depend; the ids are names of numbers if it is "numbers"."""
    num_examples: int = 0
    class_counts: tuple[float, ...] = ()
    """The number of training examples, and the amount of each class (`Labels.amounts`); 0 and none if unknown."""

    def __repr__(self) -> str:
        classes = f"{counted(len(self.class_names), 'class')} ({some(self.class_names)})"
        return f"Signature({classes}, {self.dtype}{list(self.image_shape)})"

    @classmethod
    def of(cls, source: Source, data: DataConfig) -> "Signature":
        """Return the signature of a run that trains on a source. It describes the images as they are evaluated."""
        data = data.of_evaluation
        amounts = len(source), tuple(class_counts(source).tolist())
        labels, shape, dtype = labels_of(source), source.image_shape(data), image_dtype(source, data).name
        return cls(labels.ids, labels.names, shape, dtype, source.pixel_shape is not None, labels.form, *amounts)

    @classmethod
    def read(cls, directory: Path) -> "Signature | None":
        """Read the signature of a work directory; None if there is no such file.

        Raises: InputError if the file is damaged, or belongs to another run than config.json.
        """
        path = directory / places.SIGNATURE_FILE
        if not path.exists():
            return None
        content = files.content_of(path, "make it readable")
        hints = get_type_hints(cls, include_extras=True) | {"dtype": Literal["uint8", "uint16", "float32"]}
        with files.parsing(path, "remove it to use the run's data instead"):
            entries = {"num_examples": 0, "class_counts": (), **files.parse_json(content, dict)}
            signature = cls(**{key: checked(entries[key], hint, key) for key, hint in hints.items()})
            if len(signature.class_ids) != len(signature.class_names):
                raise ValueError("there are more ids than names of classes, or fewer")
            run_id, run = entries.get(RUN_ID), RunIdentity.in_workdir(directory)
            if run_id is not None and run is not None and run_id != run.id:
                raise ValueError(f"it belongs to run {show(run_id)}, and {CONFIG_FILE} names run {run.id}")
            return signature

    def check_resumed(self, directory: Path) -> None:
        """Check that the run in a work directory has the same names of classes; its fingerprints cover only the ids.

        A damaged file is ignored, because the run writes it again. Raises: InputError if a class has another name.
        """
        before = None
        with suppress(InputError):
            before = Signature.read(directory)
        names = dict(zip(before.class_ids, before.class_names, strict=True)) if before else {}
        for each, now in zip(self.class_ids, self.class_names, strict=True):
            if (was := names.get(each, now)) != now:
                advice = ("restore the name in the data set, or start in another ", Option("workdir"))
                problem = f"class {show(each)} was called {show(was)} and is now {show(now)}"
                raise InputError(f"{directory / places.SIGNATURE_FILE}: {problem}", advice=advice)

    def write(self, directory: Path, run_id: str | None) -> None:
        """Write the file into the work directory of a run. Raises InputError if this fails."""
        files.replace_json(directory / places.SIGNATURE_FILE, {RUN_ID: run_id, **dataclasses.asdict(self)})

    def pixels(self, images: np.ndarray) -> np.ndarray:
        """Convert arrays [N, H, W, C] to pixels of this dtype. Raises: InputError about their shape or dtype."""
        given, images = images, as_pixels(images, "normalized" if self.dtype == NORMALIZED else None)
        if given.dtype != images.dtype and images.dtype == np.uint8 and self.dtype == "uint16":
            # Repeating the 8 bits keeps white white.
            images = images.astype(np.uint16) * 257
        if images.shape[1:] != self.image_shape or images.dtype != self.dtype:
            expected = f"{self.dtype}[N, {', '.join(map(str, self.image_shape))}]"
            raise InputError(f"images: {shaped(given)} was given; give {expected}, as the network was trained on")
        return images

    def data(self, data: DataConfig) -> DataConfig:
        """Return the config that reads such images from files. Raises: InputError if files cannot have this shape."""
        height, width, channels = self.image_shape
        if channels not in (1, 3, 4) or height != width or self.dtype == NORMALIZED:
            problem = f"the run was trained on arrays of {height}x{width} pixels with {channels} channels"
            advice = f"give an array, {self.dtype}[N, {height}, {width}, {channels}]"
            raise InputError(f"{problem}, which files cannot have", advice=advice)
        size: dict[str, Any] = {"image_size": height, "channels": channels, "bits": 8 * np.dtype(self.dtype).itemsize}
        # Images in memory were not cropped.
        return dataclasses.replace(data, **size, eval_size=None, resize=height if self.in_memory else data.resize)


_OF_WEIGHTS = ("image_size", "resize", "eval_crop", "interpolation", "mean", "std")


def recognized_file(file: RecipeFile, weights: str) -> RecipeFile:
    """Return a recipe file with the network that has the arrays of a file of weights, if there is one.

    The settings of images are those in which its published weights agree. Raises: InputError if several networks fit.
    """
    path = places.file_of_folder(files.expanded(weights))
    if not places.is_local(weights) or not os.path.isfile(path) or os.path.isfile(path.parent / CONFIG_FILE):
        return file
    like = places.recognized({name: array.shape for name, array in read(path).items()})
    networks = [*dict.fromkeys(one.network for one in like)]
    if not networks:
        return file
    if len(networks) > 1:
        advice = ("give the right one as ", Key("model.name", networks[0]))
        raise InputError(f"{weights}: may have the arrays of {' or '.join(networks)}", advice=advice)
    of_all = {key: {getattr(one, key) for one in like} for key in _OF_WEIGHTS}
    images = {key: values.pop() for key, values in of_all.items() if len(values) == 1}
    notice = f"{weights}: has the arrays of {networks[0]}"
    if others := [f"data.{key}" for key in of_all if key not in images]:
        notice += f", whose published weights differ in {', '.join(others)}: give those of this file"
    return _with_changes(file, {"data": images, "model": {"name": networks[0]}}, notice)


def with_settings_of_weights(file: RecipeFile, weights: str, workdir: Path | None, offline: bool = False) -> RecipeFile:
    """Return a recipe file with the network and the image settings of `weights`, if they are known.

    They are known for published weights, for a run, and for a folder or a repository of the Hub that has the files of a
    published run. If `workdir` has a run that began with these weights, its settings are read, because the earlier run
    may be gone. Nothing is fetched if `offline`.

    Raises: InputError if no published weights have this name, there is no such repository, or config.json cannot be
    read; Unreachable if the Hub does not answer.
    """
    own_network = "get_model" in file.hooks
    started_here = workdir is not None and _started_from(workdir, weights)
    if places.has_library(weights) and not started_here:
        published = places.find_published(weights)
        images = {key: getattr(published, key) for key in _OF_WEIGHTS} | {"eval_size": None, "channels": 3, "bits": 8}
        network = {} if own_network else {"model": {**dict.fromkeys(NETWORK_KEYS), "name": published.network}}
        changes = {"data": images, **network}
    else:
        place = workdir if started_here else _folder_of(weights, offline=offline)
        if place is None or not os.path.isfile(place / CONFIG_FILE):
            return file
        changes = _settings(place, own_network=own_network)
    return _with_changes(file, changes)


def _with_changes(file: RecipeFile, changes: Mapping[str, Any], notice: str = "") -> RecipeFile:
    """Return a recipe file with changes of its config, and the keys that they change as `taken`."""
    config = file.config.replace(**plain(changes))
    return dataclasses.replace(file, config=config, taken=differing(file.config, config), notice=notice)


def _folder_of(weights: str, *, offline: bool) -> Path | None:
    """Return the folder with the config.json of the run that trained the weights, if there is one."""
    if not weights.startswith(SCHEME):
        return files.expanded(weights)
    place = HubFile.parse(weights)
    if place.file not in (None, places.WEIGHTS_FILE):
        return None
    folder = places.fetch_settings(place, offline=offline)
    # Another library's config.json has other keys.
    return folder if folder is not None and RunIdentity.in_workdir(folder) is not None else None


def _settings(place: Path, *, own_network: bool) -> dict[str, dict[str, Any]]:
    """Return the settings of a run as changes of a config. If the run trained on arrays, files are resized to match.

    The network's settings are left out if only one of the two recipes defines the network in code.
    """
    config, content = read_config(place / CONFIG_FILE)
    data, signature = config.data, Signature.read(place)
    if signature is not None and signature.in_memory:
        # Image files may not have the shape of the arrays.
        with suppress(InputError):
            data = signature.data(data)
    changes = {"data": {key: getattr(data, key) for key in (*IMAGE_KEYS, *RESIZING_KEYS)}}
    if "model" in content and ("get_model" in (content["recipe"] or {}).get("hooks", ())) == own_network:
        changes["model"] = {key: getattr(config.model, key) for key in NETWORK_KEYS}
    return changes


def _started_from(workdir: Path, weights: str) -> bool:
    if not os.path.isfile(workdir / CONFIG_FILE):
        return False
    config, content = read_config(workdir / CONFIG_FILE)
    first = config.model.weights if "model" in content else None
    return first == weights or (first is not None and places.is_local(weights) and absolute(first) == absolute(weights))


def with_notice(file: RecipeFile, weights: str) -> RecipeFile:
    """Return the recipe file with a line that lists the settings that were taken over, if there are any."""
    now, keys = file.config.flat(), file.taken
    listed = ", ".join(f"{key}={now[key]}" for key in sorted(keys) if now[key] is not None)
    whose = "the run's" if places.is_local(weights) else "the"
    begin = f"{file.notice}; the" if file.notice else f"{weights}: {whose}"
    return dataclasses.replace(file, notice=f"{begin} settings are taken over: {listed}" if listed else file.notice)
