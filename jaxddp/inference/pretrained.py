"""The network of weights that no run of this machine trained: its classes, its images, and its evaluation.

A command reads its network from a run, or from weights: a name, a file, a file of the Hub, or a recipe with one of
them. `trained_network` opens both.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxddp.losses as losses
import jaxddp.platforms as platforms
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config, DataConfig
from jaxddp.config.tree import Precision
from jaxddp.core.errors import InputError, Key, counted, some
from jaxddp.core.files import check_path
from jaxddp.core.phases import doing, phase
from jaxddp.data.opening import in_form, open_validation_split, sample_images
from jaxddp.data.source import LabelForm, Source, check_labelled, check_source, image_dtype, labels_of
from jaxddp.data.united import in_classes, own_part
from jaxddp.engine.initial_state import NO_OPTIMIZER, make_init
from jaxddp.engine.state import TrainState
from jaxddp.inference.trained import OnClasses, TrainedRun, evaluator_of, fitted, restore_run
from jaxddp.mesh import Topology
from jaxddp.metrics import DEFAULT_METRICS
from jaxddp.models.adapt import NNXModel, adapt
from jaxddp.models.interface import Model, trees_of
from jaxddp.recipe.file import RecipeFile
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights, signature_of_weights, stored_arrays
from jaxddp.setup.network_checks import brings_weights, logits_of
from jaxddp.setup.recipe import check_normalization, model_of
from jaxddp.setup.resources import ImageShape, TrainingData, join_and_resolve, open_validation_alone
from jaxddp.setup.user_objects import objects_of_arguments, objects_of_hooks
from jaxddp.weights.foreign import Foreign, in_terms_of, renamed
from jaxddp.weights.match import Shapes, from_published, unwrapped
from jaxddp.weights.places import IMAGENET, find_published, has_library, local_weights
from jaxddp.weights.state_dict import read
from jaxddp.workdir.signature import Signature

_log = logging.getLogger("jaxddp.experiment")


class ClassList(NamedTuple):
    """The ids and the names of the classes of a network, in the order of its logits."""

    ids: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, labelled: Source | Signature) -> "ClassList":
        return cls(tuple(labelled.class_ids), tuple(labelled.class_names))


@functools.cache
def imagenet_classes() -> ClassList:
    """Return the 1,000 classes of ImageNet in the order of published weights, which is that of the sorted synsets.

    The names are the first words of the synsets in WordNet.
    """
    with (Path(__file__).parents[1] / "weights" / "imagenet_classes.txt").open(encoding="utf-8") as file:
        pairs = [line.rstrip("\n").split(" ", 1) for line in file]
    return ClassList(*(tuple(column) for column in zip(*pairs, strict=True)))


def network_of_weights(
    file: RecipeFile,
    topology: Topology,
    source: Source | None = None,
    *,
    measures: bool = False,
    needs_head: bool = True,
) -> TrainedRun:
    """Return the network of a recipe with the weights `model.weights`. Nothing is trained, and nothing is written.

    Without `model.weights`, the recipe's `get_initialize` or its NNX module brings the weights. The classes are those
    of the weights, if they are known: the signature of a run; ImageNet's for published weights, and for others with
    1,000 classes. Otherwise they are those of the source, or numbers.

    Args:
        source: the images, which may have another shape than the config's if they are arrays.
        measures: whether the labels of the source are compared with the classes of the network.
        needs_head: whether the weights need a head. Features do not depend on it.

    Raises:
        InputError: there are no weights, they cannot be read, they are of another network, they have other classes than
            the source, or the means do not fit the images.
    """
    config, user_object = file.config, objects_of_hooks(file.hooks)
    if config.train.precision is None:
        config = config.replace(train={"precision": platforms.platform_named(topology.platform).precision})
        file = replace(file, config=config)
    data = config.data.of_evaluation
    shape = (data.image_size, data.image_size, data.channels) if source is None else source.image_shape(data)
    dtype = np.dtype(f"uint{data.bits}") if source is None else np.dtype(image_dtype(source, data))
    check_normalization(data, shape)
    weights = config.model.weights or ""
    is_published = has_library(weights)
    if needs_head and is_published and find_published(weights).top1 is None:
        advice = "train one, or take `jaxddp features` of images"
        raise InputError(Key("model.weights", weights), ": these weights have no head for classes", advice=advice)
    path, stored = _stored_weights(config)
    own = ClassList.of(source) if source is not None and measures else None
    stated = None if path is None else signature_of_weights(path)
    known = imagenet_classes() if is_published else stated and ClassList.of(stated)
    target, known = _with_classes(functools.partial(_target, file, shape), path, stored, known, own)
    if own and not {*own.ids} <= {*known.ids}:
        if stated is not None or len(own.ids) != len(known.ids):
            raise _other_classes(config, known, own)
        known = own
    target = replace(target, class_ids=known.ids, needs_head=needs_head)
    initialize = user_object("initialize", config, functools.partial(_images, source, config))
    if path is None and initialize is None and not isinstance(target.model, NNXModel):
        raise InputError(Key("model.weights"), ": is not set", advice="name the weights")
    change = initialize and initialize.function("(params, model_state)", "params, model_state")
    arrays = dict[str, np.ndarray]()
    if path is not None:
        with doing(f"reading weights from {weights}"):
            arrays = initial_weights(path, target, topology, stored)
    init = make_init(target.model, NO_OPTIMIZER, shape, topology, transform=change)
    state = init(topology.random_key(config.seed), topology.replicate(arrays))
    if own and topology.peers.is_first:
        _log.info(f"{config.model.weights or file.path}: the classes are {_described(known, own)}")
    form: LabelForm = "one label"
    if stated is not None:
        form = stated.label_form
    elif own and source is not None:
        form = labels_of(source).form
    signature = Signature(*known, shape, dtype.name, source is not None and source.pixel_shape is not None, form)
    return TrainedRun(path or file.path, 0, config, target.model, state, Preprocess.of(config), signature, topology)


def _stored_weights(config: Config) -> tuple[Path | None, Mapping[str, np.ndarray] | None]:
    """Return the path of `model.weights`, and the arrays of a file there; None for a run, and without weights."""
    if config.model.weights is None:
        return None, None
    with doing(f"reading weights from {config.model.weights}"):
        path = local_weights(config.model.weights, offline=config.model.offline)
        return path, None if os.path.isdir(path) else read(path)


def _described(known: ClassList, own: ClassList) -> str:
    """Describe the classes of a network, `known`, and those of the data among them."""
    if own.ids == known.ids and known is not imagenet_classes():
        return f"those of the data, in their order: {some(known.ids)}"
    return f"{len(known.ids):,}, {some(known.ids)}, among them the {len(own.ids):,} of the data"


def _with_classes(
    target_of: Callable[[int], WeightsTarget],
    path: Path | None,
    stored: Mapping[str, np.ndarray] | None,
    known: ClassList | None,
    own: ClassList | None,
) -> tuple[WeightsTarget, ClassList]:
    """Return the network with an output for each class of its weights, and these classes.

    Args:
        target_of: a function of the number of classes.
        stored: the arrays of the weights' file.
        known: the classes, if they are known; otherwise their number is that of the head.
        own: the classes of the data.
    """
    likely = known or own
    target = target_of(len(likely.ids if likely else ()) or IMAGENET)
    if known is None:
        count = _head_size(path, stored, target) or _outputs(target.model, target.image_shape)
        numbers = tuple(map(str, range(count)))
        known = imagenet_classes() if count == IMAGENET else own or ClassList(numbers, numbers)
    return target if len(known.ids) == target.num_classes else target_of(len(known.ids)), known


def _target(file: RecipeFile, shape: ImageShape, num_classes: int) -> WeightsTarget:
    model = model_of(file.config, num_classes, objects_of_hooks(file.hooks), shape)
    return WeightsTarget(model, shape, num_classes, new_layers=file.config.model.fresh_layers, rename=file.rename)


def _images(source: Source | None, config: Config, count: int) -> np.ndarray:
    """Return images of the source, for `get_initialize`. Raises: InputError if there is none."""
    if source is None:
        raise InputError("get_initialize: it reads training images, and here are none; give model.weights")
    return sample_images(own_part(source), config.data, count)


def _outputs(model: Model, shape: ImageShape) -> int:
    """Return the number of logits of a network for images [H, W, C]."""
    return logits_of(model, trees_of(model, shape), shape).shape[-1]


def _head_size(path: Path | None, stored: Mapping[str, np.ndarray] | None, target: WeightsTarget) -> int | None:
    """Return the number of classes of the head in a file of weights; None if the head is not found there."""
    if path is None or stored is None:
        return None
    foreign, namings = stored_arrays(path, stored, target)
    outputs = (target.num_classes,)
    heads = [path for path, shape in target.shapes.items() if path.endswith("/kernel") and shape[1:] == outputs]
    names = [naming(heads[0]) for naming in namings] if len(heads) == 1 else []
    for name in names:
        array = foreign.arrays.get(name)
        if array is not None and array.ndim > 1:
            return from_published(heads[0], name, array).shape[-1]
    return None


def _other_classes(config: Config, known: ClassList, own: ClassList) -> InputError:
    both = f"the weights have {counted(len(known.ids), 'class')} ({some(known.ids)})"
    others = sorted({*own.ids} - {*known.ids})
    advice = f"name the classes of the data by their ids, such as {known.ids[0]}, or train a head for them"
    problem = f": {both}, and the data have {some(others)}, which are not among them"
    return InputError(Key("model.weights", config.model.weights), problem, advice=advice)


def mapped_names(file: RecipeFile, path: Path) -> tuple[Shapes, Foreign]:
    """Return the shapes of the arrays of a recipe's network, by path, and how the names in a file map to them.

    Raises: InputError if the file cannot be read, or the recipe has no network.
    """
    data = file.config.data
    shape = data.image_size, data.image_size, data.channels
    target, stored = _target(file, shape, IMAGENET), read(path)
    if (count := _head_size(path, stored, target)) not in (None, IMAGENET):
        target = _target(file, shape, count)
    mapped, (*published_names, own) = stored_arrays(path, stored, target)
    if published_names:
        paths = {naming(array): array for naming in (own, *reversed(published_names)) for array in target.shapes}
        names = unwrapped(renamed(stored, file.rename), target.shapes, (own, *published_names))
        mapped = in_terms_of(target.shapes, stored, lambda name: paths.get(names.get(name, "")))
    return target.shapes, mapped


def open_measured(file: RecipeFile) -> tuple[TrainedRun, Source]:
    """Return the network with the weights of a recipe, and its validation data, with the classes of the network.

    The training split is not opened.

    Raises: InputError if the data do not exist; see also `network_of_weights`.
    """
    topology, config = join_and_resolve(file)
    # Class weights follow from the training data, which are not opened. Crops of training are not made.
    file = replace(file, config=config.replace(loss={"class_weights": None}, data={"crop": "whole"}))
    val = open_validation_alone(file.config, topology, of_all=False)
    try:
        network = network_of_weights(file, topology, val, measures=True)
    except InputError:
        if config.data.classes is None:
            raise
        val = open_validation_alone(file.config, topology, of_all=True)
        network = network_of_weights(file, topology, val, measures=True)
    val = in_form(val, network.signature.label_form)
    return network, in_classes(val, network.class_ids, network.class_names)


@phase("start")
def evaluate_weights(file: RecipeFile, on_classes: OnClasses | None = None) -> dict[str, float]:
    """Return the validation metrics of the weights of a recipe: means, and `count`.

    The examples of the data, or those of `data.classes`, are measured among all classes of the weights.

    Raises: see `open_measured`.
    """
    network, val = open_measured(file)
    config, user_object = network.config, objects_of_hooks(file.hooks)
    data = TrainingData.of(val, config.data)
    return evaluator_of(config, user_object, network.model, data, val, network.topology, on_classes)(network.state)


def measure_network(
    model: Any, params: Any, examples: Any, loss: Any, data: DataConfig | None, topology: Topology
) -> dict[str, float]:
    """Measure a network and its parameters; see `jaxddp.evaluate`. Raises: InputError."""
    if isinstance(examples, str | os.PathLike):
        data = replace(data or DataConfig(), path=os.fspath(check_path(examples, "data")))
        source: Source = open_validation_split(data)
        source.check(data)
    else:
        source = check_source(examples, "data")
        data = data or source.default_data()
    check_labelled(source, "data")
    model, shape = adapt(model), source.image_shape(data.of_evaluation)
    if params is None and brings_weights(model):
        params = model.init(jax.random.key(0), np.zeros((1, *shape), np.float32))
    elif isinstance(params, Mapping) and "params" in params:
        params = params["params"], {name: value for name, value in params.items() if name != "params"}
    params, model_state = params if isinstance(params, tuple) else (params, {})
    state = fitted(model, TrainState(jnp.zeros((), jnp.int32), params, model_state, ()), shape, "params", "tree")
    own, count, known = ClassList.of(source), _outputs(model, shape), imagenet_classes()
    if count != len(own.ids):
        if count != IMAGENET or not {*own.ids} <= {*known.ids}:
            problem = f"data: {counted(len(own.ids), 'class')} ({some(own.ids)}), and the network has {count} outputs"
            raise InputError(problem, advice="give data with the network's classes")
        source = in_classes(source, *known)
    form = labels_of(source).form
    size = max(1, Config().eval.batch_size // topology.num_devices) * topology.num_devices
    names = DEFAULT_METRICS.get(form, Config().eval.metrics)
    config = Config(data=data).replace(eval={"batch_size": size, "metrics": names})
    loss = loss or losses.DEFAULT_LOSSES[form]
    of = TrainingData.of(source, data)
    return evaluator_of(config, objects_of_arguments(loss=loss), model, of, source, topology)(topology.replicate(state))


def trained_network(
    place: Path | RecipeFile,
    step: str,
    topology: Topology,
    source: Source | None = None,
    *,
    precision: Precision | None = None,
    needs_head: bool = True,
) -> TrainedRun:
    """Return the network of a run's checkpoint, or that of the weights of a recipe.

    Args:
        place: a work directory, or a recipe.
        step: "best", "latest" or the step of a checkpoint; for a run.
        source: the images, for weights.
        precision: the precision of the computation; None for that of the run or the recipe.
        needs_head: whether the weights need a head.

    Raises: see `restore_run` and `network_of_weights`.
    """
    if isinstance(place, RecipeFile):
        if precision is not None:
            place = replace(place, config=place.config.replace(train={"precision": precision}))
        if place.notice and topology.peers.is_first:
            _log.info(place.notice)
        return network_of_weights(place, topology, source, needs_head=needs_head)
    return restore_run(place, step, topology, precision=precision)
