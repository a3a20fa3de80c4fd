"""A profile's trace contains the chosen steps, complete and annotated, and does not change the run."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data import random_table, write_arrays
from support.networks import largest_difference, linear_model
from support.runs import exploding, metrics, setup_of, train, train_words
from support.shared import sgd

from jaxddp.cli import main
from jaxddp.config import Config
from jaxddp.core.errors import InputError, NonFiniteError
from jaxddp.measure.profile import STEP_NAME, Profile
from jaxddp.training import progress
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.events import RunStart
from jaxddp.training.plan import Plan

TABLE = random_table(50)


def plan_of(steps: int = 12, profile: str | None = "4 steps") -> dict[str, Any]:
    """Return the config of a plan."""
    sections = {"log": {"every": "5 steps", "profile": profile}, "checkpoint": {"every": "0 steps"}}
    return {"train": {"duration": f"{steps} steps"}, **sections}


def make_plan(*arguments: Any) -> Plan:
    """Return the plan of that config for the tests' data."""
    return Plan.of(Config().replace(**plan_of(*arguments)).replace(train={"batch_size": 8}), len(TABLE))


def run(plan: dict[str, Any], directory: Path, *, cache: str = "none", optimizer=None, **options: Any):
    data = Config().replace(data={"cache": cache}).data
    setup = setup_of(linear_model(), optimizer or sgd(0.05), TABLE, devices=2, data=data, seed=5)
    return jax.device_get(train(setup, plan, profile=directory, **options))


def traced_steps(directory: Path) -> list[int]:
    """Return the step numbers of a trace's annotations, in order of time."""
    reader = getattr(jax.profiler, "ProfileData", None)
    if reader is None:
        pytest.skip("this JAX does not read traces")
    (path,) = directory.glob("plugins/profile/*/*.xplane.pb")
    events = [event for plane in reader.from_file(str(path)).planes for line in plane.lines for event in line.events]
    steps = [(event.start_ns, dict(event.stats)["step_num"]) for event in events if event.name == STEP_NAME]
    return [int(number) for _, number in sorted(steps)]


@given(total=st.integers(1, 60), requested=st.integers(0, 30), longest=st.integers(1, 40), data=st.data())
def test_the_requested_number_of_steps_is_traced_but_never_the_compiling_one(total, requested, longest, data):
    done = data.draw(st.integers(0, total))
    plan = make_plan(total, f"{requested} steps")
    traced = plan.traced(done)
    assert len(traced) == max(0, min(requested, total - done - 1))
    if traced:
        assert done + 2 <= traced[0] <= done + 4 and traced[-1] <= total
        # Three steps precede the trace, unless the run is too short.
        assert traced[0] == done + 4 or traced[-1] == total
    # Steps that are dispatched together are traced together.
    for chunk in plan.chunks(done, longest):
        assert len({step + 1 in traced for step in chunk}) == 1
    unprofiled = make_plan(total, None)
    assert not unprofiled.traced(done)


def test_the_device_is_idle_when_a_trace_begins_and_ends(tmp_path, monkeypatch):
    events: list[object] = []

    class State:
        def __init__(self, step: int):
            self.step = step

        def block_until_ready(self) -> None:
            events.append(f"state {self.step} is ready")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda _: events.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: events.append("stop"))
    with Profile(tmp_path, range(3, 5), nullcontext) as profile:
        for number in range(1, 7):
            with profile.step(number, State(number - 1)):
                events.append(number)
            profile.done(number, State(number))
    assert events == [1, 2, "state 2 is ready", "start", 3, 4, "state 4 is ready", "stop", 5, 6]


@pytest.mark.slow
def test_the_trace_holds_exactly_the_requested_steps(tmp_path):
    expected = run(plan_of(profile=None), tmp_path / "none")
    assert not (tmp_path / "none").exists()
    state = run(plan_of(), tmp_path / "profile")
    assert traced_steps(tmp_path / "profile") == [4, 5, 6, 7]
    assert largest_difference(state, expected) == 0


@pytest.mark.slow
def test_a_resumed_run_traces_its_own_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path / "c")
    run(plan_of(5, None), tmp_path, checkpoints=checkpoints)
    checkpoints.wait()
    run(plan_of(12, "2 steps"), tmp_path, checkpoints=checkpoints, resume_step=5)
    assert traced_steps(tmp_path) == [9, 10]


@pytest.mark.ci
def test_a_failed_run_writes_its_trace_and_frees_the_profiler(tmp_path):
    # Update number 4 makes the parameters NaN. Step 5 is the first with a NaN loss, and its metrics are fetched.
    with pytest.raises(NonFiniteError, match="^step 5"):
        run(plan_of(12, "8 steps"), tmp_path / "failed", optimizer=exploding(4))
    assert traced_steps(tmp_path / "failed") == [4, 5]
    run(plan_of(), tmp_path / "next")
    assert len(traced_steps(tmp_path / "next")) == 4


@pytest.mark.slow
def test_an_unwritable_trace_raises_a_one_line_error_and_hides_no_other_error(tmp_path, monkeypatch):
    stop = jax.profiler.stop_trace

    def stop_on_a_full_disk() -> None:
        stop()
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(jax.profiler, "stop_trace", stop_on_a_full_disk)
    with pytest.raises(InputError, match=r"one: the trace cannot be written \(No space left on device\); free"):
        run(plan_of(), tmp_path / "one")
    with pytest.raises(NonFiniteError) as raised:
        run(plan_of(12, "8 steps"), tmp_path / "two", optimizer=exploding(4))
    assert "the trace cannot be written" in raised.value.__notes__[0]
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="file: cannot be written"):
        run(plan_of(), tmp_path / "file")


def test_the_opening_lines_name_the_traced_steps():
    def opening(traced: range | None) -> str:
        return progress.opening(RunStart(0, 40, 8, 50, 1, 1, traced=traced))[-1]

    assert opening(range(4, 14)).endswith(" | tracing steps 4 to 13")
    assert opening(range(2, 2)).endswith(" | no step left to trace (the first step compiles and is not traced)")
    assert opening(None) == "training: 40 steps (6.4 epochs) | global batch 8 on 1 x cpu"


@pytest.mark.slow
def test_a_trace_is_written_to_the_work_directory_and_is_not_part_of_the_recipe(tmp_path, capfd):
    data, workdir = tmp_path / "set.npz", tmp_path / "w"
    write_arrays(data, random_table(39, image=16), random_table(11, seed=1, image=16))
    options = ["--parallel.devices", "1", "--log.to", "jsonl"]
    words = train_words(data, workdir, "--log.every", "2 steps", *options)
    assert main([*words, "--train.duration", "5 steps", "--log.profile", "2 steps"]) == 0
    assert "tracing steps 4 to 5" in capfd.readouterr().out
    assert traced_steps(workdir / "profile") == [4, 5]
    # A resumed run may trace other steps, or none.
    assert main([*words, "--train.duration", "8 steps"]) == 0
    out = capfd.readouterr().out
    assert "tracing" not in out and "peak memory" in out.splitlines()[-2]
    assert [line["step"] for line in metrics(workdir) if line["split"] == "train"][-1] == 8
    assert json.loads((workdir / "result.json").read_text())["flops_per_step"] > 0
