"""Evaluates a checkpoint of a run, or published weights, on the validation split, for `jaxddp eval`.

It creates no optimizer, no schedule and no training batch.
"""

from pathlib import Path

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.config.goal import flat
from jaxddp.core.errors import InputError, Key
from jaxddp.core.phases import phase
from jaxddp.data.source import Source
from jaxddp.engine.objective import Objective
from jaxddp.engine.parts.part import measured_states
from jaxddp.engine.programs import make_eval_step
from jaxddp.engine.state import TrainState
from jaxddp.inference.trained import fitted
from jaxddp.mesh import Topology
from jaxddp.models.adapt import for_platform
from jaxddp.models.interface import Model
from jaxddp.models.nnx_modules import NNXModel
from jaxddp.recipe.file import RecipeFile
from jaxddp.setup.compiled_programs import settings
from jaxddp.setup.feed import eval_batches, limit_batch_size
from jaxddp.setup.initial_weights import state_of_weights
from jaxddp.setup.layout import TrainingData, steps_of
from jaxddp.setup.network_checks import check_eval_size
from jaxddp.setup.recipe import check_normalization, model_of
from jaxddp.setup.resources import join_and_resolve, open_validation, open_validation_alone
from jaxddp.setup.user_objects import ObjectSource, losses_of, metrics_of, objects_of_hooks, parts_of
from jaxddp.training.checkpoints.integrity import CHECKPOINTS
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.plan import Plan
from jaxddp.workdir.claim import check_evaluation
from jaxddp.workdir.saved_state import agreed_step, restore_state
from jaxddp.workdir.signature import Signature


@phase("start")
def evaluate(file: RecipeFile, directory: Path, which: str = "latest") -> dict[str, float]:
    """Return the validation metrics of a checkpoint ("latest", "best" or a step): means, `count` and `step`.

    The metrics of averaged parameters follow, as "val_ema loss" and so on.

    Raises:
        InputError: the checkpoint or the data do not exist, the recipe names no network, or the network, the classes or
            the images differ from the run's.
    """
    file.check_copy()
    file.check_network("evaluate it with jaxddp.evaluate, or with a config that names the network")
    topology, config = join_and_resolve(file)
    check_evaluation(directory, config)
    # Opening the data takes longer, so check first that the checkpoint exists and is undamaged.
    with Checkpoints(directory / CHECKPOINTS, topology.peers, read_only=True) as checkpoints:
        agreed_step(checkpoints, which)
    train, val = open_validation(config, topology)
    signature = Signature.read(directory)
    if signature is not None and signature.class_ids != tuple(train.class_ids):
        raise InputError(f"{directory}: the data have other classes than the run was trained on; give the run's data")
    data, user_object = TrainingData.of(train, config.data), objects_of_hooks(file.hooks)
    model = model_of(config, data.num_classes, user_object, data.image_shape)
    check_eval_size(config.data, model, data)
    evaluator = _evaluator(config, user_object, model, data, val, topology)
    # Choose the checkpoint again: a training run may have saved another one since.
    saved = restore_state(directory, which, topology)
    # A part without arrays in the checkpoint has no parameters to evaluate.
    steps = steps_of(config, Plan.of(config, data.num_examples))
    parts = [part for part in parts_of(config, steps, user_object) if part.name in saved.parts]
    shape, folder = data.image_shape, directory / CHECKPOINTS
    states = {split: fitted(model, state, shape, folder) for split, state in measured_states(saved, parts).items()}
    return {"step": int(saved.step), **flat({split: evaluator(state) for split, state in states.items()})}


@phase("start")
def evaluate_weights(file: RecipeFile) -> dict[str, float]:
    """Return the validation metrics of the weights `model.weights` of a recipe: means, and `count`. Nothing is written.

    Without `model.weights`, the recipe's `get_initialize` or its NNX module brings the weights. If the weights have all
    classes of the data, the examples of `data.classes` are measured among all of them.

    Raises:
        InputError: the recipe has no weights, they have other classes than the data, or the data do not exist.
    """
    topology, config = join_and_resolve(file)
    # Training data, which class weights follow from, are not opened, and the crops of training are not made.
    config = config.replace(loss={"class_weights": None}, data={"crop": "whole"})
    user_object = objects_of_hooks(file.hooks)
    try:
        model, state, val = _with_weights(config, user_object, topology, of_all=False)
    except InputError:
        if config.data.classes is None:
            raise
        model, state, val = _with_weights(config, user_object, topology, of_all=True)
    return _evaluator(config, user_object, model, TrainingData.of(val, config.data), val, topology)(state)


def _with_weights(
    config: Config, user_object: ObjectSource, topology: Topology, *, of_all: bool
) -> tuple[Model, TrainState, Source]:
    """Return a network, its weights, and the validation data.

    Args:
        of_all: whether the network has all classes of the data, and not only those of `data.classes`.
    """
    val = open_validation_alone(config, topology, of_all=of_all)
    data = TrainingData.of(val, config.data)
    model = model_of(config, data.num_classes, user_object, data.image_shape)
    check_eval_size(config.data, model, data)
    initialize = user_object("initialize", config, data.images)
    if config.model.weights is None and initialize is None and not isinstance(model, NNXModel):
        raise InputError(Key("model.weights"), ": is not set", advice="name the weights to evaluate")
    change = initialize and initialize.function("(params, model_state)", "params, model_state")
    more = {"initialize": change, "needs_head": True}
    _, state = state_of_weights(config, model, data.image_shape, val.class_ids, topology, **more)
    return model, state, val


def _evaluator(
    config: Config, user_object: ObjectSource, model: Model, data: TrainingData, val: Source, topology: Topology
) -> Evaluator:
    check_normalization(config.data, data.image_shape)
    (_, loss), metrics = losses_of(config, data, user_object), metrics_of(config, data, user_object)
    network, size = for_platform(model, topology.platform), limit_batch_size(config.eval.batch_size, val, topology)
    topology.peers.agree(settings())
    topology.connect()
    objective = Objective(network, loss, Preprocess.of(config), metrics, config.eval.views)
    batches = lambda: zip(eval_batches(val, config.data, size, topology))  # noqa: E731
    return Evaluator(make_eval_step(objective, topology), batches, len(val), metrics=metrics)
