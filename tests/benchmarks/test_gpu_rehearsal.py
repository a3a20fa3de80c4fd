"""A rehearsal of `benchmarks/gpu.py` on a CPU, killed and continued, with failures by `stand_in_torch.py`."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STAND_IN = Path(__file__).parents[1] / "support" / "stand_in_torch.py"
pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc")

MISSING_PACKAGES = ("tensorflow", "clu", "tyro", "tensorboard", "simplejpeg")
IMPORT_BLOCKER = f"""
from importlib.machinery import PathFinder

found = PathFinder.find_spec

def find_spec(name, *more):
    return None if name.partition(".")[0] in {MISSING_PACKAGES} else found(name, *more)

PathFinder.find_spec = find_spec
"""
AIRBENCH = """
from pathlib import Path
assert Path("cifar10/train.pt").read_text() == "images labels classes"
print("-" * 60)
print("|  run     |  epoch  |  train_acc  |  val_acc  |  tta_val_acc  |  time_seconds  |")
for run in ["warmup", *range(200)]:
    print(f"|  {run}  |  0  |  0.1  |  0.2  |    |  1.0  |")
    print("|    |  eval  |  0.9  |  0.9  |  0.9401  |  2.5000  |", flush=True)
"""


def processes_with(text):
    """Return the pids of other processes whose environment contains a text."""
    results = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if text.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                results.append(int(path.parent.name))
        except OSError:
            continue
    return results


def becomes_true(condition, seconds=60.0):
    """Wait, and return whether the condition became true in time."""
    signal_number = time.monotonic() + seconds
    while not condition() and time.monotonic() < signal_number:
        time.sleep(0.05)
    return condition()


def prepare_command(folder):
    """Return the command, and an environment without the packages that a GPU's machine may lack."""
    stand_in, airbench, blocker = folder / "python", folder / "airbench94.py", folder / "without"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {STAND_IN} "$@"\n')
    stand_in.chmod(0o755)
    airbench.write_text(AIRBENCH)
    blocker.mkdir()
    (blocker / "sitecustomize.py").write_text(IMPORT_BLOCKER)
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--small", "--batches", "2", "--rounds", "1", "--seeds", "2"]
    command += ["--torch", stand_in, "--airbench", airbench]
    command += ["--limit", "batches/torch/max-autotune-no-cudagraphs=2"]
    command += ["--cache", folder / "cache", "--out", folder / "gpu.json"]
    variables = {"STAND_IN_TABLE": str(folder / "gpu.json"), "PYTHONPATH": str(blocker)}
    return list(map(str, command)), os.environ | variables


def rows_of_table(path):
    """Return the rows of a table as text, by key."""
    results = json.loads(path.read_text())["measured"] if path.is_file() else {}
    return {key: json.dumps(figures) for key, figures in results.items()}


FAILED = {
    "batches/torch/reduce-overhead/2": "out of memory",
    "batches/torch/max-autotune-no-cudagraphs/2": "no result within 2 s",
    "batches/torch/max-autotune/2": "exit code 1: ValueError: broken",
}


ALL = ("gate", "batches", "rounds", "variants", "trace", "cifar")


@pytest.mark.parametrize(
    ("parts", "signals"),
    [
        (("batches",), (signal.SIGKILL,)),
        pytest.param(ALL, (signal.SIGKILL, signal.SIGTERM), marks=pytest.mark.exhaustive),
    ],
    ids=["one part", "all parts"],
)
def test_a_benchmark_that_is_killed_and_continued_completes_its_table(tmp_path, parts, signals):
    command, environment = prepare_command(tmp_path)
    command += ["--parts", *parts]
    out, rng, kept = tmp_path / "gpu.json", random.Random(0), {}

    def call(*more):
        return subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=280)

    short = call("--seconds", "1")
    assert short.returncode == 0
    assert "\nleft to do: facts/weights of resnet10, facts/jaxddp, facts/torch" in short.stdout
    assert f"\ncontinue with: python {BENCHMARKS / 'gpu.py'} --small" in short.stdout
    for signal_number in signals:
        running = subprocess.Popen([*command], env=environment, stdout=subprocess.DEVNULL)
        assert becomes_true(lambda: len(rows_of_table(out)) > len(kept), 120)  # noqa: B023
        time.sleep(rng.uniform(0, 4))
        running.send_signal(signal_number)
        running.wait(timeout=30)
        assert becomes_true(lambda: not processes_with(str(tmp_path / "cache")))
        now = rows_of_table(out)
        assert {key: now[key] for key in kept} == kept
        kept = now
    last = call()
    assert last.returncode == 0, last.stdout + last.stderr
    whole = rows_of_table(out)
    assert len(whole) > len(kept) >= len(signals) and {key: whole[key] for key in kept} == kept
    failures = {key: json.loads(row)["failed"] for key, row in whole.items() if "failed" in row}
    assert failures == FAILED
    for key, why in FAILED.items():
        assert f"\nFAILED {key}: {why}\n" in last.stdout
    assert f"\ncomplete: nothing is left to do; {len(whole)} rows, of which 3 failed\n" in last.stdout
    if parts == ALL:
        assert "the gate: passed" in last.stdout and "\nratio " in last.stdout
        assert "airbench94/run: 2.500 ± 0.000 s, top-1 0.9401 ± 0.0000   (± standard error; n = 2)" in last.stdout
        assert "cifar10_fast/seed: " in last.stdout and "trace of cifar10_fast: " in last.stdout
