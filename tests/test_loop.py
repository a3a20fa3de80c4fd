"""The training loop: metrics of every step, exact evaluation, and stops after which a run resumes exactly."""

import dataclasses
import functools
import json
import re
import shutil
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs
from support.data import random_table
from support.networks import SmallNet, largest_difference, linear_model
from support.peers import Second
from support.runs import Recorder, exploding, plan_of, train
from support.shared import sgd

import jaxddp.core.phases as phases
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.core.errors import InputError, NonFiniteError, Preempted
from jaxddp.engine.state import TrainState
from jaxddp.job.environment import report_work
from jaxddp.setup.run_setup import RunSetup
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.epoch_sums import Clock
from jaxddp.training.events import StepRecord
from jaxddp.workdir.session import resume_step

TABLE = random_table(50)
VAL = random_table(23, seed=1)
STEPS = 20


def setup_of(devices: int = 4, optimizer=None, net=None, table=TABLE) -> RunSetup:
    optimizer = optimizer or sgd(0.05, momentum=0.9)
    net = net or SmallNet(batch_norm=True, sync="data")
    data = DataConfig(augment=AugmentConfig(pad=1))
    return runs.setup_of(net, optimizer, table, devices=devices, data=data, seed=5)


def run(setup, plan, **settings):
    recorder = Recorder()
    return jax.device_get(train(setup, plan, val=VAL, listeners=[recorder], **settings)), recorder


@functools.cache
def uninterrupted():
    """Return the state and the records of a run that logs every step and is not interrupted."""
    return run(setup_of(), plan_of(log="1 step"))


@pytest.mark.slow
def test_listeners_are_called_in_the_order_that_fit_documents(tmp_path, monkeypatch):
    # With this private interval, each batch of a validation is reported. `Recorder` ignores records that are not final.
    monkeypatch.setattr("jaxddp.training.evaluation._REPORT_SECONDS", -1.0)
    _, recorder = run(setup_of(), plan_of(8, log="3 steps"), checkpoints=Checkpoints(tmp_path / "c"))
    # An epoch of 50 examples in batches of 8 ends with step 7, and the run with step 8. Step 4 is logged, as it saves.
    assert recorder.moments == [
        ("start", 0), ("step", 3), ("step", 4), ("step", 6), ("step", 7), ("evaluation", 7), ("step", 8),
        ("evaluation", 8), ("end", "done")
    ]  # fmt: skip
    ready: list[bool] = []

    def own_statistics(state):
        ready.append(all(leaf.is_ready() for leaf in jax.tree.leaves(state)))
        return state

    # The end of an epoch and the last step are logged whatever the cadence. The time of unfinished steps is not paused.
    monkeypatch.setattr(RunSetup, "own_statistics", lambda self: own_statistics)
    _, recorder = run(setup_of(), plan_of(9, log="1000 steps", eval="0 steps", checkpoint="0 steps"))
    assert recorder.moments == [("start", 0), ("step", 7), ("step", 9), ("end", "done")] and ready == [True]


@pytest.mark.parametrize(("log", "reported"), [("1000 steps", [10]), ("6 steps", [])])
def test_the_speed_after_ten_steps_is_reported_if_no_step_was_logged_before(log, reported):
    early: list[StepRecord] = []
    listener = SimpleNamespace(first_steps=early.append)
    plan = plan_of(14, log=log, eval="0 steps", checkpoint="0 steps")
    train(setup_of(net=linear_model(), table=random_table(200)), plan, val=VAL, listeners=[listener])
    assert [record.step for record in early] == reported
    assert all(record.images_per_second > 0 for record in early)


def test_records_have_the_losses_of_steps_the_means_of_epochs_and_the_validations_left():
    _, all_records = uninterrupted()
    _, some_records = run(setup_of(), plan_of(log="5 steps"))
    losses = {record.step: record.metrics["loss"] for record in all_records.steps}
    assert len(losses) == STEPS
    assert all(record.metrics["loss"] == losses[record.step] for record in some_records.steps)
    ends = [record for record in all_records.steps if record.epoch_end]
    assert [(record.step, record.epoch_end.number) for record in ends] == [(7, 1), (13, 2), (19, 3)]
    mean = np.mean([losses[step] for step in range(8, 14)])
    assert ends[1].epoch_end.metrics["loss"] == pytest.approx(mean, rel=1e-6)
    validated = [record.step for record in all_records.evaluations]
    left = [sum(step >= record.step for step in validated) for record in all_records.steps]
    assert [record.validations_left for record in all_records.steps] == left


def test_speed_and_waiting_are_those_of_the_steps_since_the_last_record(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("jaxddp.training.epoch_sums.time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock(batch_size=8)

    def step(waits: float, computes: float) -> None:
        with clock.waiting_for_data():
            now[0] += waits
        now[0] += computes
        clock.count_dispatch(1, 0.0)

    # The first step warms up.
    for waits, computes in ((9, 90), (1, 3), (0, 4)):
        step(waits, computes)
    assert clock.rates() == (2 * 8 / 8, 1 / 8)
    with clock.paused():
        now[0] += 1000
    step(1, 1)
    assert clock.rates() == (8 / 2, 1 / 2) and clock.rate() == 3 * 8 / 10 and clock.end_epoch() == 99 + 8 + 2


def test_the_time_before_the_first_step_counts_for_the_run_but_not_for_its_speed():
    recorder, slow = Recorder(), SimpleNamespace(start=lambda run: time.sleep(0.5))
    with report_work():
        # As if the process had read its data for 1,000 s. The end of the block restores the value.
        phases._tracker.work_began = time.monotonic() - 1000
        plan = plan_of(1, log="1 step", eval="0 steps", checkpoint="0 steps")
        train(setup_of(net=linear_model()), plan, listeners=[recorder, slow])
    assert recorder.ends[0].seconds >= 1000
    assert recorder.steps[0].images_per_second > 8 / 0.5


def test_a_validation_shows_its_progress_and_its_time_leaves_out_compiling(monkeypatch):
    monkeypatch.setattr("jaxddp.training.evaluation._REPORT_SECONDS", -1.0)
    setup, details = setup_of(net=linear_model()), []
    evaluator = setup.evaluator(VAL, 8)

    def compiling(*arguments):
        time.sleep(0.3 * (not details))
        return evaluator.step(*arguments)

    def between():
        details.append(phases.activity().details())

    begin, running = time.monotonic(), phases.running_time()
    dataclasses.replace(evaluator, step=compiling).measure(setup.state, between=between)
    assert time.monotonic() - begin - (phases.running_time() - running) >= 0.3
    expected = [rf"{seen} of 23 images, \d s, \d s left, [\d,.e+]+ images/s" for seen in (8, 16)]
    assert all(map(re.fullmatch, expected, details)) and len(details) == 2


@pytest.mark.slow
@pytest.mark.parametrize("devices", (1, 8))
def test_evaluation_is_exact_for_sizes_that_are_not_multiples_of_the_batch_size(devices):
    setup = setup_of(devices)
    for size in (1, 7, 23):
        figures = setup.evaluator(random_table(size, seed=1))(setup.state)
        assert figures["count"] == size and round(figures["top1"] * size, 6).is_integer()
    # A batch that is larger than the set has no more padding than needed.
    evaluator = setup.evaluator(random_table(23, seed=1), 10_000_000 // 8 * 8)
    assert [batch.image.shape[0] for (batch,) in evaluator.batches()] == [-(-23 // devices) * devices]
    assert evaluator(setup.state)["count"] == 23


@pytest.mark.slow
@pytest.mark.parametrize("stop", (1, 5, pytest.param(13, marks=pytest.mark.exhaustive)))
def test_a_run_interrupted_anywhere_and_resumed_is_the_same_bit_for_bit(tmp_path, stop):
    whole, expected = uninterrupted()
    plan, checkpoints = plan_of(log="1 step", checkpoint="0 steps"), Checkpoints(tmp_path)
    with pytest.raises(Preempted, match=f"saved step {stop} of {STEPS}"):
        run(setup_of(), plan, checkpoints=checkpoints, should_stop=lambda step: step == stop)
    resumed, recorder = run(setup_of(), plan, checkpoints=checkpoints, resume_step=stop)
    assert largest_difference(resumed, whole) == 0
    assert [record.step for record in recorder.steps] == list(range(stop + 1, STEPS + 1))
    for record, same in zip(recorder.steps, expected.steps[stop:], strict=True):
        assert record.metrics == same.metrics
        assert (record.epoch_end and record.epoch_end.metrics) == (same.epoch_end and same.epoch_end.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ("4 steps", "0 steps"))
def test_a_stop_during_validation_saves_and_a_resumed_run_repeats_the_validation(tmp_path, checkpoint):
    whole, expected = uninterrupted()
    stop, calls = (7 if checkpoint == "4 steps" else STEPS), []  # The last step of an epoch, or of the run.

    def before_the_last_batch(step: int) -> bool:
        calls.append(step)
        return calls.count(stop) == 3  # One call after the step, then one for each of three batches.

    plan, checkpoints = plan_of(log="1 step", checkpoint=checkpoint), Checkpoints(tmp_path)
    with pytest.raises(Preempted, match=f"saved step {stop} of {STEPS}"):
        run(setup_of(), plan, checkpoints=checkpoints, should_stop=before_the_last_batch)
    assert checkpoints.latest() == stop and stop not in checkpoints.validations.by_step
    resumed, recorder = run(setup_of(), plan, checkpoints=checkpoints, resume_step=stop)
    assert recorder.moments[:2] == [("start", stop), ("evaluation", stop)]
    assert stop in checkpoints.validations.by_step and largest_difference(resumed, whole) == 0
    measured = {record.step: record.metrics for record in expected.evaluations if record.step >= stop}
    assert {record.step: record.metrics for record in recorder.evaluations} == measured


@pytest.mark.slow
def test_a_validation_that_fails_loses_no_training(tmp_path):
    def evaluator_that_fails(state):
        raise InputError("no figures today")

    checkpoints, plan = Checkpoints(tmp_path), plan_of(checkpoint="7 steps")
    with pytest.raises(InputError, match="no figures today"):
        train(setup_of(), plan, val=VAL, evaluators=[evaluator_that_fails], checkpoints=checkpoints)
    checkpoints.wait()
    assert checkpoints.steps() == [7]


@pytest.mark.slow
def test_a_run_resumed_on_another_number_of_devices_is_equal_within_tolerance(tmp_path):
    plan, checkpoints = plan_of(checkpoint="0 steps"), Checkpoints(tmp_path)
    with pytest.raises(Preempted):
        run(setup_of(), plan, checkpoints=checkpoints, should_stop=lambda step: step == 9)
    resumed, _ = run(setup_of(8), plan, checkpoints=checkpoints, resume_step=9)
    assert largest_difference(resumed.params, uninterrupted()[0].params) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("bad", (1, pytest.param(11, marks=pytest.mark.exhaustive)))
def test_a_run_that_turns_non_finite_leaves_only_finite_checkpoints(tmp_path, bad):
    checkpoints = Checkpoints(tmp_path / "c", keep=100)
    setup = setup_of(net=linear_model(), optimizer=exploding(bad))
    template = jax.tree.map(jnp.copy, setup.state)  # Training reuses the memory of the state.
    with pytest.raises(NonFiniteError) as raised:
        run(setup, plan_of(30, log="10 steps", checkpoint="2 steps"), checkpoints=checkpoints)
    assert raised.value.exit_code == 1
    checkpoints.wait()
    saved = checkpoints.steps()
    assert saved == list(range(2, bad, 2))
    for step in saved:
        assert np.isfinite(jax.device_get(checkpoints.restore(step, template)[0].params)["weight"]).all()


def test_a_failed_run_names_the_first_step_that_is_not_finite_or_the_step_of_the_failed_listener():
    ends, steps = [], []

    def fail(record):
        steps.append(record.step)
        raise RuntimeError("disk on fire")

    # Update number 11 spoils the parameters, so step 12 is the first to use them. The metrics are fetched at step 13.
    setup, plan = (
        setup_of(net=linear_model(), optimizer=exploding(11)),
        plan_of(30, eval="0 steps", checkpoint="0 steps"),
    )
    with pytest.raises(NonFiniteError, match="^step 12: the loss is nan"):
        train(setup, plan | {"log": {"every": "20 steps"}}, listeners=[SimpleNamespace(end=ends.append)])
    setup = setup_of(net=linear_model(), optimizer=exploding(11))
    with pytest.raises(RuntimeError, match="disk on fire"):
        train(setup, plan | {"log": {"every": "3 steps"}}, listeners=[SimpleNamespace(step=fail, end=ends.append)])
    assert [(end.status, end.step) for end in ends] == [("failed", 12), ("failed", 3)]
    assert steps == [3] and "disk on fire" in ends[1].reason


@pytest.mark.slow
def test_the_last_k_checkpoints_are_kept_and_the_best(tmp_path):
    setup, checkpoints = setup_of(), Checkpoints(tmp_path / "c", keep=2)
    for step, top1 in enumerate((None, 0.9, 0.3, 0.2, None, 0.4), start=1):
        checkpoints.save(step, setup.state, {})
        if top1 is not None:
            checkpoints.validations.put(step, {"top1": top1, "count": 1})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "c", keep=2)
    assert checkpoints.steps() == [2, 5, 6]
    assert (checkpoints.latest(), checkpoints.best()) == (6, 2)
    assert [checkpoints.step(which) for which in ("latest", "best", "5")] == [6, 2, 5]
    with pytest.raises(InputError, match="no checkpoint '4'; give latest, best or one of the steps 2, 5, 6"):
        checkpoints.step("4")
    assert [step for step in checkpoints.steps() if step in checkpoints.validations.by_step] == [2, 6]
    checkpoints.save(7, setup.state, {})
    checkpoints.validations.put(7, {"loss": 0.1, "count": 1})
    checkpoints.wait()
    assert (checkpoints.steps(), checkpoints.best()) == ([2, 6, 7], 2)
    checkpoints.close()
    # The metrics of a removed checkpoint must not be used for a new one of the same step.
    shutil.rmtree(tmp_path / "c" / "7")
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        checkpoints.save(7, setup.state, {})
        assert 7 not in checkpoints.validations.by_step
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.steps() == [2, 6, 7] and 7 not in checkpoints.validations.by_step
    shutil.rmtree(tmp_path / "c" / "2")
    assert Checkpoints(tmp_path / "c", keep=2).best() == 6


def test_metrics_that_are_not_finite_are_written_as_json_and_such_a_state_is_never_saved(tmp_path):
    setup, checkpoints = setup_of(), Checkpoints(tmp_path)
    checkpoints.save(1, setup.state, {})
    checkpoints.validations.put(1, {"top1": np.float32(0.5), "loss": np.float32(np.inf), "count": 3})
    checkpoints.save(2, setup.state, {})
    checkpoints.validations.put(2, {"top1": np.nan})
    assert checkpoints.best() == 1
    bad = setup.state.replace(params=jax.tree.map(lambda x: x * np.nan, setup.state.params))
    with pytest.raises(NonFiniteError, match="step 3: .* not saved; the last good one is step 2"):
        checkpoints.save(3, bad, {})
    checkpoints.wait()
    assert checkpoints.latest() == 2
    checkpoints.close()
    known = json.loads((tmp_path / "validation.json").read_text(), parse_constant=pytest.fail)
    assert known == {"1": {"top1": 0.5, "loss": None, "count": 3}, "2": {"top1": None}}


def test_reading_does_not_disturb_a_checkpoint_that_is_being_written(tmp_path):
    setup, unfinished = setup_of(), tmp_path / "c" / "2.orbax-checkpoint-tmp"
    with Checkpoints(tmp_path / "c") as writer:
        writer.save(1, setup.state, {})
        writer.validations.put(1, {"top1": 0.5, "count": 1})
        writer.wait()
        unfinished.mkdir()
        with Checkpoints(tmp_path / "c", read_only=True) as reader:
            assert (reader.steps(), reader.best()) == ([1], 1)
            state, _ = reader.restore(reader.step("best"), setup.state)
    assert largest_difference(state.params, setup.state.params) == 0 and unfinished.exists()
    # The next run in this directory removes the unfinished checkpoint, in a thread.
    deadline = time.monotonic() + 20
    with Checkpoints(tmp_path / "c"):
        while unfinished.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not unfinished.exists()
    with Checkpoints(tmp_path / "none", read_only=True) as reader:
        assert reader.steps() == [] and not (tmp_path / "none").exists()


def test_a_checkpoint_of_another_architecture_is_rejected(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    checkpoints.save(1, setup_of().state, {})
    checkpoints.wait()
    other = setup_of(net=SmallNet(), optimizer=sgd(0.05, momentum=0.9))
    message = "another architecture or optimizer: .* is .* in the checkpoint and .* in this run"
    with pytest.raises(InputError, match=message):
        checkpoints.restore(1, other.state)


def test_a_checkpoint_that_cannot_be_written_raises_a_one_line_error(tmp_path):
    import resource

    state = TrainState(np.int32(0), {"w": np.random.default_rng(0).random(1_000_000)}, {}, ())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    expected = f"^{tmp_path}: cannot be written \\(File too large\\); choose another place$"
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(1, state, {})
        with pytest.raises(InputError, match=expected):
            checkpoints.wait()
        # The write error does not hide the error that ended the run.
        with pytest.raises(NonFiniteError) as raised, checkpoints:
            checkpoints.save(2, state, {})
            raise NonFiniteError("step 3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.__notes__ == [f"then: {tmp_path}: cannot be written (File too large); choose another place"]


def test_processes_resume_from_the_checkpoint_that_process_0_finds(tmp_path, monkeypatch):
    with Checkpoints(tmp_path) as saved:
        saved.save(4, setup_of().state, {})
    for expected in (8, None):
        # Process 1 receives the value of process 0.
        monkeypatch.setattr(Second, "exchange", lambda self, name, value, first=expected: [first, value])
        checkpoints = Checkpoints(tmp_path, Second(), read_only=True)
        assert resume_step(checkpoints, "auto") == expected
        accepted, refused = ("must", "never") if expected else ("never", "must")
        assert resume_step(checkpoints, accepted) == expected
        message = "has checkpoints up to step 8; a new run" if expected else "no checkpoint"
        with pytest.raises(InputError, match=message):
            resume_step(checkpoints, refused)


def test_batches_that_miss_an_example_are_detected():
    setup = setup_of()
    evaluator = setup.evaluator(VAL)
    incomplete = type(evaluator)(evaluator.step, lambda: list(evaluator.batches())[:-1], evaluator.num_examples)
    with pytest.raises(RuntimeError, match="saw 16 examples of 23"):
        incomplete(setup.state)
    sums, count = evaluator.step(setup.state, *next(evaluator.batches())), 2**24 - 1
    many = sums.replace(values=count + 0 * sums.values)  # Counts above 2^24 are exact.
    dataclasses.replace(evaluator, step=lambda *_: many, num_examples=3 * count)(setup.state)


@pytest.mark.slow
def test_the_schedule_of_the_notebook_multiplies_the_updates():
    recorder, rate_recorder = Recorder(), Recorder()
    scheduled = train(
        setup_of(net=linear_model(), optimizer=sgd(0.1)),
        plan_of(3),
        # The schedule gets 0 for the first step. There are no updates after the second step.
        schedule=lambda step: jnp.where(step < 2, 0.5, 0.0),
        listeners=[recorder],
    )
    # The rate of the caller's optimizer is unknown, so it is not logged, whatever the factor.
    assert recorder.steps and all(record.learning_rate is None for record in recorder.steps)
    # A record has the learning rate of its step.
    options = {"learning_rate": lambda step: 0.25 * step, "listeners": [rate_recorder]}
    plain = train(setup_of(net=linear_model(), optimizer=sgd(0.05)), plan_of(2, log="1 step"), **options)
    assert [(record.step, record.learning_rate) for record in rate_recorder.steps] == [(1, 0.0), (2, 0.25)]
    assert largest_difference(jax.device_get(scheduled.params), jax.device_get(plain.params)) < 1e-7
