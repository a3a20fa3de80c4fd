"""A trained network for inference, of a run's checkpoint or of a file of weights, with its preprocessing.

`jaxddp eval` evaluates it on the validation split, without an optimizer, a schedule or a training batch.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

import jaxddp.losses as losses
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config, DataConfig
from jaxddp.config.goal import flat
from jaxddp.config.tree import Precision
from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, Option, counted, nearest, show, some
from jaxddp.core.phases import doing, phase
from jaxddp.core.threads import taken_ahead
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.batch import Batch
from jaxddp.data.opening import chosen_images, open_inputs
from jaxddp.data.order import EvalOrder, Shard
from jaxddp.data.source import LabelKind, Labels, Source, Substitutes, check_labelled, check_source, id_of, image_dtype
from jaxddp.engine import initial_state, programs
from jaxddp.engine.objective import Objective, example_loss
from jaxddp.engine.parts.part import measured_states
from jaxddp.engine.predictions import LayerProgram, Pool, make_classify, make_explain, make_features, make_probabilities
from jaxddp.engine.state import TrainState
from jaxddp.inference.predictions import Outcome, Predictions
from jaxddp.mesh import Topology, without_mesh
from jaxddp.models.activations import find_layer, heat_map_layer
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.interface import Model, by_path, own_arrays, trees_of
from jaxddp.recipe.file import RecipeFile
from jaxddp.setup import feed, network_checks
from jaxddp.setup.identity import checksums
from jaxddp.setup.recipe import check_normalization, model_of
from jaxddp.setup.resources import TrainingData, join_and_resolve, open_validation
from jaxddp.setup.user_objects import ObjectSource, losses_of, metrics_of, objects_of_hooks, parts_of
from jaxddp.training import evaluation, events, plan
from jaxddp.training.checkpoints import integrity, manager
from jaxddp.weights.places import SIGNATURE_FILE
from jaxddp.workdir.claim import check_evaluation
from jaxddp.workdir.saved_state import agreed_step, recipe_of_run, restore_state
from jaxddp.workdir.signature import NORMALIZED, Signature

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Images = np.ndarray | Source | str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
OnClasses = Callable[[Sequence[str], np.ndarray], None]
"""A function that receives the names of the K classes, and the number of examples by label (row) and prediction
(column), int[K, K]."""
_MOST_AT_ONCE, _AHEAD = 64, 2
"""The largest number of images per device in a batch, and the number of batches that wait for their results."""


class BatchOutputs(NamedTuple):
    """The outputs for consecutive images, such as the probabilities of classes."""

    start: int
    """The row of the first image in the source."""
    values: Any
    """An array [n, …], or a tree of such arrays; floats are NaN for an image that cannot be used."""
    errors: dict[int, str]
    """The faults of unusable images, by their rows in the source."""

    def __repr__(self) -> str:
        return f"BatchOutputs({counted(self.size, 'image')} from row {self.start:,})"

    @property
    def size(self) -> int:
        """The number n of images."""
        return len(jax.tree.leaves(self.values)[0])


def images_at_once(num_examples: int) -> int:
    """Return the number of images per device in a batch, a power of two. It does not depend on the devices."""
    return min(_MOST_AT_ONCE, 1 << (num_examples - 1).bit_length())


def output_batches(
    program: LayerProgram, run: "TrainedRun", row: Any, source: Source, at_once: int
) -> Iterator[BatchOutputs]:
    """Yield the outputs of a network for a source, in batches, in the order of the source.

    Args:
        program: a function of the state and a batch on the devices that returns its outputs and its `substituted`, such
            as that of `jaxddp.engine.predictions.make_classify`.
        row: the shapes and dtypes of the outputs for one image.
        at_once: images per device. The images in the batch of a device, and their positions, depend on this number
            alone. So the outputs have the same bits on any number of devices.

    Raises: InputError if the processes' images differ.
    """
    topology, peers = run.topology, run.topology.peers
    peers.agree({"the images": source.fingerprint, "images at once": str(at_once)})
    topology.connect()
    order = EvalOrder(len(source), at_once * topology.num_devices)
    # In place of an image that cannot be used, the next one is classified, and its result is dropped.
    omissions = Substitutes(Labels(np.zeros(len(source), np.int32), (), ()))
    batches = _batches(source, order, run, omissions)
    has_files = getattr(source, "verified", None) is not None
    none_is_left = len(omissions.faults) == len(source)
    # A process with only padding checks no image. It must not compute if the other processes stop.
    if has_files and any(peers.exchange("whether no image is left", none_is_left)):
        # Process 0 has the faults of all images.
        faults = peers.from_first("faults of all images", lambda: omissions.faults)
        nothing = jax.tree.map(lambda one: np.full((len(source), *one.shape), _unusable(one), one.dtype), row)
        yield BatchOutputs(0, nothing, _by_row([faults]))
        return

    def finished(start: int, values: Any, replaced: Any) -> BatchOutputs:
        """Return the computed outputs of a batch. An image whose `replaced` (float[B]) is not 0 has an error."""
        count, errors = min(order.batch_size, len(source) - start), dict[int, str]()
        values = jax.tree.map(lambda array: np.array(array)[:count], values)
        if has_files and (bad := np.flatnonzero(np.asarray(replaced)[:count])).size:
            faults = {at: omissions.faults[at] for at in (start + bad).tolist() if at in omissions.faults}
            errors = _by_row(peers.exchange("images that cannot be used", faults))
            for array in jax.tree.leaves(values):
                array[bad] = _unusable(array)
        return BatchOutputs(start, values, errors)

    def dispatched() -> Iterator[tuple[int, Any, Any]]:
        for step, batch in enumerate(batches):
            # The first call compiles the network.
            with without_mesh(), nullcontext() if step else doing("compiling the network"):
                values, replaced = program(run.state, topology.place(batch))
            yield step * order.batch_size, values, replaced

    for outputs in taken_ahead(dispatched(), _AHEAD):
        yield finished(*outputs)


def _batches(source: Source, order: EvalOrder, run: "TrainedRun", omissions: Substitutes) -> Iterator[Batch]:
    """Return this process's batches; none if no image can be used. Images that cannot be used go into `omissions`."""
    data, peers = run.data_of(source), run.topology.peers
    shard, verified = Shard.of_process(peers), getattr(source, "verified", None)
    if verified is None:
        return source.eval_batches(order, data, shard)
    try:
        for number, fault in verified.check_files():
            omissions.refuse(number, str(InputError(f"{source.name(number)}: {fault}")))
        batches = cast(Any, source).eval_batches(order, data, shard, omissions=omissions)
        return itertools.chain([next(batches)], batches)
    except InputError:
        if len(omissions.faults) < len(source):
            raise
        return iter(())


def _by_row(faults: Iterable[Mapping[Any, str]]) -> dict[int, str]:
    """Return the faults of images by row, from the JSON of several processes."""
    return dict(sorted((int(row), fault) for some in faults for row, fault in some.items()))


def _unusable(array: Any) -> float:
    """Return the output for an image that cannot be used."""
    return np.nan if np.issubdtype(array.dtype, np.floating) else 0


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
        temperature: the logits are divided by it before the softmax; see `jaxddp.inference.calibrated`.
    """

    directory: Path
    step: int
    config: Config = field(repr=False)
    model: Model = field(repr=False)
    state: TrainState = field(repr=False)
    preprocess: Preprocess = field(repr=False)
    signature: Signature
    topology: Topology = field(repr=False)
    temperature: float = 1.0
    _feature_programs: dict[Any, tuple[LayerProgram, Any]] = field(default_factory=dict, init=False, repr=False)

    @property
    def origin(self) -> str:
        """The checkpoint, or the weights, for messages."""
        weights = self.config.model.weights or self.directory
        origin = f"step {self.step} of {self.directory}" if self.step else str(weights)
        return origin if self.temperature == 1 else f"{origin}, calibrated with temperature {self.temperature:.4g}"

    @property
    def identity(self) -> dict[str, Any]:
        """JSON values that differ between two networks."""
        run, step = str(self.directory.resolve()), self.step
        return {"run": run, "step": step, "temperature": self.temperature, **checksums(self.state)}

    @property
    def class_ids(self) -> tuple[str, ...]:
        """The ids of the K classes, by which data sets are compared, such as folder names."""
        return self.signature.class_ids

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the K classes, for display."""
        return self.signature.class_names

    def predict(self, images: Images) -> Predictions:
        """Classify images as in evaluation, in order. An unusable file has an error instead of a prediction.

        All processes of a job must call it with the same images.

        Args:
            images: an array, uint8, uint16 or floats [N, H, W, C] as for an `ArrayTable`, of the size that the network
                was trained on; a folder, a CSV file or a test listing, or paths of files (see
                `jaxddp.data.opening.open_inputs`); or a source.

        Raises: InputError if the images have another format, or do not exist.
        """
        source = self.source(images)
        batches = [*self.stream(source)]
        return Predictions(
            [id_of(source, row) for row in range(len(source))],
            np.concatenate([batch.values for batch in batches]),
            self.class_ids,
            self.class_names,
            {row: error for batch in batches for row, error in batch.errors.items()},
            self.signature.label_form,
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

        Raises: InputError if the network is no Flax module, or it has no such layer; see also `predict`.
        """
        checked(pool, Pool, "pool")
        stream = self.feature_stream(self.source(images), layer, pool)
        return np.concatenate([np.asarray(batch.values, np.float32) for batch in stream])

    def feature_shape(self, layer: str | None = None, pool: Pool = "mean") -> tuple[int, ...]:
        """Return the shape of the features of one image. Raises: InputError, see `features`."""
        return self._feature_program(layer, pool)[1].shape

    def outcome(self, source: Source) -> Outcome:
        """Return statistics of the predictions for a labelled source: confusions, accuracies, confident mistakes.

        Raises: InputError if the source has other classes; see also `predict`.
        """
        labels, logits = self._labels_of(source), self.logits(source)
        return Outcome(labels, logits, self.class_names, self.step, self.temperature)

    def logits(self, source: Source) -> np.ndarray:
        """Return logits, float32[N, K]; NaN for an image that has no finite logits. Raises: see `predict`."""
        program = make_classify(self._measured, self.topology, lambda logits: logits.astype(jnp.float32))
        logits = np.concatenate([batch.values for batch in self._stream(program, None, source, None)])
        return np.where(np.isfinite(logits).all(1, keepdims=True), logits, np.nan)

    def label_probabilities(self, source: Source) -> np.ndarray:
        """Return the probability of the label of each image that can be used, float32[n]. Raises: see `outcome`."""
        labels, probabilities = self._labels_of(source), self.predict(source).probabilities
        rows = np.flatnonzero((labels >= 0) & np.isfinite(probabilities).all(1))
        return probabilities[rows, labels[rows]]

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
        is_row = (chosen >= 0) & (chosen < len(source)) if np.issubdtype(chosen.dtype, np.integer) else np.zeros(1)
        if not (is_row.all() and 0 < len(is_row) <= events.MAX_SHOWN):
            advice = f"give numbers of rows of the source, 0 to {len(source) - 1}, at most {events.MAX_SHOWN} of them"
            raise InputError(f"rows={show(rows)}: {advice}")
        images = chosen_images(source, self.data_of(source), chosen)
        labels = np.asarray(source.labels)[chosen]
        batches = [batch.values for batch in (self.explained_stream if explain else self.stream)(self.source(images))]
        values = jax.tree.map(lambda *arrays: np.concatenate(arrays), *batches)
        probabilities, maps = values[:2] if explain else (values, None)
        best = probabilities.argmax(-1), probabilities.max(-1)
        return prediction_grid(events.PredictedImages(images, labels, *best, self.class_names, maps))

    def source(self, images: Images) -> Source:
        """Convert images that `predict` accepts to a source. Raises: InputError."""
        paths: Sequence[Any] = images if isinstance(images, list | tuple) else [images]
        if all(isinstance(path, str | os.PathLike) for path in paths):
            return open_inputs(paths, self.config.data)
        if isinstance(images, np.ndarray | jax.Array):
            images = self.signature.pixels(np.asarray(images))
            pixels = "normalized" if self.signature.dtype == NORMALIZED else None
            return ArrayTable(images, np.full(len(images), -1), self.class_names, pixels)
        if not hasattr(images, "eval_batches"):
            raise InputError(f"images={show(images)}: give an array, a path, a list of paths, or a source")
        return cast(Source, images)

    def stream(self, source: Source, at_once: int | None = None) -> Iterator[BatchOutputs]:
        """Yield the probabilities of the classes, float32[K] for an image, of `at_once` images on each device.

        See `output_batches`. Raises: InputError if the network does not accept such images.
        """
        return self._stream(self._classify, None, source, at_once)

    def feature_stream(
        self, source: Source, layer: str | None = None, pool: Pool = "mean", at_once: int | None = None
    ) -> Iterator[BatchOutputs]:
        """Yield the features of a source; see `output_batches`. Raises: InputError, see `features`."""
        return self._stream(*self._feature_program(layer, pool), source, at_once)

    def explained_stream(self, source: Source, at_once: int | None = None) -> Iterator[BatchOutputs]:
        """Yield (probabilities, heat maps, images) of a source; see `output_batches` and `heat_map_layer`."""
        return self._stream(*self._explain_program, source, at_once)

    def _stream(self, program: LayerProgram, row: Any, source: Source, at_once: int | None) -> Iterator[BatchOutputs]:
        data = self.data_of(source)
        if (shape := source.image_shape(data)) != self.signature.image_shape:
            raise InputError(f"images of {shape}: the network was trained on images of {self.signature.image_shape}")
        if (dtype := image_dtype(source, data)) != self.signature.dtype:
            raise InputError(f"pixels of {dtype}: the network was trained on {self.signature.dtype}")
        row = row or jax.ShapeDtypeStruct((len(self.class_ids),), np.float32)
        return output_batches(program, self, row, source, at_once or images_at_once(len(source)))

    def data_of(self, source: Source) -> DataConfig:
        """Return the config for evaluation on a source.

        Raises: InputError if the source has files, and files cannot have the shape of the run's images.
        """
        data = self.config.data
        return data.of_evaluation if source.pixel_shape is not None else self.signature.data(data)

    def objective(self, model: Model) -> Objective:
        """Return the objective of evaluation, with the default loss for the labels. Raises: see `check_head`."""
        network_checks.check_head(self.config, self.directory)
        labels = LabelKind(len(self.class_ids), self.signature.label_form)
        loss = example_loss(losses.DEFAULT_LOSSES[labels.form], labels)
        return Objective(model, loss, self.preprocess, views=self.config.eval.views)

    def _labels_of(self, source: Source) -> np.ndarray:
        """Return the labels of a source with the run's classes, int[N]. Raises: see `outcome`."""
        self._check_one_label()
        check_labelled(check_source(source, "source"), "the source")
        if tuple(source.class_ids) != self.class_ids:
            raise InputError(f"{self.directory}: the source has other classes than the run; give the run's data")
        return np.asarray(source.labels)

    def _check_one_label(self) -> None:
        if (form := self.signature.label_form) != "one label":
            needs = "--calibrate, --coverage and statistics of classes need one label"
            raise InputError(f"{self.directory}: its images have {form}, and {needs}", advice="leave them out")

    @cached_property
    def _measured(self) -> Objective:
        return self.objective(for_platform(self.model, self.topology.platform))

    @cached_property
    def _classify(self) -> LayerProgram:
        return make_classify(self._measured, self.topology, make_probabilities(self._measured, self.temperature))

    @cached_property
    def _explain_program(self) -> tuple[LayerProgram, Any]:
        """The program of `make_explain`, and the shapes and dtypes of its values for one image."""
        signature, probabilities_of = self.signature, make_probabilities(self._measured, self.temperature)
        layer = heat_map_layer(self._measured.model, signature.image_shape)
        program = make_explain(self._measured, layer, self.topology, probabilities_of)
        shapes = (len(self.class_ids),), signature.image_shape[:2], signature.image_shape
        return program, tuple(map(jax.ShapeDtypeStruct, shapes, (jnp.float32, jnp.float32, signature.dtype)))

    def _feature_program(self, name: str | None, pool: Pool) -> tuple[LayerProgram, Any]:
        """Return the program of `make_features` for a layer, and the shape and dtype of the features of one image.

        Raises: see `find_layer`.
        """
        if (name, pool) not in self._feature_programs:
            network = for_platform(self.model, self.topology.platform)
            layer = find_layer(network, self.signature.image_shape, name)
            program = make_features(network, self.preprocess, layer, pool, self.topology)
            shape = layer.shape[-1:] if pool == "mean" else layer.shape
            self._feature_programs[name, pool] = program, jax.ShapeDtypeStruct(shape, jnp.float32)
        return self._feature_programs[name, pool]


@dataclass(frozen=True)
class Ensemble(TrainedRun):
    """Networks with the same classes, as one whose probabilities are the weighted mean of theirs.

    Each network reads the images as in its own evaluation, with its `eval.views`. All attributes but these are those of
    the first network.

    Attributes:
        members: the networks.
        shares: their weights in the mean, which add up to 1.
    """

    members: Sequence[TrainedRun] = ()
    shares: Sequence[float] = ()

    @classmethod
    def of(cls, members: Sequence[TrainedRun], weights: Sequence[float] = ()) -> TrainedRun:
        """Return the ensemble of some networks, or the network itself if there is only one.

        Args:
            weights: the weight of each network, not all 0; none for equal weights.

        Raises: InputError if the classes differ.
        """
        check_same_classes(members)
        if len(members) == 1:
            return members[0]
        weights = weights or [1.0] * len(members)
        of_first = {each.name: getattr(members[0], each.name) for each in fields(TrainedRun) if each.init}
        return cls(**of_first, members=members, shares=[weight / sum(weights) for weight in weights])

    @property
    def origin(self) -> str:
        return f"mean of {', '.join(member.origin for member in self.members)}"

    @property
    def identity(self) -> dict[str, Any]:
        return {"members": [member.identity for member in self.members], "shares": [*self.shares]}

    def stream(self, source: Source, at_once: int | None = None) -> Iterator[BatchOutputs]:
        for batches in zip(*(member.stream(source, at_once) for member in self.members), strict=True):
            parts = zip(self.shares, batches, strict=True)
            mean = sum(share * batch.values.astype(np.float64) for share, batch in parts)
            yield batches[0]._replace(values=np.asarray(mean, np.float32))

    def logits(self, source: Source) -> np.ndarray:
        return np.log(self.predict(source).probabilities)


def check_same_classes(members: Sequence[TrainedRun]) -> None:
    """Raise `InputError` if the networks do not have the same classes in the same order."""
    first = members[0]
    for other in members[1:]:
        if other.signature.label_form != first.signature.label_form:
            fault = f"its images have {other.signature.label_form}, and those of the other {first.signature.label_form}"
        elif other.class_ids != first.class_ids:
            same = sorted(other.class_ids) == sorted(first.class_ids)
            fault = f"has {'the same classes in another order' if same else 'other classes'} ({some(other.class_ids)})"
        else:
            continue
        raise InputError(f"{other.directory}: {fault}", advice=f"give runs with the classes of {first.directory}")


def restore_run(
    place: Path, step: str, topology: Topology, model: Any = None, *, precision: Precision | None = None
) -> TrainedRun:
    """Restore the network of a checkpoint of the run in a work directory: "best", "latest" or its step.

    Args:
        model: the network of a run from Python. The work directory of such a run does not name its network.
        precision: the precision of the computation; the default is the run's precision.

    Raises: InputError if there is no such run or checkpoint, or the network does not fit the checkpoint.
    """
    file = recipe_of_run(place)
    config = file.config if precision is None else file.config.replace(train={"precision": precision})
    signature, saved = Signature.read(place), restore_state(place, step, topology)
    if signature is None:
        raise InputError(f"{place}: has no {SIGNATURE_FILE}, which a run writes at its start; restore the file")
    if model is not None:
        network = network_checks.in_precision(adapt(model), signature.image_shape, config.train.precision)
    else:
        file.check_network("give model= too")
        network = model_of(config, len(signature.class_ids), objects_of_hooks(file.hooks), signature.image_shape)
    state = fitted(network, saved, signature.image_shape, place)
    return TrainedRun(place, int(saved.step), config, network, state, Preprocess.of(config), signature, topology)


def fitted(
    network: Model, saved: TrainState, image_shape: tuple[int, int, int], place: Path | str, kind: str = "checkpoint"
) -> TrainState:
    """Return a checkpoint's state for evaluation, with the tree structure of the network for images [H, W, C].

    Args:
        place, kind: the place of the state and what it is, for messages.

    Raises: InputError if the arrays do not fit the network.
    """
    trees = trees_of(network, image_shape)
    arrays, expected_arrays = own_arrays(saved.eval_params, saved.eval_model_state), by_path(*trees)
    for path in sorted(arrays.keys() | expected_arrays.keys()):
        found, expected = (list(tree[path].shape) if path in tree else "absent" for tree in (arrays, expected_arrays))
        if found != expected:
            fault = f"another architecture: {path} is {found} in the {kind} and {expected} in the model"
            raise InputError(f"{place}: the {kind} is of {fault}", advice="give the model that was trained")
    params, model_state = initial_state.replace_by_weights(*trees, arrays)
    return TrainState(saved.step, params, model_state, ())


@phase("start")
def evaluate_checkpoint(
    file: RecipeFile, directory: Path, which: str = "latest", on_classes: OnClasses | None = None
) -> dict[str, float]:
    """Return the validation metrics of a checkpoint ("latest", "best" or a step): means, `count` and `step`.

    The metrics of averaged parameters follow, as "val_ema loss" and so on. `on_classes` receives the confusions; with
    averaged parameters, theirs. Raises: InputError if the checkpoint or the data do not exist, the recipe names no
    network, or the network, the classes or the images differ from the run's.
    """
    network_checks.check_head(file.config, directory)
    file.check_network("evaluate it with jaxddp.evaluate, or with a config that names the network")
    topology, config = join_and_resolve(file)
    of_run = check_evaluation(directory, config)
    # Opening the data takes longer, so check first that the checkpoint exists and is undamaged.
    with manager.Checkpoints(directory / integrity.CHECKPOINTS, topology.peers, read_only=True) as checkpoints:
        agreed_step(checkpoints, which)
    signature = Signature.read(directory)
    of_signature = ((signature.class_ids, signature.class_names), signature.label_form) if signature else ((), "")
    train, val = open_validation(config, topology, of_run, *of_signature)
    if signature is not None and signature.class_ids != tuple(train.class_ids):
        new = [class_id for class_id in train.class_ids if class_id not in signature.class_ids]
        alike = nearest(new[0], signature.class_ids) if new else ""
        classes = f"other classes ({some(new or train.class_ids)}) than the run was trained on{alike}"
        raise InputError(f"{directory}: the data have {classes}; give the run's data")
    data, user_object = TrainingData.of(train, config.data), objects_of_hooks(file.hooks)
    if signature is not None and signature.num_examples:  # The data may be others than those of the run.
        data = replace(data, num_examples=signature.num_examples, class_counts=np.array(signature.class_counts))
    model = model_of(config, data.labels.num_classes, user_object, data.image_shape)
    network_checks.check_sizes(config.data, model, data)
    evaluator = evaluator_of(config, user_object, model, data, val, topology, on_classes)
    # Choose the checkpoint again: a training run may have saved another one since.
    saved = restore_state(directory, which, topology)
    # A part without arrays in the checkpoint has no parameters to evaluate.
    steps = plan.Plan.of(config, data.num_examples).schedule_steps(config)
    parts = [part for part in parts_of(config, steps, user_object) if part.name in saved.parts]
    shape, folder = data.image_shape, directory / integrity.CHECKPOINTS
    states = {split: fitted(model, state, shape, folder) for split, state in measured_states(saved, parts).items()}
    return {"step": int(saved.step), **flat({split: evaluator(state) for split, state in states.items()})}


def evaluator_of(
    config: Config,
    user_object: ObjectSource,
    model: Model,
    data: TrainingData,
    val: Source,
    topology: Topology,
    on_classes: OnClasses | None = None,
) -> Callable[[TrainState], dict[str, float]]:
    """Return a function that measures a state on validation data. Raises: InputError."""
    check_normalization(config.data, data.image_shape)
    if on_classes is not None:
        if (form := data.labels.form) != "one label":
            raise InputError(Option("per_class"), f" takes one label per image, but the data have {form}")
        config = config.replace(eval={"metrics": (*dict.fromkeys((*config.eval.metrics, "confusion")),)})
    _, loss = losses_of(config, data, user_object)
    metrics = metrics_of(config, data.labels, user_object)
    topology.peers.agree(programs.jax_settings())
    topology.connect()
    network = for_platform(model, topology.platform)
    objective = Objective(network, loss, Preprocess.of(config), metrics, config.eval.views)
    step = programs.make_eval_step(objective, topology)
    order = EvalOrder(len(val), feed.limit_batch_size(config.eval.batch_size, val, topology))
    batches = partial(feed.eval_batches, val, config.data, order, topology)
    evaluator = evaluation.Evaluator(step, lambda: zip(batches()), len(val), metrics=metrics)

    def measure(state: TrainState) -> dict[str, float]:
        measured, sets = evaluator.measure(state)
        if on_classes is not None:
            on_classes(val.class_names, sets["confusion"])
        return measured

    return measure
