"""FixMatch: what a network is sure of on an image is what it shall say of a strongly augmented copy.

Sohn et al. 2020 (arXiv:2001.07685). A step has B labelled images and a multiple of as many unlabelled ones, each in two
views. Where the network gives a class of the weak view a probability of `threshold` or more, this class is a label for
the strong view. The loss is the mean of the labelled images' plus a weight times the mean over all unlabelled ones.

As in the authors' code, one pass of the network has all images of a step, so that batch norm sees all. Other than
there, all operations of RandAugment have one magnitude.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.augment.preprocess import Preprocess, check_augmentation
from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.ranges import Factor, Share
from jaxddp.data.batch import Batch
from jaxddp.engine.step_objective import MetricSums, Objective, TrainObjective, example_keys, wide_logits
from jaxddp.losses.cross_entropy import softmax_cross_entropy
from jaxddp.models.interface import takes_example_keys
from jaxddp.registry import OBJECTIVES
from jaxddp.sections.data_section import RandAugment, RandMagnitude
from jaxddp.sections.objective_section import Ratio

MEASURED = ("supervised_loss", "unlabelled_loss", "pseudo_labels")
"""What is measured beside the loss: its two parts, and the share of unlabelled images that had a pseudo-label."""

_NAMED = Key.plain("objective.name", "fixmatch")
_NEEDED = (_NAMED, " needs images without labels; give ", Key("data.unlabelled"))
# One stream of random numbers per view, of the run's key.
_WEAK, _STRONG = 0x7765616B, 0x7374726F


@dataclass(frozen=True)
class FixMatchSettings:
    """Of `objective`, with the paper's defaults. The batches of the run have the ratio."""

    unlabelled_ratio: Ratio = 7
    unlabelled_weight: Factor = 1.0
    threshold: Share = 0.95
    strong_rand_augment: RandAugment = 2
    strong_rand_magnitude: RandMagnitude = 10.0
    strong_cutout: Share = 0.5


@OBJECTIVES.add("fixmatch", FixMatchSettings)
def fixmatch_from(config: Config, topology: Any) -> "FixMatch":
    """With the config's settings."""
    return FixMatch(settings_of(config.objective, FixMatchSettings))


@dataclass(frozen=True)
class FixMatch:
    """Makes what a step minimizes of the supervised objective, and of these settings."""

    settings: FixMatchSettings

    def __call__(self, supervised: Objective) -> TrainObjective:
        """Raises: InputError; the loss is normalized by weights within the batch, or a metric has one of our names."""
        if supervised.loss.form == "weighted":
            raise InputError(
                _NAMED,
                " adds up means over examples, and this loss is divided by weights of the batch",
                advice="give a loss of each example",
            )
        if taken := [name for name in supervised.metrics if name in MEASURED]:
            raise InputError(
                _NAMED,
                f" measures {taken[0]} itself",
                advice="give the metric another name",
            )
        return _Minimized(supervised, self.settings)

    def check(self, supervised: Objective, image: jax.ShapeDtypeStruct, *, unlabelled: bool) -> None:
        """Raises: InputError; the objective cannot be made, there is no second source, or an image does not suit."""
        if not unlabelled:
            raise InputError(_NEEDED)
        if supervised.loss.labels.several:
            raise InputError(
                _NAMED,
                " takes one label an image, and the training data have several",
            )
        minimized = _Minimized(supervised, self.settings)
        try:
            check_augmentation(minimized.strong(image.shape), image.shape, image.dtype)
        except InputError as error:
            error.change_keys(_of_strong_view)
            raise
        self(supervised)


@dataclass(frozen=True)
class _Minimized:
    """See `jaxddp.engine.step_objective.TrainObjective`; the module's docstring says what is minimized."""

    supervised: Objective
    settings: FixMatchSettings

    @property
    def weak(self) -> Preprocess:
        """As labelled images are augmented, but none is mixed with another, whose class may be another."""
        own = self.supervised.preprocess
        return replace(own, augment=replace(own.augment, mixup=0.0, cutmix=0.0))

    def strong(self, shape: tuple[int, ...]) -> Preprocess:
        """The weak one with RandAugment and cutout, of images [..., H, W, C]."""
        settings, weak = self.settings, self.weak
        layers, magnitude = settings.strong_rand_augment, settings.strong_rand_magnitude
        side = round(settings.strong_cutout * min(shape[-3:-1]))
        return replace(weak, augment=replace(weak.augment, rand_augment=layers, rand_magnitude=magnitude, cutout=side))

    def __call__(
        self,
        params: Any,
        model_state: Any,
        batch: Batch,
        *,
        train: bool,
        key: jax.Array | None = None,
        image_key: jax.Array | None = None,
    ) -> tuple[MetricSums, Any]:
        """Raises: InputError; the batch has no unlabelled one."""
        supervised, others = self.supervised, batch.unlabelled
        if others is None:
            raise InputError(_NEEDED)
        run_key = jax.random.key(0) if image_key is None else image_key
        views = [
            (supervised.preprocess, batch, image_key),
            (self.weak, others, jax.random.fold_in(run_key, _WEAK)),
            (self.strong(_shape(others)), others, jax.random.fold_in(run_key, _STRONG)),
        ]
        inputs = [preprocess(own, train=train, key=view_key) for preprocess, own, view_key in views]
        images = jnp.concatenate([each.images for each in inputs])
        if train:
            own = {}
            if takes_example_keys(supervised.model):
                own["example_keys"] = jnp.concatenate([example_keys(own, view_key) for _, own, view_key in views])
            logits, model_state = supervised.model.apply(params, model_state, images, train=True, key=key, **own)
        else:
            logits = supervised.predict(params, model_state, images)
        logits = wide_logits(logits, (len(images), supervised.loss.labels.num_classes))
        labelled, weak, strong = jnp.split(logits, [len(batch.mask), len(batch.mask) + len(others.mask)])
        sums = supervised.sums(supervised.columns(labelled, batch, inputs[0].mixing), batch)
        return self._with_unlabelled(sums, weak, strong, others.mask, len(batch.mask)), model_state

    def _with_unlabelled(
        self, sums: MetricSums, weak: jax.Array, strong: jax.Array, mask: jax.Array, num_labelled: int
    ) -> MetricSums:
        """The sums over the labelled images with those over the unlabelled ones, of logits float[U, K] and a mask."""
        probabilities = jax.nn.softmax(jax.lax.stop_gradient(weak))
        sure = (probabilities.max(-1) >= self.settings.threshold) & (mask > 0)
        losses = jnp.where(sure, softmax_cross_entropy(strong, probabilities.argmax(-1)), 0)
        count = mask.sum().astype(losses.dtype)
        (loss, examples), *others = sums.values
        # The step divides by the number of labelled images; of unlabelled ones each part of a batch has as many times
        # as many as the whole.
        total = loss + self.settings.unlabelled_weight * num_labelled / len(mask) * losses.sum()
        rows = [(loss, examples), (losses.sum(), count), (sure.sum().astype(losses.dtype), count)]
        *metrics, last = others
        values = [jnp.stack([total, examples]), *metrics, *map(jnp.stack, rows), last]
        return MetricSums(jnp.stack(values), (*sums.names, *MEASURED))


def _of_strong_view(key: Key) -> Key:
    """Its settings have keys of their own."""
    return replace(key, name=key.name.replace("data.augment.rand", "objective.strong_rand"))


def _shape(batch: Batch) -> tuple[int, ...]:
    """(H, W, C) of the images as the step has them."""
    *sides, channels = batch.image.shape[1:]
    return (*(sides if batch.side is None else 2 * [batch.side.pixels]), channels)
