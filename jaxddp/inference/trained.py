"""A trained run, loaded for inference: the network of a checkpoint, its parameters and its preprocessing."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config, DataConfig, Precision
from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, show
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.example_set import id_of
from jaxddp.data.inputs import open_inputs
from jaxddp.data.opening import open_splits
from jaxddp.data.selection.chosen import chosen_images
from jaxddp.data.source import Source, check_labelled, check_source, image_dtype
from jaxddp.engine.example_loss import example_loss
from jaxddp.engine.initial_state import replace_by_weights
from jaxddp.engine.state import TrainState
from jaxddp.inference.outcome import Outcome
from jaxddp.inference.prediction_stream import PredictionStream, images_at_once
from jaxddp.inference.predictions import Predictions
from jaxddp.losses.bce import sigmoid_cross_entropy
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.interface import Model
from jaxddp.models.variables import by_path, trees_of
from jaxddp.recipe.make_recipe import model_of
from jaxddp.recipe.user_objects import objects_of_hooks
from jaxddp.setup.classifier import Classifier
from jaxddp.training.validation.predicted_images import MAX_SHOWN, PredictedImages
from jaxddp.workdir.saved_state import recipe_of_run, restore_state
from jaxddp.workdir.signature import SIGNATURE_FILE, Signature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Images = np.ndarray | Source | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class TrainedRun:
    """The network of a checkpoint of a run.

    Attributes:
        directory: the work directory of the run.
        step: the step of the checkpoint.
        config: the config of the run. The config of a run from Python has only the saved settings.
        model: `apply(state.params, state.model_state, images, train=False, key=None)` returns (logits float[B, K], …).
        state: the parameters for evaluation, on every device, without an optimizer state.
        preprocess: converts pixels to the network's input.
        signature: the classes and the format of the images.
    """

    directory: Path
    step: int
    config: Config = field(repr=False)
    model: Model = field(repr=False)
    state: TrainState = field(repr=False)
    preprocess: Preprocess = field(repr=False)
    signature: Signature
    topology: Topology = field(repr=False)

    @property
    def class_ids(self) -> tuple[str, ...]:
        """The ids of the K classes, by which data sets are compared, such as folder names."""
        return self.signature.class_ids

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the K classes, for display."""
        return self.signature.class_names

    def predict(self, images: Images) -> Predictions:
        """Classify images as in evaluation. All processes of a job must call it with the same images.

        Args:
            images: an array, uint8, uint16 or floats [N, H, W, C] as for an `ArrayTable`, of the size that the network
                was trained on; a folder, a CSV file or a test listing, or paths of files (see
                `jaxddp.data.inputs.open_inputs`); or a source.

        Returns:
            The predictions of all images, in order. An unusable file has an error instead of a prediction.

        Raises:
            InputError: the images have another format, or do not exist.
        """
        source = self.source(images)
        batches = [*self.stream(source)]
        return Predictions(
            [id_of(source, row) for row in range(len(source))],
            np.concatenate([batch.probabilities for batch in batches]),
            self.class_ids,
            self.class_names,
            {row: error for batch in batches for row, error in batch.errors.items()},
        )

    def outcome(self, source: Source) -> Outcome:
        """Return statistics of the predictions for a labelled source: confusions, accuracies, confident mistakes.

        Raises: InputError if the source has other classes; see also `predict`.
        """
        self._check_one_label()
        check_labelled(check_source(source, "source"), "the source")
        if tuple(source.class_ids) != self.class_ids:
            raise InputError(f"{self.directory}: the source has other classes than the run; give the run's data")
        probabilities = self.predict(source).probabilities
        return Outcome(np.asarray(source.labels), probabilities, self.class_names, self.step)

    def show(self, source: Source, rows: Sequence[int] | np.ndarray) -> "Figure":
        """Return a figure of some images of a source with label, prediction and probability, for a notebook.

        Raises: InputError if the source has no such row; see also `predict`.
        """
        from jaxddp.training.pictures import prediction_grid

        check_source(source, "source")
        self._check_one_label()
        chosen = np.asarray(rows).reshape(-1)
        whole = chosen.size > 0 and np.issubdtype(chosen.dtype, np.integer)
        if chosen.size > MAX_SHOWN:
            raise InputError(f"rows: {counted(chosen.size, 'row')}; give at most {MAX_SHOWN}")
        if not whole or chosen.min() < 0 or chosen.max() >= len(source):
            raise InputError(f"rows={show(rows)}: give numbers of rows of the source, 0 to {len(source) - 1}")
        images = chosen_images(source, self.data_of(source), chosen)
        predictions = self.predict(images)
        labels = np.asarray(source.labels)[chosen]
        return prediction_grid(PredictedImages.of(images, labels, predictions.probabilities, self.class_names))

    def source(self, images: Images) -> Source:
        """Convert images that `predict` accepts to a source. Raises: InputError."""
        if isinstance(images, str | os.PathLike):
            return open_inputs([images])
        paths: list[Any] = [*images] if isinstance(images, list | tuple) else [None]
        if all(isinstance(path, str | os.PathLike) for path in paths):
            return open_inputs(paths)
        if isinstance(images, np.ndarray | jax.Array):
            images = self.signature.pixels(np.asarray(images))
            return ArrayTable(images, np.full(len(images), -1), self.class_names)
        if not hasattr(images, "eval_batches"):
            raise InputError(f"images={show(images)}: give an array, a path, a list of paths, or a source")
        source: Any = images
        return source

    def stream(self, source: Source, at_once: int | None = None) -> PredictionStream:
        """Return the predictions of a source as an iterable of batches, with `at_once` images on each device.

        Raises:
            InputError: the network does not accept such images.
        """
        data = self.data_of(source)
        if (shape := source.image_shape(data)) != self.signature.image_shape:
            raise InputError(f"images of {shape}: the network was trained on images of {self.signature.image_shape}")
        if (dtype := image_dtype(source, data)) != self.signature.dtype:
            raise InputError(f"pixels of {dtype}: the network was trained on {self.signature.dtype}")
        size = at_once or images_at_once(len(source))
        return PredictionStream(
            lambda batch: self._classify(self.state, batch),
            *(source, data, self.topology, len(self.class_ids), size),
        )

    def data_of(self, source: Source) -> DataConfig:
        """Return the config for evaluation on a source.

        Raises: InputError if the source has files, and files cannot have the shape of the run's images.
        """
        data = self.config.data
        return data.of_evaluation if source.pixel_shape is not None else self.signature.data(data)

    def classifier(self, model: Model) -> Classifier:
        """Return the classifier of a model, with the default loss for the labels."""
        labels = self.signature.labels
        loss = example_loss(sigmoid_cross_entropy if labels.several else softmax_cross_entropy, labels)
        return Classifier(model, loss, {}, self.preprocess, self.config.eval.views, self.topology)

    def _check_one_label(self) -> None:
        if self.signature.multi_label:
            raise InputError(
                f"{self.directory}: its images may have several labels, and this method takes one; use predict"
            )

    @cached_property
    def _classify(self) -> Callable[..., Any]:
        return self.classifier(for_platform(self.model, self.topology.platform)).classify()


def restore_run(
    directory: str | os.PathLike[str],
    step: str,
    topology: Topology,
    model: Any = None,
    *,
    precision: Precision | None = None,
) -> TrainedRun:
    """Restore the network of a run's checkpoint: "best", "latest" or its step.

    Args:
        model: the network of a run from Python. The work directory of such a run does not name its network.
        precision: the precision of the computation; the default is the run's precision.

    Raises:
        InputError: there is no such run or checkpoint, or the network does not fit the checkpoint.
    """
    place = Path(directory).expanduser()
    file = recipe_of_run(place)
    config = file.config if precision is None else file.config.replace(train={"precision": precision})
    signature = Signature.read(place) or _signature_of_data(place, config)
    if model is not None:
        network = adapt(model)
    elif file.has_network:
        network = model_of(config, len(signature.class_ids), objects_of_hooks(file.hooks))
    else:
        raise InputError(
            f"{file.path}: the run came from Python and its config does not name the network; give model= too"
        )
    saved = restore_state(place, step, topology)
    state = fitted(network, saved, signature.image_shape, place)
    return TrainedRun(place, int(saved.step), config, network, state, Preprocess.of(config), signature, topology)


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


def _signature_of_data(place: Path, config: Config) -> Signature:
    """Return the signature of the data of a run. Runs of old releases have no file with a signature."""
    try:
        return Signature.of(open_splits(config.data)["train"], config.data)
    except InputError as error:
        raise InputError(
            f"{place}: has no {SIGNATURE_FILE}, and the data of the run cannot be opened ({error})"
        ) from error
