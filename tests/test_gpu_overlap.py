"""A ResNet-50's step as compiled for two hosts of eight H200s: what its all-reduces run beside.

The GPUs are only described. Skipped where the compiler was not fetched (`python benchmarks/gpu_plugin.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import gpu_plugin

from jaxddp.api import resnet
from jaxddp.engine.averaging import GPU_BUCKETS
from jaxddp.models.adapt import adapt

PROGRAM = Path(gpu_plugin.__file__).parent / "gpu_program.py"
SUMS = 4 * 2 * 4
"""Bytes of the sums of loss, top-1, top-5 and examples, each with its weight."""

USER = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAXDDP_CACHE")}
"""Without what the tests set: the compiler lies in the user's cache."""
with patch.dict(os.environ, USER, clear=True):
    PRESENT = gpu_plugin.is_present()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PRESENT, reason="XLA's CUDA compiler is absent: benchmarks/gpu_plugin.py"),
]


def figures(folder: Path, *overrides: str) -> dict:
    """What `gpu_program.py` counts."""
    out = folder / "2x8.json"
    command = [sys.executable, str(PROGRAM), "imagenet_resnet50", "--topology", "1x2x8"]
    command += ["--out", str(out), *overrides]
    done = subprocess.run(command, env=USER, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(out.read_text())


def averaged_bytes() -> int:
    """Of all that the devices average in a step."""
    model = adapt(resnet("resnet50", 1000))
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    return SUMS + sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def test_most_gradients_travel_beside_the_backward_pass(tmp_path):
    found = figures(tmp_path)
    assert found["overlapped"] >= 0.85
    assert found["gradient_bytes"] == averaged_bytes()
    assert len(found["collectives"]) == GPU_BUCKETS
    # Between the start of each and the wait for it.
    assert all(each["kernels_between"] for each in found["collectives"])
    assert found["roofline"]["overlap"] > 0.85


def test_one_bucket_starts_behind_the_last_gradient(tmp_path):
    found = figures(tmp_path, "--parallel.buckets", "1")
    assert found["overlapped"] == 0 and len(found["collectives"]) == 1
    assert found["gradient_bytes"] == averaged_bytes()


def test_in_bfloat16_half_of_the_bytes_travel(tmp_path):
    found = figures(tmp_path, "--train.gradient-precision", "bfloat16")
    assert found["overlapped"] >= 0.85
    assert found["gradient_bytes"] < 0.51 * averaged_bytes()
