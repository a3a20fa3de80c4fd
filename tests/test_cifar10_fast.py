"""The recipes of the CIFAR-10 speedruns: optimizers compared with NumPy, the operations of a run, and short runs."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import random_table, write_arrays
from support.runs import fails

from jaxddp.config.registry import MODELS
from jaxddp.measure.cost import count_flops
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.airbench import Airbench, parameter_groups, patch_moments, whitening_kernel
from jaxddp.recipe.file import read_recipe
from jaxddp.schedules import Steps, make_schedule
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.run_setup import initialize, open_recipe

RECIPES = ("cifar10_fast", "cifar10_fast_sgd")
SMALL = [
    *("--model.width", "4", "--train.batch-size", "16", "--eval.batch-size", "16"),
    *("--log.to", "jsonl", "--parallel.devices", "1"),
]
IMAGES = 50_000
"""The number of training images of CIFAR-10."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "set.npz"
    return write_arrays(file, random_table(60, image=32), random_table(25, image=32, seed=1))


def recipe_of(name: str, data: Path, **changes) -> Recipe:
    file = read_recipe(name)
    sizes = {"model": {"width": 4}, "train": {"batch_size": 12}, "eval": {"batch_size": 12}, "parallel": {"devices": 1}}
    config = file.config.replace(**sizes).replace(data={"path": str(data)}, **{"log": {"to": ("jsonl",)}} | changes)
    return open_recipe(dataclasses.replace(file, config=config))


def optimizer_of(name: str, total: int, **changes):
    """Return the optimizer of a recipe for a run of this many steps, and its learning rate at each step."""
    file = read_recipe(name)
    config = file.config.replace(**changes)
    steps = Steps(total, config.optimizer.warmup.steps(num_examples=IMAGES, batch_size=1, total_steps=total))
    schedule = make_schedule(config, steps)
    return file.hooks["get_optimizer"](config, schedule), np.asarray(jax.vmap(schedule)(jnp.arange(total)))


@functools.cache
def initial(dtype: str):
    """Return the parameters of a narrow network."""
    net = Airbench(3, width=2, dtype=dtype, param_dtype=dtype)
    return jax.jit(adapt(net).init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))[0]


def numpy_sgd(parameter, grads, rates, decay, momentum):
    """Compute PyTorch's SGD with Nesterov momentum; weight decay is added to the gradient."""
    velocity, parameters = 0.0, []
    for grad, rate in zip(grads, rates, strict=True):
        full = grad + decay * parameter
        velocity = momentum * velocity + full
        parameter = parameter - rate * (full + momentum * velocity)
        parameters.append(parameter)
    return parameters


def numpy_muon(kernel, grads, rates, momentum):
    """Compute Muon; three steps of its quintic iteration are applied to the singular values."""
    velocity, parameters = 0.0, []
    for count, (grad, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        velocity = momentum * velocity + (1 - momentum) * grad
        # The average starts at zero, and Optax corrects both terms for this bias.
        update = momentum * velocity / (1 - momentum ** (count + 1)) + (1 - momentum) * grad / (1 - momentum**count)
        u, s, v = np.linalg.svd(update.reshape(-1, update.shape[-1]), full_matrices=False)
        s = s / np.linalg.norm(s)
        for _ in range(3):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        features = kernel.shape[-1]
        kernel = kernel * features**0.5 / np.linalg.norm(kernel) - rate * (u @ np.diag(s) @ v).reshape(kernel.shape)
        parameters.append(kernel)
    return parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_each_parameter_group_has_the_optimizer_of_the_recipe(name):
    total, num_steps = 20, 4
    with jax.enable_x64(True):
        # Three epochs, after which the bias of the whitening convolution is frozen, are 7.5 of these steps.
        optimizer, rates = optimizer_of(name, total, train={"batch_size": 20_000})
        params = initial("float64")
        initial_params, state = jax.device_get(params), optimizer.init(params)
        rng = np.random.default_rng(0)
        grads = [jax.tree.map(lambda p: rng.normal(size=p.shape), initial_params) for _ in range(num_steps)]
        actual = []
        for grad in grads:
            updates, state = optimizer.update(grad, state, params)
            params = optax.apply_updates(params, updates)
            actual.append(jax.device_get(params))
    groups, rates = parameter_groups(initial_params), rates[:num_steps]
    linear_decay, sgd = (1 - np.arange(num_steps) / 7.5), functools.partial(numpy_sgd, momentum=0.85)
    plain = functools.partial(sgd, rates=rates, decay=1.33e-3)
    references = dict.fromkeys(("convolution", "whitening bias", "head"), plain)
    references["norm"] = functools.partial(sgd, rates=64 * rates, decay=1.33e-3 / 64)
    if name == "cifar10_fast":
        bias, head = 0.053 * 20_000, 0.67 * 20_000
        references = {
            "convolution": lambda p, g: numpy_muon(p, g, rates, 0.6),
            "norm": functools.partial(sgd, rates=rates / 0.24 * bias, decay=2e-6 / 0.053),
            "whitening bias": functools.partial(sgd, rates=linear_decay * bias, decay=2e-6 / 0.053),
            "head": functools.partial(sgd, rates=rates / 0.24 * head, decay=2e-6 / 0.67),
        }
    references["whitening"] = lambda p, g: [p] * num_steps
    for path, group in jax.tree_util.tree_leaves_with_path(groups):
        keys = [key.key for key in path]
        group_grads = [tree[keys[0]][keys[1]] for tree in grads]
        expected = references[group](initial_params[keys[0]][keys[1]], group_grads)
        for step in range(num_steps):
            np.testing.assert_allclose(
                actual[step][keys[0]][keys[1]], expected[step], rtol=1e-5, atol=1e-6, err_msg=group
            )


@pytest.mark.parametrize(
    ("name", "decoupled_rate", "decoupled_decay", "warmup", "last"),
    [("fast_sgd", 11.5, 0.0153, 0.23, 0.07), ("95", 10, 0.0153, 0.23, 0.07), ("96", 9, 0.012, 0.1, 0)],
)
def test_rates_and_decays_are_those_of_the_paper(name, decoupled_rate, decoupled_decay, warmup, last):
    """The paper gives both for the sum of the losses of 1,024 images, times 1 + 1 / (1 - momentum)."""
    total, scale, name = 1000, 1 + 1 / (1 - 0.85), f"cifar10_{name}"
    _, rates = optimizer_of(name, total)
    expected = np.interp(np.arange(total), [0, warmup * total, total], [0.2, 1, last]) * decoupled_rate / scale
    np.testing.assert_allclose(rates, expected, rtol=1e-3, atol=1e-6)
    decay = read_recipe(name).config.optimizer.weight_decay * decoupled_rate / scale
    assert decay == pytest.approx(decoupled_decay / scale, rel=2e-3)


def test_the_bias_of_the_whitening_convolution_is_frozen_after_three_epochs():
    optimizer, _ = optimizer_of("cifar10_fast_sgd", 100, train={"batch_size": 50_000})
    params = initial("float32")
    state, has_update = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(5):
        updates, state = update(jax.tree.map(jnp.ones_like, params), state, params)
        has_update.append((bool(updates["whiten"]["bias"].any()), bool(updates["norm1_1"]["bias"].any())))
    assert has_update == [(True, True)] * 3 + [(False, True)] * 2


@pytest.mark.parametrize(
    ("name", "petaflop"),
    [("cifar10_fast", 0.243), ("cifar10_fast_sgd", 0.301), ("cifar10_95", 1.172), ("cifar10_96", 4.22)],
)
def test_a_whole_run_takes_a_fraction_of_a_petaflop(name, petaflop):
    """Count the operations of the forward and backward passes of all examples, without products with padding."""
    config = read_recipe(name).config
    net = MODELS.get(config.model.name)(config, 10)
    model, images = for_platform(adapt(net), "gpu"), jax.ShapeDtypeStruct((10, 32, 32, 3), jnp.float32)
    params, state = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, state, images):
        return model.apply(params, state, images, train=True, key=None)[0].sum()

    def flops_of(function) -> float:
        return sum(count_flops(jax.jit(function).trace(params, state, images).jaxpr).values()) / 10

    batch_size = config.train.batch_size
    examples = float(config.train.duration.examples(num_examples=IMAGES, batch_size=batch_size))
    assert examples * flops_of(jax.grad(loss)) / 1e15 == pytest.approx(petaflop, abs=5e-4)
    # Validation evaluates six views of 10,000 images.
    assert 60_000 * flops_of(loss) / 1e15 < petaflop / 15


@pytest.mark.slow
def test_the_first_convolution_whitens_a_sample_of_the_training_images(data, monkeypatch):
    kernels = []
    for devices in (1, 2):
        experiment = recipe_of("cifar10_fast", data, parallel={"devices": devices})
        function = experiment.file.hooks["get_initialize"].function
        monkeypatch.setitem(function.__globals__, "IMAGES_TO_WHITEN", 10)
        kernels.append(np.asarray(initialize(experiment).state.params["whiten"]["kernel"]))
    sample, settings = experiment.resources.train.take(10), experiment.config.data
    assert len(sample) == 10 and len(set(sample.labels)) == 5
    expected = whitening_kernel(patch_moments(sample.images, 2, settings.mean, settings.std), 3)
    np.testing.assert_allclose(kernels[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(kernels[0], kernels[1])


def test_a_recipe_with_the_wrong_network_raises_a_one_line_error(data, capfd):
    arguments = ["train", "cifar10_fast", "--data.path", str(data), "--workdir", str(data.parent / "w"), *SMALL]
    line = fails([*arguments, "--model.name", "resnet10"], capfd)
    assert "bn1/bias is not a parameter of the network airbench; set --model.name to airbench" in line
