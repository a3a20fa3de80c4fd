"""Restarted training on one or several machines, which leave and join, equals an undisturbed run."""

import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import support.processes as processes
from support.launches import free_port

from jaxddp.data.order import SampleOrder

STEPS, EXAMPLES, BATCH = processes.LONGER_STEPS, 39, 8

# Writes the rows of each step, and kills itself at "generation:rank:step", or with the step "start" after it has joined
# the job.
OBSERVED = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np
from jaxddp.cli import main
from jaxddp.setup.run_setup import RunSetup
from jaxddp.mesh import Topology

folder, ends, seconds = Path(sys.argv[1]), sys.argv[2].split(","), float(sys.argv[3])
generation, rank = os.environ["JAXDDP_GENERATION"], os.environ["JAX_PROCESS_ID"]
file = (folder / f"{os.environ['JAXDDP_RUN_ID']}-{rank}.jsonl").open("a")
batches, create = RunSetup.batches, Topology.create

def end_here(at):
    if f"{generation}:{rank}:{at}" in ends:
        os.kill(os.getpid(), signal.SIGKILL)

def observed(setup, start, stop):
    for step, batch in enumerate(batches(setup, start, stop), start):
        end_here(step)
        time.sleep(seconds)
        rows = np.concatenate([shard.data for shard in batch.row.addressable_shards]).tolist()
        print(json.dumps([step, rows]), file=file, flush=True)
        yield batch

def created(*arguments):
    topology = create(*arguments)
    end_here("start")
    return topology

RunSetup.batches, Topology.create = observed, created
sys.exit(main(sys.argv[4:]))
"""


@pytest.fixture(scope="module")
def observed(arrays, tmp_path_factory) -> Callable[..., list[str]]:
    """Return the command of a training that writes its rows into a folder."""
    script = tmp_path_factory.mktemp("script") / "observed.py"
    script.write_text(OBSERVED)

    def command(workdir: Path, ends: str = "", seconds: float = 0.0) -> list[str]:
        (workdir / "rows").mkdir(parents=True, exist_ok=True)
        words = [*processes.TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *processes.LONGER]
        return ["python", str(script), str(workdir / "rows"), ends, str(seconds), *words]

    return command


def lines_without_times(workdir: Path) -> list[dict]:
    """Return the lines of both splits without times."""
    timed = ("second", "time", "wait", "utilization", "memory", "mfu")
    return [
        {key: value for key, value in line.items() if not any(word in key for word in timed)}
        for split in ("train", "val")
        for line in processes.lines(workdir, split)
    ]


def are_the_same(workdir: Path, other: Path) -> bool:
    """Return whether two runs are equal bit for bit."""
    return (
        processes.result(workdir)["status"] == "done"
        and processes.checkpoint_bytes(workdir) == processes.checkpoint_bytes(other)
        and lines_without_times(workdir) == lines_without_times(other)
    )


class Machine(processes.Program):
    """The launcher of one of several simulated machines."""

    def __init__(self, folder: Path, nr: int, place: Sequence[str], command: Sequence[str]):
        options = f"--nr {nr} --processes 1 --grace 2 --logs {folder / 'logs'}".split()
        words = [sys.executable, "-m", "jaxddp", "launch", *options, *processes.THREADS, *place, "--", *command]
        super().__init__(words, folder, processes.environment(JAXDDP_JOB_KEY="secret"))

    def expect(self, *words: str) -> None:
        self.wait_until(lambda: all(word in self.out + self.err for word in words))


@pytest.fixture
def coordinator() -> list[str]:
    return ["--coordinator", f"127.0.0.1:{free_port()}"]


# tests/test_machines.py restarts machines without training, and test_faults.py resumes a job.
@pytest.mark.ci
def test_two_restarted_machines_equal_an_undisturbed_job(observed, undisturbed, coordinator, start, tmp_path):
    place = ["--nodes", "2", "--restarts", "5", *coordinator]
    command = observed(tmp_path / "run", "0:1:9", seconds=0.05)
    first, second = (start(Machine, tmp_path / str(nr), nr, place, command) for nr in (0, 1))
    for each in (first, second):
        each.expect("process 1: killed by SIGKILL; restart 1 of 5 in 1 s")
    first.wait_until(lambda: len(processes.lines(tmp_path / "run")) >= 18)
    second.process.send_signal(signal.SIGKILL)
    second.end()
    second = start(Machine, tmp_path / "again", 1, place, command)
    assert (first.end(), second.end()) == (0, 0), first.out + first.err + second.out + second.err
    assert "machine 1 was lost (on " in first.err and "restart 2 of 5 in 2 s" in first.err
    assert are_the_same(tmp_path / "run", undisturbed)


def rows_by_start(folder: Path) -> list[dict[int, list[list[int]]]]:
    """Return for each generation the rows of each process by step."""
    rows_of_runs: dict[str, dict[int, list[list[int]]]] = {}
    for file in sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime):
        run_id, _, rank = file.stem.rpartition("-")
        for step, rows in map(json.loads, file.read_text().splitlines()):
            rows_of_runs.setdefault(run_id, {}).setdefault(step, []).append((int(rank), rows))
    ordered = sorted(rows_of_runs, key=lambda run_id: int(run_id.rpartition(".")[2]))
    return [
        {step: [rows for _, rows in sorted(parts)] for step, parts in rows_of_runs[run_id].items()}
        for run_id in ordered
    ]


# tests/test_machines.py tests machines that leave and join without training.
@pytest.mark.ci
def test_while_machines_leave_and_join_every_example_is_used_once_an_epoch(
    observed, undisturbed, coordinator, start, tmp_path
):
    workdir = tmp_path / "run"
    place = ["--nodes", "1:2", "--restarts", "1", "--settle", "2", "--join-after", "0", *coordinator]
    command = observed(workdir, seconds=0.15)
    # Machine 1 starts first, so that machine 0 does not start without it.
    second, first = (start(Machine, tmp_path / str(nr), nr, place, command) for nr in (1, 0))
    first.wait_until(lambda: len(processes.lines(workdir)) >= 9)
    second.process.send_signal(signal.SIGKILL)
    second.end()
    first.expect("restart 1 of 1 in 1 s")
    first.wait_until(lambda: len(processes.lines(workdir)) >= 14)
    third = start(Machine, tmp_path / "again", 1, place, command)
    assert (first.end(), third.end()) == (0, 0), first.out + first.err + third.out + third.err
    assert "2 machines are connected; all processes save, and restart on these machines" in first.err

    order, starts, seen = SampleOrder(EXAMPLES, BATCH, 0), rows_by_start(workdir / "rows"), {}
    assert [max(map(len, each.values())) for each in starts] == [2, 1, 2]
    for generation in starts:
        widest = max(map(len, generation.values()))
        whole = {step: np.concatenate(parts) for step, parts in generation.items() if len(parts) == widest}
        for step, rows in whole.items():
            assert rows.tolist() == order.rows(step).tolist()
        # Only steps after the last checkpoint of the previous start are repeated.
        seen |= {step: rows.tolist() for step, rows in whole.items()}
    assert list(seen) == list(range(STEPS))
    stream = [row for step in range(STEPS) for row in seen[step]]
    for begin in range(0, len(stream) - EXAMPLES + 1, EXAMPLES):
        assert sorted(stream[begin : begin + EXAMPLES]) == list(range(EXAMPLES))
    assert processes.close(processes.losses(workdir), processes.losses(undisturbed))
    assert list(processes.losses(workdir)) == list(range(1, STEPS + 1)) and processes.result(workdir)["processes"] == 2
