"""What the validation data of a run say about its probabilities: a temperature for them, and sets of classes.

`calibration.json` in the work directory holds the temperature of one checkpoint, which it names by its step and by the
SHA-256 of its manifest, with `eval.views`. No other checkpoint takes it, and no other views.
"""

import logging
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from jaxddp.calibration import fitted_temperature, negative_log_likelihood, set_threshold
from jaxddp.config import Config
from jaxddp.config.values import checked
from jaxddp.core import errors, files, phases, ranges
from jaxddp.data.opening import open_evaluated
from jaxddp.data.source import Table
from jaxddp.inference.trained import TrainedRun, restore_run
from jaxddp.recipe.file import RecipeFile
from jaxddp.setup.resources import join_and_resolve
from jaxddp.training.checkpoints.integrity import CHECKPOINTS, MANIFEST, sha256
from jaxddp.workdir.claim import check_evaluation

CALIBRATION_FILE = "calibration.json"
_log = logging.getLogger("jaxddp.predictions")


@dataclass(frozen=True)
class Calibration:
    """A temperature, the checkpoint that it belongs to, and what it changes for the images that it was fitted on.

    Attributes:
        checkpoint: the SHA-256 of the checkpoint's manifest.
        nll, ece: negative log likelihood and expected calibration error (15 bins), before and after.
        views: the views of each image.
    """

    step: int
    checkpoint: str
    temperature: float
    images: int
    nll: tuple[float, float]
    ece: tuple[float, float]
    views: str = "one"

    def __str__(self) -> str:
        fitted = f"temperature {self.temperature:.4f} of step {self.step} from {errors.counted(self.images, 'image')}"
        nll, ece = ("{:.4f} -> {:.4f}".format(*both) for both in (self.nll, self.ece))
        return f"{fitted}: negative log likelihood {nll}, expected calibration error {ece}"


def calibrate(file: RecipeFile, directory: Path, which: str) -> Calibration:
    """Fit a temperature to the validation data of a run, and write it into the work directory.

    Args:
        file: the recipe of the run, which may name another location of the data, and other views.
        which: the checkpoint: "latest", "best" or a step.

    Raises:
        InputError: the images may have several labels, no temperature fits, or the file cannot be written; see also
            `jaxddp.inference.trained.evaluate_checkpoint`.
    """
    topology, config = join_and_resolve(file)
    run, views = restore_run(directory, which, topology), config.eval.views
    run = replace(run, config=run.config.replace(eval={"views": views}))
    with phases.doing("classifying the validation images"):
        before = run.outcome(open_validation_of(run, config))
    logits, labels = before.logits[before.known], before.labels[before.known]
    temperature = fitted_temperature(logits, labels)
    nll = negative_log_likelihood(logits, labels), negative_log_likelihood(logits, labels, temperature)
    ece = before.reliability.error, replace(before, temperature=temperature).reliability.error
    found = Calibration(run.step, _digest(run), temperature, len(labels), nll, ece, views)
    if topology.peers.is_first:
        files.replace_json(directory / CALIBRATION_FILE, asdict(found))
    return found


def open_validation_of(run: TrainedRun, config: Config) -> Table:
    """Return the validation data of a config for a run. Raises: see `check_evaluation` and `open_evaluated`."""
    of_run, classes = check_evaluation(run.directory, config), (run.class_ids, run.class_names)
    return open_evaluated(config.data, config.eval.limit, of_run, classes)[1]


def calibrated(run: TrainedRun) -> TrainedRun:
    """Return a run with the temperature that was fitted for its checkpoint, or unchanged if none was.

    Raises: InputError if the file with the temperature is damaged.
    """
    return replace(run, temperature=run.topology.peers.from_first("the calibration", lambda: _temperature(run)))


def threshold_of(run: TrainedRun, coverage: float) -> float:
    """Return `set_threshold` for the validation data of a run.

    Raises: InputError if these data cannot be read, have several labels for an image, or have too few images.
    """
    with phases.doing("classifying the validation images"):
        return set_threshold(run.label_probabilities(open_validation_of(run, run.config)), coverage)


def _digest(run: TrainedRun) -> str:
    manifest = run.directory / CHECKPOINTS / str(run.step) / MANIFEST
    return sha256(files.read(manifest)) if manifest.exists() else ""


def _temperature(run: TrainedRun) -> float:
    path = run.directory / CALIBRATION_FILE
    if not path.exists():
        return 1.0
    content = files.content_of(path, "make it readable")
    with files.parsing(path, "remove it, and calibrate again"):
        found = Calibration(**files.parse_json(content, dict))
        checked(found.temperature, ranges.Positive, "temperature")
    views = run.config.eval.views
    if (found.step, found.checkpoint, found.views) == (run.step, _digest(run), views):
        return found.temperature
    other = f"another checkpoint (step {found.step})" if found.views == views else f"eval.views={found.views}"
    command = f"jaxddp eval {run.directory} --step {run.step} --eval.views {views} --calibrate"
    _log.warning(f"{path}: belongs to {other}, so step {run.step} is not calibrated; run {command}")
    return 1.0
