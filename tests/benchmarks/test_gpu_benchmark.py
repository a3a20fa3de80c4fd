"""The functions of `benchmarks/gpu.py` that need neither a GPU nor torch."""

import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from support.networks import largest_difference

from benchmarks import gpu
from benchmarks.rivals import gpu_gate
from benchmarks.rivals.contenders import step_variants
from benchmarks.rivals.contenders.trace_summary import instruction_bytes
from benchmarks.rivals.gpu_call import Call
from benchmarks.rivals.gpu_children import Children, CutOff
from benchmarks.rivals.gpu_data import pack, unpack
from benchmarks.rivals.gpu_parts import Cifar, Pixels, Plan
from benchmarks.rivals.gpu_results import Refused, Table
from benchmarks.rivals.gpu_scale import GPU
from jaxddp.models.ops.convolution import convolve_on_cpu

ABOUT = {"case": "a network", "device": "a device"}
NOISE = "RESOURCE_EXHAUSTED: Out of memory; torch.OutOfMemoryError: CUDA out of memory: candidate left out"


def test_without_a_gpu_the_benchmark_prints_one_line_and_exits_with_code_2(tmp_path):
    command = [sys.executable, str(gpu.__file__), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("gpu.py: JAX finds no GPU here; ") and done.stderr.count("\n") == 1


def run(tmp_path, program, limit=60.0, cut=False):
    """Run a child. Returns its results and its failure."""
    children, results = Children(tmp_path, tmp_path / "cache", {}), []
    command = [sys.executable, "-c", program, str(children.out)]
    return results, children.run("a/key", command, limit, {}, results.append, cut=cut)


def test_results_of_a_child_are_read_before_it_ends(tmp_path):
    program = "import sys, time; open(sys.argv[1], 'a').write('{\"step\": 2}\\n{\"torn'); time.sleep(60)"
    results, failed = run(tmp_path, program, limit=2)
    assert results == [{"step": 2}] and failed is not None and failed["failed"] == "no result within 2 s"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (f"import sys; print({NOISE!r}); sys.exit('ValueError: broken')", "exit code 1: ValueError: broken"),
        ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("", "it succeeded, but without a result"),
    ],
)
def test_the_reason_of_a_childs_failure_is_reported(tmp_path, program, why):
    results, failed = run(tmp_path, program)
    assert results == [] and failed is not None and failed["failed"] == why


def test_a_child_cut_off_by_the_end_of_the_call_is_no_failure(tmp_path):
    with pytest.raises(CutOff):
        run(tmp_path, "import time; time.sleep(60)", limit=0.5, cut=True)


def test_a_table_of_another_device_or_format_is_rejected_in_one_line(tmp_path):
    path = tmp_path / "gpu.json"
    Table.open(path, ABOUT).save()
    with pytest.raises(Refused, match=r"gpu\.json: its device is a device, not another; give another --out$"):
        Table.open(path, ABOUT | {"device": "another"})
    path.write_text("[]")
    with pytest.raises(Refused, match="not a table of this benchmark"):
        Table.open(path, ABOUT)


def plan_of(tmp_path, measured, rival=True, **changes):
    table = Table(tmp_path / "gpu.json", {"case": str(GPU.case), "device": "NVIDIA H100"}, measured)
    cifar = Cifar(Pixels((), None), ("cifar10",), (), None)
    return Plan(replace(GPU, **changes), cifar, table, tmp_path / "out.jsonl", tmp_path / "cache", rival)


SPEEDS = {
    "batches/jaxddp/128": {"step": 1.0},
    "batches/jaxddp/256": {"step": 1.9},
    "batches/jaxddp/512": {"step": 4.0},
    "batches/torch/eager/256": {"step": 1.8},
    "batches/torch/max-autotune/128": {"step": 0.8},
    "batches/torch/max-autotune/256": {"failed": "out of memory"},
}


def test_rounds_use_each_contenders_best_batch_and_torchs_best_mode(tmp_path):
    plan = plan_of(tmp_path, SPEEDS, rounds=2)
    assert plan.best("jaxddp") == (256, None) and plan.best("torch") == (128, "max-autotune")
    keys = [each.key for each in plan.pending("rounds")]
    assert keys == ["rounds/torch/max-autotune 128/0", "rounds/jaxddp/256/0", *keys[2:]]
    assert [key[-1] for key in keys] == ["0", "0", "1", "1"] and keys[2].startswith("rounds/jaxddp")


def test_a_larger_batch_than_one_that_ran_out_of_memory_is_not_started(tmp_path):
    plan = plan_of(tmp_path, dict(SPEEDS), batches=(256, 512), modes=("max-autotune",))
    call = Call(plan, Children(tmp_path, tmp_path, {}), "no-such-python", float("inf"))
    assert call.take(["batches"])
    why = plan.table.failures["batches/torch/max-autotune/512"]
    assert why == "not started: batches/torch/max-autotune/256 ran out of memory"


def judge_losses(tmp_path, **losses):
    return gpu_gate.judge(Table(tmp_path / "t", {}, {k.replace("_", "/"): {"losses": v} for k, v in losses.items()}))


EQUAL_LOSSES = {
    "gate_float32_jaxddp": [6.829183, 6.724484, 6.535261, 6.282351, 5.981870],
    "gate_float32_torch": [6.829184, 6.724483, 6.535251, 6.282360, 5.981918],
    "gate_bfloat16_jaxddp": [6.827765, 6.727368, 6.539035, 6.285022, 5.983629],
    "gate_bfloat16_torch": [6.828042, 6.727061, 6.540047, 6.285959, 5.983768],
}
"""Losses of ResNet-50 at 224 px with 8 images, measured on a CPU."""


def test_equal_networks_pass_the_gate(tmp_path):
    lines, passed = judge_losses(tmp_path, **EQUAL_LOSSES)
    assert passed and lines[-1] == "the gate: passed"
    assert judge_losses(tmp_path)[0] == ["the gate: not measured"]


@pytest.mark.parametrize(
    "losses",
    [
        pytest.param([6.829183, 6.729619, 6.549260, 6.307627, 6.020058], id="a rate that is 5% off"),
        pytest.param([6.823372, 6.719173, 6.531817, 6.281762, 5.983556], id="the stride in the first convolution"),
    ],
)
def test_networks_with_a_mistake_fail_the_gate(tmp_path, losses):
    """The losses were measured like `EQUAL_LOSSES`."""
    lines, passed = judge_losses(tmp_path, **(EQUAL_LOSSES | {"gate_float32_torch": losses}))
    assert not passed and "float32, ours against torch" in lines[-1]


@pytest.mark.parametrize("contender", ["float32_jaxddp", "bfloat16_torch"])
@pytest.mark.parametrize("wrong", ["fall", "first", "nan", "short"])
def test_wrong_losses_fail_the_gate(tmp_path, contender, wrong):
    key = f"gate_{contender}"
    first, *others = EQUAL_LOSSES[key]
    changed = {
        "fall": [first + 0.95 * (loss - first) for loss in EQUAL_LOSSES[key]],
        "first": [first * 1.006, *others],
        "nan": [first, float("nan"), *others[1:]],
        "short": others,
    }[wrong]
    lines, passed = judge_losses(tmp_path, **(EQUAL_LOSSES | {key: changed}))
    assert not passed and "FAILED" in lines[-1]


def test_a_bfloat16_error_far_above_the_rivals_fails_the_gate(tmp_path):
    worse = [loss * (1 + 4e-3) for loss in EQUAL_LOSSES["gate_float32_jaxddp"]]
    assert judge_losses(tmp_path, **(EQUAL_LOSSES | {"gate_bfloat16_torch": worse}))[1]
    lines, passed = judge_losses(tmp_path, **(EQUAL_LOSSES | {"gate_bfloat16_jaxddp": worse}))
    assert not passed and lines[-1].endswith("FAILED, bfloat16, ours against torch's error")


def test_nothing_is_measured_after_a_failed_gate(tmp_path):
    wrong = EQUAL_LOSSES | {"gate_float32_torch": EQUAL_LOSSES["gate_float32_torch"][::-1]}
    plan = plan_of(tmp_path, {key.replace("_", "/"): {"losses": losses} for key, losses in wrong.items()})
    call = Call(plan, Children(tmp_path, tmp_path, {}), "no-such-python", float("inf"))
    assert not call.take(["gate", "batches"])
    assert len(plan.table.measured) == len(wrong) and call.left(["gate", "batches"])


def test_packed_pixels_are_unpacked_bit_for_bit_from_several_files(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {"class_names": np.array(["a", "b"])}
    for split, count in (("train", 41), ("val", 8)):
        # Smooth images, noise, and black ones.
        images = np.cumsum(rng.integers(0, 9, (count, 32, 32, 3)), 1).astype(np.uint8)
        images[::3] = rng.integers(0, 256, images[::3].shape)
        images[1] = 0
        arrays |= {f"{split}_images": images, f"{split}_labels": rng.integers(0, 2, count).astype(np.int32)}
    np.savez(tmp_path / "set.npz", **arrays)
    paths = pack(tmp_path / "set.npz", tmp_path / "set.packed.npz", most=50_000)
    assert [path.name for path in paths] == [f"set.{part}.packed.npz" for part in range(1, len(paths) + 1)]
    assert len(paths) > 1 and all(path.stat().st_size <= 50_000 for path in paths)
    assert len(pack(tmp_path / "set.npz", tmp_path / "whole.packed.npz")) == 1
    for sources in (paths[::-1], [tmp_path / "whole.packed.npz"]):
        unpack(sources, tmp_path / "again.npz")
        with np.load(tmp_path / "again.npz") as again:
            assert again.files and all(np.array_equal(again[name], arrays[name]) for name in arrays)
    with pytest.raises(SystemExit, match=f"{len(paths) - 1} of {len(paths)} files are given; give all of them"):
        unpack(paths[1:], tmp_path / "again.npz")


def test_the_bytes_of_an_instruction_are_those_of_its_operands_and_results():
    program = """
  %a.1 = bf16[8,4]{1,0} parameter(0), metadata={op_name="a"}
  %sum-start = (f32[4]{0}, pred[2]{0}) fusion(%a.1), kind=kInput, calls=%fused_computation
  ROOT %get = f32[] custom-call(%sum-start, %a.1), backend_config={"x":"%a.1"}
"""
    expected = {"a.1": 64, "sum-start": 64 + 16 + 2, "get": 4 + 18 + 64}
    assert instruction_bytes(program) == expected


@pytest.mark.parametrize(("size", "stride", "padding"), [(1, 2, 0), (3, 2, 1)])
def test_1x1_convolution_as_matrix_product_equals_the_networks_convolution(size, stride, padding):
    rng = np.random.default_rng(size)

    def values_and_gradients(operation):
        out, gradients = jax.vjp(lambda x, k: operation(x, k, stride, padding), images, kernel)
        return out, gradients(out)

    with jax.enable_x64(True):
        images, kernel = rng.normal(size=(2, 7, 7, 4)), rng.normal(size=(size, size, 4, 3))
        assert (
            largest_difference(*map(values_and_gradients, (step_variants.as_matrix_product, convolve_on_cpu))) < 1e-11
        )
