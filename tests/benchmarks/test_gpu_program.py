"""`benchmarks/gpu_program.py`: counts of compiled GPU programs, and the budgets of kernels and bytes."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxlib import _hlo
from support.programs import assert_a_wrong_config_is_one_line, counts_of, needs_plugin, run_script, uncached

from benchmarks import gpu_program
from benchmarks.programs import gpu_plugin, roofline
from benchmarks.programs.communication import DGX_H200, ring
from benchmarks.programs.counts import communication, count, total_bytes
from benchmarks.programs.schedule import COLLECTIVE, KERNEL_GRADIENT, Kernel, Schedule, read_schedule
from jaxddp.api import resnet
from jaxddp.models.adapt import adapt
from jaxddp.platforms import PLATFORMS

HERE = Path(__file__).parent


def schedule(program: str, **options):
    module = _hlo.hlo_module_from_text((HERE / program).read_text())
    return read_schedule(module.as_serialized_hlo_module_proto(), **options)


def test_each_launch_is_a_kernel_with_the_bytes_it_reads_and_writes():
    results = [(kernel.kind, kernel.num_bytes, kernel.done) for kernel in schedule("loop.hlo").kernels]
    assert results == [
        ("transpose", 64 + 128, None),
        (COLLECTIVE, 128 + 128, 6),  # The wait follows all six launches.
        ("copy", 128 + 128, None),
        ("elementwise", 16 + 4 + 16, None),  # One row of eight, although all are multiplied first.
        ("elementwise", 16 + 4 + 16, None),  # A row, written in place.
        ("elementwise", 4 + 4, None),
    ]
    assert schedule("loop.hlo").trip_counts == (6,) and schedule("loop.hlo").conditionals == 0


def test_the_flops_of_batched_products_are_those_of_each_product():
    assert [kernel.flops for kernel in schedule("products.hlo").kernels] == 2 * [2 * 3 * 4 * 5 * 6]


def test_with_steps_in_a_loop_the_kernels_are_those_of_its_body():
    results = schedule("loop.hlo", steps_in_a_loop=True)
    assert [kernel.name for kernel in results.kernels] == ["taken", "written", "counted"]
    assert results.trip_counts == (6,)


def kernel(kind, num_bytes=0, flops=0, operation="", done=None):
    message = num_bytes // 2 if kind == COLLECTIVE else 0
    return Kernel(kind, kind, operation, "", num_bytes, flops, "f32", "all-reduce" if message else "", message, done)


GRADIENT, AVERAGE = kernel(KERNEL_GRADIENT, 100), "jit(step)/average_gradients/psum"


@pytest.mark.parametrize(("place", "overlapped"), [(0, 1.0), (2, 1.0), (3, 0.0), (5, 0.0)])
def test_an_all_reduce_that_starts_before_the_last_three_kernel_gradients_is_overlapped(place, overlapped):
    kernels = [GRADIENT] * 5
    kernels.insert(place, kernel(COLLECTIVE, 2 * 400, operation=AVERAGE, done=6))
    results = communication(kernels)
    assert (results["gradient_bytes"], results["overlapped"]) == (400, overlapped)
    (collective,) = results["collectives"]
    assert collective["kernel_gradients_between"] == 5 - place


def test_other_collectives_count_no_gradient_bytes():
    results = communication([kernel(COLLECTIVE, 80, operation="jit(step)/bn1/psum", done=1)])
    assert (results["gradient_bytes"], results["overlapped"], len(results["collectives"])) == (0, None, 1)


def test_counts_by_kind_add_up_to_the_totals():
    results = count(schedule("loop.hlo"), images=4)
    assert results["kernels"] == 6 and (results["transposes"], results["copies"], results["converts"]) == (1, 1, 0)
    assert sum(kind["kernels"] for kind in results["kinds"].values()) == 6
    assert results["bytes_per_image"] == total_bytes(schedule("loop.hlo").kernels) / 4
    assert sum(kind["bytes_per_image"] for kind in results["kinds"].values()) == results["bytes_per_image"]
    json.dumps(results)


def test_the_roofline_adds_exposed_communication_to_the_longer_of_memory_and_multiplication():
    memory, flops = round(roofline.BYTES_A_SECOND), round(roofline.SHARE_OF_PEAK * 989.5e12)
    kernels = (kernel("elementwise", memory), kernel("convolution", memory, 3 * flops))
    results = roofline.predict(Schedule(kernels, 0, ()), images=8, num_gpus=1, precision="bfloat16")
    assert results["compute_seconds"] == pytest.approx(4 + 2 * roofline.LAUNCH_SECONDS)
    assert results["images_per_second"] == pytest.approx(8 / 4, rel=1e-5)

    link, size = DGX_H200.inside, 10**12
    hidden, shown = kernel(COLLECTIVE, 2 * size, done=2), kernel(COLLECTIVE, 2 * size, done=3)
    kernels = (hidden, kernel("elementwise", memory * 60), shown)
    results = roofline.predict(Schedule(kernels, 0, ()), images=1, num_gpus=8, precision="bfloat16")
    assert results["communication_seconds"] == pytest.approx(2 * ring(size, 8, link))
    assert results["exposed_seconds"] == pytest.approx(ring(size, 8, link))
    assert results["overlap"] == pytest.approx(0.5)


def test_a_mistake_raises_a_one_line_error():
    assert_a_wrong_config_is_one_line(gpu_program)


needs_compiler = needs_plugin(gpu_plugin)


@needs_compiler
def test_a_program_that_cannot_be_compiled_raises_a_one_line_error(capfd, tmp_path):
    assert run_script(gpu_program, "cifar10", "--topology", "eight", "--out", str(tmp_path / "out.json")) == 2
    output = capfd.readouterr().err.splitlines()[-1]
    assert "gpu_program.py: --topology eight: " in output and "Traceback" not in output


@functools.cache
def figures(*words):
    """Return the counts of a program with 256 images on each GPU. The tests' XLA flags do not change the kernels."""
    return counts_of(gpu_program, *words, "--batch", "256")


@needs_compiler
@uncached
@pytest.mark.parametrize(
    ("words", "parameters", "kernels", "megabytes", "trip_counts"),
    [
        (["imagenet_resnet50"], 25_557_032, 775, 352, []),
        (["imagenet_resnet50", "--model.name", "resnet18", "--train.max-bad-steps", "0"], 11_689_512, 345, 77.5, []),
        pytest.param(
            *(["cifar10", "--classes", "10", "--data.cache", "device"], 11_173_962, 300, 21.6, [32]),
            marks=pytest.mark.exhaustive,
        ),
        (["cifar10_fast", "--classes", "10"], 1_971_640, 260, 5.8, [32]),
    ],
    ids=["ResNet-50", "ResNet-18 without the guard", "CIFAR-10 on the device", "fast CIFAR-10"],
)
def test_the_step_of_one_gpu_stays_within_its_budget(words, parameters, kernels, megabytes, trip_counts):
    """The budget of bytes and launches on an H200. A change that exceeds it must be justified."""
    results = figures(*words, "--topology", "1x1x1")
    assert results["kernels"] <= kernels and results["bytes_per_image"] <= megabytes * 1e6
    assert results["conditionals"] == 0 and results["trip_counts"] == trip_counts
    # Parameters and momentum, in float32, are updated in place.
    assert 2 * 4 * parameters <= results["aliased_bytes"] <= 1.01 * 2 * 4 * parameters
    assert results["temporary_bytes"] > 0 and results["gradient_bytes"] == 0


def averaged_bytes(name):
    """Return the bytes that devices average in a step: gradients, statistics, and four metric sums with weights."""
    model = adapt(resnet(name, 1000))
    results = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 224, 224, 3)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(results)) + 4 * 2 * 4


@needs_compiler
@uncached
def test_on_two_hosts_most_all_reduces_overlap_the_backward_pass():
    results = figures("imagenet_resnet50", "--topology", "1x2x8")
    assert results["overlapped"] >= 0.85 and results["roofline"]["overlap"] >= 0.85
    assert results["gradient_bytes"] == averaged_bytes("resnet50")
    assert len(results["collectives"]) == PLATFORMS["gpu"].buckets
    assert results["kernels"] <= 795 and results["bytes_per_image"] <= 352e6 and results["conditionals"] == 0


@needs_compiler
@uncached
def test_bfloat16_gradients_halve_the_bytes_of_the_all_reduces():
    words = ["--model.name", "resnet10", "--train.gradient-precision", "bfloat16"]
    results = figures("imagenet_resnet50", "--topology", "1x2x8", *words)
    assert results["overlapped"] >= 0.85
    assert results["gradient_bytes"] < 0.51 * averaged_bytes("resnet10")
