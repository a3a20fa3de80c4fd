"""Shares models, optimizers and programs: setups of equal pieces get the same objects, which a worker compiles once.

The package caches programs by object identity, because equal objects of a user may compute different results.
The objects of these tests do not: Linen modules, topologies and parts are equal only if they compute the same.
`setup_of` shares its pieces, and `shared` does it for other setups. Tests of compilation use `share=False`."""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any

import optax

from jaxddp.engine.objective import example_loss
from jaxddp.engine.programs import CompiledPrograms
from jaxddp.losses import cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.setup.run_setup import RunSetup

PROGRAMS = CompiledPrograms(max_programs=400)
_known: dict[Hashable, Any] = {}

sgd = functools.cache(optax.sgd)
"""Return the same optimizer for the same arguments."""
plain_loss = functools.cache(cross_entropy)
taken_apart = functools.cache(example_loss)
"""Return the result of `example_loss`, which compiles a program, once for each loss."""
topology_of = functools.cache(Topology.create)


def interned(piece: Any) -> Any:
    """Return the first piece that was equal to this one, or the piece itself if it is not hashable."""
    try:
        return _known.setdefault(_key(piece), piece)
    except TypeError:
        return piece


def adapted(model: Any) -> Any:
    """Return `adapt`'s result, the same for equal modules and for the same functions."""
    return interned(adapt(model))


def shared(setup: RunSetup) -> RunSetup:
    """Return the setup with pieces and programs that the worker shares."""
    names = "model", "loss", "eval_loss", "metrics", "parts", "objective", "topology", "preprocess", "network"
    pieces = {name: interned(getattr(setup, name)) for name in names}
    resources = dataclasses.replace(setup.resources, compiler_options=interned(setup.resources.compiler_options))
    return dataclasses.replace(setup.changed(resources=resources, **pieces), programs=PROGRAMS)


def _key(piece: Any) -> Hashable:
    """Return a key that is equal for equal objects. Raises TypeError if the object is not hashable."""
    if isinstance(piece, Mapping):
        key: Hashable = tuple(sorted((name, _key(value)) for name, value in piece.items()))
    elif isinstance(piece, tuple | list):
        key = tuple(map(_key, piece))
    elif dataclasses.is_dataclass(piece) and type(piece).__eq__ is object.__eq__:
        # The package's wrappers of a model, which it compares by identity.
        key = tuple(_key(getattr(piece, field.name)) for field in dataclasses.fields(piece))
    else:
        key = piece
    hash(key)
    return type(piece), key
