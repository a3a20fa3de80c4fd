"""The self-test: a gradient that is wrong only on several devices is found before the first step, with a message that
gives the factor. A correct gradient, or one that cannot be judged, passes."""

import dataclasses
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support import runs
from support.cases import essential_and_rare
from support.data import CLASSES, NO_AUGMENTATION, random_table
from support.errors import error_line
from support.networks import SmallNet, linear_model
from support.shared import sgd

from jaxddp.api import prepare_training, softmax_cross_entropy, train
from jaxddp.config import Config
from jaxddp.core.errors import GradientError
from jaxddp.engine import self_test
from jaxddp.engine.gradients import Averaging
from jaxddp.engine.self_test import SelfTest
from jaxddp.mesh import AXIS
from jaxddp.setup.run_training import make_run
from jaxddp.training.checkpoints.manager import Checkpoints

TABLE, AVERAGE = random_table(64), Averaging.average
ALWAYS = {"parallel": {"self_test": "always"}, "train": {"duration": "1 step"}}
AUTO = {"parallel": {"self_test": "auto"}}
PLAIN, LINEAR = SmallNet(), linear_model()
COMPLEX = lambda key, x: jnp.full((x.size, 5), 0.1j), lambda weight, x: abs(x.reshape(len(x), -1) @ weight)


def run_of(model, devices: int = 4, changes=ALWAYS, **settings):
    # Programs are cached, so the self-test of a correct step would be reused for a faulty step.
    settings = {"batch_size": 16, "table": TABLE, "share": False, "data": NO_AUGMENTATION, **settings}
    return make_run(runs.changed(runs.setup_of(model, sgd(0.1), devices=devices, **settings), changes))


def run_self_test(model, devices: int = 4, changes=ALWAYS, **settings) -> SelfTest:
    """Return the self-test of a new setup after its first chunk."""
    run = run_of(model, devices, changes, **settings)
    assert run.self_test is not None
    run.self_test(run.state, *next(run.chunks(0)).feed)
    return run.self_test


def self_test_error(model=LINEAR, devices: int = 4, **settings) -> str:
    return error_line(run_self_test, model, devices, kind=GradientError, **settings)


# The self-test only raises or passes; no public interface gives its results and tolerance.


def has_compared(test: SelfTest) -> bool:
    return test._tolerance > 0


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((3,), 2, 8))
@pytest.mark.parametrize("model", [LINEAR, COMPLEX, SmallNet(batch_norm=True, sync="data")])
def test_right_gradients_pass(model, devices):
    """Networks that use running statistics pass the comparison for the whole batch, so none is made in slices."""
    assert run_self_test(model, devices, batch_size=24)._compare.cache_info().currsize == 1


@pytest.mark.slow
def test_gradients_in_bfloat16_pass():
    config = Config().replace(train={"gradient_precision": "bfloat16"})
    assert run_self_test(LINEAR, config=config)._tolerance == self_test._TOLERANCE["bfloat16"]
    assert run_self_test(LINEAR)._tolerance == self_test._TOLERANCE["float32"]


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", "float32"), ("gpu", "float16"), ("tpu", "bfloat16")])
def test_the_tolerance_for_float32_is_that_of_the_platforms_products(platform, dtype):
    operations = jax.make_jaxpr(lambda x: x @ x)(np.ones((2, 2), np.float32)).jaxpr.eqns
    assert list(self_test._tolerances(operations, platform)) == [self_test._TOLERANCE[dtype]]


def test_images_on_the_devices_pass():
    assert has_compared(run_self_test(LINEAR, data=dataclasses.replace(NO_AUGMENTATION, cache="device")))


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((4,), 2, 8))
@pytest.mark.parametrize("changes", [{"parallel": {"reproducible": True}}, {"train": {"accumulate": 2}}])
def test_other_ways_to_compute_the_gradient_pass(changes, devices):
    assert has_compared(run_self_test(NormalizesByBatch(), devices, config=Config().replace(**changes)))


def test_more_devices_than_are_counted_pass(monkeypatch):
    monkeypatch.setattr(self_test, "MOST_DEVICES", 3)
    assert list(run_self_test(LINEAR, 8)._unmasked_devices) == [0, 3, 6]


class NormalizesByBatch(nn.Module):
    """A network that normalizes by the batch also in evaluation: by a device's slice, or with `sync` by all slices."""

    sync: str | None = None

    @nn.compact
    def __call__(self, images):
        x = nn.Dense(4)(images.reshape(len(images), -1))
        x = nn.BatchNorm(use_running_average=False, axis_name=self.sync)(x)
        return nn.Dense(CLASSES)(jnp.tanh(x))


@pytest.mark.slow
@pytest.mark.parametrize("sync", [None, "data"])
def test_a_network_that_normalizes_by_the_batch_in_evaluation_passes(sync, caplog):
    assert has_compared(run_self_test(NormalizesByBatch(sync)))
    assert ("the gradient changes with the number of devices" in caplog.text) == (sync is None)


@pytest.mark.slow
def test_a_loss_with_weights_passes_where_slices_differ_in_weight():
    weights = jnp.arange(1.0, CLASSES + 1)

    def weighted(logits, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return (weights[labels] * losses).sum(), weights[labels].sum()

    assert has_compared(run_self_test(NormalizesByBatch(), loss=weighted))


@pytest.fixture
def without_cast(monkeypatch):
    """The gradient without the cast in the step: a sum over the devices instead of a mean."""
    monkeypatch.setattr(jax.lax, "pcast", lambda tree, *axes, **to: tree)


@pytest.mark.parametrize("devices", essential_and_rare((2,), 4, 8))
def test_a_sum_in_place_of_a_mean_is_found(without_cast, devices):
    assert self_test_error(devices=devices).startswith(
        f"self-test before the first step: the gradient that {devices} devices average is {devices} times that of one "
        "device for the same examples: it is their sum and not their mean. "
    )


def scale_shares(monkeypatch, share):
    """Replace the all-reduce of gradients by one that multiplies each device's share by `share(device's number)`."""

    def average(self, grads, others, order):
        if lax.axis_size(AXIS) > 1:
            grads = jax.tree.map(lambda grad: grad * share(lax.axis_index(AXIS)), grads)
        return AVERAGE(self, grads, others, order)

    monkeypatch.setattr(Averaging, "average", average)


@pytest.mark.slow
def test_a_share_that_counts_twice_is_found(monkeypatch):
    scale_shares(monkeypatch, lambda device: 1.0 + (device == 2))
    message = self_test_error(PLAIN)
    assert "4 devices average is not that of one device for the same examples: the difference is 0." in message
    assert "the largest part is in Conv_0/kernel. A device's share counts twice or not at all" in message


def test_any_other_factor_is_found(monkeypatch):
    scale_shares(monkeypatch, lambda device: 1.01)
    assert "is 1.01 times that of one device for the same examples. A device's share" in self_test_error()


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_over_devices_alone_is_found(monkeypatch):
    scale_shares(monkeypatch, lambda device: jnp.where(device == 1, jnp.nan, 1.0))
    assert "is not that of one device" in self_test_error()


@jax.custom_vjp
def centered(x):
    """Subtract the mean over the batches of all devices."""
    return x - lax.pmean(x.mean(0), AXIS)


def _without_sum(_, grad):
    # This is correct on one device only. On several, the mean of all devices' gradients is missing.
    return (grad - grad.mean(0),)


def _with_sum(_, grad):
    return (grad - lax.pmean(grad.mean(0), AXIS),)


def with_custom_gradient(backward):
    init, _ = LINEAR
    function = jax.custom_vjp(centered.fun)
    function.defvjp(lambda x: (function(x), None), backward)

    def apply(params, images):
        return jnp.tanh(function(images.reshape(len(images), -1) @ params["weight"])) * jnp.arange(1.0, CLASSES + 1)

    return init, apply


@pytest.mark.slow
def test_a_custom_gradient_without_the_sum_over_devices_is_found():
    assert "a custom gradient in the model or the loss omits a sum over the devices" in self_test_error(
        with_custom_gradient(_without_sum)
    )
    assert has_compared(run_self_test(with_custom_gradient(_with_sum)))


def scaled(factor: float):
    init, apply = LINEAR
    return init, lambda params, images: factor * apply(params, images)


@pytest.mark.parametrize(("factor", "norm"), [(0.0, "0"), (np.nan, "nan")])
def test_a_gradient_that_cannot_be_judged_is_logged(caplog, factor, norm):
    with caplog.at_level(logging.WARNING, "jaxddp.training"):
        run_self_test(scaled(factor))
    assert caplog.messages == [f"self-test: the gradient of the first examples is {norm}, so the test proves nothing"]


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["MOST_PARAMETERS", "MOST_OPERATIONS"])
def test_auto_skips_networks_that_take_long_to_compile(without_cast, monkeypatch, limit):
    monkeypatch.setattr(self_test, limit, 0)
    for _ in range(2):
        assert not has_compared(run_self_test(LINEAR, changes=AUTO))
    assert "4 times" in self_test_error(changes=ALWAYS)


def test_a_network_without_an_evaluation_mode_is_not_tested():
    class Drops(nn.Module):
        @nn.compact
        def __call__(self, images):
            return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=False)(images.reshape(len(images), -1)))

    assert not has_compared(run_self_test(Drops(), changes=AUTO))


def test_on_one_device_there_is_no_self_test():
    assert run_of(LINEAR, 1).self_test is None


def test_a_run_is_tested_once(monkeypatch):
    tests = []
    monkeypatch.setattr(SelfTest, "__call__", lambda self, state, *feed: tests.append(int(state.step)))
    setup = runs.setup_of(LINEAR, sgd(0.1), TABLE, devices=2, batch_size=16)
    runs.train(setup, AUTO | {"train": {"duration": "5 steps"}})
    assert tests == [0]


@pytest.mark.slow
def test_a_failed_self_test_takes_no_step_and_a_resumed_run_is_tested_too(tmp_path, monkeypatch):
    """Test from Python with a work directory, with a fault that starts between two runs."""
    setup = prepare_training(LINEAR, TABLE, 4, sgd(0.1), 4, epochs=1)
    train(softmax_cross_entropy, setup, workdir=tmp_path, listeners=())
    before = (tmp_path / "metrics.jsonl").read_text()
    scale_shares(monkeypatch, lambda device: 2.0)
    setup = prepare_training(LINEAR, TABLE, 4, sgd(0.1), 4, epochs=2)
    with pytest.raises(GradientError, match="is 2 times that of one device"):
        train(softmax_cross_entropy, setup, workdir=tmp_path, listeners=())
    assert Checkpoints(tmp_path / "checkpoints", read_only=True).steps() == [4]
    assert (tmp_path / "metrics.jsonl").read_text() == before
    state, _ = train(softmax_cross_entropy, setup, workdir=tmp_path, listeners=(), self_test="never")
    assert int(state.step) == 8
