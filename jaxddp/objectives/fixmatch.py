"""FixMatch: a confident prediction for an unlabelled image becomes the label of a strongly augmented copy of the image.

Source: Sohn et al. 2020 (arXiv:2001.07685). A step has B labelled images and a multiple of B unlabelled ones. Each
unlabelled image has a weakly and a strongly augmented view. If the network gives a class of the weak view a probability
of `threshold` or more, that class is the pseudo-label of the strong view. The loss is the mean over the labelled images
plus a weight times the mean over all unlabelled images.

As in the authors' code, all images of a step go through the network in one batch, so batch norm takes its statistics
from all of them. Unlike in the authors' code, all operations of RandAugment have the same magnitude.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.augment.preprocess import Preprocess, check_augmentation
from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.data.source import check_one_label
from jaxddp.engine.objective import MetricSums, Objective, TrainObjective
from jaxddp.losses import softmax_cross_entropy

ADDED_METRICS = ("supervised_loss", "unlabelled_loss", "pseudo_labels")
"""The names of the added metrics: the two terms of the loss, and the share of unlabelled images with a pseudo-label."""

_NAME = Key.plain("objective.name", "fixmatch")
_NO_UNLABELLED = (_NAME, " needs images without labels; give ", Key("data.unlabelled"))
# The numbers that are folded into the run's key for the random stream of each view.
_WEAK, _STRONG = 0x7765616B, 0x7374726F


@dataclass(frozen=True)
class FixMatch:
    """Creates the FixMatch objective from the supervised objective.

    Its attributes are settings; see `jaxddp.objectives.choices.FixMatchSettings`.
    """

    unlabelled_weight: float
    threshold: float
    strong_rand_augment: int
    strong_rand_magnitude: float
    strong_cutout: float

    def __call__(self, supervised: Objective) -> TrainObjective:
        """Return the objective, which takes batches that have unlabelled images.

        Raises:
            InputError: the loss is normalized by weights within the batch, a metric has a name in `ADDED_METRICS`, or,
                from the objective, the training images have weights.
        """
        if supervised.loss.form == "weighted":
            problem = " averages the losses of examples, and this loss is normalized by weights within a batch"
            raise InputError(_NAME, problem, advice=("leave ", Key("loss.class_weights"), " out, or give another loss"))
        if reserved := [name for name in supervised.metrics if name in ADDED_METRICS]:
            raise InputError(_NAME, f" already measures {reserved[0]}", advice="give the metric another name")

        def objective(
            params: Any, model_state: Any, batch: Batch, *, train: bool, key: Any = None, image_key: Any = None
        ) -> tuple[MetricSums, Any]:
            unlabelled = batch.unlabelled
            assert unlabelled is not None
            if batch.weight is not None:
                problem = " averages over images, and the training images have weights"
                raise InputError(_NAME, problem, advice=("leave ", Key("data.weight_column"), " out"))
            *shape, channels = unlabelled.image.shape[1:]
            shape = shape if unlabelled.side is None else 2 * [unlabelled.side.pixels]
            run_key = jax.random.key(0) if image_key is None else image_key
            views = [
                (supervised.preprocess, batch, image_key),
                (self._weak(supervised), unlabelled, jax.random.fold_in(run_key, _WEAK)),
                (self._strong(supervised, (*shape, channels)), unlabelled, jax.random.fold_in(run_key, _STRONG)),
            ]
            inputs = [preprocess(part, train=train, key=view_key) for preprocess, part, view_key in views]
            images, of_examples = jnp.concatenate([view.images for view in inputs]), [view[1:] for view in views]
            logits, model_state = supervised.logits(params, model_state, images, of_examples, train=train, key=key)
            labelled, weak, strong = jnp.split(logits, [len(batch.mask), len(batch.mask) + len(unlabelled.mask)])
            sums = supervised.sums(supervised.columns(labelled, batch, inputs[0].mixing), batch)
            # Add the sums over the unlabelled images to the sums over the labelled images.
            mask = unlabelled.mask
            probabilities = jax.nn.softmax(jax.lax.stop_gradient(weak))
            confident = (probabilities.max(-1) >= self.threshold) & (mask > 0)
            losses = jnp.where(confident, softmax_cross_entropy(strong, probabilities.argmax(-1)), 0)
            count = mask.sum().astype(losses.dtype)
            (loss, examples), *rest = sums.values
            # The step divides the sum by the number of labelled images. So the sum over unlabelled images is scaled by
            # the ratio of the two numbers of images, which is the same in each part of a batch.
            total = loss + self.unlabelled_weight * len(batch.mask) / len(mask) * losses.sum()
            rows = [(loss, examples), (losses.sum(), count), (confident.sum().astype(losses.dtype), count)]
            *metrics, last = rest
            values = [jnp.stack([total, examples]), *metrics, *map(jnp.stack, rows), last]
            return MetricSums(jnp.stack(values), (*sums.names, *ADDED_METRICS)), model_state

        return objective

    def check(self, supervised: Objective, image: jax.ShapeDtypeStruct, *, unlabelled: bool) -> None:
        """Check the objective before anything is compiled.

        Raises:
            InputError: the objective cannot be created, unlabelled images are missing, or images do not fit the
                augmentation.
        """
        if not unlabelled:
            raise InputError(_NO_UNLABELLED)
        check_one_label(supervised.loss.labels, _NAME)
        try:
            check_augmentation(self._strong(supervised, image.shape), image.shape, image.dtype)
        except InputError as error:
            # The keys of `data.augment` are those of the strong view.
            names = "data.augment.rand", "objective.strong_rand"
            error.change_keys(lambda key: replace(key, name=key.name.replace(*names)))
            raise
        self(supervised)

    def _weak(self, supervised: Objective) -> Preprocess:
        """Return the weak augmentation: that of labelled images without mixing, which needs labels."""
        preprocess = supervised.preprocess
        return replace(preprocess, augment=replace(preprocess.augment, mixup=0.0, cutmix=0.0))

    def _strong(self, supervised: Objective, shape: tuple[int, ...]) -> Preprocess:
        """Return the strong augmentation for images [..., H, W, C]: the weak one with RandAugment and cutout."""
        weak, layers, magnitude = self._weak(supervised), self.strong_rand_augment, self.strong_rand_magnitude
        side = round(self.strong_cutout * min(shape[-3:-1]))
        return replace(weak, augment=replace(weak.augment, rand_augment=layers, rand_magnitude=magnitude, cutout=side))
