"""Shares compiled programs between setups of equal objects, within a worker.

The package caches programs by the identity of their objects, because equality of a user's objects may mean nothing.
For the objects of tests equality is enough: equal Linen modules, topologies and parts of configs compute the same.
Therefore equal objects are replaced by the first one. `setup_of` does this by default, and `shared` for other setups.
Tests that count compilations use `share=False`.
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import optax

from jaxddp.engine.example_loss import example_loss
from jaxddp.losses.cross_entropy import cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.setup.programs import Programs
from jaxddp.setup.run_setup import RunSetup

PROGRAMS = Programs(most=400)
_known: dict[Hashable, Any] = {}

sgd = functools.cache(optax.sgd)
"""`optax.sgd`, with the same object for the same arguments."""
plain_loss = functools.cache(cross_entropy)
taken_apart = functools.cache(example_loss)
"""Cached `example_loss`, which traces the loss in a separate program."""
topology_of = functools.cache(Topology.create)


def interned(piece: Any) -> Any:
    """Returns the first equal object, or the object itself if it cannot be compared."""
    try:
        return _known.setdefault(_key(piece), piece)
    except TypeError:
        return piece


def adapted(model: Any) -> Any:
    """Returns `adapt(model)`, the same object for equal modules or functions."""
    return interned(adapt(model))


def shared(setup: RunSetup) -> RunSetup:
    """Returns the setup with shared objects and programs."""
    recipe, resources = setup.recipe, setup.resources
    pieces = {
        name: interned(getattr(recipe, name))
        for name in ("model", "loss", "eval_loss", "metrics", "parts", "objective")
    }
    of_devices = {name: interned(getattr(resources, name)) for name in ("topology", "compiler_options")}
    experiment = setup.experiment.changed(resources=dataclasses.replace(resources, **of_devices), **pieces)
    experiment = dataclasses.replace(experiment, preprocess=interned(setup.preprocess))
    return dataclasses.replace(setup, experiment=experiment, model=interned(setup.model), programs=PROGRAMS)


def _key(piece: Any) -> Hashable:
    """Returns a hashable key of an object. Raises TypeError if there is none."""
    if isinstance(piece, Mapping):
        key: Hashable = tuple(sorted((name, _key(value)) for name, value in piece.items()))
    elif isinstance(piece, tuple | list):
        key = tuple(map(_key, piece))
    elif dataclasses.is_dataclass(piece) and type(piece).__eq__ is object.__eq__:
        # Wrappers of models, which the package compares by identity.
        key = tuple(_key(getattr(piece, field.name)) for field in dataclasses.fields(piece))
    else:
        key = piece
    hash(key)
    return type(piece), key
