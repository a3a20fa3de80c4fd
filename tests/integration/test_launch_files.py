"""The script `launch/main.py` trains in two processes."""

import subprocess
import sys

import pytest
from support.processes import REPOSITORY, environment, result

pytestmark = pytest.mark.ci


def test_the_launch_script_on_the_python_api_trains(tree, tmp_path):
    script = REPOSITORY / "launch" / "main.py"
    recipe = ["--model", "resnet10", "--width", "2", "--image-size", "16", "--batch-size", "4", "--epochs", "0.5"]
    recipe += ["--precision", "float16"]
    command = [sys.executable, str(script), "--data", str(tree), "--workdir", str(tmp_path), *recipe]
    env = environment(JAX_NUM_CPU_DEVICES="1")
    done = subprocess.run(
        [*command, "--gpus", "0", "--processes", "2"], env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert "[0] validation top-1: 0." in done.stdout or "[0] validation top-1: 1." in done.stdout
    assert result(tmp_path)["processes"] == 2 and '"loss_scale": 65536' in (tmp_path / "metrics.jsonl").read_text()
    bad = subprocess.run([*command, "--nodes", "2"], env=env, capture_output=True, text=True, timeout=60)
    assert (bad.returncode, bad.stderr.count("\n")) == (2, 1)
    assert "--nodes 2: give --coordinator HOST:PORT" in bad.stderr
