"""Finds the examples with a non-finite image or loss in the batch that ended a run."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxddp.core.wording import plural
from jaxddp.data.batch import Batch
from jaxddp.engine.objective import Objective, targets
from jaxddp.engine.state import TrainState
from jaxddp.mesh import AXIS, Topology
from jaxddp.setup.feed import Feed

_MOST_SHOWN = 8


def describe_non_finite(state: TrainState, step: int, objective: Objective, feed: Feed, key: jax.Array) -> str:
    """Describe the rows of a step's batch whose loss is not finite.

    If all losses are finite, describe the rows whose image is not finite. If all images are finite too, describe all.

    The network is evaluated on the augmented images of the step with running statistics, so that an image does not
    affect the losses of other images. The state may belong to a later step. All processes must call this together.
    """
    batch = next(feed.batches(step - 1, step))
    images, losses = map(np.asarray, _finite(objective, feed.topology)(state, batch, key))
    rows = feed.rows(step - 1)
    # Padding is not described.
    real = rows >= 0
    rows, images, losses = rows[real], images[real], losses[real]
    if not losses.all():
        return f"The loss is not finite for {_rows_text(rows[~losses])} of the training data"
    if not images.all():
        return f"Images are not finite after augmentation: {_rows_text(rows[~images])} of the training data"
    return (
        "Each image of the batch has a finite loss if it is evaluated alone; "
        f"the batch is {_rows_text(rows)} of the training data"
    )


def _finite(objective: Objective, topology: Topology) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a function that returns two masks of a global batch, bool[B]: its finite images and its finite losses.

    A network can hide the NaN of an image: in XLA's CPU compiler, max(NaN, 0), as in a ReLU, is 0.
    """

    def local(state: TrainState, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        images = objective.preprocess(batch, train=True, key=key).images
        logits = objective.predict(state.params, state.model_state, images)
        logits = logits.astype(jnp.float32)
        losses, _ = objective.loss(logits, targets(batch.label, logits))
        return jnp.isfinite(images).all((1, 2, 3)), jnp.isfinite(losses)

    sharded = jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(AXIS))
    return jax.jit(sharded, out_shardings=topology.replicated)


def _rows_text(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:_MOST_SHOWN]))
    more = f" and {len(rows) - _MOST_SHOWN} more" if len(rows) > _MOST_SHOWN else ""
    return f"{plural(len(rows), 'row')} {shown}{more}"
