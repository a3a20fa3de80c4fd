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
from support.cases import few
from support.data import random_table, write_arrays
from support.networks import largest_difference
from support.runs import Recorder, train

from jaxddp.cli import main
from jaxddp.core.errors import Preempted
from jaxddp.measure.flops import count_flops
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.airbench import Airbench, parameter_groups
from jaxddp.models.ops.whitening import patch_moments, whitening_kernel
from jaxddp.recipe_file import read_recipe
from jaxddp.schedules.warmup import Steps, make_schedule
from jaxddp.setup.experiment import Experiment
from jaxddp.setup.prepare import initialize, open_experiment
from jaxddp.tasks.run_training import task_of_file
from jaxddp.tasks.run_training import train as train_experiment
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


def experiment_of(name: str, data: Path, **changes) -> Experiment:
    file = read_recipe(name)
    sizes = {"model": {"width": 4}, "train": {"batch_size": 12}, "eval": {"batch_size": 12}, "parallel": {"devices": 1}}
    config = file.config.replace(**sizes).replace(data={"path": str(data)}, **{"log": {"to": ("jsonl",)}} | changes)
    return open_experiment(dataclasses.replace(file, config=config))


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


def sgd_by_hand(parameter, grads, rates, decay, momentum):
    """PyTorch's SGD with Nesterov momentum; weight decay is added to the gradient."""
    velocity, parameters = 0.0, []
    for grad, rate in zip(grads, rates, strict=True):
        full = grad + decay * parameter
        velocity = momentum * velocity + full
        parameter = parameter - rate * (full + momentum * velocity)
        parameters.append(parameter)
    return parameters


def muon_by_hand(kernel, grads, rates, momentum):
    """Orthogonalize by singular values, with three steps of Muon's quintic iteration."""
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
    total, few = 20, 4
    with jax.enable_x64(True):
        # Three epochs are 7.5 of these steps.
        optimizer, rates = optimizer_of(name, total, train={"batch_size": 20_000})
        params = initial("float64")
        begin, state = jax.device_get(params), optimizer.init(params)
        rng = np.random.default_rng(0)
        grads = [jax.tree.map(lambda p: rng.normal(size=p.shape), begin) for _ in range(few)]
        found = []
        for grad in grads:
            updates, state = optimizer.update(grad, state, params)
            params = optax.apply_updates(params, updates)
            found.append(jax.device_get(params))
    groups, rates = parameter_groups(begin), rates[:few]
    falling, sgd = (1 - np.arange(few) / 7.5), 0.85
    if name == "cifar10_fast":
        bias, head = 0.053 * 20_000, 0.67 * 20_000
        ways = {
            "convolution": lambda p, g: muon_by_hand(p, g, rates, 0.6),
            "norm": lambda p, g: sgd_by_hand(p, g, rates / 0.24 * bias, 2e-6 / 0.053, sgd),
            "whitening bias": lambda p, g: sgd_by_hand(p, g, falling * bias, 2e-6 / 0.053, sgd),
            "head": lambda p, g: sgd_by_hand(p, g, rates / 0.24 * head, 2e-6 / 0.67, sgd),
            "whitening": lambda p, g: [p] * few,
        }
    else:
        plain = functools.partial(sgd_by_hand, rates=rates, decay=1.33e-3, momentum=sgd)
        # Logits are divided by 256 here, and by 9 in the paper.
        head = (256 / 9) ** 2
        ways = {
            "convolution": plain,
            "norm": lambda p, g: sgd_by_hand(p, g, 64 * rates, 1.33e-3 / 64, sgd),
            "whitening bias": plain,
            "head": lambda p, g: sgd_by_hand(p, g, head * rates, 1.33e-3 / head, sgd),
            "whitening": lambda p, g: [p] * few,
        }
    for path, group in jax.tree_util.tree_leaves_with_path(groups):
        at = [key.key for key in path]
        own = [each[at[0]][at[1]] for each in grads]
        expected = ways[group](begin[at[0]][at[1]], own)
        for step in range(few):
            np.testing.assert_allclose(found[step][at[0]][at[1]], expected[step], rtol=1e-5, atol=1e-6, err_msg=group)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_bias_of_the_whitening_convolution_is_frozen_after_three_epochs(name):
    optimizer, _ = optimizer_of(name, 100, train={"batch_size": 50_000})
    params = initial("float32")
    state, moved = optimizer.init(params), []
    update = jax.jit(optimizer.update)
    for _ in range(5):
        updates, state = update(jax.tree.map(jnp.ones_like, params), state, params)
        moved.append((bool(updates["whiten"]["bias"].any()), bool(updates["norm1_1"]["bias"].any())))
    assert moved == [(True, True)] * 3 + [(False, True)] * 2


# --- The operations of a run ---


def multiplications(width: int = 64) -> int:
    """Count the operations of one image's forward pass as papers do: with padding, from the network's shapes."""
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

    def of(function) -> float:
        return sum(count_flops(jax.jit(function).trace(params, state, images).jaxpr).values()) / 10

    batch_size = config.train.batch_size
    examples = float(config.train.duration.examples(num_examples=IMAGES, batch_size=batch_size))
    assert examples * of(jax.grad(loss)) / 1e15 == pytest.approx(petaflop, abs=5e-4)
    assert examples * 6 * multiplications() / 1e15 == pytest.approx(padded, abs=2e-3)
    # Validation: six views of 10,000 images.
    assert 60_000 * of(loss) / 1e15 < 0.015


# --- Short runs ---


@pytest.mark.slow
def test_the_first_convolution_whitens_a_sample_of_the_training_images(data, monkeypatch):
    kernels = []
    for devices in (1, 2):
        experiment = experiment_of("cifar10_fast", data, parallel={"devices": devices})
        function = experiment.file.hooks["get_initialize"].function
        monkeypatch.setitem(function.__globals__, "IMAGES_TO_WHITEN", 10)
        kernels.append(np.asarray(initialize(experiment).state.params["whiten"]["kernel"]))
    sample, own = experiment.resources.train.take(10), experiment.config.data
    assert len(sample) == 10 and len(set(sample.labels)) == 5
    expected = whitening_kernel(patch_moments(sample.images, 2, own.mean, own.std), 3)
    np.testing.assert_allclose(kernels[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(kernels[0], kernels[1])


def test_another_network_raises_a_one_line_error(data, capfd):
    words = ["train", "cifar10_fast", "--data.path", str(data), "--workdir", str(data.parent / "w"), *SMALL]
    assert main([*words, "--model.name", "resnet10"]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "bn1/bias is not a parameter of the network airbench; set --model.name to airbench" in line


@pytest.mark.slow
@pytest.mark.ci
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(data, tmp_path):
    """Resume with Lookahead's slow weights. `conformance/test_optimizers.py` resumes Muon's state."""
    words = {"train": {"batch_size": 16, "duration": "8 steps"}, "eval": {"batch_size": 16, "every": "100%"}}
    words |= {"log": {"every": "1 step"}}
    experiment = experiment_of("cifar10_fast_sgd", data, **words)
    setup, val, whole, half = initialize(experiment), experiment.resources.val, Recorder(), Recorder()
    checkpoints, states = Checkpoints(tmp_path / "c"), [train(again(setup), words, val=val, listeners=[whole])]
    with pytest.raises(Preempted):
        train(again(setup), words, checkpoints=checkpoints, should_stop=lambda step: step >= 4)
    begin = checkpoints.latest()
    states.append(train(again(setup), words, val=val, checkpoints=checkpoints, resume_step=begin, listeners=[half]))
    assert largest_difference(*map(jax.device_get, states)) == 0
    assert [record.metrics for record in half.steps] == [record.metrics for record in whole.steps[begin:]]
    ((one, other),) = zip(whole.evaluations, half.evaluations, strict=True)
    assert one.metrics == other.metrics
    assert whole.steps[-1].metrics["loss"] < whole.steps[0].metrics["loss"]


def again(setup):
    return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))


@pytest.mark.ci
@pytest.mark.parametrize("name", few(("cifar10_fast_sgd",), "cifar10_fast"))
def test_a_resumed_run_equals_an_uninterrupted_one_and_is_evaluated_from_its_config(name, data, tmp_path, capfd):
    """Stop a run of 8 steps after the fourth, and resume it bit for bit, including Lookahead's slow weights."""

    def run(workdir: str, stops: bool = False) -> list[dict]:
        words = {"train": {"batch_size": 16, "duration": "8 steps"}, "eval": {"batch_size": 16, "every": "100%"}}
        experiment = experiment_of(name, data, **words, log={"every": "1 step", "to": ("jsonl",)})
        with contextlib.ExitStack() as stack:
            if stops:
                stack.enter_context(pytest.raises(Preempted))
            train_experiment(task_of_file(experiment), tmp_path / workdir, listeners=[Terminated()] if stops else [])
        return [json.loads(line) for line in (tmp_path / workdir / "metrics.jsonl").read_text().splitlines()]

    whole = run("whole")
    assert 4 <= len(run("half", stops=True)) < 8
    half = run("half")
    assert [(line["step"], line["loss"]) for line in half] == [(line["step"], line["loss"]) for line in whole]
    assert whole[-1]["count"] == 25 and whole[-2]["loss"] < whole[0]["loss"]
    capfd.readouterr()
    assert main(["eval", str(tmp_path / "half" / "config.json")]) == 0
    shown = dict(line.split(": ") for line in capfd.readouterr().out.splitlines())
    assert float(shown["loss"]) == pytest.approx(whole[-1]["loss"], rel=1e-6)


class Terminated:
    """A listener that sends SIGTERM to its own process after the fourth step."""

    def step(self, record) -> None:
        if record.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)


# The tests in `conformance/` show that the network and all kinds of optimizers give the same results on any devices.
@pytest.mark.ci
@pytest.mark.parametrize("name", few(("cifar10_fast",), "cifar10_fast_sgd"))
def test_four_devices_with_sync_batch_norm_train_the_same_as_one(name, data):
    losses = []
    for devices in (1, 4):
        setup = initialize(experiment_of(name, data, model={"batch_norm": "sync"}, parallel={"devices": devices}))
        state, step = setup.state, setup.step()
        series = []
        for batch in setup.batches(0, 3):
            state, sums = step(state, batch)
            series.append(sums.means()["loss"])
        losses.append(series)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)
    assert losses[0][2] != losses[0][0]
