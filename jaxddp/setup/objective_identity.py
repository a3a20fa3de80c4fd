"""The identity of a recipe's objective, for comparison with the objective of a resumed run."""

import dataclasses
import inspect
from typing import Any

import jax

from jaxddp.data.batch import Batch
from jaxddp.engine.objective import Objective, supervised
from jaxddp.engine.state import TrainState
from jaxddp.setup.experiment import Experiment
from jaxddp.setup.recipe import Recipe
from jaxddp.workdir.digests import name_and_digest


def objective_fingerprints(experiment: Experiment) -> dict[str, str]:
    """Return the fingerprints of objects that an objective loads, such as a teacher, by name.

    Raises: InputError if the processes have different fingerprints, or the objective does not fit the run.
    """
    # `unwrap` undoes the wrapper that adds the line of the recipe file to errors.
    method = getattr(inspect.unwrap(experiment.recipe.objective), "fingerprints", None)
    if method is None:
        return {}
    fingerprints = method(experiment.config, experiment.resources, experiment.layout)
    experiment.topology.peers.agree({f"objective's {name}": value for name, value in fingerprints.items()})
    return fingerprints


def objective_identity(recipe: Recipe, objective: Objective, state: TrainState, batch: Batch) -> dict[str, str]:
    """Return the name of an objective and a digest of its jaxpr; empty for the supervised objective."""
    if recipe.objective is supervised:
        return {}
    train_objective = recipe.minimized(dataclasses.replace(objective, metrics={}))

    def minimized(params: Any, model_state: Any, batch: Batch, key: jax.Array) -> Any:
        return train_objective(params, model_state, batch, train=True, key=key, image_key=key)

    key = jax.eval_shape(lambda: jax.random.key(0))
    name = getattr(recipe.objective, "__qualname__", type(recipe.objective).__name__)
    return {"objective": name_and_digest(minimized, state.params, state.model_state, batch, key, name=name)}
