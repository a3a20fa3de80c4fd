"""What a config's `model` may say to a network: looked up, checked, and refused where the network has no such thing."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax.numpy as jnp

from jaxddp.config import ModelConfig
from jaxddp.errors import InputError
from jaxddp.weight_init import WeightInit
from jaxddp.wording import choices

T = TypeVar("T")

RESNET_KEYS = ("width", "stem", "batch_norm", "zero_init_last_scale", "shortcut_norm", "weight_init", "blur_pool")
"""The keys of `model` that are about ResNets, to be refused by others."""

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
    """The initializer of a network's kernels. Glorot's is Xavier's: he has both names."""
    if chosen.deviation is not None:
        return _WITH_DEVIATION[chosen.name](chosen.deviation)
    return nn.initializers.zeros if chosen.name == "zeros" else WEIGHT_INITS[chosen.name.replace("glorot", "xavier")]


def lookup(key: str, name: str, known: Mapping[str, T]) -> T:
    """Raises `InputError` where there is no such name; says the nearest."""
    if name not in known:
        raise InputError(f"unknown {key} {name!r}; {choices(str(name), known)}")
    return known[name]


def check_floating(network: str, key: str, dtype: Any) -> None:
    """Raises `InputError` where a dtype is none of floating-point numbers."""
    try:
        floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise InputError(f'{network}: {key}={dtype!r}; give "float32", "bfloat16", "float16" or "float64"')


def refuse(network: str, settings: ModelConfig, keys: Iterable[str]) -> None:
    """Raises `InputError` where a key that means nothing to a network is not left at its default."""
    default = ModelConfig()
    for key in keys:
        value, usual = getattr(settings, key), getattr(default, key)
        if value != usual:
            raise InputError(f"model.{key}={value}: {network} has no such setting; leave it at {usual}")
