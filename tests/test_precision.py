"""`train.precision` applies to convolutions and not to parameters or the loss. Its default depends on the devices."""

import re
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import runs
from support.data import CLASSES, NO_AUGMENTATION, random_table
from support.runs import recipe_of
from support.shared import sgd

from jaxddp.api import prepare_training
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.ops.layers import attend
from jaxddp.models.resnet import BASIC, Architecture, ResNet
from jaxddp.setup.network_checks import check_outputs, dtypes_of_products, in_precision
from jaxddp.setup.run_setup import RunSetup, initialize
from jaxddp.setup.run_training import make_run

SIZE, BATCH = 8, 8
TABLE = random_table(4 * BATCH, image=SIZE)


def setup_of(precision: str) -> RunSetup:
    network = ResNet(Architecture((1, 1), BASIC), CLASSES, width=4, stem="small", dtype=precision)
    config = Config().replace(train={"precision": precision})
    return runs.setup_of(
        network, sgd(0.05, 0.9), TABLE, devices=2, config=config, batch_size=BATCH, data=NO_AUGMENTATION
    )


@pytest.mark.slow
def test_parameters_statistics_and_loss_are_float32_and_convolutions_are_not():
    setup = setup_of("bfloat16")
    step, batch = setup.step(), next(setup.batches(0, 1))
    program = str(jax.make_jaxpr(step)(setup.state, batch))
    outputs = re.findall(r":(\w+)\[[\d,]*\](?:\{[^}]*\})? = conv_general_dilated", program)
    assert outputs and set(outputs) == {"bf16"}
    state, sums = jax.eval_shape(step, setup.state, batch)
    leaves = jax.tree.leaves((state.params, state.model_state, state.opt_state, sums.values))
    assert {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)} == {jnp.dtype("float32")}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    arrays = {f"{split}_{name}": getattr(TABLE, name) for split in ("train", "val") for name in ("images", "labels")}
    np.savez(tmp_path / "arrays.npz", **arrays)
    return Config().replace(
        data={"path": str(tmp_path / "arrays.npz"), "image_size": SIZE, "crop": "whole"},
        model={"name": "resnet10", "width": 2, "stem": "small"},
        train={"batch_size": BATCH, "duration": "1 step"},
        eval={"batch_size": BATCH, "every": "0 steps"},
        log={"to": ("jsonl", "curves")},
        parallel={"devices": 1},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "configured", "expected"),
    [
        ("cpu", None, "float32"),
        ("gpu", None, "bfloat16"),
        ("gpu", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_precision_is_that_of_the_config_or_the_default_of_the_devices(
    platform, configured, expected, config, monkeypatch
):
    monkeypatch.setattr(Topology, "platform", platform)
    experiment = recipe_of(config.replace(train={"precision": configured}))
    assert experiment.config.train.precision == expected
    assert experiment.model.module.dtype == initialize(experiment).preprocess.dtype == expected


class Mixed(nn.Module):
    """A network with a batch norm, whose dense layer computes in `dtype`."""

    dtype: str | None = None

    @nn.compact
    def __call__(self, images, train: bool = False):
        x = nn.BatchNorm(use_running_average=not train)(images)
        return nn.Dense(CLASSES, dtype=self.dtype)(x.reshape(len(x), -1))


class NNXDense(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.head = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(SIZE * SIZE * 3, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.head(self.norm(images).reshape(len(images), -1))


PAIR = (
    lambda key, example: ({"head": jnp.ones((SIZE * SIZE * 3, CLASSES))}, {"mean": jnp.zeros(())}),
    lambda params, state, x: (x.reshape(len(x), -1) @ params["head"], {"mean": x.mean()}),
)


def test_the_gradient_of_attention_multiplies_in_the_precision():
    program = jax.make_jaxpr(jax.grad(lambda x: attend(x, x, x).sum()))(jnp.ones((2, 3, 4), jnp.bfloat16))
    assert [*dtypes_of_products(program)] == ["bfloat16"]


@pytest.mark.parametrize("network", [Mixed(), NNXDense, PAIR], ids=["linen", "nnx", "functions"])
def test_a_users_network_computes_in_the_precision_and_keeps_float32(network):
    setup = prepare_training(network, TABLE, 1, sgd(0.05, 0.9), BATCH, precision="bfloat16")
    batch = next(setup.batches(0, 1))
    assert {*dtypes_of_products(jax.make_jaxpr(setup.step())(setup.state, batch))} == {"bfloat16"}
    state, sums = jax.eval_shape(setup.step(), setup.state, batch)
    leaves = jax.tree.leaves((state.params, state.model_state, state.opt_state, sums.values))
    assert {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)} == {jnp.dtype("float32")}


def test_a_network_with_a_dtype_of_its_own_is_refused_only_if_the_precision_is_set(caplog):
    arguments = TABLE, 1, sgd(0.05), BATCH
    for dtype, warnings in (("bfloat16", 0), ("float16", 1)):
        setup = prepare_training(Mixed(dtype), *arguments)
        assert make_run(setup).description.network == f"Mixed in {dtype}"
        assert caplog.text.count("in float16 without a loss scale") == warnings
    for dtype, precision in (("float32", "bfloat16"), ("bfloat16", "float32")):
        with pytest.raises(InputError, match=f"^precision='{precision}': the network computes in {dtype}, because"):
            prepare_training(Mixed(dtype), *arguments, precision=precision)


@pytest.mark.parametrize(
    ("layer", "modes"),
    [
        (lambda x: jax.lax.conv_general_dilated(x, np.ones((3, 3, 3, 3), np.float32), (1, 1), "SAME"), (True, False)),
        (lambda x: jnp.fft.fft(x).real, (True, False)),
        (lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y * np.ones(3, np.float32), x), (True,)),
    ],
    ids=["convolution", "fft", "loop in training"],
)
def test_a_network_that_does_not_accept_the_cast_computes_in_float32(layer, modes):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, images, train: bool):
            x = nn.Dense(3)(images[:, :3])
            return nn.Dense(CLASSES)((layer(x) if train in modes else x).reshape(len(x), -1))

    model, shape = adapt(Net()), (SIZE, SIZE, 3)
    assert in_precision(model, shape, "bfloat16") is model
    assert [*dtypes_of_products(check_outputs(model, shape, CLASSES, "bfloat16")[0])] == ["float32"]
    with pytest.raises(InputError, match="^precision='bfloat16': the network computes in float32, because"):
        prepare_training(Net(), TABLE, 1, sgd(0.05), BATCH, precision="bfloat16")
