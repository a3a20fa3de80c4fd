"""Gradient checkpointing changes the memory of a step, and neither its gradient nor the model's state."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from support.cases import ci_case
from support.data import CLASSES, random_batch
from support.networks import fresh_state, largest_difference, linear_model, objective_of
from support.shared import sgd, topology_of

from jaxddp.core.errors import InputError
from jaxddp.engine.gradients import Averaging, Gradients
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import AXIS
from jaxddp.models.remat import block_names
from jaxddp.models.vit import ViT, ViTSize


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool, kept: str):
        x = nn.Conv(8, (3, 3), param_dtype=jnp.float64)(x)
        self.sow(kept, "size", (x**2).mean())
        x = nn.BatchNorm(not train, axis_name=AXIS, param_dtype=jnp.float64)(x)
        return nn.Dropout(0.2, deterministic=not train)(jnp.tanh(x))


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool, kept: str):
        for _ in range(4):
            x = x + Block()(x, train, kept)
        return x


class Blocks(nn.Module):
    """Blocks within one module, with batch statistics, dropout and arguments that are no arrays, which sow a number."""

    kept: str = "intermediates"

    @nn.compact
    def __call__(self, images, train: bool = False):
        x = Encoder()(nn.Conv(8, (1, 1), param_dtype=jnp.float64)(images), train, self.kept)
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(x.mean((1, 2)))


WIDE = {"dtype": jnp.float64, "param_dtype": jnp.float64}
NETS = {
    "linen": Blocks(),
    "sowing": Blocks("losses"),
    "vit": ViT(ViTSize(8, 2, blocks=2, patch=3), CLASSES, drop_path=0.5, **WIDE),
    "pair": linear_model(),
}


def compiled(net: str, remat, devices: int, gradients: Gradients):
    objective, topology, optimizer = objective_of(NETS[net]), topology_of(devices), sgd(1.0)
    supervised = dataclasses.replace(objective, remat=remat)

    def once(*arguments, **more):
        sums, state = supervised(*arguments, **more)
        total = sum(jax.tree.leaves(state.get("losses", 0.0)))
        return sums.replace(values=sums.values.at[0, 0].add(total)), state

    def twice(params, state, *batch, **more):  # The second pass gets the state of the first, as in SimSiam.
        return once(params, once(params, state, *batch, **more)[1], *batch, **more)

    phases = Phases(twice if devices == 1 else once, optimizer)
    state, batch = fresh_state(objective, optimizer, topology), topology.place(random_batch(24, masked=5))
    return Way(topology, gradients).step(phases).lower(state, batch).compile(), state, batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("net", "remat", "devices", "gradients"),
    [
        ("linen", "blocks", 2, Gradients(Averaging(3), accumulate=2, for_cpu=True)),
        ("linen", "dots", 1, Gradients()),
        ("sowing", "blocks", 1, Gradients()),
        ci_case("vit", "blocks", 2, Gradients()),
        ("pair", "dots", 1, Gradients()),
    ],
)
def test_gradients_and_statistics_are_equal(net, remat, devices, gradients):
    with jax.enable_x64(True):
        runs = [compiled(net, each, devices, gradients) for each in ("none", remat)]
        steps = [(step.memory_analysis().temp_size_in_bytes, step.as_text()) for step, _, _ in runs]
        (plain, _), (result, sums) = [step(state, batch) for step, state, batch in runs]
    assert largest_difference((plain.params, plain.model_state), (result.params, result.model_state)) < 1e-12
    assert sums.count() == 19
    if (net, remat) == ("linen", "blocks"):
        assert steps[1][0] < 0.9 * steps[0][0]
        assert steps[1][1].count(" all-reduce(") == steps[0][1].count(" all-reduce(")


def test_blocks_are_the_modules_that_consist_of_modules():
    assert block_names({"weight": 0, "stem": {"kernel": 0}, "head": {"bias": 0}}) == []
    assert block_names({"stem": {"conv": {}}, "a_0": {"fc": {}}, "fc": {"kernel": 0}}) == ["stem", "a_0"]
    assert block_names({"net": {"a_0": {"fc": {}}, "a_1": {"fc": {}}}, "fc": {"bias": 0}}) == ["net/a_0", "net/a_1"]
    with jax.enable_x64(True), pytest.raises(InputError, match="no Linen module that consists of modules; give dots"):
        compiled("pair", "blocks", 1, Gradients())
