"""Times the control plane of a job with thousands of processes: one process simulates all but process 0.

    python benchmarks/processes/meeting.py --processes 1000 --out FILE.json

The processes join, compare a value, compare a value that differs, and lose one process. The script prints the seconds
of each phase, until the last process has the result, and the threads, open files and memory of process 0. It does not
start JAX.
"""

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import CHILD_SECONDS, Figures, machine
from jaxddp.core.peers import result_of
from jaxddp.job.control_plane import ControlPlane, Follower, Value
from jaxddp.job.environment import Job
from jaxddp.job.watchdog import Lost, Timeouts

SECONDS = 120.0
FACTS = {"Python": "3", "jax's version": "0"}
VALUES = ["the same", "another"]


def run_first(address: str, processes: int) -> None:
    """Run process 0, and print its figures as JSON."""
    before, lost = used_resources(), threading.Event()
    begin = time.perf_counter()
    plane = ControlPlane(job(address, processes, 0), FACTS, Timeouts(SECONDS), end=lambda loss: lost.set())
    figures: Figures = {"meet": time.perf_counter() - begin}
    for name in VALUES:
        begin = time.perf_counter()
        plane.decide(name, "0", verdict)
        figures[name] = time.perf_counter() - begin
    figures |= {f"{name} of process 0": value for name, value in used_resources().items()}
    figures["resident MB before"] = before["resident MB"]
    if not lost.wait(SECONDS):
        sys.exit("process 0 did not notice that a process was lost")
    # In this time process 0 notifies the others.
    time.sleep(5)
    print(json.dumps(figures))


async def run_others(address: str, processes: int) -> None:
    """Run all other processes; the last one disconnects. Prints as JSON the seconds until all detect the loss."""
    raise_file_limit()
    all_lost, losses = asyncio.Event(), list[Lost]()

    def end(loss: Lost) -> None:
        losses.append(loss)
        if len(losses) == processes - 2:
            all_lost.set()

    followers = [Follower(job(address, processes, process), FACTS) for process in range(1, processes)]
    watchdogs = await asyncio.gather(*(follower.meet(Timeouts(SECONDS), end) for follower in followers))
    for number, name in enumerate(VALUES):
        for process, follower in enumerate(followers, 1):
            follower.send(Value(number, name, "1" if name == VALUES[1] and process == processes // 2 else "0"))
        answers = await asyncio.gather(*(follower.values(number, name, SECONDS) for follower in followers))
        found = {result_of(value.text) for values in answers for value in values}
        assert found == {str(number * (processes // 2))}, answers[0]
    begin = time.perf_counter()
    watchdogs[-1].close()
    followers[-1].connections[0].writer.transport.abort()
    async with asyncio.timeout(SECONDS):
        await all_lost.wait()
    assert {loss.process for loss in losses} == {processes - 1}
    print(json.dumps({"lose one": time.perf_counter() - begin}))


def verdict(texts: list[str]) -> str:
    """Return a process whose text differs from that of process 0, or 0 if none does."""
    return str(next((process for process, text in enumerate(texts) if text != texts[0]), 0))


def job(address: str, processes: int, process: int) -> Job:
    return Job(address, processes, process, run_id="measured", key="of this benchmark")


def used_resources() -> dict[str, float]:
    """Return the resources that this process uses."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": int(status["Threads"]),
        "files": len(os.listdir("/proc/self/fd")),
        "resident MB": int(status["VmRSS"].split()[0]) / 1024,
    }


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure_job(processes: int) -> Figures:
    """Run one job, and return its figures."""
    address = f"127.0.0.1:{20000 + os.getpid() % 10000}"
    command = [sys.executable, __file__, "--processes", str(processes), "--address", address, "--part"]
    parts = [subprocess.Popen([*command, part], stdout=subprocess.PIPE, text=True) for part in ("first", "others")]
    figures: Figures = {"processes": processes}
    try:
        for part in parts:
            output, _ = part.communicate(timeout=CHILD_SECONDS)
            if part.returncode:
                sys.exit(f"a part of the job ended with exit code {part.returncode}")
            figures |= json.loads(output)
    finally:
        for part in parts:
            part.kill()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1000], help="3 or more")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=("first", "others"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "first":
        return run_first(options.address, options.processes[0])
    if options.part == "others":
        return asyncio.run(run_others(options.address, options.processes[0]))
    results = []
    for processes in options.processes:
        results.append(measure_job(processes))
        print("\n".join(f"{name:<28}{value:,.3f}" for name, value in results[-1].items()), flush=True)
    if options.out:
        options.out.write_text(json.dumps({**machine(), "found": results}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
