"""Every kind of network becomes a `Model`: Linen modules, NNX modules and pairs of functions."""

import sys
from typing import Any

import flax.linen as nn

from jaxddp.errors import InputError
from jaxddp.models.functions import FunctionModel
from jaxddp.models.linen import LinenModel
from jaxddp.models.nnx_modules import NNXModel
from jaxddp.models.protocol import Model, name_of, require

ACCEPTED = "a Linen module, an NNX module, a pair of functions (init, apply), or an object with a Model's two methods"


def adapt(model: Any) -> Model:
    """Makes a `Model` of a network, which is never changed; a `Model` is returned as it is.

    See `LinenModel` and `NNXModel`, whose `__call__(images)` may also take its mode by any name in `MODE_ARGUMENTS`,
    and `FunctionModel` for the signatures of a pair.

    Raises:
        InputError: it is not `ACCEPTED`, or a function has another signature.
    """
    if isinstance(model, nn.Module):
        return LinenModel(model)
    # Importing NNX takes as long as all the rest of Flax; a user who has such a module has imported it.
    if (nnx := sys.modules.get("flax.nnx")) and isinstance(model, nnx.Module):
        return NNXModel.of(model)
    if isinstance(model, tuple | list) and len(model) == 2 and all(map(callable, model)):
        return FunctionModel.of(*model)
    if isinstance(model, Model) and not isinstance(model, type):
        require(model.init, 2, (), "init(key, example)")
        require(model.apply, 3, ("train", "key"), "apply(params, model_state, images, *, train, key)")
        return model
    what = f"the class {name_of(model)}" if isinstance(model, type) else f"of type {name_of(type(model))}"
    raise InputError(f"model is {what}; give {ACCEPTED}")
