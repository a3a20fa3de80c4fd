"""Which examples of a batch have an image or a loss that is not finite: asked when a run has to end because of them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxddp.data.batch import Batch
from jaxddp.engine.objective import Objective
from jaxddp.engine.state import TrainState
from jaxddp.experiment.feed import Feed
from jaxddp.mesh import AXIS, Topology

_MOST_SHOWN = 8


def suspects(state: TrainState, step: int, objective: Objective, feed: Feed, key: jax.Array) -> str:
    """Names the rows of a step's batch whose image or loss is not finite, or all of its rows where there are none.

    The state may be that of a later step: the host hears of steps some at a time. The network sees the images
    of the step, augmented as they were, but in evaluation: by running statistics, so that no image can spoil the losses
    of others. All processes must ask together.
    """
    batch = next(feed.batches(step - 1, step))
    finite = np.asarray(_finite(objective, feed.topology)(state, batch, key))
    rows = feed.order.rows(step - 1)
    if finite.all():
        return f"Each image of its batch has a finite loss by itself; the batch is {_listed(rows)} of the training data"
    return f"The image or its loss is not finite for {_listed(rows[~finite])} of the training data"


def _finite(objective: Objective, topology: Topology) -> Callable[..., jax.Array]:
    """bool[B], of the examples of the global batch, on every device.

    The images are asked, too: on a CPU the ReLU of a NaN may be 0, as XLA compiles it.
    """

    def local(state: TrainState, batch: Batch, key: jax.Array) -> jax.Array:
        images = objective.preprocess(batch, train=True, key=key).images
        logits = objective.predict(state.params, state.model_state, images)
        losses, _ = objective.loss(logits.astype(jnp.float32), batch.label)
        return jnp.isfinite(losses) & jnp.isfinite(images).all(axis=(1, 2, 3))

    sharded = jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(AXIS))
    return jax.jit(sharded, out_shardings=topology.replicated)


def _listed(rows: np.ndarray) -> str:
    shown = ", ".join(map(str, rows[:_MOST_SHOWN]))
    more = f" and {len(rows) - _MOST_SHOWN} more" if len(rows) > _MOST_SHOWN else ""
    return f"row{'s' if len(rows) > 1 else ''} {shown}{more}"
