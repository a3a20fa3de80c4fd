"""Which examples of a batch are not finite, or have no finite loss: asked when a run has to end because of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxddp.core.wording import plural
from jaxddp.data.batch import Batch
from jaxddp.engine.state import TrainState
from jaxddp.engine.step_objective import Objective, targets
from jaxddp.mesh import AXIS, Topology
from jaxddp.setup.feed import Feed

_MOST_SHOWN = 8


def describe_non_finite(state: TrainState, step: int, objective: Objective, feed: Feed, key: jax.Array) -> str:
    """Names the rows of a step's batch whose loss is not finite, else whose image is not, else all of its rows.

    The state may be that of a later step: the host hears of steps some at a time. The network sees the images
    of the step, augmented as they were, but in evaluation: by running statistics, so that no image can spoil the losses
    of others. All processes must ask together.
    """
    batch = next(feed.batches(step - 1, step))
    images, losses = map(np.asarray, _finite(objective, feed.topology)(state, batch, key))
    rows = feed.order.rows(step - 1)
    if not losses.all():
        return f"The loss is not finite for {_listed(rows[~losses])} of the training data"
    if not images.all():
        return f"As they are augmented, images are not finite: {_listed(rows[~images])} of the training data"
    return f"Each image of its batch has a finite loss by itself; the batch is {_listed(rows)} of the training data"


def _finite(objective: Objective, topology: Topology) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """bool[B] twice, of the images and of the losses of the global batch's examples, on every device.

    A network can hide an image's NaN: where XLA's CPU compiler takes a maximum, as a ReLU is, 0 wins.
    """

    def local(state: TrainState, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        images = objective.preprocess(batch, train=True, key=key).images
        logits = objective.predict(state.params, state.model_state, images)
        logits = logits.astype(jnp.float32)
        losses, _ = objective.loss(logits, targets(batch.label, logits))
        return jnp.isfinite(images).all((1, 2, 3)), jnp.isfinite(losses)

    sharded = jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(AXIS))
    return jax.jit(sharded, out_shardings=topology.replicated)


def _listed(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:_MOST_SHOWN]))
    more = f" and {len(rows) - _MOST_SHOWN} more" if len(rows) > _MOST_SHOWN else ""
    return f"{plural(len(rows), 'row')} {shown}{more}"
