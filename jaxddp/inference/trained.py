"""A trained run, loaded for inference: the network of a checkpoint, its parameters and its preprocessing."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import jaxddp.core.files as files
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config, DataConfig, Precision
from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted, show
from jaxddp.data.labels import id_of
from jaxddp.data.selection import chosen_images
from jaxddp.data.source import Source, check_labelled, check_source, image_dtype
from jaxddp.engine.example_loss import example_loss
from jaxddp.engine.predictions import Pool
from jaxddp.engine.state import TrainState
from jaxddp.inference.fitting import fitted, signature_of_data
from jaxddp.inference.image_arguments import Images, source_of
from jaxddp.inference.layer_programs import LayerPrograms
from jaxddp.inference.outcome import Outcome
from jaxddp.inference.output_stream import OutputStream, images_at_once
from jaxddp.inference.predictions import Predictions
from jaxddp.losses.bce import sigmoid_cross_entropy
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.interface import Model
from jaxddp.overrides import checked
from jaxddp.setup.classifier import Classifier
from jaxddp.setup.network_checks import in_precision
from jaxddp.setup.recipe import model_of
from jaxddp.setup.user_objects import objects_of_hooks
from jaxddp.training.validation.predicted_images import MAX_SHOWN, PredictedImages
from jaxddp.workdir.saved_state import recipe_of_run, restore_state
from jaxddp.workdir.signature import Signature

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
                `jaxddp.data.opening.open_inputs`); or a source.

        Returns:
            The predictions of all images, in order. An unusable file has an error instead of a prediction.

        Raises:
            InputError: the images have another format, or do not exist.
        """
        source = self.source(images)
        batches = [*self.stream(source)]
        return Predictions(
            [id_of(source, row) for row in range(len(source))],
            np.concatenate([batch.values for batch in batches]),
            self.class_ids,
            self.class_names,
            {row: error for batch in batches for row, error in batch.errors.items()},
        )

    def features(self, images: Images, layer: str | None = None, pool: Pool = "mean") -> np.ndarray:
        """Return the activations of a layer. All processes of a job must call it with the same images.

        Args:
            images: as for `predict`. The views of `eval.views` are not used.
            layer: the name of a module of the network, whose output is returned, such as "layer3_0/conv2", or
                "layer3.0.conv2" as in published weights. By default, the features that the head reads.
            pool: "mean" averages an output [N, H, W, C] over its pixels; "none" does not.

        Returns:
            float32[N, D] for N images, in order; with `pool="none"`, float32[N, …] with the shape of the output. The
            features of an image that cannot be used are NaN.

        Raises:
            InputError: the network is no Linen module, or it has no such layer; see also `predict`.
        """
        checked(pool, Pool, "pool")
        stream = self.feature_stream(self.source(images), layer, pool)
        return np.concatenate([np.asarray(batch.values, np.float32) for batch in stream])

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

    def show(self, source: Source, rows: Sequence[int] | np.ndarray, *, explain: bool = False) -> "Figure":
        """Return a figure of some images of a source with label, prediction and probability, for a notebook.

        Args:
            explain: whether to draw a heat map of Grad-CAM for the predicted class over each image.

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
        labels = np.asarray(source.labels)[chosen]
        stream = self.explained_stream(self.source(images)) if explain else self.stream(self.source(images))
        batches = [batch.values for batch in stream]
        values = jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)
        probabilities, maps = values[:2] if explain else (values, None)
        return prediction_grid(PredictedImages.of(images, labels, probabilities, self.class_names, maps))

    def source(self, images: Images) -> Source:
        """Convert images that `predict` accepts to a source. Raises: InputError."""
        return source_of(images, self.signature)

    def stream(self, source: Source, at_once: int | None = None) -> OutputStream:
        """Return the probabilities of the classes, float32[K] for an image, as a stream; see `OutputStream`.

        Args:
            at_once: the number of images on each device.

        Raises:
            InputError: the network does not accept such images.
        """
        row = jax.ShapeDtypeStruct((len(self.class_ids),), np.float32)
        return self._stream(self._classify, row, source, at_once)

    def feature_stream(
        self, source: Source, layer: str | None = None, pool: Pool = "mean", at_once: int | None = None
    ) -> OutputStream:
        """Return the features of a source as a stream. Raises: InputError, see `features`."""
        return self._stream(*self.layer_programs.features(layer, pool), source, at_once)

    def explained_stream(self, source: Source, at_once: int | None = None) -> OutputStream:
        """Return (probabilities, heat maps, images) of a source as a stream; see `LayerPrograms.explain`."""
        programs = self.layer_programs.explain(len(self.class_ids), self.signature.dtype)
        return self._stream(*programs, source, at_once)

    def _stream(self, program: Callable[..., Any], row: Any, source: Source, at_once: int | None) -> OutputStream:
        data = self.data_of(source)
        if (shape := source.image_shape(data)) != self.signature.image_shape:
            raise InputError(f"images of {shape}: the network was trained on images of {self.signature.image_shape}")
        if (dtype := image_dtype(source, data)) != self.signature.dtype:
            raise InputError(f"pixels of {dtype}: the network was trained on {self.signature.dtype}")
        size = at_once or images_at_once(len(source))
        return OutputStream(lambda batch: program(self.state, batch), row, source, data, self.topology, size)

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
    def layer_programs(self) -> LayerPrograms:
        """The programs that read layers of the network."""
        return LayerPrograms(self._classifier, self.signature.image_shape)

    @cached_property
    def _classifier(self) -> Classifier:
        return self.classifier(for_platform(self.model, self.topology.platform))

    @cached_property
    def _classify(self) -> Callable[..., Any]:
        return self._classifier.classify()


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
    place = files.expanded(directory)
    file = recipe_of_run(place)
    config = file.config if precision is None else file.config.replace(train={"precision": precision})
    signature = Signature.read(place) or signature_of_data(place, config)
    if model is not None:
        network = in_precision(adapt(model), signature.image_shape, config.train.precision)
    elif file.has_network:
        network = model_of(config, len(signature.class_ids), objects_of_hooks(file.hooks), signature.image_shape)
    else:
        raise InputError(
            f"{file.path}: the run came from Python and its config does not name the network; give model= too"
        )
    saved = restore_state(place, step, topology)
    state = fitted(network, saved, signature.image_shape, place)
    return TrainedRun(place, int(saved.step), config, network, state, Preprocess.of(config), signature, topology)
