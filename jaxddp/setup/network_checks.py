"""Check a network against the classes and the image sizes of a run by abstract evaluation (`jax.eval_shape`)."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.config import Config, DataConfig
from jaxddp.config.layers import NO_LAYERS, SIMSIAM, Layers
from jaxddp.core.errors import InputError, Key, counted, first_line, listed
from jaxddp.engine.objective import wide_logits
from jaxddp.measure.cost import flops_by_dtype, operations_in, origins
from jaxddp.mesh import AXIS
from jaxddp.models.adapt import FunctionModel, LinenModel, NNXModel, has_dropout, takes_cpu_convolutions
from jaxddp.models.interface import Model, by_path, name_of, other_switches, pair, selects, takes_example_keys, trees_of
from jaxddp.setup.resources import ImageShape, Layout, TrainingData

_log = logging.getLogger("jaxddp.experiment")
OWN_WEIGHTS = (
    "the NNX module has the same initial parameters for every seed; give a function that makes it, such as "
    "lambda rngs: Net(rngs=rngs), or lambda rngs: net for a module net that brings its weights"
)
_NUM_IMAGES = 2


def check_sizes(config: DataConfig, model: Model, data: TrainingData, shapes: Sequence[ImageShape] = ()) -> None:
    """Check that a network accepts images of all `shapes` of the training images, and those of evaluation.

    Raises: InputError if the network does not accept a size. The message names the first such size.
    """
    made_for = data.image_shape
    for shape, key in [*((shape, "grow_from") for shape in shapes), (data.eval_shape, "eval_size")]:
        if shape != made_for and (reason := reason_of_rejection(model, trees_of(model, made_for), made_for, shape)):
            size, other = ("x".join(map(str, each[:2])) for each in (made_for, shape))
            problem = f": the network that is made for {size} pixels does not take {other} ({reason})"
            advice = "leave ", Key(f"data.{key}"), " out, or choose another network"
            raise InputError(Key(f"data.{key}", getattr(config, key)), problem, advice=advice)


def check_head(config: Config, place: Path | str) -> None:
    """Raise `InputError` if the objective of a run trains no head."""
    if config.objective.name == SIMSIAM:
        advice = f"take `jaxddp features`, or train a head with --model.weights {place}"
        raise InputError(f"{place}: ", Key.plain("objective.name", SIMSIAM), " trains no head", advice=advice)


def reason_of_rejection(model: Model, trees: Any, made_for: ImageShape, shape: ImageShape) -> str:
    """Return why a network with (params, model_state) for images [H, W, C] rejects those of another shape; or ""."""
    expected = logits_of(model, trees, made_for)
    try:
        return "" if logits_of(model, trees, shape) == expected else "its output has another shape"
    except Exception as error:
        return first_line(error)


def logits_of(model: Model, trees: Any, shape: ImageShape) -> Any:
    """Return the shape and dtype of a network's logits for an image [H, W, C]."""
    image = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    return jax.eval_shape(lambda *arguments: model.apply(*arguments, train=False, key=None)[0], *trees, image)


def check_frozen_state(model: Model, frozen: Layers, trees: Any, image_shape: ImageShape) -> None:
    """Check that a network without a module keeps the state of frozen layers in training.

    The batch norms of frozen layers in Linen and NNX modules use their running statistics. Functions get no such
    switch: statistics that they change are those of a batch norm that normalizes by the batch. Raises: InputError if
    the network changes the state of a frozen layer.
    """
    if not frozen or isinstance(model, LinenModel | NNXModel):
        return
    training = origins(_trace(model, image_shape, "float32", train=True).jaxpr)
    for index, (name, (_, copied)) in enumerate(zip(by_path((), trees[1]), training, strict=False)):
        if selects(frozen, name, trees[0]) and copied != index:
            problem = f"the network changes the state {name} of a layer that is frozen or unfrozen later"
            advice = "normalize by the state and return it unchanged, or give a Linen or NNX module"
            raise InputError(f"model: {problem}, so its norm uses the batch's statistics", advice=advice)


def check_network(model: Model, where: str, config: Config, layout: Layout, precision: str | None) -> None:
    """Check a user's network before training, and log what looks like a mistake. Raises: InputError.

    Args:
        where: the beginning of the lines of the log.
        precision: the `train.precision` that the user set, which the network must have; None for a default.
    """
    used, data, topology = config.train.precision or "float32", layout.training_data, layout.way.topology
    evaluation, training = check_outputs(model, data.image_shape, data.labels.num_classes, used)
    computed = next(iter(dtypes_of_products(evaluation)), used)
    if precision not in (None, computed):
        problem = f": the network computes in {computed}, because its layers or constants have this dtype"
        advice = "let it set no dtype, or leave ", Key("train.precision"), " out"
        raise InputError(Key("train.precision", precision), problem, advice=advice)
    if not topology.peers.is_first:
        return
    replaces = topology.platform == "cpu" and config.model.cpu_convolutions and takes_cpu_convolutions(model)
    convolutions = [each for each in operations_in(evaluation) if each.primitive.name == "conv_general_dilated"]
    count = sum(each.params["feature_group_count"] > 1 and each.invars[0].aval.ndim == 4 for each in convolutions)
    if replaces and count:
        faster = "faster on CPUs as sums and products of matrices; model.cpu_convolutions=False leaves them to XLA"
        _log.info(f"{where}: {counted(count, 'convolution')} of grouped channels computed {faster}")
    if computed == "float16" != used:
        _log.warning(f"{where}: the network computes in float16 without a loss scale; set the precision to float16")
    for notice in notices(model, data.image_shape, evaluation, training, config.frozen_norms):
        _log.warning(f"{where}: {notice}")


def brings_weights(model: Model) -> bool:
    """Return whether a model is an NNX module, whose initial values do not depend on the key of `init`."""
    return isinstance(model, NNXModel) and model.make is None


def check_outputs(model: Model, image_shape: ImageShape, classes: int, precision: str = "float32") -> tuple[Any, Any]:
    """Check that a network returns one logit per class for each image [H, W, C], in evaluation and in training.

    Return the jaxprs of both; None for training if the network does not accept so few images. Raises: InputError.
    """
    evaluation, training = (_trace(model, image_shape, precision, train=t, classes=classes) for t in (False, True))
    return evaluation, training if training.out_avals else None


def in_precision(model: Model, image_shape: ImageShape, precision: str | None) -> Model:
    """Return a user's network with parameters and images cast to a precision, if most of its products then have it.

    A network that computes most products in the precision by itself, that sets the dtype of its layers, or that raises
    an error after the cast, is returned unchanged, and so is an object with the methods of a `Model`.
    """
    if precision in (None, "float32") or not isinstance(model, LinenModel | NNXModel | FunctionModel):
        return model

    def follows(model: Model) -> bool:
        # A cast network may not accept its own constants: `lax.conv_general_dilated` promotes no dtypes, and the
        # carry of a loop must keep its dtype.
        try:
            evaluation = _trace(model, image_shape, precision, train=False)
            _trace(model, image_shape, precision, train=True)
        except Exception:
            return False
        return precision == next(iter(dtypes_of_products(evaluation)), None)

    in_dtype = dataclasses.replace(model, dtype=jnp.dtype(precision))
    return in_dtype if not follows(model) and follows(in_dtype) else model


def _trace(model: Model, image_shape: ImageShape, precision: str, *, train: bool, classes: int | None = None) -> Any:
    """Return the jaxpr of a network in a mode: (state, params, images, key) to (new state, logits).

    The jaxpr of training has no outputs if the network does not accept so few images, as with ghost batch norm. The
    logits are checked if the number of classes is given. Raises: InputError.
    """
    params, state = trees_of(model, image_shape)
    images = jax.ShapeDtypeStruct((_NUM_IMAGES, *image_shape), precision)

    def call(state: Any, params: Any, images: jax.Array, key: jax.Array) -> Any:
        keys = {"example_keys": jax.random.split(key, _NUM_IMAGES)} if train and takes_example_keys(model) else {}
        try:
            result = model.apply(params, state, images, train=train, key=key if train else None, **keys)
        except InputError:
            if train:
                return ()
            raise
        logits, new_state = pair(result, "apply", "(logits, model_state)")
        return new_state, logits if classes is None else _checked_logits(logits, classes, train=train)

    # The trace needs the axis of the devices, because a batch norm may average over it.
    return jax.make_jaxpr(call, axis_env=[(AXIS, 1)])(state, params, images, jax.eval_shape(lambda: jax.random.key(0)))


def _checked_logits(logits: Any, num_classes: int, *, train: bool) -> Any:
    try:
        return wide_logits(logits, (_NUM_IMAGES, num_classes))
    except InputError as error:
        data = "the data in training" if train else "the data"
        shape, advice = getattr(logits, "shape", ()), f"one for each of the {num_classes} classes of {data}"
        if len(shape) == 2 and shape[-1] != num_classes:
            advice += f": the network's last layer has {shape[-1]} outputs; give it {num_classes}"
        raise InputError(f"{error}, {advice}") from None


def dtypes_of_products(jaxpr: Any) -> dict[str, float]:
    """Return the share of each dtype in the operations of products and convolutions, the largest first."""
    flops = flops_by_dtype(jaxpr)
    return {name: count / sum(flops.values()) for name, count in flops.items()}


def notices(
    model: Model, image_shape: ImageShape, evaluation: Any, training: Any, frozen: Layers = NO_LAYERS
) -> Iterator[str]:
    """Yield what looks like a mistake in the mode of a user's network, from the jaxprs of `check_outputs`.

    Training should not change the state of `frozen` layers.
    """
    params, state = trees_of(model, image_shape)
    advice = "the argument that sets the mode has a name of docs/extending.md#a-model, such as train or deterministic"
    function = getattr(model, "function", model.apply)
    if switches := other_switches(function):
        yield f"{', '.join(switches)}: {name_of(function)} has this default in training and evaluation; {advice}"
    if training is None:
        return
    # The inputs and the outputs of both programs begin with the arrays of the state. The logits are the last output.
    *of_state, (read_in_training, _) = origins(training.jaxpr)
    read_in_evaluation, _ = origins(evaluation.jaxpr)[-1]
    arrays = enumerate(by_path((), state).items())
    paths = [(index, path) for index, (path, leaf) in arrays if jnp.issubdtype(leaf.dtype, jnp.floating)]
    # Evaluation does not read the arrays of a metric, and a counter does not depend on the images.
    kept = [path for index, path in paths if of_state[index][1] == index and index in read_in_evaluation]
    # A module may also have constants.
    if isinstance(model, LinenModel | NNXModel):
        kept = [path for path in kept if path.startswith("batch_stats/") or path in getattr(model, "statistics", ())]
    if unchanged := [path for path in kept if not selects(frozen, path, params)]:
        yield f"training does not change {listed(unchanged)}, as if the network were in evaluation mode; {advice}"
    *_, images, key = range(len(training.jaxpr.invars))
    # A value that the network sows, as a loss, does not depend on its last value.
    changed = [(index, path) for index, path in paths if {index, images} <= of_state[index][0]]
    # A layer may keep an array for its users only, such as `sigma` of `nn.SpectralNorm`.
    layers_read = {path.rpartition("/")[0] for index, path in changed if index in read_in_evaluation}
    if unread := [path for _, path in changed if path.rpartition("/")[0] not in layers_read]:
        yield f"evaluation does not read {listed(unread)}, as if the network were in training mode; {advice}"
    if key not in read_in_training and has_dropout(model, params, state, image_shape):
        yield f"the network has dropout, and training does not apply it; {advice}"
