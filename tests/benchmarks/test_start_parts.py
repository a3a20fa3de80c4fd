"""`benchmarks/start.py`: a start is timed in parts up to its first step."""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import start

SCRIPT = Path(start.__file__).parent / "whole_runs" / "start_parts.py"


def test_the_parts_of_a_start_add_up_to_its_seconds(tmp_path):
    words = [*start.arrays(tmp_path, tmp_path), *start.SMALL, "--model.name", "resnet10", "--model.width", "4"]
    command = [sys.executable, str(SCRIPT), str(time.monotonic()), words[0], str(tmp_path / "run"), *words[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    # Arrays need no TensorFlow.
    assert figures["seconds"].keys() == {*start.PARTS} - {"TensorFlow"}
    assert abs(sum(figures["seconds"].values()) - figures["total"]) < 1e-6 < figures["cpu"]
    assert figures["loss"] > 0 and figures["loaded"] + figures["compiled"] > 0
