"""Low-rank adapters: what they compute and train, on one device and several, and merged after training."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from support.data import CLASSES, random_table
from support.networks import SmallNet, largest_difference
from support.runs import train
from support.shared import adapted, sgd, shared

import jaxddp
from jaxddp.core.errors import InputError
from jaxddp.inference.exports import write_weights
from jaxddp.models.adapt import without_adapters
from jaxddp.models.interface import by_path

TABLE = random_table(24)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.mlp = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 6, rngs=rngs)
        self.fc = nnx.Linear(6, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.fc(self.mlp(self.norm(images).mean((1, 2))))


class AttentionNet(nn.Module):
    """Two layers of attention, whose kernels have an axis of layers, and one of heads."""

    @nn.compact
    def __call__(self, images):
        step = lambda attention, x, _: (x + attention(x), None)  # noqa: E731
        layer = nn.scan(step, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x = nn.Conv(4, (3, 3), 3, name="patches")(images).reshape(len(images), -1, 4)
        x, _ = layer(nn.MultiHeadDotProductAttention(2, name="attention"), x, None)
        return nn.Dense(CLASSES, name="head")(x.mean(1))


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, images):
        return nn.Dense(CLASSES, name="head")(nn.Dense(8, name="body")(images.mean((1, 2))))


PAIR = (
    lambda key, example: {
        "body": [{"w": jax.random.normal(key, (3, 4))}],
        "head": jax.random.normal(key, (4, CLASSES)),
    },
    lambda params, images: images.mean((1, 2)) @ params["body"][0]["w"] @ params["head"],
)
NO_DICT = lambda key, example: [jnp.ones((3, CLASSES))], lambda params, images: images.mean((1, 2)) @ params[0]


def make_setup(model, devices=1, optimizer=None, **keys):
    """Return a setup with adapters of rank 2, none of which is zero."""
    arguments = model, TABLE, devices, optimizer or optax.adam(0.1), 8 // devices
    setup = jaxddp.prepare_training(*arguments, lora=2, lora_alpha=3.0, **keys)
    adapters = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), setup.state.params["lora"])
    state = setup.state.replace(params={**setup.state.params, "lora": adapters})
    return dataclasses.replace(setup, state=setup.topology.replicate(jax.device_get(state)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "kernels"),
    [
        (AttentionNet(), {f"attention/{name}/kernel" for name in ("query", "key", "value", "out")}),
        (lambda rngs: NNXNet(rngs), {"mlp/kernel"}),
        (PAIR, {"body/0/w"}),
    ],
)
def test_only_adapters_and_the_head_are_trained(model, kernels):
    """The network computes with W + alpha / rank A B, and at first with W."""
    setup, images = make_setup(model), jax.random.normal(jax.random.key(1), (2, 6, 6, 3))

    def logits(network, params):
        return network.apply(params, setup.state.model_state, images, train=False, key=None)[0]

    fresh, moments = setup.initial_state().params, [x for x in jax.tree.leaves(setup.state.opt_state) if x.ndim]
    own = {name: tree for name, tree in fresh.items() if name != "lora"}
    assert np.array_equal(logits(setup.network, fresh), logits(setup.model, own))
    before = jax.device_get(by_path(setup.state.params, setup.state.model_state))
    state, _ = setup.step()(setup.state, next(setup.batches(0, 1)))
    after = jax.device_get(by_path(state.params, state.model_state))
    trained = {path for path in before if path.split("/")[1] in ("lora", "head", "fc")}
    assert {path for path in before if not np.array_equal(before[path], after[path])} == trained
    assert {path[len("params/lora/") : -2] for path in trained if "/lora/" in path} == kernels
    assert len(moments) == 2 * len(trained)
    merged = without_adapters(setup.network, state.params)
    for path, kernel in ((f"params/{name}", by_path(merged, ())[f"params/{name}"]) for name in kernels):
        a, b = (after[path.replace("params/", "params/lora/") + part] for part in ("/a", "/b"))
        assert np.allclose(kernel, before[path] + 1.5 * (a @ b).reshape(kernel.shape), rtol=1e-5, atol=1e-6)
    assert largest_difference(logits(setup.model, merged), logits(setup.network, state.params)) < 1e-5


def test_adapters_are_trained_equally_on_one_device_and_several():
    setups = [make_setup(PAIR, devices, sgd(0.1), accumulate=2) for devices in (1, 4)]
    before = jax.device_get(setups[0].state.params["lora"])
    steps = {"train": {"duration": "2 steps"}, "log": {"every": "2 steps"}, "parallel": {"self_test": "never"}}
    one, four = (jax.device_get(train(setup, steps).params) for setup in setups)
    changes = jax.tree.map(lambda old, new: np.abs(new - old).max(), before, one["lora"])
    assert largest_difference(one, four) < 1e-5 and min(jax.tree.leaves(changes)) > 1e-3


def test_a_resumed_run_has_the_bits_of_a_whole_run_and_is_exported_merged(tmp_path):
    """The weights of a file are those of the frozen kernels. The export has the names of the network's own arrays."""
    file, model = tmp_path / "weights.safetensors", adapted(Mlp())
    params, _ = jax.device_get(jax.jit(model.init)(jax.random.key(5), jnp.zeros((1, 6, 6, 3))))
    write_weights(file, model, by_path(params, {}))
    options = {"weights": str(file), "new_layers": "head", "lora": 3, "lora_alpha": 4.5, "ema": 0.5, "epochs": 2}
    setup = shared(jaxddp.prepare_training(Mlp(), TABLE, 1, optax.adam(0.1), 8, **options))

    def run(folder, epochs):
        words = {"epochs": epochs, "workdir": tmp_path / folder, "listeners": ()}
        return jaxddp.train(jaxddp.softmax_cross_entropy, setup, **words)[0]

    whole, _, resumed = run("whole", 2), run("resumed", 1), run("resumed", 2)
    assert jax.tree.all(jax.tree.map(np.array_equal, whole, resumed))
    jaxddp.export_weights(whole, setup, file)
    exported, adapters = safetensors.numpy.load_file(file), whole.eval_params["lora"]["body"]["kernel"]
    expected = params["body"]["kernel"] + 1.5 * adapters["a"] @ adapters["b"]
    assert exported.keys() == {f"params.{layer}.{name}" for layer in ("body", "head") for name in ("bias", "kernel")}
    assert largest_difference(exported["params.body.kernel"], expected) < 1e-6
    loaded = jaxddp.load_run(tmp_path / "resumed", "latest", model=Mlp(), devices=1)
    assert largest_difference(loaded.state.params["body"]["kernel"], expected) < 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": 4}, "lora=4: the kernel body/kernel is a matrix of 3x8; give at most 3, or name other"),
        ({"lora_layers": "stages"}, "lora_layers: no layer's name begins with 'stages'"),
        ({"lora_layers": "head"}, "lora_layers='head': no frozen layer has a kernel of attention or of a dense"),
        ({"model": SmallNet(), "freeze": "all but Dense_0"}, "lora=2: no frozen layer has a kernel of attention"),
        ({"model": SmallNet()}, "lora=2: the network has no layer called head or fc; name the trained layers: freeze="),
        ({"model": NO_DICT}, "lora=2: the network's parameters must be a dict without the key 'lora'"),
        ({"rate_factors": "body=2"}, "rate_factors: 'body' is frozen by lora=2"),
        ({"lora": None, "lora_alpha": 2.0}, "lora_alpha=2.0 has no effect without lora"),
    ],
)
def test_a_wrong_setting_of_adapters_raises_a_one_line_error(changes, message):
    arguments = {"model": Mlp(), "table": TABLE, "devices": 1, "optimizer": sgd(0.1), "lora": 2} | changes
    with pytest.raises(InputError, match=f"^{message}[^\n]*$"):
        jaxddp.prepare_training(**arguments, batch_size_per_device=4)
