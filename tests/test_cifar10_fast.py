"""The recipes of the CIFAR-10 speedruns: optimizers compared with NumPy, the operations of a run, and short runs."""

import contextlib
import dataclasses
import functools
import json
import os
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import essential_and_rare
from support.data import random_table, write_arrays
from support.networks import largest_difference
from support.runs import Recorder, train

from jaxddp.cli import main
from jaxddp.core.errors import Preempted
from jaxddp.measure.cost import count_flops
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.airbench import Airbench, parameter_groups, patch_moments, whitening_kernel
from jaxddp.recipe.file import read_recipe
from jaxddp.schedules import Steps, make_schedule
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.run_setup import initialize, open_recipe
from jaxddp.setup.run_training import train as train_experiment
from jaxddp.training.checkpoints.manager import Checkpoints

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


# --- The optimizers ---


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
    linear_decay, momentum = (1 - np.arange(num_steps) / 7.5), 0.85
    if name == "cifar10_fast":
        bias, head = 0.053 * 20_000, 0.67 * 20_000
        references = {
            "convolution": lambda p, g: numpy_muon(p, g, rates, 0.6),
            "norm": lambda p, g: numpy_sgd(p, g, rates / 0.24 * bias, 2e-6 / 0.053, momentum),
            "whitening bias": lambda p, g: numpy_sgd(p, g, linear_decay * bias, 2e-6 / 0.053, momentum),
            "head": lambda p, g: numpy_sgd(p, g, rates / 0.24 * head, 2e-6 / 0.67, momentum),
            "whitening": lambda p, g: [p] * num_steps,
        }
    else:
        plain = functools.partial(numpy_sgd, rates=rates, decay=1.33e-3, momentum=momentum)
        # The network divides logits by 256, and the network of the paper by 9.
        head = (256 / 9) ** 2
        references = {
            "convolution": plain,
            "norm": lambda p, g: numpy_sgd(p, g, 64 * rates, 1.33e-3 / 64, momentum),
            "whitening bias": plain,
            "head": lambda p, g: numpy_sgd(p, g, head * rates, 1.33e-3 / head, momentum),
            "whitening": lambda p, g: [p] * num_steps,
        }
    for path, group in jax.tree_util.tree_leaves_with_path(groups):
        keys = [key.key for key in path]
        group_grads = [tree[keys[0]][keys[1]] for tree in grads]
        expected = references[group](initial_params[keys[0]][keys[1]], group_grads)
        for step in range(num_steps):
            np.testing.assert_allclose(
                actual[step][keys[0]][keys[1]], expected[step], rtol=1e-5, atol=1e-6, err_msg=group
            )


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_bias_of_the_whitening_convolution_is_frozen_after_three_epochs(name):
    optimizer, _ = optimizer_of(name, 100, train={"batch_size": 50_000})
    params = initial("float32")
    state, has_update = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(5):
        updates, state = update(jax.tree.map(jnp.ones_like, params), state, params)
        has_update.append((bool(updates["whiten"]["bias"].any()), bool(updates["norm1_1"]["bias"].any())))
    assert has_update == [(True, True)] * 3 + [(False, True)] * 2


# --- The operations of a run ---


def multiplications(width: int = 64) -> int:
    """Count the multiplications of a forward pass of one image as papers do, including those with padding."""
    whitening, sides, inputs = 31 * 31 * 24 * 12, (31, 15, 7, 3), 24
    groups = 0
    for group, features in enumerate((width, 4 * width, 4 * width)):
        groups += 9 * features * (sides[group] ** 2 * inputs + sides[group + 1] ** 2 * features)
        inputs = features
    return whitening + groups + 10 * inputs


@pytest.mark.parametrize(
    ("name", "petaflop", "padded"), [("cifar10_fast", 0.243, 0.284), ("cifar10_fast_sgd", 0.301, 0.351)]
)
def test_a_whole_run_takes_a_fraction_of_a_petaflop(name, petaflop, padded):
    """Count the operations of the forward and backward passes of all examples.

    `petaflop` does not count products with padding, and `padded` does.
    """
    config = read_recipe(name).config
    model, images = for_platform(adapt(Airbench(10)), "gpu"), jax.ShapeDtypeStruct((10, 32, 32, 3), jnp.float32)
    params, state = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, state, images):
        return model.apply(params, state, images, train=True, key=None)[0].sum()

    def flops_of(function) -> float:
        return sum(count_flops(jax.jit(function).trace(params, state, images).jaxpr).values()) / 10

    batch_size = config.train.batch_size
    examples = float(config.train.duration.examples(num_examples=IMAGES, batch_size=batch_size))
    assert examples * flops_of(jax.grad(loss)) / 1e15 == pytest.approx(petaflop, abs=5e-4)
    assert examples * 6 * multiplications() / 1e15 == pytest.approx(padded, abs=2e-3)
    # Validation evaluates six views of 10,000 images.
    assert 60_000 * flops_of(loss) / 1e15 < 0.015


# --- Short runs ---


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
    assert main([*arguments, "--model.name", "resnet10"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "bn1/bias is not a parameter of the network airbench; set --model.name to airbench" in line


@pytest.mark.slow
@pytest.mark.ci
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(data, tmp_path):
    """The state has Lookahead's slow weights. `conformance/test_optimizers.py` resumes Muon's state."""
    changes = {"train": {"batch_size": 16, "duration": "8 steps"}, "eval": {"batch_size": 16, "every": "100%"}}
    changes |= {"log": {"every": "1 step"}}
    experiment = recipe_of("cifar10_fast_sgd", data, **changes)
    setup, val, uninterrupted, resumed = initialize(experiment), experiment.resources.val, Recorder(), Recorder()
    checkpoints, states = (
        Checkpoints(tmp_path / "c"),
        [train(copy_of(setup), changes, val=val, listeners=[uninterrupted])],
    )
    with pytest.raises(Preempted):
        train(copy_of(setup), changes, checkpoints=checkpoints, should_stop=lambda step: step >= 4)
    saved_step = checkpoints.latest()
    states.append(
        train(copy_of(setup), changes, val=val, checkpoints=checkpoints, resume_step=saved_step, listeners=[resumed])
    )
    assert largest_difference(*map(jax.device_get, states)) == 0
    assert [record.metrics for record in resumed.steps] == [
        record.metrics for record in uninterrupted.steps[saved_step:]
    ]
    ((expected, actual),) = zip(uninterrupted.evaluations, resumed.evaluations, strict=True)
    assert expected.metrics == actual.metrics
    assert uninterrupted.steps[-1].metrics["loss"] < uninterrupted.steps[0].metrics["loss"]


def copy_of(setup):
    return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))


@pytest.mark.ci
@pytest.mark.parametrize("name", essential_and_rare(("cifar10_fast_sgd",), "cifar10_fast"))
def test_a_resumed_run_equals_an_uninterrupted_one_and_is_evaluated_from_its_config(name, data, tmp_path, capfd):
    """Stop a run of 8 steps after the fourth, and resume it bit for bit, including Lookahead's slow weights."""

    def run(workdir: str, is_stopped: bool = False) -> list[dict]:
        changes = {"train": {"batch_size": 16, "duration": "8 steps"}, "eval": {"batch_size": 16, "every": "100%"}}
        experiment = recipe_of(name, data, **changes, log={"every": "1 step", "to": ("jsonl",)})
        with contextlib.ExitStack() as stack:
            if is_stopped:
                stack.enter_context(pytest.raises(Preempted))
            train_experiment(experiment, tmp_path / workdir, listeners=[SendsSigterm()] if is_stopped else [])
        return [json.loads(line) for line in (tmp_path / workdir / "metrics.jsonl").read_text().splitlines()]

    uninterrupted = run("whole")
    assert 4 <= len(run("half", is_stopped=True)) < 8
    resumed = run("half")
    assert [(line["step"], line["loss"]) for line in resumed] == [
        (line["step"], line["loss"]) for line in uninterrupted
    ]
    assert uninterrupted[-1]["count"] == 25 and uninterrupted[-2]["loss"] < uninterrupted[0]["loss"]
    capfd.readouterr()
    assert main(["eval", str(tmp_path / "half" / "config.json")]) == 0
    printed = dict(line.split(": ") for line in capfd.readouterr().out.splitlines())
    assert float(printed["loss"]) == pytest.approx(uninterrupted[-1]["loss"], rel=1e-6)


class SendsSigterm:
    """A listener that sends SIGTERM to its own process after the fourth step."""

    def step(self, record) -> None:
        if record.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


# The tests in `conformance/` compare networks and optimizers of every kind on different numbers of devices.
@pytest.mark.ci
@pytest.mark.parametrize("name", essential_and_rare(("cifar10_fast",), "cifar10_fast_sgd"))
def test_four_devices_with_sync_batch_norm_train_the_same_as_one(name, data):
    losses = []
    for devices in (1, 4):
        setup = initialize(recipe_of(name, data, model={"batch_norm": "sync"}, parallel={"devices": devices}))
        state, step = setup.state, setup.step()
        device_losses = []
        for batch in setup.batches(0, 3):
            state, sums = step(state, batch)
            device_losses.append(sums.means()["loss"])
        losses.append(device_losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0][2] != losses[0][0]
