"""The error message of a step that does not fit in memory, before the first step and when memory runs out."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support import runs
from support.data import random_table, write_arrays
from support.errors import error_line
from support.networks import linear_model
from support.runs import LEAN, RECIPE, copy_setup, train
from support.shared import sgd

from jaxddp.cli import main
from jaxddp.core.errors import InputError, text_of
from jaxddp.data.batch import Division
from jaxddp.engine.parts.part import Part
from jaxddp.engine.programs import Program
from jaxddp.measure.cost import Cost
from jaxddp.measure.memory import Fit, HostMemory, MemoryReport, Needs, bytes_on_a_device
from jaxddp.mesh import Topology
from jaxddp.setup.run_training import make_run
from jaxddp.training.loop import fit

GB = 10**9
SIZES = st.integers(0, 10**12)
NEEDS = st.builds(
    lambda arguments, output, gradients, activations: Needs(arguments, output, gradients + activations, gradients),
    *(SIZES,) * 4,
)
DIVISIONS = st.builds(
    lambda devices, accumulate, group_size, times: Division(
        devices * accumulate * group_size * times, devices, accumulate, group_size, "dots"
    ),
    *(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 24)),
)


def test_the_memory_of_a_step_is_read_from_the_compiled_program():
    sizes = {"argument": 100, "output": 70, "alias": 60, "temp": 500}
    memory = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    params, topology = {"kernel": jnp.zeros((3, 4)), "key": jax.random.key(0)}, Topology.create(1)
    needs = Needs.of(Cost({}, memory), params, topology, {"training": 1000})
    # On a CPU, XLA does not count all temporary memory.
    assert needs == Needs(100, 10, 550, 48 + 8, False, {"training": 1000})
    assert needs.persistent == 1110 and needs.total == 1660
    assert Needs.of(Cost({}, None), params, topology) is None


def test_the_size_of_arrays_counts_the_bytes_on_one_device():
    topology = Topology.create(4)
    tree = {
        "sharded": topology.place(jnp.zeros((8, 3))),
        "replicated": topology.replicate(jnp.zeros(5)),
        "shape": jax.ShapeDtypeStruct((100,), jnp.float32),
        "nothing": None,
    }
    assert bytes_on_a_device(tree) == 8 * 3 * 4 / 4 + 5 * 4


def test_on_a_cpu_the_advice_has_no_numbers_and_the_process_counts():
    needs = Needs(arguments=100, output=0, temporary=800, gradients=0, is_linear=False, process=100)
    fit = Fit(Division(100, 1), needs, 900, "there")
    advice = "raise --train.accumulate, or lower --train.batch-size, or --train.remat blocks keeps fewer activations"
    assert fit.is_short and text_of(fit.advice()) == advice
    assert "remat" not in text_of(dataclasses.replace(fit, section="eval").advice())
    assert "temporary 800 B" in f"{needs}" and ", the process itself 100 B, " in f"{needs}"


def test_the_message_has_the_needed_and_free_memory_and_a_suggestion():
    needs = Needs(arguments=GB, output=0, temporary=92 * GB, gradients=2 * GB)
    fit = Fit(Division(1024, 1), needs, 84 * GB, "NVIDIA H100 has 84 GB")
    assert error_line(fit.check) == (
        "the step needs 93 GB on each device (arguments 1.0 GB, output 0 B, temporary 92 GB), "
        "and NVIDIA H100 has 84 GB; "
        # 52 = 1 + 3 * 2 + 90 / 2. With 892 images, 1 + 2 + 90 * 892 / 1024 is still below 0.97 * 84.
        "--train.accumulate 2 would need about 52 GB, or --train.batch-size 892 would need about 81 GB, or "
        "--train.remat blocks keeps fewer activations"
    )


def test_the_message_says_if_no_batch_would_fit():
    needs = Needs(arguments=90 * GB, output=0, temporary=12 * GB, gradients=2 * GB)
    fit = Fit(Division(64, 4, group_size=2, remat="dots"), needs, 84 * GB, "NVIDIA H100 has 84 GB")
    # 93 = 90 + 2 + 10 * 2 / 16
    expected = "no accumulate and no batch size would help (even 2 at a time would need about 93 GB); choose a smaller"
    assert expected in text_of(fit.advice())
    images = dataclasses.replace(needs, arguments=GB, images={"training": 89 * GB})
    assert text_of(dataclasses.replace(fit, needs=images).advice()).endswith("network, or set data.cache to none")


@given(NEEDS, DIVISIONS, SIZES)
def test_the_suggestion_fits_and_is_the_smallest_change_that_fits(needs, division, room):
    fit = Fit(division, needs, room, "there")
    assert fit.is_short == (needs.total > room)
    assume(fit.is_short)
    words = text_of(fit.advice()).split()
    suggested = {word: int(words[index + 1]) for index, word in enumerate(words) if word.startswith("--")}
    limit = (1 - 0.03) * room
    finer = [each for each in division.finer_divisions() if needs.estimate_bytes(division, each) <= limit]
    assert suggested.get("--train.accumulate") == (finer[0].accumulate if finer else None)
    smaller = [dataclasses.replace(division, batch_size=size) for size in range(division.batch_size - 1, 0, -1)]
    fits = [each.batch_size for each in smaller if each.is_even and needs.estimate_bytes(division, each) <= limit]
    assert suggested.get("--train.batch-size") == (fits[0] if fits else None)
    assert ("no accumulate and no batch size would help" in text_of(fit.advice())) == (not suggested)


def test_the_message_names_the_process_and_the_machine():
    needs, rooms = Needs(5, 0, 5, 0), (100, 7)
    gpus = [MemoryReport(needs, "NVIDIA H100", 8, room, None) for room in rooms]
    assert str(Fit.of(Division(8, 16), gpus)).endswith(", and NVIDIA H100 of process 1 has 7 B")
    assert str(Fit.of(Division(8, 8), gpus[1:])).endswith(", and NVIDIA H100 has 7 B")
    cpus = [MemoryReport(needs, "cpu", 4, None, HostMemory("one", 80, 80)) for _ in range(2)]
    assert str(Fit.of(Division(8, 8), cpus)).endswith("machine of process 0 has 10 B for each of its 8 devices")
    alone = MemoryReport(needs, "cpu", 1, None, HostMemory("one", 80, 60))
    assert str(Fit.of(Division(8, 1), [alone])).endswith(", and the machine has 60 B for its device")


@pytest.mark.parametrize(
    ("free", "platform", "has_host"), [(None, "cpu", True), (None, "gpu", False), (50, "cpu", False)]
)
def test_cpu_devices_without_a_known_memory_report_the_memory_of_the_host(free, platform, has_host):
    device = SimpleNamespace(platform=platform)
    topology = SimpleNamespace(
        free_memory=lambda: free, platform=platform, device_kind="a kind", mesh=SimpleNamespace(local_devices=[device])
    )
    needs = Needs(12, 0, 5, 0)
    report = MemoryReport.of(needs, topology, jnp.zeros(3))  # pyright: ignore[reportArgumentType]
    assert (report.room, report.host is not None) == (None if free is None else 62, has_host)
    # The step also needs the memory of its process, without the arguments that are already there.
    process = report.host.used - 12 if report.host else 0
    assert report.needs == dataclasses.replace(needs, process=process)
    assert report.needs.total == 17 + process


PEAK = """
import json, re, sys
from pathlib import Path
import jaxddp.training.device_memory as device_memory
from jaxddp.cli import main

check = device_memory.Memory.check
def checked(self, *arguments):
    check(self, *arguments)
    needs.append(self._fit.needs.total)
needs, device_memory.Memory.check = [], checked
code = main(sys.argv[1:])
# Linux's ru_maxrss of a process begins with that of its parent.
peak = re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())
print(json.dumps([code, needs[0], 1024 * int(peak[1])]))
"""


@pytest.mark.ci
def test_on_a_cpu_the_predicted_memory_is_that_of_the_process(tmp_path):
    data = write_arrays(tmp_path / "images.npz", random_table(64, image=16), random_table(16, image=16))
    words = ["train", RECIPE, *LEAN, "--data.path", str(data), "--workdir", str(tmp_path / "run")]
    # A validation is not predicted.
    words += ["--train.duration", "3 steps", "--parallel.cpu-devices", "2", "--eval.every", "0 steps"]
    done = subprocess.run([sys.executable, "-c", PEAK, *words], capture_output=True, text=True, check=True)
    code, of_a_device, peak = json.loads(done.stdout.splitlines()[-1])
    # Most of the memory is that of Python and its libraries.
    assert code == 0 and 0.85 * peak < 2 * of_a_device < 1.1 * peak


def small_setup(devices: int = 2, net: Any = None, **options: Any) -> Any:
    options.setdefault("table", random_table(50))
    return runs.setup_of(net or linear_model(), sgd(0.1), devices=devices, **options)


def changes(steps: int = 4) -> dict[str, Any]:
    every = {"every": "1 step"}
    return {"train": {"duration": f"{steps} steps"}, "log": every, "eval": {"every": "2 steps"}, "checkpoint": every}


def needs_of(setup: Any) -> Needs:
    program = setup.compiled_steps(resident=False)
    program.prepare(setup.state, next(setup.batches(0, 1)), setup.key)
    needs = Needs.of(program.cost, setup.state.params, setup.topology)
    assert needs is not None
    return needs


def test_arguments_already_on_the_devices_are_not_counted_twice(monkeypatch):
    """With one byte less than the step still needs, the first step does not run."""
    needs = needs_of(setup := small_setup())
    missing = needs.total - bytes_on_a_device((setup.state, next(setup.batches(0, 1)), setup.key))
    assert 0 < missing < needs.total
    for free, fits in ((missing, True), (missing - 1, False)):
        monkeypatch.setattr(Topology, "free_memory", lambda _, free=free: free)
        if fits:
            assert int(train(copy_setup(setup), changes()).step) == 4
        else:
            with pytest.raises(InputError, match=rf"^the step needs {needs.total / 1000:.1f} kB on each device"):
                train(copy_setup(setup), changes())


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_before_its_first_step_with_a_one_line_error(tmp_path, monkeypatch, capfd):
    data = write_arrays(tmp_path / "images.npz", random_table(39, image=16), random_table(11, image=16))
    monkeypatch.setattr(Topology, "free_memory", lambda _: 10_000)
    options = ["--data.path", str(data), "--train.duration", "3 steps"]
    workdir = tmp_path / "run"
    assert main(["train", RECIPE, *LEAN, *options, "--workdir", str(workdir)]) == 2
    captured = capfd.readouterr()
    last = captured.err.rstrip("\n").split("\n")[-1]
    assert last.startswith("jaxddp: the step needs ") and ", and cpu has " in last
    assert "step 1/3" not in captured.out and not list((workdir / "checkpoints").glob("[0-9]*"))
    result = json.loads((workdir / "result.json").read_text())
    assert (result["status"], result["step"]) == ("failed", 0)


GPU_MESSAGE = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5.00GiB.\nAllocator dump:\n ... 200 lines"


class FailingProgram:
    """A program whose n-th call raises an error, as a program of XLA does."""

    def __init__(self, program: Program, number: int, error: BaseException):
        self.program, self.number, self.error = program, number, error
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.program, name)

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self.number:
            raise self.error
        return self.program(*arguments)


def failing_run(number: int, error: BaseException, *listeners: Any, val: Any = None) -> Any:
    setup = runs.changed(small_setup(), {"eval": {"batch_size": 8}} | changes(), val)
    run = make_run(setup, listeners=listeners)
    return dataclasses.replace(run, program=FailingProgram(run.program, number, error))


def test_a_later_failed_allocation_raises_a_one_line_error_with_its_step():
    ends, error = [], jax.errors.JaxRuntimeError(GPU_MESSAGE)
    with pytest.raises(InputError) as caught:
        fit(failing_run(3, error, SimpleNamespace(end=ends.append)))
    message = str(caught.value)
    assert message.startswith("memory ran out by step 3 (Out of memory while trying to allocate 5.00GiB): the step ")
    # On a CPU the memory that does not depend on the batch is unknown at that point.
    assert "Allocator" not in message and "; raise --train.accumulate, or lower --train.batch-size" in message
    assert caught.value.__cause__ is error
    assert [(end.status, end.step, end.reason) for end in ends] == [("failed", 2, message)]


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("INTERNAL: a peer said RESOURCE_EXHAUSTED: Out of memory"),
        RuntimeError("RESOURCE_EXHAUSTED: of a user's own"),
        KeyboardInterrupt("RESOURCE_EXHAUSTED: Out of memory"),
    ],
)
def test_another_failure_is_raised_unchanged(error):
    with pytest.raises(type(error)) as caught:
        fit(failing_run(2, error))
    assert caught.value is error


def test_a_validation_that_does_not_fit_ends_before_it_runs_and_names_its_batch_size(monkeypatch):
    evaluation = {"eval": {"batch_size": 96, "every": "2 steps"}}
    run = make_run(runs.changed(small_setup(), changes(2) | evaluation, random_table(96)))
    monkeypatch.setattr(Topology, "free_memory", lambda _: 20_000)
    expected = r"^the validation needs .* on each device .*, and cpu has .*; lower --eval.batch-size$"
    with pytest.raises(InputError, match=expected):
        fit(run)


@dataclasses.dataclass(frozen=True)
class MemoryHungry(Part):
    """A part that sorts a TiB in the middle of a step."""

    name: str = "memory_hungry"

    def gradients(self, own: Any, grads: Any) -> Any:
        columns = jnp.arange(1 << 18, dtype=jnp.float32)
        total = jnp.sort(jnp.ones((1 << 20, 1)) * grads["weight"][0, 0] + columns, axis=0) @ columns
        return {"weight": grads["weight"] + 0 * total[0]}


@pytest.mark.slow
def test_an_allocation_that_xla_rejects_is_reported_before_and_during_the_run(monkeypatch):
    message = r"^the step needs 1\.2 TB .* the machine has .*; raise --train.accumulate, or"
    with pytest.raises(InputError, match=message):
        train(small_setup(4, parts=(MemoryHungry(),)), changes())
    monkeypatch.setattr("jaxddp.measure.memory.host_memory", lambda: None)
    with pytest.raises(InputError, match=r"^memory ran out by step \d \(Out of memory allocating 1\d{12} bytes\): the"):
        train(small_setup(4, parts=(MemoryHungry(),)), changes())


def test_a_network_that_does_not_fit_raises_a_one_line_error():
    def init(key: jax.Array, example: Any) -> Any:
        return {"weight": jax.random.normal(key, (1 << 20, 1 << 20))}

    model = (init, lambda params, images: images.reshape(len(images), -1)[:, :1] * params["weight"][0, :5])
    with pytest.raises(InputError, match="^memory ran out while the network was initialized .*: choose a smaller"):
        small_setup(1, model)
