"""What a worker traces and compiles once: setups of equal pieces have the same pieces, and so the same programs.

The package keeps programs by the identity of the objects that they are made of, since of a user's objects equality may
say nothing. Of those that tests make in a few words it does: a Linen module, a topology and a config's parts are equal
where they compute the same. `setup_of` shares by itself, and `shared` does it for a setup from anywhere else. A test of
what is compiled, or how often, wants `share=False`.
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
from jaxddp.setup.compiled_programs import Programs
from jaxddp.setup.run_setup import RunSetup

PROGRAMS = Programs(most=400)
_known: dict[Hashable, Any] = {}

sgd = functools.cache(optax.sgd)
"""The same optimizer for the same words."""
plain_loss = functools.cache(cross_entropy)
taken_apart = functools.cache(example_loss)
"""See `example_loss`, which tries a loss out in a program of its own."""
topology_of = functools.cache(Topology.create)


def interned(piece: Any) -> Any:
    """The first piece that was equal to this one; itself, where there is no telling."""
    try:
        return _known.setdefault(_key(piece), piece)
    except TypeError:
        return piece


def adapted(model: Any) -> Any:
    """See `adapt`; of equal modules, and of the same functions, the same model."""
    return interned(adapt(model))


def shared(setup: RunSetup) -> RunSetup:
    """The setup with pieces and programs that are one in a worker."""
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
    """Raises: TypeError; it cannot be told from others."""
    if isinstance(piece, Mapping):
        key: Hashable = tuple(sorted((name, _key(value)) for name, value in piece.items()))
    elif isinstance(piece, tuple | list):
        key = tuple(map(_key, piece))
    elif dataclasses.is_dataclass(piece) and type(piece).__eq__ is object.__eq__:
        # The package's own wrappers of a model, which the package compares by identity.
        key = tuple(_key(getattr(piece, field.name)) for field in dataclasses.fields(piece))
    else:
        key = piece
    hash(key)
    return type(piece), key
