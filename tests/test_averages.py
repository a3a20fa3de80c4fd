"""Averages of the parameters and Lookahead's slow weights equal those of loops in NumPy."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.contrib import schedule_free_sgd
from support.cases import ci_case
from support.data import CLASSES, random_table
from support.networks import largest_difference, linear_model
from support.runs import setup_of
from support.shared import sgd

import jaxddp
from jaxddp.core.errors import InputError
from jaxddp.engine.parts.averages import LastAverage, Lookahead, ParameterAverage
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.guard import Guard
from jaxddp.engine.parts.part import measured_states
from jaxddp.engine.state import EVAL_PARAMS, TrainState
from jaxddp.losses import softmax_cross_entropy
from jaxddp.schedules import Steps

TABLE, VAL = random_table(50), random_table(23, seed=1)


def decays(decay: float, steps: int, every: int, warmup: bool) -> list[float | None]:
    """Return the decay of the average at each step; None where the average does not change."""
    result = []
    for step in range(steps):
        step_decay = min(decay, (1 + step) / (10 + step)) if warmup else decay
        result.append(step_decay**every if (step + 1) % every == 0 else None)
    return result


@pytest.mark.parametrize(("every", "warmup"), [(1, True), (1, False), (3, True), (3, False)])
def test_the_average_equals_that_of_a_numpy_loop(every, warmup):
    part = ParameterAverage(0.8, every=every, warmup=warmup)
    trajectory = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    state = TrainState(jnp.int32(0), {"w": jnp.asarray(trajectory[0])}, {}, ())
    average = trajectory[0].astype(np.float64)
    part_state = part.init(state.params, {})
    for decay, params in zip(decays(0.8, 8, every, warmup), trajectory[1:], strict=True):
        after = state.replace(step=state.step + 1, params={"w": jnp.asarray(params)})
        next_part_state, unchanged = part.update(part_state, state, after, None)
        if decay is None:
            np.testing.assert_array_equal(next_part_state[EVAL_PARAMS]["w"], part_state[EVAL_PARAMS]["w"])
        else:
            average = decay * average + (1 - decay) * params
            assert np.abs(next_part_state[EVAL_PARAMS]["w"] - part_state[EVAL_PARAMS]["w"]).min() > 0
        np.testing.assert_allclose(next_part_state[EVAL_PARAMS]["w"], average, rtol=1e-5, atol=1e-6)
        assert unchanged is after
        part_state, state = next_part_state, after


def test_the_last_average_gives_the_same_weight_to_each_of_the_last_steps():
    part, trajectory = LastAverage(first=3), np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    state = TrainState(jnp.int32(0), {"w": jnp.asarray(trajectory[0])}, {}, ())
    own = part.init(state.params, {})
    for step, params in enumerate(trajectory[1:], start=1):
        after = state.replace(step=state.step + 1, params={"w": jnp.asarray(params)})
        own, state = part.update(own, state, after, None)[0], after
        first = min(4, step)
        np.testing.assert_allclose(own[EVAL_PARAMS]["w"], trajectory[first : step + 1].mean(0), rtol=1e-5, atol=1e-6)
    config = jaxddp.Config().replace(train={"swa": "25%"})
    assert configured_parts(config, Steps(100, 0, 25))[0] == LastAverage(first=75)
    with pytest.raises(InputError, match="train.swa and train.ema are given"):
        configured_parts(config.replace(train={"ema": 0.9}), Steps(100, 0, 25))


class Normalized(nn.Module):
    """A network whose batch statistics depend on a kernel, the mean color of the images, and those of a frozen norm."""

    momentum: float

    @nn.compact
    def __call__(self, images, train: bool):
        frozen = nn.BatchNorm(use_running_average=True, epsilon=0, use_scale=False, use_bias=False, name="frozen")
        x = nn.Dense(6, name="first")(frozen(images.mean((1, 2))))
        x = nn.BatchNorm(use_running_average=not train, momentum=self.momentum, use_fast_variance=False)(x)
        return nn.Dense(CLASSES)(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("momentum", "average", "options", "slices"),
    [
        (0.99, {"ema": 0.9}, {"devices": 4}, 4),
        ci_case(0.9, {"swa": "50%"}, {"devices": 2, "accumulate": 2}, 4),
        ci_case(0.5, {"ema": 0.9}, {"devices": 2, "shard_optimizer": True, "freeze": "first"}, 2),
        ci_case(0.9, {"swa": "50%"}, {"devices": 2, "data": jaxddp.DataConfig(cache="device")}, 2),
        ci_case(0.9, {"ema": 0.9}, {"devices": 2, "reproducible": True}, 8),
        ci_case(0.9, {}, {"devices": 1, "optimizer": schedule_free_sgd(0.5)}, 1),
    ],
)
def test_averaged_parameters_end_with_batch_statistics_of_their_own(momentum, average, options, slices, monkeypatch):
    """They are the means of those of each slice of the last finite batches. Only the last state has them."""
    moves = list[None]()
    monkeypatch.setattr("jaxddp.engine.statistics.moved", lambda: moves.append(None))
    words, batch = {"optimizer": sgd(0.5)} | options, 16
    optimizer, devices, model = words.pop("optimizer"), words.pop("devices"), Normalized(momentum)
    words |= {"epochs": 4, "batch_size_per_device": batch // devices, "devices": devices} | average
    words |= {"augmentation": lambda key, image: jnp.where(image[0, 0, 0] > 1.99, jnp.nan, image)}
    setup = jaxddp.prepare_training(model, TABLE, optimizer=optimizer, **words)
    state, history = jaxddp.train(softmax_cross_entropy, setup, val=VAL, listeners=(), eval_every="1 epoch")
    total = setup.layout.plan.total_steps
    found, raw = (each["batch_stats"]["BatchNorm_0"] for each in (state.eval_model_state, state.model_state))
    first, moments = state.eval_params["first"], []
    for batch in setup.batches(max(0, total - 100), total):
        images = setup.supervised.preprocess(batch, train=True, key=setup.key).images
        x = (np.asarray(images, np.float64).mean((1, 2)) @ first["kernel"] + first["bias"]).reshape(slices, -1, 6)
        moments.append((x.mean(1).mean(0), x.var(1).mean(0)))
    assert np.isnan(moments).any()
    np.testing.assert_allclose((found["mean"], found["var"]), np.nanmean(moments, 0), rtol=2e-4, atol=2e-5)
    assert np.abs(found["mean"] - raw["mean"]).max() > 1e-3 and len(moves) == total
    assert largest_difference(state.replace(step=state.step - 1).eval_model_state, state.model_state) == 0
    measured = history.val_ema if average else history.val
    assert jaxddp.evaluate(state, setup, VAL)["loss"] == pytest.approx(measured["loss"][-1], rel=1e-6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train with an average of the parameters.

    Return the setup, state, history and work directory, the number of traces of the metric, and the parameters that
    evaluators received.
    """
    traced, evaluated = [], []

    def first(logits, labels):
        traced.append(logits.shape)
        return logits[:, 0]

    def norm(state):
        evaluated.append(jax.device_get((state.params, state.eval_params)))
        return {"norm": float(np.linalg.norm(state.params["weight"]))}

    options = {"ema": 0.8, "ema_every": 2, "best": "val_ema norm", "metrics": {"first": first}}
    setup = jaxddp.prepare_training(linear_model(), TABLE, 4, sgd(0.1), 2, epochs=2, **options)
    num_earlier_traces = len(traced)
    directory = tmp_path_factory.mktemp("average") / "run"
    words = {"evaluators": [norm], "workdir": directory, "listeners": (), "log_every": "1 step"}
    state, history = jaxddp.train(softmax_cross_entropy, setup, val=VAL, eval_every="5 steps", **words)
    return setup, state, history, directory, len(traced) - num_earlier_traces, evaluated


@pytest.mark.slow
def test_the_parameters_and_their_average_are_both_evaluated_and_logged(trained):
    setup, state, history, directory, *_ = trained
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["split"]) for row in rows if row["split"] != "train"] == [
        (step, split) for step in (5, 10, 13) for split in ("val", "val_ema")
    ]
    assert [*history.val] == [*history.val_ema] and history.val_ema["step"].tolist() == [5, 10, 13]
    assert len(history.to_frame("val_ema")) == 3 and set(history.to_frame()["split"]) == {"train", "val", "val_ema"}
    # `evaluate` measures the average. Without an average in the state, it measures the trained parameters.
    average = jaxddp.evaluate(state, setup, VAL)
    plain = jaxddp.evaluate(state.replace(parts={}), setup, VAL)
    assert average["loss"] != plain["loss"] and average["count"] == 23
    result = json.loads((directory / "result.json").read_text())
    for split, measured, of_history in (("val", plain, history.val), ("val_ema", average, history.val_ema)):
        assert result[split]["loss"] == of_history["loss"][-1] == pytest.approx(measured["loss"], rel=1e-6)
        assert result[split]["count"] == 23 and of_history["count"][-1] == 23
    recorded = json.loads((directory / "checkpoints" / "validation.json").read_text())
    losses = result["val"]["loss"], result["val_ema"]["loss"]
    assert (recorded["13"]["loss"], recorded["13"]["val_ema loss"]) == losses
    assert recorded["goal"] == {"best": "val_ema norm", "is": "max", "smoothing": 0.0}


@pytest.mark.slow
def test_one_program_evaluates_the_parameters_and_their_average(trained):
    *_, traced, evaluated = trained
    # The average adds no trace to those of the step, of the shapes and cost, and of evaluation.
    plain_traces, metrics = [], {"first": lambda logits, labels: plain_traces.append(0) or logits[:, 0]}
    setup = jaxddp.prepare_training(linear_model(), TABLE, 4, sgd(0.1), 2, epochs=2, metrics=metrics)
    del plain_traces[:]
    jaxddp.train(softmax_cross_entropy, setup, val=VAL, listeners=(), eval_every="5 steps")
    # With a work directory, the identity of the recipe takes one more trace.
    assert traced == len(plain_traces) + 1
    # In the state that an evaluator receives, `params` and `eval_params` are the same parameters.
    assert len(evaluated) == 6 and all(largest_difference(*pair) == 0 for pair in evaluated)
    assert all(largest_difference(evaluated[index][0], evaluated[index + 1][0]) > 0 for index in (0, 2, 4))


def test_an_average_that_replaces_the_parameters_in_evaluation_is_logged_as_val():
    @dataclasses.dataclass(frozen=True)
    class InPlace(ParameterAverage):
        beside = False

    setup = setup_of(linear_model(), sgd(0.1), TABLE, parts=(InPlace(0.9),))
    assert measured_states(setup.state, setup.parts) == {"val": setup.state}
    with pytest.raises(InputError, match="the parts 'average' and 'other' both keep parameters for evaluation; leave"):
        setup_of(linear_model(), sgd(0.1), TABLE, parts=(InPlace(0.9), ParameterAverage(0.5, "other")))


def test_a_config_adds_averages_and_lookahead_in_their_order():
    config = jaxddp.Config().replace(train={"ema": 0.99, "ema_every": 4, "ema_warmup": False, "lookahead": 6})
    lookahead, average, guard = configured_parts(config, Steps(100, 0))
    assert (type(lookahead), lookahead.period, lookahead.total_steps, lookahead.decay(3)) == (Lookahead, 6, 100, 0.5)
    assert average == ParameterAverage(0.99, every=4, warmup=False) and guard == Guard()
    with pytest.raises(InputError, match="^train.lookahead=6: the run of 5 steps would end with its initial"):
        configured_parts(config, Steps(5, 0))
