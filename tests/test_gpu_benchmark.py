"""The parts of `benchmarks/gpu.py` that need neither a GPU nor torch."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import largest_difference

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
sys.path.append(str(Path(__file__).parent.parent / "benchmarks/contenders"))
import gpu
import jax_levers
from gpu_children import Children
from gpu_table import render

from jaxddp.engine.compiler_options import compiler_options
from jaxddp.errors import InputError
from jaxddp.models.cpu_convolution import convolve


def test_without_a_gpu_it_is_one_line_and_code_2(tmp_path):
    command = [sys.executable, str(gpu.__file__), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gpu.py: JAX finds no GPU here; ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("import sys; open(sys.argv[1], 'w').write('{\"step\": 2}')", {"step": 2}),
        ("import sys; sys.exit('jaxlib: RESOURCE_EXHAUSTED: Out of memory while trying to allocate')", None),
        ("import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory')", None),
    ],
)
def test_a_contender_s_figures_or_that_it_ran_out_of_memory(tmp_path, program, expected):
    out = tmp_path / "out.json"
    out.write_text('{"of": "the one before"}')
    assert Children(tmp_path, sys.executable, {}).run([sys.executable, "-c", program, str(out)], out) == expected


def test_a_contender_that_wrote_nothing_is_not_given_the_figures_before(tmp_path):
    out = tmp_path / "out.json"
    out.write_text('{"of": "the one before"}')
    with pytest.raises(FileNotFoundError):
        Children(tmp_path, "", {}).run([sys.executable, "-c", ""], out)


def test_a_contender_that_fails_ends_the_benchmark(tmp_path):
    with pytest.raises(SystemExit, match="(?s)ended with 1:.*ValueError: broken"):
        Children(tmp_path, "", {}).run([sys.executable, "-c", "raise ValueError('broken')"], tmp_path / "out.json")


def test_the_best_batch_is_the_quickest_that_fits(tmp_path, capsys):
    speeds = {"jaxddp": {"64": 10.0, "128": 12.5, "256": 12.0, "512": None}, "torch": {"64": None}}
    bench = gpu.Bench(gpu.GPU, Children(tmp_path, "", {}), False, None, {"batches": speeds})
    assert bench.best_batch("jaxddp") == 128
    with pytest.raises(SystemExit):
        bench.best_batch("torch")
    assert capsys.readouterr().err == "gpu.py: no batch of torch was measured; give --parts batches first\n"


def test_the_table_takes_shares_of_the_larger_of_two_peaks():
    peaks = {"version": "1", "device": "NVIDIA H200", "flops_an_image": 24e9}
    report = {
        "case": {"network": "resnet50", "width": 64, "size": 224, "precision": "bfloat16"},
        "facts": {
            "jaxddp": {**peaks, "matmul_flops_a_second": 600e12, "memory_bytes_a_second": 3.47e12},
            "torch": {**peaks, "matmul_flops_a_second": 720e12, "memory_bytes_a_second": 3e12},
        },
        "batches": {"jaxddp": {"64": 2999.0, "128": None}},
        "rounds": {
            "images_per_second": {"jaxddp": 3000.0, "torch": 2000.0},
            "batch": {"jaxddp": 256, "torch": 128},
            "ratio": 1.5,
            "ratio_of_each_round": [1.4, 1.6],
            "ratio_of_best_turns": 1.45,
            "target": 1.0,
        },
        "cifar": None,
        "levers": {"a network": {"an option": {"refused": "No such compile option"}}},
    }
    text = render(json.loads(json.dumps(report)))
    # 3,000 images of 24 GFLOP are 72 of 720 TFLOP/s; 3.47 TB/s carry 10,000 images of 347 MB.
    for part in ("0.100 of the matrix peak", "0.300 of 10,000 (batch norm apart)", "128: out of memory"):
        assert part in text
    for part in ("ratio 1.500   (rounds 1.400 to 1.600", "CIFAR-10: left out", "refused: No such compile option"):
        assert part in text
    del report["case"]["width"]
    assert "batch norm apart" not in render(report)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(3, 8), st.integers(1, 3), st.sampled_from([(1, 0), (3, 1)]))
def test_the_lever_of_1x1_convolutions_computes_what_the_network_does(stride, size, features, shape):
    kernel_size, padding = shape
    rng = np.random.default_rng(size)
    images = rng.normal(size=(2, size, size, 4)).astype(np.float32)
    kernel = rng.normal(size=(kernel_size, kernel_size, 4, features)).astype(np.float32)

    def both_ways(operation):
        out, gradients = jax.vjp(lambda x, k: operation(x, k, stride, padding), images, kernel)
        return out, gradients(out)

    assert largest_difference(both_ways(jax_levers.by_products), both_ways(convolve)) < 1e-5


def test_each_of_xla_s_options_is_one_of_the_tested_jaxlib():
    assert len(set(jax_levers.XLA_OPTIONS)) == len(jax_levers.XLA_OPTIONS)
    with pytest.raises(InputError, match="xla_gpu_gone_since"):
        compiler_options(("xla_gpu_gone_since=true",))
    # Another jaxlib may have dropped a name; the benchmark then says so.
    if jax.__version_info__[:2] == (0, 10):
        for option in jax_levers.XLA_OPTIONS:
            assert compiler_options((option,))
