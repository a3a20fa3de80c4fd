"""A run's checkpoint on the validation split: what `jaxddp eval` does.

Nothing is made that training alone needs: no optimizer, no schedule, no training batch.
"""

from pathlib import Path

import jaxddp.job.progress as progress
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig, Config
from jaxddp.data.source import Source
from jaxddp.engine.objective import Objective
from jaxddp.engine.state import measured_states
from jaxddp.engine.step import make_eval_step
from jaxddp.errors import InputError
from jaxddp.experiment.feed import eval_batches, no_larger
from jaxddp.experiment.image_sizes import check_sizes
from jaxddp.experiment.joined import joined
from jaxddp.experiment.prepare import check_normalization
from jaxddp.experiment.programs import settings
from jaxddp.experiment.recipe import TrainingData, losses_of, metrics_of, model_of, parts_of
from jaxddp.experiment.resources import open_validation
from jaxddp.experiment.resume import check_measured
from jaxddp.experiment.saved_state import agreed_step, restored
from jaxddp.experiment.signature import Signature
from jaxddp.experiment.trained import fitted
from jaxddp.goal import flat
from jaxddp.job.membership import agree
from jaxddp.mesh import Topology
from jaxddp.models.adapt import for_platform
from jaxddp.models.protocol import Model
from jaxddp.recipe_file import RecipeFile
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.manifest import CHECKPOINTS


@progress.phase("start")
def evaluate(file: RecipeFile, directory: Path, which: str = "latest") -> dict[str, float]:
    """The validation metrics of a checkpoint ("latest", "best" or a step): means, `count` and `step`.

    Those of averaged parameters follow, as "val_ema loss" and so on.

    Raises:
        InputError: there is no such checkpoint or no such data, the recipe has another network, classes or images than
            the run, or it does not say its network.
    """
    file.check_kept()
    if not file.says_network:
        raise InputError(
            f"{file.path}: the run came from Python and does not say its network; measure it there with "
            "jaxddp.evaluate, or at the terminal under a config that says it"
        )
    topology, config = joined(file)
    check_measured(directory, config)
    # A missing or damaged one is an error before the data are opened.
    with Checkpoints(directory / CHECKPOINTS, read_only=True) as checkpoints:
        agreed_step(checkpoints, which)
    train, val = open_validation(config, topology)
    _check_classes(directory, train)
    model = model_of(file, config, train.num_classes)
    # Images grow in training alone.
    check_sizes(config.replace(data={"grow_from": None}), train, model)
    evaluator = _evaluator(file, config, model, train, val, topology)
    agree(settings())
    topology.connect()
    # Looked up again, for a run may have gone on meanwhile.
    saved = restored(directory, which, topology)
    parts = [part for part in parts_of(file, config, len(train)) if part.name in saved.parts]
    shape, place = train.image_shape(config.data), directory / CHECKPOINTS
    states = {split: fitted(model, own, shape, place) for split, own in measured_states(saved, parts).items()}
    return {"step": int(saved.step), **flat({split: evaluator(own) for split, own in states.items()})}


def _check_classes(directory: Path, source: Source) -> None:
    signature = Signature.read(directory)
    if signature is not None and signature.class_ids != tuple(source.class_ids):
        raise InputError(f"{directory}: the data have other classes than the run was trained on; give the run's data")


def _evaluator(
    file: RecipeFile, config: Config, model: Model, train: Source, val: Source, topology: Topology
) -> Evaluator:
    known, data = TrainingData.of(train, config.data), config.data
    check_normalization(data, train.image_shape(data))
    (_, loss), metrics = losses_of(file, config, known), metrics_of(file, config, known)
    preprocess = Preprocess(data.mean, data.std, AugmentConfig(), config.train.precision or "float32")
    model = for_platform(model, topology.platform)
    step = make_eval_step(Objective(model, loss, preprocess, metrics, config.eval.views), topology)
    size = no_larger(config.eval.batch_size, val, topology)
    return Evaluator(step, lambda: zip(eval_batches(val, data, size, topology)), len(val), metrics=metrics)
