"""Runs the usual data-parallel step in Flax, in which devices average gradients, statistics and metrics leaf by leaf.

`benchmarks/step.py --against flax` starts it. The network is that of `jaxddp.models.resnet` with Linen's layers.
"""

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import BOTTLENECK, MEAN, MOMENTUM, STAGES, STD, Case, Task
from benchmarks.rivals.contenders.jax_case import join_or_simulate, local_images, read_weights, run
from benchmarks.rivals.contenders.outcome import attempt
from jaxddp.mesh import AXIS

# Linen annotates paddings as a string.
MARGINS: Any = ((1, 1), (1, 1))


class ResNet(nn.Module):
    case: Case

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        case = self.case
        small, dtype = case.stem == "small", case.precision
        x = conv(case.width, 3 if small else 7, 1 if small else 2, dtype, "conv1")(images)
        x = nn.relu(norm(dtype, "bn1")(x))
        x = x if small else nn.max_pool(x, (3, 3), (2, 2), MARGINS)
        for stage, blocks in enumerate(STAGES[case.network]):
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                x = Block(case, case.width * 2**stage, stride, name=f"layer{stage + 1}_{block}")(x)
        return nn.Dense(case.classes, name="fc")(jnp.mean(x, (1, 2), jnp.float32))


class Block(nn.Module):
    case: Case
    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype, narrow = self.case.precision, self.features
        shapes = [(narrow, 3, self.stride), (narrow, 3, 1)]
        if self.case.network in BOTTLENECK:
            shapes = [(narrow, 1, 1), (narrow, 3, self.stride), (4 * narrow, 1, 1)]
        y = x
        for number, shape in enumerate(shapes, start=1):
            y = norm(dtype, f"bn{number}")(conv(*shape, dtype, f"conv{number}")(y))
            y = nn.relu(y) if number < len(shapes) else y
        if x.shape != y.shape:
            x = conv(y.shape[-1], 1, self.stride, dtype, "downsample_conv")(x)
            x = norm(dtype, "downsample_bn")(x)
        return nn.relu(x + y)


def conv(features: int, kernel: int, stride: int, dtype: Any, name: str) -> nn.Conv:
    pad = kernel // 2
    return nn.Conv(features, (kernel, kernel), stride, pad, use_bias=False, dtype=dtype, name=name)


def norm(dtype: Any, name: str) -> nn.BatchNorm:
    return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, dtype=dtype, name=name)


class State(TrainState):
    batch_stats: Any


def train_step(state: State, pixels: jax.Array, labels: jax.Array) -> tuple[State, dict[str, jax.Array]]:
    def mean_loss(params: Any) -> tuple[jax.Array, Any]:
        images = (pixels.astype(jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(STD)
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, images, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return loss, updated["batch_stats"]

    # Without this cast, gradients of replicated parameters would be sums over the devices.
    params = lax.pcast(state.params, AXIS, to="varying")
    (loss, batch_stats), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
    grads, batch_stats, loss = (
        jax.tree.map(lambda leaf: lax.pmean(leaf, AXIS), tree) for tree in (grads, batch_stats, loss)
    )
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), {"loss": loss}


def make_state(network: ResNet, variables: Any) -> State:
    return State.create(
        apply_fn=network.apply,
        params=variables["params"],
        tx=optax.sgd(network.case.learning_rate, MOMENTUM),
        batch_stats=variables["batch_stats"],
    )


def make_step(mesh: Mesh) -> Any:
    """Returns the compiled step: (state, pixels, labels) -> (state, figures)."""
    specs = {"in_specs": (P(), P(AXIS), P(AXIS)), "out_specs": P()}
    return jax.jit(jax.shard_map(train_step, mesh=mesh, **specs), donate_argnums=0)


def main(task: Task) -> None:
    topology, case = join_or_simulate(task), task.case
    network = ResNet(case)
    variables = dict(jax.jit(network.init)(jax.random.key(0), jnp.zeros((1, case.size, case.size, 3))))
    variables["params"] = read_weights(task, variables["params"])
    state = topology.replicate(make_state(network, variables))
    pixels, labels = topology.place(local_images(task))
    step = make_step(topology.mesh)

    def take_step() -> Any:
        nonlocal state
        state, figures = step(state, pixels, labels)
        return state, figures

    run(task, topology, take_step, lambda result: float(result[1]["loss"]))


if __name__ == "__main__":
    attempt(main, Task.parse())
