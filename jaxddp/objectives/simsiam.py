"""SimSiam: a network learns from images without labels, by predicting its output for one view of an image from another.

Source: Chen & He 2021 (arXiv:2011.10566). Each image has two augmented views. A projector maps the features of the
network to z, and a predictor maps z to p. The loss of an image is the mean of -cos(p1, z2) and -cos(p2, z1), without a
gradient of z. Otherwise all outputs could become equal. As in the authors' code, the views go through the network one
after the other, so batch norm takes its statistics from one view at a time.

The features are the input of the network's head. The head itself, which needs labels, is not trained.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.augment.mixing import check_unmixed
from jaxddp.config.layers import SIMSIAM
from jaxddp.core.errors import Key, about
from jaxddp.data.batch import Batch
from jaxddp.data.source import LabelKind
from jaxddp.engine.objective import MetricSums, Objective, TrainObjective, compute_contributions
from jaxddp.mesh import AXIS
from jaxddp.metrics import NearestNeighbours
from jaxddp.models.activations import find_layer, without_head
from jaxddp.models.interface import ImageShape, Model, as_wide
from jaxddp.models.projection import Projected, Projection, moments

OUTPUT_STD = "output_std"
"""The name of the metric of collapse: the standard deviation of z / |z| over the images of a batch, times the square
root of its width. It is 0 if all outputs are equal, and 1 if they are distributed evenly."""

_NAME = Key.plain("objective.name", SIMSIAM)
# Folded into a key for the random numbers of each view.
_VIEW, _VIEWS = 0x7373, 2


@dataclass(frozen=True)
class SimSiam:
    """Creates the objective from the supervised objective, whose loss it does not use.

    Attributes:
        projection: the projector and the predictor.
        axis_name: the mesh axis over which batch norms of the projection average their statistics in training; None
            for the statistics of each part of a batch.
    """

    projection: Projection
    axis_name: str | None = None

    reads_unlabelled = False
    """Whether a batch must contain images of `data.unlabelled`."""
    num_references = 10_000
    """The largest number of training images among which a validation looks for the nearest neighbours."""

    def network(self, model: Model, image_shape: ImageShape) -> Model:
        """Return the network with projector and predictor. Raises: InputError if it has no head; see `find_layer`."""
        with about(_NAME):
            features = find_layer(model, image_shape).shape[-1]
        return Projected(**vars(model), projection=self.projection, features=features)

    def metrics(self, labels: LabelKind) -> dict[str, Any]:
        """Return the metric of a validation; none for images without classes, or of several classes each."""
        return {"knn_accuracy": NearestNeighbours()} if labels.form == "one label" and labels.num_classes > 1 else {}

    def check(self, supervised: Objective, image: jax.ShapeDtypeStruct, *, unlabelled: bool) -> None:
        """Raise `InputError` if images are mixed."""
        check_unmixed(supervised.preprocess.augment, _NAME)

    def __call__(self, supervised: Objective) -> TrainObjective:
        """Return the objective; see `jaxddp.config.registry.OBJECTIVES`.

        In evaluation, the loss is also that of two augmented views, and the projector normalizes the global batch. The
        metrics over the set are those of the image itself.
        """
        # Metrics of logits cannot be measured.
        metrics = {name: each for name, each in supervised.metrics.items() if isinstance(each, NearestNeighbours)}
        supervised = replace(supervised, metrics=metrics)

        def features(*trees: Any, **more: Any) -> tuple[jax.Array, Any]:
            *_, images, _ = trees
            with without_head(supervised.model, images.shape[1:]):
                x, model_state = supervised.outputs(*trees, **more)
            return as_wide(x), model_state

        def objective(
            params: Any, model_state: Any, batch: Batch, *, train: bool, key: Any = None, image_key: Any = None
        ) -> tuple[MetricSums, Any]:
            outputs, axis_name = [], self.axis_name if train else AXIS
            for number in range(_VIEWS):
                view_key, own_key = (_folded(each, number) for each in (image_key, key))
                images = supervised.preprocess(batch, train=True, key=view_key).images
                x, model_state = features(params, model_state, images, [(batch, view_key)], train=train, key=own_key)
                outputs.append(self.projection.apply({"params": params[SIMSIAM]}, x, batch.mask, axis_name))
            (z1, p1), (z2, p2) = (map(_unit, each) for each in outputs)
            losses = -((p1 * jax.lax.stop_gradient(z2)).sum(-1) + (p2 * jax.lax.stop_gradient(z1)).sum(-1)) / 2
            sums = supervised.sums([(losses, jnp.ones_like(losses))], batch)
            if train:
                _, var = moments(jax.lax.stop_gradient(z1), batch.mask, axis_name)
                return sums.with_scalars({OUTPUT_STD: jnp.sqrt(var * z1.shape[-1]).mean()}), model_state
            images = supervised.preprocess(batch, train=False).images
            x, _ = features(params, model_state, images, (), train=False, key=None)
            return sums.replace(sets=compute_contributions(supervised.metrics, x, batch.label, batch.mask)), model_state

        return objective


def _folded(key: jax.Array | None, view: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(0) if key is None else key, _VIEW + view)


def _unit(x: jax.Array) -> jax.Array:
    """Return the rows of an array, float[B, D], divided by their norms. A row of zeros has no gradient."""
    squared = jnp.square(x).sum(-1, keepdims=True)
    return jnp.where(squared > 0, x * jax.lax.rsqrt(jnp.where(squared > 0, squared, 1)), 0)
