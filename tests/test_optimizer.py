"""Single schedules and optimizers, besides `conformance/test_optimizers.py`, and the rate for other batch sizes."""

import runpy
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, traverse_util
from support.data import CLASSES, random_table
from support.optimizers import config_of, make_optimizer, parameters, rates

from jaxddp.config import Config, DataConfig
from jaxddp.config.registry import MODELS, OPTIMIZERS
from jaxddp.core.errors import InputError
from jaxddp.kernels import BY_NAME, Kernel, Kernels
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.interface import trees_of
from jaxddp.optimizers import Sgd
from jaxddp.schedules import Steps, at_batch_size, batch_factor, derivation, make_schedule
from jaxddp.setup.recipe import make_objects
from jaxddp.setup.resources import Layout, TrainingData
from jaxddp.setup.user_objects import objects_of_arguments
from jaxddp.training.plan import Plan

PEAK = 0.8

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.slow
def test_one_cycle_equals_optaxs_schedule_after_the_warm_up():
    """The warm-up of 60 of 200 steps is that of the paper's policy."""
    learning_rates = rates(200, 60, PEAK, schedule="one_cycle")
    optax_schedule = optax.linear_onecycle_schedule(200, PEAK)
    np.testing.assert_allclose(learning_rates[60:], [optax_schedule(step) for step in range(60, 200)], rtol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "peak", "line"),
    [
        ("linear", 0.4, "learning rate 0.4 = 0.1 x 1024 / 256 (linear, for optimizer.reference_batch=256)"),
        ("sqrt", 0.2, "learning rate 0.2 = 0.1 x sqrt(1024 / 256) (sqrt, for optimizer.reference_batch=256)"),
        ("none", 0.1, None),
    ],
)
def test_the_peak_follows_the_batch_size(scaling, peak, line):
    config = config_of(reference_batch=256, scaling=scaling).replace(train={"batch_size": 1024})
    assert float(make_schedule(config, Steps(30, 3))(2)) == pytest.approx(peak)
    assert at_batch_size(config).optimizer.learning_rate == pytest.approx(peak)
    assert at_batch_size(at_batch_size(config)) == at_batch_size(config)
    assert derivation(config) == line
    assert at_batch_size(Config()) == Config() and batch_factor(Config()) == 1 and derivation(Config()) is None


@pytest.mark.parametrize(
    ("words", "warmup", "message"),
    [
        ({"learning_rate": 1e6, "reference_batch": 1}, 1, "learning_rate=256000000.0: expected 0 to 1,000,000"),
        ({"warmup": "11 steps"}, 11, 'warmup="11 steps" is 11 steps, longer than the run of 10; shorten'),
        ({"schedule": "cosin"}, 1, "schedule='cosin' is unknown; did you mean 'cosine'"),
        ({"name": "momentun"}, 1, "name='momentun' is unknown; did you mean 'momentum'"),
    ],
)
def test_a_wrong_setting_of_a_schedule_or_an_optimizer_raises_a_one_line_error(words, warmup, message):
    with pytest.raises(InputError, match=f"optimizer.{message}"):
        make_optimizer(config_of(**words), make_schedule(config_of(**words), Steps(10, warmup)))


def test_a_warm_up_may_be_as_long_as_the_run_and_has_at_least_one_step():
    assert rates(10, 10, PEAK)[-1] == pytest.approx(PEAK)
    for total, steps in ((1000, 50), (10, 1), (1, 1)):
        assert Config().optimizer.warmup.steps(num_examples=100, batch_size=10, total_steps=total) == steps


def test_absent_settings_take_the_optimizers_defaults():
    assert OPTIMIZERS.settings(config_of(name="sgd").optimizer) == Sgd(momentum=0.0, nesterov=False)
    section = config_of(name="sgd", momentum=0.8, nesterov=True).optimizer
    assert OPTIMIZERS.settings(section) == Sgd(momentum=0.8, nesterov=True)
    # SGD without momentum has no buffer.
    state = make_optimizer(config_of(name="sgd"), optax.constant_schedule(0.1)).init(parameters())
    assert all(leaf.ndim == 0 for leaf in jax.tree.leaves(state))


def test_a_run_of_more_steps_than_the_state_can_count_is_refused():
    faults = {"0 epochs": 'is less than one step; give at least "1 step"', "5%": "is a share of itself; write it in"}
    for text, fault in {**faults, "2147483648 steps": "is 2,147,483,648 steps; at most 2,147,483,647"}.items():
        with pytest.raises(InputError, match=f'^train.duration="{text}" {fault}'):
            Plan.of(Config().replace(train={"duration": text}), 100)
    assert Plan.of(Config().replace(train={"duration": "2147483647 steps"}), 100).total_steps == 2**31 - 1


class Block(nn.Module):
    """A block of `nn.scan`, with a vector whose name says nothing and a layer without bias."""

    @nn.compact
    def __call__(self, x, _):
        factor = self.param("factor", nn.initializers.ones, (8,))
        return x + factor * nn.Dense(8, use_bias=False)(nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))), None


class StackedNet(nn.Module):
    """A transformer after a depthwise and a transposed convolution. Its kernels have stacked and several axes."""

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(3, (3, 3), feature_group_count=3, name="depthwise")(x)
        x = nn.ConvTranspose(8, (2, 2), (2, 2), transpose_kernel=True, name="transposed")(x)
        x = x.reshape(len(x), -1, 8) + nn.Embed(64, 8, name="pos_embed")(jnp.arange(64))
        words = nn.Embed(4, 8, name="words")(jnp.array(1))
        x += self.param("class_embedding", nn.initializers.zeros, (1, 1, 8)) + words
        split = {"split_rngs": {"params": True}}
        x, _ = nn.scan(Block, {"params": 0}, length=3, **split)(name="rows")(x, None)
        x, _ = nn.scan(nn.remat(Block), {"params": 1}, length=5, **split)(name="columns")(x, None)
        experts = nn.vmap(nn.Dense, in_axes=None, variable_axes={"params": 0}, axis_size=2, **split)
        return nn.Dense(CLASSES, name="head")(experts(8, name="experts")(x).mean((0, 2)))


QKV = ("query", "key", "value")
LINEN_KERNELS = {
    "depthwise/kernel": Kernel((), (0, 1, 2), (3,)),
    "transposed/kernel": Kernel((), (0, 1, 3), (2,)),
    "words/embedding": Kernel((), (), (0, 1)),
    "rows/Dense_0/kernel": Kernel((0,), (1,), (2,)),
    **{f"rows/MultiHeadDotProductAttention_0/{name}/kernel": Kernel((0,), (1,), (2, 3)) for name in QKV},
    "rows/MultiHeadDotProductAttention_0/out/kernel": Kernel((0,), (1, 2), (3,)),
    "columns/Dense_0/kernel": Kernel((1,), (0,), (2,)),
    **{f"columns/MultiHeadDotProductAttention_0/{name}/kernel": Kernel((1,), (0,), (2, 3)) for name in QKV},
    "columns/MultiHeadDotProductAttention_0/out/kernel": Kernel((1,), (0, 2), (3,)),
    "experts/kernel": Kernel((0,), (1,), (2,)),
    "head/kernel": Kernel((), (0,), (1,)),
}


def test_the_axes_of_a_linen_modules_kernels():
    kernels = Kernels.of_layers(adapt(StackedNet()).layer_arrays((4, 4, 3)))
    assert {name: kernel for name, kernel in kernels.known.items() if kernel} == LINEN_KERNELS


@pytest.mark.ci
def test_the_axes_of_a_kernel_in_a_box_of_flax():
    boxed = {"kernel_init": nn.with_partitioning(nn.initializers.ones, (None, None, None))}
    boxed["bias_init"] = nn.with_partitioning(nn.initializers.zeros, (None, None))
    kernels = Kernels.of_layers(adapt(nn.DenseGeneral((2, 3), **boxed)).layer_arrays((4, 4, 3)))
    assert kernels.known == {"kernel/value": Kernel((), (0,), (1, 2)), "bias/value": None}


@pytest.mark.ci
def test_the_axes_of_an_nnx_modules_kernels():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(4, 8, decode=False, rngs=rngs)
            self.dense = nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs)
            self.factor = nnx.Param(jnp.ones(8))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.vmap(Layers)(rngs.split(3))
            self.convs = nnx.List([nnx.ConvTranspose(3, 8, (3, 3), transpose_kernel=True, rngs=rngs)])
            self.pos_embed = nnx.Param(jnp.ones((1, 4, 8)))
            self.norm = nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, images):
            return images

    kernels = Kernels.of_layers(adapt(Net(nnx.Rngs(0))).layer_arrays((4, 4, 3)))
    assert {name: kernel for name, kernel in kernels.known.items() if kernel} == {
        **{f"blocks/attention/{name}/kernel": Kernel((0,), (1,), (2, 3)) for name in QKV},
        "blocks/attention/out/kernel": Kernel((0,), (1, 2), (3,)),
        **{f"blocks/dense/{name}": Kernel((0,), (1,), (2,)) for name in ("kernel", "lora/lora_a", "lora/lora_b")},
        "convs/0/kernel": Kernel((), (0, 1, 3), (2,)),
    }
    assert {*adapt(nnx.LoRA(8, 2, 4, rngs=nnx.Rngs(0))).layer_arrays((4, 4, 3))} == {"lora_a", "lora_b"}


@pytest.mark.parametrize("name", ["lamb", *(pytest.param(name, marks=pytest.mark.ci) for name in ("lars", "muon"))])
def test_a_layer_of_a_stack_and_of_several_axes_is_updated_like_a_matrix(name):
    """The columns' queries, [8, 5, 4, 2], are five matrices of 8 x 8; their biases, [4, 5, 2], are no matrices."""
    rng, layer = np.random.default_rng(0), "columns/MultiHeadDotProductAttention_0/query/"
    kernel, grad, bias = (rng.normal(size=shape) for shape in ((8, 5, 4, 2), (8, 5, 4, 2), (4, 5, 2)))
    config = config_of(name=name, weight_decay=0.1)

    def update(params, grads, kernels):
        optimizer = OPTIMIZERS.get(name)(config, lambda step: 0.1, kernels)
        return optimizer.update(grads, optimizer.init(params), params)[0]

    by_name = {f"{layer}kernel": kernel, f"{layer}bias": bias}
    whole = update(by_name, {f"{layer}kernel": grad, f"{layer}bias": bias}, Kernels(LINEN_KERNELS))
    for index in range(5):
        matrices = [{"kernel": array[:, index].reshape(8, 8)} for array in (kernel, grad)]
        alone = update(*matrices, BY_NAME)["kernel"]
        np.testing.assert_allclose(whole[f"{layer}kernel"][:, index].reshape(8, 8), alone, rtol=1e-9, atol=1e-12)
    vector = {"bias": bias.ravel()}
    alone = update(vector, vector, BY_NAME)["bias"]
    np.testing.assert_allclose(whole[f"{layer}bias"].ravel(), alone, rtol=1e-12)


@pytest.mark.slow
def test_a_recipe_decays_only_kernels_of_a_users_network():
    config = config_of(name="sgd", weight_decay=0.5, groups=["head:decay=0.25"])
    data = TrainingData.of(random_table(50, image=4), DataConfig())
    layout = Layout.of(config.replace(train={"batch_size": 8}), Topology.create(1), data)
    objects = make_objects(config, layout, objects_of_arguments(model=StackedNet()), lambda step: 1.0)
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), trees_of(objects["model"], (4, 4, 3))[0])
    optimizer = objects["optimizer"]
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    changed = {name: set(np.unique(leaf)) for name, leaf in traverse_util.flatten_dict(updates, sep="/").items()}
    decays = {name: -0.25 if name == "head/kernel" else -0.5 for name in LINEN_KERNELS}
    assert changed == {name: {decays.get(name, 0)} for name in changed}


@pytest.mark.ci
@pytest.mark.parametrize("name", MODELS.names())
def test_the_kernels_of_a_built_in_network(name):
    model = adapt(MODELS.get(name)(Config(), 10))
    arrays = model.layer_arrays((224, 224, 3) if name.startswith("vit") else (64, 64, 3))
    kernels = {path: BY_NAME.get(path, shape) for path, (shape, *_) in arrays.items()}
    last = {path: len(shape) - 1 for path, (shape, *_) in arrays.items() if path.endswith("/kernel")}
    assert kernels == {path: None for path in arrays} | {
        path: Kernel((), tuple(range(axis)), (axis,)) for path, axis in last.items()
    }
    assert kernels == Kernels.of_layers(arrays).known


def test_the_training_script_decays_only_kernels():
    script = runpy.run_path(str(Path(__file__).parents[1] / "launch" / "main.py"))
    params = {"kernel": jnp.ones((2, 2)), "scale": jnp.ones(2), "bias": jnp.ones(2)}
    optimizer = script["make_optimizer"](1.0)
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    assert {name for name, update in updates.items() if update.any()} == {"kernel"}
