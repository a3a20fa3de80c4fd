"""Averages of the parameters and Lookahead's slow weights: compared with loops in NumPy."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import AS_THEY_ARE, CLASSES, random_table
from support.networks import largest_difference, linear_model
from support.runs import setup_of
from support.shared import sgd, shared

import jaxddp
from jaxddp.core.errors import InputError
from jaxddp.engine.parts.average import ParameterAverage
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.engine.parts.guard import Guard
from jaxddp.engine.parts.lookahead import Lookahead
from jaxddp.engine.parts.part import Part, measured_states
from jaxddp.engine.state import EVAL_PARAMS, TrainState
from jaxddp.losses.cross_entropy import softmax_cross_entropy

TABLE, VAL = random_table(50), random_table(23, seed=1)


def decays(decay: float, steps: int, every: int, warmup: bool) -> list[float | None]:
    """Return the decay of the average at each step; None where the average does not change."""
    found = []
    for step in range(steps):
        own = min(decay, (1 + step) / (10 + step)) if warmup else decay
        found.append(own**every if (step + 1) % every == 0 else None)
    return found


@pytest.mark.parametrize(("every", "warmup"), [(1, True), (1, False), (3, True), (3, False)])
def test_the_average_equals_that_of_a_numpy_loop(every, warmup):
    part = ParameterAverage(0.8, every=every, warmup=warmup)
    course = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    state, average = TrainState(jnp.int32(0), {"w": jnp.asarray(course[0])}, {}, ()), course[0].astype(np.float64)
    own = part.init(state.params, {})
    for kept, params in zip(decays(0.8, 8, every, warmup), course[1:], strict=True):
        after = state.replace(step=state.step + 1, params={"w": jnp.asarray(params)})
        following, same = part.update(own, state, after, None)
        if kept is None:
            np.testing.assert_array_equal(following[EVAL_PARAMS]["w"], own[EVAL_PARAMS]["w"])
        else:
            average = kept * average + (1 - kept) * params
            assert np.abs(following[EVAL_PARAMS]["w"] - own[EVAL_PARAMS]["w"]).min() > 0
        np.testing.assert_allclose(following[EVAL_PARAMS]["w"], average, rtol=1e-5, atol=1e-6)
        assert same is after
        own, state = following, after


def test_the_average_in_a_step_equals_a_loops_on_one_and_on_four_devices():
    found, parts = [], (Lookahead(2, optax.constant_schedule(0.5), 6), ParameterAverage(0.9, every=2))
    with jax.enable_x64(True):
        weight = np.random.default_rng(3).normal(size=(108, CLASSES)) * 0.1
        for devices in (1, 4):
            setup = setup_of(linear_model(), sgd(0.1), TABLE, devices=devices, parts=parts, data=AS_THEY_ARE)
            # NumPy computes every step in float64.
            fresh = [setup.topology.replicate({"weight": weight}) for _ in range(3)]
            slow = {"params": fresh[1], "model_state": setup.state.model_state}
            own = {"lookahead": slow, "average": {EVAL_PARAMS: fresh[2]}}
            state, average, step = setup.state.replace(params=fresh[0], parts=own), weight, setup.step()
            for kept, batch in zip(decays(0.9, 6, 2, warmup=True), setup.batches(0, 6), strict=True):
                state, _ = step(state, batch)
                if kept is not None:
                    average = kept * average + (1 - kept) * np.asarray(state.params["weight"])
            found.append(jax.device_get((state.params, state.parts)))
            # The decay is float32.
            assert largest_difference(jax.device_get(state.eval_params), {"weight": average}) < 1e-6
    assert found[0][0]["weight"].dtype == np.float64
    assert largest_difference(*found) < 1e-9 and largest_difference(found[0][0], {"weight": average}) > 1e-3


class Shows:
    """A listener that stores the predictions of a few images."""

    wants_predictions = 7

    def evaluation(self, record):
        if record.predictions is not None:
            self.last, self.split = record.predictions, record.split


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run with an average, its work directory, the number of traces of the metric, the arguments of
    evaluators, and a listener with predictions."""
    traced, given, shown = [], [], Shows()

    def first(logits, labels):
        traced.append(logits.shape)
        return logits[:, 0]

    def norm(state):
        given.append(jax.device_get((state.params, state.eval_params)))
        return {"norm": float(np.linalg.norm(state.params["weight"]))}

    options = {"ema": 0.8, "ema_every": 2, "best": "val_ema norm", "metrics": {"first": first}}
    setup = jaxddp.prepare_training(linear_model(), TABLE, 4, sgd(0.1), 2, epochs=2, **options)
    before = len(traced)
    directory = tmp_path_factory.mktemp("average") / "run"
    state, history = jaxddp.train(
        softmax_cross_entropy,
        setup,
        val=VAL,
        evaluators=[norm],
        workdir=directory,
        listeners=[shown],
        log_every="1 step",
        eval_every="5 steps",
    )
    return setup, state, history, directory, len(traced) - before, given, shown


@pytest.mark.slow
def test_the_parameters_and_their_average_are_both_evaluated_and_logged(trained):
    setup, state, history, directory, *_ = trained
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["split"]) for row in rows if row["split"] != "train"] == [
        (step, split) for step in (5, 10, 13) for split in ("val", "val_ema")
    ]
    assert [*history.val] == [*history.val_ema] and history.val_ema["step"].tolist() == [5, 10, 13]
    assert len(history.to_frame("val_ema")) == 3 and set(history.to_frame()["split"]) == {"train", "val", "val_ema"}
    # Evaluation measures the average, and without it the trained parameters.
    average = jaxddp.evaluate(state, setup, VAL)
    plain = jaxddp.evaluate(state.replace(parts={}), setup, VAL)
    assert average["loss"] != plain["loss"] and average["count"] == 23
    result = json.loads((directory / "result.json").read_text())
    for split, measured, of_history in (("val", plain, history.val), ("val_ema", average, history.val_ema)):
        assert result[split]["loss"] == of_history["loss"][-1] == pytest.approx(measured["loss"], rel=1e-6)
        assert result[split]["count"] == 23 and of_history["count"][-1] == 23
    known = json.loads((directory / "checkpoints" / "validation.json").read_text())
    assert (known["13"]["loss"], known["13"]["val_ema loss"]) == (result["val"]["loss"], result["val_ema"]["loss"])
    assert known["goal"] == {"best": "val_ema norm", "is": "max", "smoothing": 0.0}


@pytest.mark.slow
def test_one_program_evaluates_the_parameters_and_their_average(trained):
    *_, traced, given, _ = trained
    # One trace for the step, one for shapes and cost, one for evaluation: as many as without an average.
    plain, names = [], {"first": lambda logits, labels: plain.append(0) or logits[:, 0]}
    setup = jaxddp.prepare_training(linear_model(), TABLE, 4, sgd(0.1), 2, epochs=2, metrics=names)
    del plain[:]
    jaxddp.train(softmax_cross_entropy, setup, val=VAL, listeners=(), eval_every="5 steps")
    # A work directory also holds the recipe's identity.
    assert traced == len(plain) + 1
    # An evaluator sees the same parameters in `params` and `eval_params`.
    assert len(given) == 6 and all(largest_difference(*each) == 0 for each in given)
    assert all(largest_difference(given[place][0], given[place + 1][0]) > 0 for place in (0, 2, 4))


def test_readers_find_the_best_checkpoint_by_an_evaluator_of_the_average(trained):
    _, _, history, directory, *_, shown = trained
    best = int(history.val_ema["step"][np.argmax(history.val_ema["norm"])])
    run = jaxddp.load_run(directory, model=linear_model(), devices=1)
    assert run.step == best
    last = jaxddp.load_run(directory, "latest", model=linear_model(), devices=1)
    assert last.outcome(VAL).accuracy == pytest.approx(history.val_ema["top1"][-1])
    probabilities = last.predict(shown.last.images).probabilities
    assert shown.split == "val_ema"
    np.testing.assert_allclose(shown.last.probabilities, probabilities.max(-1), rtol=1e-5)


@pytest.mark.slow
def test_images_on_the_devices_give_the_same_metrics_of_both(trained):
    _, _, history, *_ = trained
    data = dataclasses.replace(TABLE.default_data(), cache="device")
    options = {"ema": 0.8, "ema_every": 2, "data": data}
    setup = jaxddp.prepare_training(linear_model(), TABLE, 4, sgd(0.1), 2, epochs=2, **options)
    _, resident = jaxddp.train(softmax_cross_entropy, setup, val=VAL, listeners=(), eval_every="5 steps")
    for name in ("loss", "top1", "count"):
        np.testing.assert_allclose(resident.val_ema[name], history.val_ema[name], rtol=1e-6)


def test_an_evaluation_in_place_of_the_parameters_logs_only_val():
    @dataclasses.dataclass(frozen=True)
    class InPlace(ParameterAverage):
        beside = False

    setup = setup_of(linear_model(), sgd(0.1), TABLE, parts=(InPlace(0.9),))
    assert measured_states(setup.state, setup.recipe.parts) == {"val": setup.state}
    with pytest.raises(InputError, match="the parts 'average' and 'other' both keep parameters for evaluation; leave"):
        setup_of(linear_model(), sgd(0.1), TABLE, parts=(InPlace(0.9), ParameterAverage(0.5, "other")))


def test_a_config_adds_averages_and_lookahead_in_their_order():
    config = jaxddp.Config().replace(train={"ema": 0.99, "ema_every": 4, "ema_warmup": False, "lookahead": 6})
    slow, average, guard = configured_parts(config, 100)
    assert isinstance(slow, Lookahead) and (slow.period, slow.total_steps, slow.decay(3)) == (6, 100, 0.5)
    assert average == ParameterAverage(0.99, every=4, warmup=False) and guard == Guard()
    assert all(isinstance(part, Part) for part in (slow, average, guard))


@pytest.mark.slow
def test_a_key_for_lookahead_adds_the_lookahead_part():
    states = []
    for options in ({"lookahead": 3, "lookahead_decay": 0.25}, {"parts": [Lookahead(3, lambda step: 0.25, 13)]}):
        setup = shared(jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(0.1), 4, epochs=2, **options))
        states.append(jaxddp.train(softmax_cross_entropy, setup, listeners=())[0])
    assert largest_difference(*map(jax.device_get, states)) == 0
    assert largest_difference(*jax.device_get((states[0].params, states[0].parts["lookahead"]["params"]))) == 0
    setup = jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(0.1), 4, epochs=2, lookahead=3)
    with pytest.raises(
        InputError, match="^lookahead: a run of 2 epochs ends with the slow weights, but the length is now 3"
    ):
        jaxddp.train(softmax_cross_entropy, setup, epochs=3, listeners=())


def test_an_average_without_a_period_is_rejected():
    with pytest.raises(InputError, match="ParameterAverage: every=0: expected 1 to"):
        ParameterAverage(0.9, every=0)
