"""A run's checkpoint on the validation split: what `jaxddp eval` does.

Nothing is made that training alone needs: no optimizer, no schedule, no training batch.
"""

from pathlib import Path

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.phases import phase
from jaxddp.data.source import Source
from jaxddp.engine.parts.part import measured_states
from jaxddp.inference.trained import fitted
from jaxddp.mesh import Topology
from jaxddp.models.adapt import for_platform
from jaxddp.models.interface import Model
from jaxddp.recipe.layout import TrainingData, steps_of
from jaxddp.recipe.make_recipe import losses_of, metrics_of, model_of, parts_of
from jaxddp.recipe.network_checks import check_eval_size
from jaxddp.recipe.user_objects import ObjectSource, objects_of_hooks
from jaxddp.recipe_file import RecipeFile
from jaxddp.sections.goal import flat
from jaxddp.setup.classifier import Classifier
from jaxddp.setup.compiled_programs import settings
from jaxddp.setup.experiment import check_normalization
from jaxddp.setup.feed import eval_batches, no_larger
from jaxddp.setup.joining import join_and_resolve
from jaxddp.setup.resources import open_validation
from jaxddp.training.checkpoints.integrity import CHECKPOINTS
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.plan import Plan
from jaxddp.training.validation.evaluator import Evaluator
from jaxddp.workdir.claim import check_measured
from jaxddp.workdir.saved_state import agreed_step, restored
from jaxddp.workdir.signature import Signature


@phase("start")
def evaluate(file: RecipeFile, directory: Path, which: str = "latest") -> dict[str, float]:
    """The validation metrics of a checkpoint ("latest", "best" or a step): means, `count` and `step`.

    Those of averaged parameters follow, as "val_ema loss" and so on.

    Raises:
        InputError: there is no such checkpoint or no such data, the recipe has another network, classes or images than
            the run, or it does not say its network.
    """
    file.check_copy()
    if not file.has_network:
        raise InputError(
            f"{file.path}: the run came from Python and does not say its network; measure it there with "
            "jaxddp.evaluate, or at the terminal under a config that says it"
        )
    topology, config = join_and_resolve(file)
    check_measured(directory, config)
    # A missing or damaged one is an error before the data are opened.
    with Checkpoints(directory / CHECKPOINTS, topology.peers, read_only=True) as checkpoints:
        agreed_step(checkpoints, which)
    train, val = open_validation(config, topology)
    _check_classes(directory, train)
    known, give = TrainingData.of(train, config.data), objects_of_hooks(file.hooks)
    model = model_of(config, known.num_classes, give)
    check_eval_size(config.data, model, known)
    evaluator = _evaluator(config, give, model, known, val, topology)
    topology.peers.agree(settings())
    topology.connect()
    # Looked up again, for a run may have gone on meanwhile.
    saved = restored(directory, which, topology)
    # Parts whose arrays are not there measure nothing.
    steps = steps_of(config, Plan.of(config, known.num_examples))
    parts = [part for part in parts_of(config, steps, give) if part.name in saved.parts]
    shape, place = known.image_shape, directory / CHECKPOINTS
    states = {split: fitted(model, own, shape, place) for split, own in measured_states(saved, parts).items()}
    return {"step": int(saved.step), **flat({split: evaluator(own) for split, own in states.items()})}


def _check_classes(directory: Path, source: Source) -> None:
    signature = Signature.read(directory)
    if signature is not None and signature.class_ids != tuple(source.class_ids):
        raise InputError(f"{directory}: the data have other classes than the run was trained on; give the run's data")


def _evaluator(
    config: Config, give: ObjectSource, model: Model, known: TrainingData, val: Source, topology: Topology
) -> Evaluator:
    check_normalization(config.data, known.image_shape)
    (_, loss), metrics = losses_of(config, known, give), metrics_of(config, known, give)
    own = for_platform(model, topology.platform), loss, metrics, Preprocess.of(config), config.eval.views
    size = no_larger(config.eval.batch_size, val, topology)
    return Classifier(*own, topology).evaluator(val, lambda: zip(eval_batches(val, config.data, size, topology)))
