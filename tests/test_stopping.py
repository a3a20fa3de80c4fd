"""Runs that are stopped or killed and resumed, and runs that follow their validations: early stopping and plateaus."""

import functools
import json
import math
import tempfile
from contextlib import suppress
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.data import random_table, write_arrays
from support.networks import largest_difference, linear_model
from support.runs import Recorder, fails, setup_of, train
from support.shared import sgd, shared

import jaxddp
from jaxddp.cli import main
from jaxddp.config.goal import Goal
from jaxddp.core.errors import InputError, Preempted
from jaxddp.engine.parts.configured import Plateau
from jaxddp.losses import softmax_cross_entropy
from jaxddp.training.checkpoints.integrity import ValidationFile
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.listeners.jsonl import JsonLines

TABLE, VAL = random_table(50), random_table(23, seed=1)


@functools.cache
def compiled_rule(part: Plateau):
    return jax.jit(part.validated)


def factors(part: Plateau, losses: list[float]) -> list[float]:
    """Return the factor after each validation."""
    state, values = part.init({}, {}), []
    for loss in losses:
        state = compiled_rule(part)(state, {"val loss": np.float32(loss)})
        values.append(float(part.rate_factor(state)))
    return values


def test_a_plateau_lowers_the_rate_after_patience_validations_without_gain():
    """A case computed by hand, with PyTorch's threshold: an improvement is below the best loss by a relative 1e-4."""
    losses = [1.0, 0.9, 0.89995, 0.8998, 0.9, math.nan, 0.95, 0.8, 0.8, 0.8, 0.7, 0.8, 0.8]
    #         gain gain no       gain    no   lowered   no    gain no  lowered gain no lowered
    expected = [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.2]
    assert factors(Plateau(0.5, 2, 0.2), losses) == pytest.approx(expected)
    with pytest.raises(InputError, match="Plateau: patience=0: expected 1 to 1,000,000"):
        Plateau(patience=0)


@given(st.lists(st.sampled_from((0.5, 0.50004, 0.6, 0.7, 0.4999, math.inf)), max_size=20), st.integers(1, 4))
def test_a_plateau_equals_pytorchs_with_a_patience_of_one_less(losses, patience):
    best, bad, factor, expected = math.inf, 0, 1.0, []
    for loss in losses:
        # ReduceLROnPlateau.step, mode min, threshold_mode rel, cooldown 0; its patience is `patience - 1`.
        if loss < best * (1 - 1e-4):
            best, bad = loss, 0
        else:
            bad += 1
        if bad > patience - 1:
            factor, bad = max(factor * 0.1, 1e-3), 0
        expected.append(factor)
    assert factors(Plateau(0.1, patience, 1e-3), losses) == pytest.approx(expected)


class Killed(BaseException):
    """An exception that ends a run as if the process had been killed: nothing is saved."""


class KilledAt:
    """A listener that ends the run at a moment: "step" or the name of a split, and a step."""

    def __init__(self, moment: str, step: int):
        self._moment, self._step = moment, step

    def step(self, record):
        if self._moment == "step" and record.step >= self._step:
            raise Killed

    def evaluation(self, record):
        if record.final and (self._moment, self._step) == (record.split, record.step):
            raise Killed


def lines(workdir: Path) -> list[dict]:
    """Return the rows of metrics.jsonl without times."""
    timed = ("seconds", "images_per_second", "data_wait_fraction", "epoch_seconds", "peak_memory", "flops_utilization")
    rows = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in row.items() if name not in timed} for row in rows]


STEPS = 16


def run(workdir: Path, log: str, save: str, *, stop: int = 0, kill: int = 0) -> Recorder:
    """Train 16 steps, with epochs of 6.25 steps, in a work directory until it is stopped, killed or done."""
    records = Recorder()
    plan = {"train": {"duration": f"{STEPS} steps"}, "log": {"every": log}, "checkpoint": {"every": save}}
    plan |= {"eval": {"every": "0.5 epochs", "batch_size": 8}}
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        listeners = [JsonLines(workdir), records, *([KilledAt("step", kill)] if kill else [])]
        options = {"checkpoints": checkpoints, "resume_step": checkpoints.latest(), "listeners": listeners}
        setup, val = setup_of(linear_model(), sgd(0.05), TABLE), random_table(9, seed=1)
        train(setup, plan, val=val, should_stop=lambda step: step == stop, **options)
    return records


@functools.cache
def uninterrupted(log: str, save: str) -> tuple[list[dict], list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        steps = [record.step for record in run(Path(folder), log, save).steps]
        return lines(Path(folder)), steps


@pytest.mark.ci
@settings(max_examples=settings.default.max_examples // 10)
@example("3 steps", "5 steps", [(False, 4), (True, 8), (False, 11)])
@given(
    st.sampled_from(("3 steps", "0.4 epochs", "0 steps")),
    st.sampled_from(("5 steps", "0 steps")),
    st.lists(st.tuples(st.booleans(), st.integers(1, STEPS)), min_size=1, max_size=2, unique_by=lambda end: end[1]),
)
def test_a_run_stopped_or_killed_at_any_steps_logs_the_lines_of_an_uninterrupted_one(log, save, ends):
    expected, steps = uninterrupted(log, save)
    with tempfile.TemporaryDirectory() as folder:
        for killed, step in sorted(ends, key=lambda end: end[1]):
            with suppress(Killed, Preempted):
                run(Path(folder), log, save, **({"kill": step} if killed else {"stop": step}))
        logged_steps = [record.step for record in run(Path(folder), log, save).steps]
        assert lines(Path(folder)) == expected
    # Each logged step is also a step of the uninterrupted run.
    assert {*logged_steps} <= {*steps}


def setup_of_rising_loss(**changes):
    """Return a setup whose loss rises, by its negative rate: the plateau halves it at every second validation."""
    options = {"ema": 0.8, "parts": [Plateau(0.5, 2)], "best": "val loss", "best_smoothing": 0.5} | changes
    return shared(jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(-0.02), 4, epochs=3, **options))


def trained(setup, workdir: Path | None = None, listeners=(), **changes):
    cadences = {"log_every": "1 step", "eval_every": "3 steps", "save_every": "6 steps"} | changes
    return jaxddp.train(softmax_cross_entropy, setup, val=VAL, workdir=workdir, listeners=listeners, **cadences)


@pytest.fixture(scope="module")
def setup():
    return setup_of_rising_loss()


@pytest.fixture(scope="module")
def uninterrupted_run(setup, tmp_path_factory):
    """The uninterrupted run of 19 steps: validated at 3, 6, …, 18 and 19, saved at 6, 12, 18 and 19."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    state, _ = trained(setup, directory)
    return state, directory


@pytest.mark.slow
def test_the_rate_of_any_optimizer_follows_the_plateau(uninterrupted_run):
    """Compare with a loop of plain steps whose updates are halved after the second validation without improvement."""
    state, directory = uninterrupted_run
    rows = [row for row in lines(directory) if row["split"] == "val"]
    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses) and [row["step"] for row in rows] == [3, 6, 9, 12, 15, 18, 19]
    assert float(state.parts["plateau"]["rule"].scale) == 0.125
    plain = jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(1.0), 4)
    plain_state, step = plain.state, plain.step()
    for number, batch in enumerate(plain.batches(0, 19)):
        before = jax.device_get(plain_state.params["weight"])
        plain_state, _ = step(plain_state, batch)
        update = jax.device_get(plain_state.params["weight"]) - before
        rate = -0.02 * (1 if number < 9 else 0.5 if number < 15 else 0.25)
        plain_state = plain_state.replace(
            params=plain.topology.replicate({"weight": before + np.float32(rate) * update})
        )
    assert largest_difference(jax.device_get(state.params), jax.device_get(plain_state.params)) < 1e-5


KILLS = {
    "after the save, in the validation": ("evaluator", 6),
    "between the two lines": ("val", 12),
    "before the validation is saved": ("put", 12),
    "after the validation": ("step", 13),
    "after a validation that no checkpoint has": ("step", 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLS)
def test_a_run_killed_at_any_moment_and_resumed_equals_an_uninterrupted_one(
    moment, setup, uninterrupted_run, tmp_path, monkeypatch
):
    kind, step = KILLS[moment]
    with monkeypatch.context() as patched:
        if kind == "evaluator":
            evaluator = type(setup.evaluator(VAL))
            measure = evaluator.measure

            def killed(self, state, *rest):
                if int(state.step) == step:
                    raise Killed
                return measure(self, state, *rest)

            patched.setattr(evaluator, "measure", killed)
        if kind == "put":
            put = ValidationFile.put

            def killed_put(self, at, metrics):
                if at == step:
                    raise Killed
                put(self, at, metrics)

            patched.setattr(ValidationFile, "put", killed_put)
        with pytest.raises(Killed):
            trained(setup, tmp_path, [KilledAt(kind, step)])
    state, _ = trained(setup, tmp_path)
    expected, directory = uninterrupted_run
    assert lines(tmp_path) == lines(directory)
    assert largest_difference(*jax.device_get((state, expected))) == 0
    validations = [(place / "checkpoints" / "validation.json").read_text() for place in (tmp_path, directory)]
    assert validations[0] == validations[1]


@pytest.mark.slow
def test_a_run_without_gain_stops_and_continues_only_with_more_patience_or_epochs(tmp_path):
    def result() -> dict:
        return json.loads((tmp_path / "result.json").read_text())

    class EndRecorder:
        def end(self, run):
            self.status, self.at, self.reason = run.status, run.step, run.reason

    ends, options = EndRecorder(), {"best_smoothing": 0.0, "parts": []}
    setup = setup_of_rising_loss(stop_after=2, **options)
    state, history = trained(setup, tmp_path, [ends])
    # The first validation is the best. Its step is saved, although it is not at the cadence of checkpoints.
    reason = "no gain in val loss in 2 validations since step 3, where it was "
    assert (ends.status, ends.at, int(state.step)) == ("stopped", 9, 9) and history.val["step"].tolist() == [3, 6, 9]
    assert ends.reason.startswith(reason) and result() | {"reason": ends.reason} == result()
    assert ends.reason.endswith("; to continue, give a larger train.stop_after or another train.duration")
    assert Checkpoints(tmp_path / "checkpoints").best() == 3
    written = lines(tmp_path)
    repeated, history = trained(setup, tmp_path, [ends])
    assert (ends.status, ends.at) == ("stopped", 9) and ends.reason.startswith(reason)
    assert largest_difference(*jax.device_get((state, repeated))) == 0 and lines(tmp_path) == written
    assert result()["status"] == "stopped"
    patient = setup_of_rising_loss(stop_after=4, **options)
    _, history = trained(patient, tmp_path, [ends])
    assert (ends.status, ends.at) == ("stopped", 15)
    trained(patient, tmp_path, [ends], epochs=9)
    # None of four more validations is an improvement.
    assert (ends.status, ends.at) == ("stopped", 27)
    # The result equals that of the uninterrupted run.
    _, uninterrupted = trained(setup_of_rising_loss(**options), None, epochs=9)
    losses = [row["loss"] for row in lines(tmp_path) if row["split"] == "val"]
    assert losses == uninterrupted.val["loss"][:9].tolist()


@pytest.mark.parametrize(("method", "step", "saved"), [("step", 4, [4]), ("evaluation", 9, [6, 9])])
def test_a_listener_ends_the_training_saved_and_validated(setup, uninterrupted_run, tmp_path, method, step, saved):
    def stop(record):
        if record.step == step:
            raise jaxddp.StopTraining("enough")

    listener, recorder = jaxddp.Listener(), Recorder()
    setattr(listener, method, stop)
    state, history = trained(setup, tmp_path, [listener, recorder])
    assert (int(state.step), history.val["step"][-1], recorder.moments[-1]) == (step, step, ("end", "stopped"))
    assert Checkpoints(tmp_path / "checkpoints").steps() == saved and lines(tmp_path)[-1]["step"] == step
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["reason"], result["step"]) == ("stopped", "enough", step)
    continued, _ = trained(setup, tmp_path)
    assert int(continued.step) == 19
    # After "step", a further validation, at step 4, changes the plateau.
    if method == "evaluation":
        assert largest_difference(*jax.device_get((continued, uninterrupted_run[0]))) == 0
        return
    alone = jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(0.02), 4)
    jaxddp.train(softmax_cross_entropy, alone, workdir=tmp_path / "alone", listeners=[listener], log_every="1 step")
    assert Checkpoints(tmp_path / "alone/checkpoints").steps() == [4]


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"stop_after": 3}, {}, "stop_after=3: nothing is validated; give val too"),
        ({"stop_after": 3}, {"val": VAL, "eval_every": "0 steps"}, 'validated; eval_every="0 steps" disables'),
        ({"parts": [Plateau()]}, {}, "the part 'plateau' follows validations, and nothing is validated; give val too"),
        ({"best": "val f1"}, {"val": VAL}, "best='val f1' is not measured; did you mean .* are: val loss, val top1"),
        ({"best": "val_ema loss"}, {"val": VAL}, "best='val_ema loss' is not measured"),
        # The names of the user's metrics are known at the first validation.
        ({"best": "val f2"}, {"val": VAL, "evaluators": [lambda state: {"f1": 0.5}]}, "did you mean 'val f1'"),
    ],
)
def test_stopping_without_a_validation_raises_a_one_line_error(options, call, message):
    made = jaxddp.prepare_training(linear_model(), TABLE, 2, sgd(0.1), 4, **options)
    with pytest.raises(InputError, match=message):
        jaxddp.train(softmax_cross_entropy, made, listeners=(), **call)


RECIPE = """
import jax.numpy as jnp
from jaxddp.config import load

def get_config():
    return load("digits").replace(
        data={"image_size": 6, "resize": 6}, train={"batch_size": 8, "duration": "6 epochs"}, eval={"batch_size": 8},
        optimizer={"name": "momentum", "learning_rate": 50.0, "warmup": "0 steps"}, log={"to": ("jsonl",)},
    )

def get_model(config, num_classes):
    def init(key, example):
        return {"weight": jnp.zeros((example[0].size, num_classes), example.dtype)}
    return init, lambda params, images: images.reshape(len(images), -1) @ params["weight"]
"""


@pytest.fixture(scope="module")
def recipe_arguments(tmp_path_factory) -> list[str]:
    """Return the arguments that train the recipe, whose learning rate is far too high."""
    folder = tmp_path_factory.mktemp("terminal")
    write_arrays(folder / "images.npz", TABLE, VAL)
    (folder / "recipe.py").write_text(RECIPE)
    return [str(folder / "recipe.py"), "--data.path", str(folder / "images.npz"), "--workdir", str(folder / "run")]


@pytest.fixture(scope="module")
def stopped(recipe_arguments):
    words = ["--optimizer.schedule", "plateau", "--optimizer.plateau-patience", "1", "--train.ema", "0.9"]
    words += ["--train.stop-after", "3", "--train.stop-min-gain", "100", "--checkpoint.best", "val_ema loss"]
    words += ["--checkpoint.keep", "9"]
    assert main(["train", *recipe_arguments, *words]) == 0
    return [*recipe_arguments, *words], Path(recipe_arguments[-1])


@pytest.mark.slow
def test_a_resumed_run_may_change_its_stopping_settings(stopped, capfd):
    words, workdir = stopped
    goal, other = ValidationFile(workdir / "checkpoints", None).goal, ["--checkpoint.best", "val loss"]
    assert "--train.ema was 0.9 and is now 0.5" in fails(["train", *words, *other, "--train.ema", "0.5"], capfd)
    assert ValidationFile(workdir / "checkpoints", None).goal == goal
    # With another metric another checkpoint is the best, the latest of those with the same value.
    assert main(["train", *words, "--checkpoint.best", "val top1", "--train.stop-after", "1"]) == 0
    assert ValidationFile(workdir / "checkpoints", None).goal == Goal()
    assert "since step 25, where it was 13.04%; the best checkpoint is step 13; to continue" in capfd.readouterr().out
