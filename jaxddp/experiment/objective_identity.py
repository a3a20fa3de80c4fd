"""What tells one objective from another, where it is more than the loss of the labels."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.data.batch import Batch
from jaxddp.data.source import image_dtype
from jaxddp.engine.objective import Objective, supervised
from jaxddp.engine.state import TrainState
from jaxddp.experiment.identity import described
from jaxddp.experiment.recipe import Recipe
from jaxddp.experiment.resources import Resources
from jaxddp.experiment.signature import Signature
from jaxddp.job.membership import agree


def objective_fingerprints(recipe: Recipe, resources: Resources) -> dict[str, str]:
    """Of what an objective brings from elsewhere, such as a teacher, by name: what its `fingerprints` says.

    All processes must be told the same. Raises: InputError; it does not suit the run.
    """
    # What a recipe file returned is wrapped, so that its errors name the line.
    asked = getattr(inspect.unwrap(recipe.objective), "fingerprints", None)
    if asked is None:
        return {}
    found = asked(Signature.of(resources.train, recipe.config.data), resources.topology)
    agree({f"objective's {name}": value for name, value in found.items()})
    return found


def objective_identity(recipe: Recipe, objective: Objective, state: TrainState, resources: Resources) -> dict[str, str]:
    """The recipe's objective by its name and by a digest of what it computes; nothing of the usual one."""
    if recipe.objective is supervised:
        return {}
    data, source = recipe.config.data, resources.train
    whole = jax.ShapeDtypeStruct((2,), jnp.int32)
    batch = Batch(
        image=jax.ShapeDtypeStruct((2, *source.image_shape(data)), image_dtype(source, data)),
        label=jax.ShapeDtypeStruct((2, *source.labels.shape[1:]), source.labels.dtype),
        mask=jax.ShapeDtypeStruct((2,), jnp.float32),
        row=whole,
        epoch=whole,
    )
    made = recipe.objective(objective)

    def minimized(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Any:
        return made(params, model_state, batch, train=True, key=key, image_key=key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    told = described(minimized, state.params, state.model_state, batch, key, name=type(recipe.objective).__name__)
    return {"objective": told}
