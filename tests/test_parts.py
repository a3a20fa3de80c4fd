"""Optional parts of the step: a part has arrays in the state, and an absent part does not change the program."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.cases import essential_and_rare
from support.data import NO_AUGMENTATION, random_table
from support.networks import SmallNet, largest_difference, linear_model
from support.runs import Recorder, setup_of, train
from support.shared import sgd

from jaxddp.core.errors import InputError
from jaxddp.engine.initial_state import make_init
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.parts.averages import Lookahead, ParameterAverage
from jaxddp.engine.parts.guard import GradientNorm
from jaxddp.engine.parts.part import Part
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.training.checkpoints.manager import Checkpoints

TABLE, VAL = random_table(50), random_table(23, seed=1)
CHANGES = {
    "train": {"duration": "12 steps"},
    "log": {"every": "1 step"},
    "eval": {"every": "4 steps"},
    "checkpoint": {"every": "0 steps"},
}


def make_setup(devices: int = 4, parts: tuple[Part, ...] = (), net=None, **options):
    net = net or SmallNet(batch_norm=True, sync="data")
    return setup_of(
        net, sgd(0.05, momentum=0.9), TABLE, devices=devices, data=NO_AUGMENTATION, parts=parts, seed=5, **options
    )


def run_training(setup, **options):
    records = Recorder()
    return jax.device_get(train(setup, CHANGES, val=VAL, listeners=[records], **options)), records


AVERAGE_AND_NORM = (ParameterAverage(0.9), GradientNorm())


@pytest.mark.slow
def test_an_absent_part_adds_no_array_and_no_operation():
    setup = make_setup()
    assert jax.tree.leaves(setup.state.parts) == []
    batch = next(setup.batches(0, 1))
    plain = str(jax.make_jaxpr(setup.step())(setup.state, batch))
    normed = make_setup(parts=(GradientNorm(),))
    assert len(plain) < len(str(jax.make_jaxpr(normed.step())(normed.state, batch)))
    _, sums = setup.step()(setup.state, batch)
    assert sums.names == ("loss", "top1")


@pytest.mark.slow
@pytest.mark.parametrize("steps", essential_and_rare((7,), 6))
def test_lookahead_draws_training_back_to_slow_weights(steps):
    """The parameters and the batch statistics equal their definition, and the run ends with the slow weights."""
    plain = make_setup()
    step = plain.step()
    setup = make_setup(parts=(Lookahead(3, lambda step: step / 10, steps),))
    state, expected_state = setup.state, plain.state
    slow = jax.device_get((expected_state.params, expected_state.model_state))
    for number, batch in enumerate(plain.batches(0, steps), start=1):
        state, _ = setup.step()(state, batch)
        expected_state, _ = step(expected_state, batch)
        trained = jax.device_get((expected_state.params, expected_state.model_state))
        if number % 3 == 0:
            slow = jax.tree.map(lambda s, t, d=number / 10: d * s + (1 - d) * t, slow, trained)
        if number % 3 == 0 or number == steps:
            params, model_state = plain.topology.replicate(slow)
            expected_state = expected_state.replace(params=params, model_state=model_state)
        actual, expected = (jax.device_get((each.params, each.model_state)) for each in (state, expected_state))
        assert largest_difference(actual, expected) < 1e-6
    lookahead_arrays = jax.device_get(state.parts["lookahead"])
    assert largest_difference((lookahead_arrays["params"], lookahead_arrays["model_state"]), slow) < 1e-6
    assert largest_difference(jax.device_get(state.params), lookahead_arrays["params"]) == 0


@pytest.mark.slow
def test_a_step_reports_scalars_beside_its_metrics():
    _, records = run_training(make_setup(parts=(GradientNorm(),), net=linear_model()))
    norms = [record.metrics["gradient_norm"] for record in records.steps]
    assert len(norms) == 12 and min(norms) > 0
    epoch_ends = [record.epoch_end for record in records.steps if record.epoch_end]
    # An epoch of 50 examples in batches of 8 ends with step 7. It shows a scalar's mean over its steps.
    assert epoch_ends[0].metrics["gradient_norm"] == pytest.approx(np.mean(norms[:7]), rel=1e-5)
    plain_setup = make_setup(net=linear_model())
    grads = jax.jit(jax.grad(loss_of(plain_setup)))(plain_setup.state.params)
    assert norms[0] == pytest.approx(float(optax.tree.norm(grads)), rel=1e-5)
    assert all("gradient_norm" not in record.metrics for record in records.evaluations)
    for name, value in (("loss", 1.0), ("norms", np.ones(2))):
        with pytest.raises(InputError, match=f"the step reports '{name}'; report numbers, float"):
            MetricSums(jnp.ones((2, 2)), ("loss",)).with_scalars({name: value})


def loss_of(setup):
    """Return the loss of a setup's first batch, as a function of the parameters."""
    batch, keys = next(setup.batches(0, 1)), {"key": jax.random.key(0), "image_key": setup.key}

    def loss(params):
        sums, _ = setup.supervised(params, setup.state.model_state, batch, train=True, **keys)
        return sums.values[0, 0] / sums.values[0, 1]

    return loss


def test_a_checkpoint_with_other_parts_raises_an_error_that_names_them(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, make_setup(parts=AVERAGE_AND_NORM).state, {})
    checkpoints.wait()
    with pytest.raises(InputError, match="optimizer: parts/average/eval_model_state/.* absent in this run"):
        checkpoints.restore(1, make_setup().state)


@dataclass(frozen=True)
class Scaled(Part):
    """A part with a constant loss scale that skips every other step."""

    name: str = "scaled"

    def loss_scale(self, own):
        return 1024.0

    def update(self, own, before, after, grads):
        keep = before.step % 2 == 1
        params = jax.tree.map(lambda old, new: jnp.where(keep, old, new), before.params, after.params)
        return own, after.replace(params=params)


def test_a_part_may_scale_the_loss_and_skip_steps():
    setup, plain = make_setup(parts=(Scaled(),), net=linear_model()), make_setup(net=linear_model())
    batches = list(plain.batches(0, 2))
    state, sums = setup.step()(setup.state, batches[0])
    expected, expected_sums = plain.step()(plain.state, batches[0])
    # Scaling by a power of two changes no bit.
    assert largest_difference(jax.device_get(state.params), jax.device_get(expected.params)) == 0
    assert sums.means()["loss"] == expected_sums.means()["loss"]
    params = jax.device_get(state.params)
    state, _ = setup.step()(state, batches[1])
    assert int(state.step) == 2 and largest_difference(jax.device_get(state.params), params) == 0


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (lambda params, state: ({**params, "more": jnp.zeros(3)}, state), r"initialize: params/more is float32\[3\]"),
        (lambda params, state: ({"weight": params["weight"][:3]}, state), r"weight is float32\[3, 5\], and the"),
    ],
)
def test_a_transform_that_changes_more_than_values_is_refused(transform, message):
    model, topology = adapt(linear_model()), Topology.create(1)
    with pytest.raises(InputError, match=message):
        make_init(model, sgd(0.1), (6, 6, 3), topology, transform=transform)(jax.random.key(0))
