"""Look up and check the values of the config section `model`."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from jaxddp.config.model_section import WeightInit
from jaxddp.core.errors import InputError

WEIGHT_INITS = {
    "he_normal": nn.initializers.variance_scaling(2.0, "fan_out", "normal"),
    "he_uniform": nn.initializers.variance_scaling(2.0, "fan_out", "uniform"),
    "xavier_normal": nn.initializers.variance_scaling(1.0, "fan_avg", "normal"),
    "xavier_uniform": nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
    "lecun_normal": nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal"),
    "lecun_uniform": nn.initializers.lecun_uniform(),
    "orthogonal": nn.initializers.orthogonal(2.0**0.5),
}
_WITH_DEVIATION = {"normal": nn.initializers.normal, "truncated_normal": nn.initializers.truncated_normal}


def kernel_init(chosen: WeightInit) -> nn.initializers.Initializer:
    """Return the initializer of a network's kernels. "glorot" and "xavier" are two names of the same initializers."""
    if chosen.deviation is not None:
        return _WITH_DEVIATION[chosen.name](chosen.deviation)
    return nn.initializers.zeros if chosen.name == "zeros" else WEIGHT_INITS[chosen.name.replace("glorot", "xavier")]


def check_floating(network: str, key: str, dtype: Any) -> None:
    """Raise `InputError` if `dtype` is not a floating-point dtype."""
    try:
        floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise InputError(f'{network}: {key}={dtype!r}; give "float32", "bfloat16", "float16" or "float64"')
