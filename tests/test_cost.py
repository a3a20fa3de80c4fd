"""The cost of a step: counts of operations by hand and by XLA, a single compilation, and figures in a run's files."""

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax
from support import runs
from support.cases import essential_and_rare
from support.data import CLASSES, random_table
from support.networks import SmallNet, linear_model
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.core.errors import Preempted
from jaxddp.measure.cost import Cost, compile_with_cost, count_flops, peak
from jaxddp.mesh import Topology
from jaxddp.models.ops.convolution import convolve_on_cpu, convolve_on_gpu
from jaxddp.setup.run_setup import RunSetup
from jaxddp.training.listeners.jsonl import JsonLines

TABLE, BATCH = random_table(64), 16


def flops(function, *arguments) -> dict[str, int]:
    return dict(count_flops(jax.make_jaxpr(function)(*arguments).jaxpr))


def shaped(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def setup_of(devices: int = 1, net=None, table=TABLE, cache: str = "none", **more) -> RunSetup:
    data = Config().replace(data={"cache": cache}).data
    return runs.setup_of(net or linear_model(), sgd(0.1), table, devices=devices, data=data, batch_size=BATCH, **more)


def test_a_product_counts_two_operations_for_each_multiplication():
    assert flops(jnp.matmul, shaped(3, 5), shaped(5, 7)) == {"float32": 2 * 3 * 5 * 7}
    assert flops(jnp.matmul, shaped(4, 3, 5), shaped(4, 5, 7)) == {"float32": 2 * 4 * 3 * 5 * 7}
    half = shaped(3, 5, dtype="bfloat16")
    assert flops(lambda a, b: (a @ b.T, b @ b.T), half, shaped(3, 5)) == {"float32": 180}
    assert flops(lambda a, b: (a @ a.T, b @ b.T), half, shaped(3, 5)) == {"bfloat16": 90, "float32": 90}
    # Operations other than products of floats are not counted.
    assert flops(lambda a: jnp.exp(a).sum() + a, shaped(100)) == {}
    assert flops(jnp.matmul, shaped(3, 5, dtype="int32"), shaped(5, 7, dtype="int32")) == {}


def test_all_iterations_of_a_scan_count_but_one_of_a_while_loop_and_the_cheapest_branch():
    a, product = shaped(4, 4), 2 * 4**3

    def scanned(a):
        return lax.scan(lambda carry, _: (carry @ a, None), a, length=5)[0]

    def looped(a, turns):
        return lax.fori_loop(0, turns, lambda _, carry: carry @ a, a)

    def branched(a, which):
        return lax.cond(which > 0, lambda a: a @ a @ a, lambda a: a @ a, a)

    assert flops(scanned, a) == {"float32": 5 * product}
    assert flops(looped, a, shaped(dtype="int32")) == {"float32": product}
    assert flops(branched, a, shaped(dtype="int32")) == {"float32": product}
    assert flops(jax.jit(jax.checkpoint(scanned)), a) == {"float32": 5 * product}


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [(3, 3, 3, 256), (3, 3, 256, 3), (3, 3, 3, 4), (1, 1, 8, 8)], ids=str)
def test_own_convolutions_count_as_many_operations_as_xlas(kernel, stride):
    """Both counts are of jaxprs, because XLA's own count on a CPU includes products with a convolution's padding."""

    def gradients(convolution):
        return jax.grad(lambda x, k: convolution(x, k, stride, 1).sum(), argnums=(0, 1))

    def xlas(x, k, stride, padding):
        layout = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": x.shape[-1] // k.shape[2]}
        return lax.conv_general_dilated(x, k, (stride,) * 2, [(padding, padding)] * 2, **layout)

    def assert_equal_counts(channels, kernel):
        shapes = shaped(2, 5, 4, channels, dtype="bfloat16"), shaped(*kernel, dtype="bfloat16")
        expected, *ours = (flops(gradients(each), *shapes) for each in (xlas, convolve_on_cpu, convolve_on_gpu))
        assert ours == [expected, expected] and set(expected) == {"bfloat16"}

    assert_equal_counts(kernel[2], kernel)
    if stride == 1:
        assert_equal_counts(kernel[3], (3, 3, 1, kernel[3]))


@pytest.mark.slow
@given(data=st.data())
def test_a_convolution_and_its_gradients_are_counted_as_xla_counts_them(data):
    """On a CPU XLA counts the unoptimized program, where a convolution is one operation."""

    def draw(low: int, high: int) -> tuple[int, int]:
        return data.draw(st.tuples(st.integers(low, high), st.integers(low, high)))

    size, kernel_size, stride = draw(3, 9), draw(1, 4), draw(1, 3)
    input_dilation, kernel_dilation = draw(1, 2), draw(1, 2)
    padding, groups, batch = data.draw(st.tuples(*[st.tuples(*[st.integers(0, 3)] * 2)] * 2)), *draw(1, 3)
    inputs, outputs = (groups * width for width in draw(1, 3))
    images, kernel = shaped(batch, *size, inputs), shaped(*kernel_size, inputs // groups, outputs)
    padded_size = [(n - 1) * s + sum(p) for n, s, p in zip(size, input_dilation, padding, strict=True)]
    assume(all((t - 1) * h <= r for t, h, r in zip(kernel_size, kernel_dilation, padded_size, strict=True)))

    def convolve(images, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        options = {"lhs_dilation": input_dilation, "rhs_dilation": kernel_dilation, "feature_group_count": groups}
        return lax.conv_general_dilated(images, kernel, stride, padding, dimension_numbers=numbers, **options)

    def both_ways(images, kernel, cotangent):
        output, gradients = jax.vjp(convolve, images, kernel)
        return output, gradients(cotangent)

    cotangent = jax.eval_shape(convolve, images, kernel)
    for function, arguments in ((convolve, (images, kernel)), (both_ways, (images, kernel, cotangent))):
        expected = jax.jit(function).lower(*arguments).cost_analysis()
        # A count of 0 has no entry.
        assert expected is not None
        assert sum(flops(function, *arguments).values()) == expected.get("flops", 0)


PIXELS = 6 * 6 * 3
"""The number of values of an image of the table."""
TAPS = (3 * 6 - 2) ** 2
"""The number of products of a pixel and a weight, for a 3x3 kernel over 6x6 pixels with padding."""
BY_HAND = {
    # The forward pass, and the gradient of the weights.
    "linear": 2 * BATCH * 2 * PIXELS * CLASSES,
    # The same two for the convolution from 3 to 4 channels. The dense layer also has the gradient of its input.
    "convolution": 2 * BATCH * (2 * TAPS * 3 * 4 + 3 * 4 * CLASSES),
}


@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("devices", essential_and_rare((2,), 1, 4))
def test_the_count_of_a_training_step_equals_the_count_by_hand_on_any_devices(name, devices):
    setup = setup_of(devices, {"linear": linear_model(), "convolution": SmallNet()}[name])
    jaxpr = setup.compiled_steps(resident=False).function.trace(setup.state, next(setup.batches(0, 1))).jaxpr
    assert dict(count_flops(jaxpr)) == {"float32": BY_HAND[name]}


def test_the_reported_memory_is_that_of_the_compiled_program():
    large = jnp.zeros((256, 256))
    compiled, cost = compile_with_cost(jax.jit(lambda a, b: (a + b, b.sum()), donate_argnums=0), large, large)
    assert cost.memory.argument_size_in_bytes == 2 * large.nbytes and cost.memory.alias_size_in_bytes == large.nbytes
    assert np.asarray(compiled(large, jnp.ones((256, 256)))[1]) == 256**2


@pytest.mark.parametrize("cache", ("none", "device"))
def test_a_run_compiles_its_step_once(cache, caplog, monkeypatch):
    setup, compilations = setup_of(2, cache=cache, share=False), []
    monkeypatch.setattr(
        "jaxddp.engine.programs.compile_with_cost",
        lambda *arguments: compilations.append(arguments) or compile_with_cost(*arguments),
    )
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        run(setup, steps=9)
    lines = [record.getMessage() for record in caplog.records if "Finished XLA compilation" in record.getMessage()]
    # Placing the images on the devices takes two additional programs.
    assert len(lines) == (1 if cache == "none" else 3) and sum("local_step" in line for line in lines) == 1, lines
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("Tesla V100-SXM2-16GB", "bfloat16", None),
        ("NVIDIA A10G", "bfloat16", 70),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("NVIDIA A100-SXM4-80GB", "float32", 156),
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756.5),
        ("NVIDIA H200", "float32", 494.5),
        ("NVIDIA H200", "float64", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA GH200 480GB", "bfloat16", None),
        ("TPU v4 lite", "bfloat16", None),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "float32", 459),
        ("cpu", "float32", None),
    ],
)
def test_peak_speeds_equal_those_in_the_data_sheets(kind, dtype, tera):
    assert peak(kind, dtype) == (None if tera is None else tera * 1e12)


def test_utilization_is_the_time_at_the_peak_over_the_time_taken():
    counts = {"bfloat16": 989_500_000_000_000, "float32": 494_500_000_000_000}
    assert Cost(counts, None).utilization(8.0, 2, "NVIDIA H200") == pytest.approx(2 / (2 * 8.0))
    assert Cost(counts, None).utilization(8.0, 2, "cpu") is None
    assert Cost(counts | {"float64": 1}, None).utilization(8.0, 2, "NVIDIA H200") is None
    assert Cost({}, None).utilization(8.0, 2, "NVIDIA H200") is None


def run(setup: RunSetup, *, steps: int, directory: Path | None = None, **more: Any) -> None:
    """Train a setup and log every step."""
    changes = {"train": {"duration": f"{steps} steps"}, "log": {"every": "1 step"}}
    runs.train(setup, changes, listeners=[JsonLines(directory)] if directory else (), **more)


@pytest.mark.parametrize(("cache", "stop"), [("none", None), ("device", None), ("none", 8)])
def test_the_files_of_a_run_have_the_cost_of_its_steps(cache, stop, tmp_path, monkeypatch):
    monkeypatch.setattr(Topology, "device_kind", "NVIDIA H200")
    with pytest.raises(Preempted) if stop else nullcontext():
        steps = 9 if stop else 8
        run(setup_of(2, cache=cache), steps=steps, directory=tmp_path, should_stop=lambda step: step == stop)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((tmp_path / "result.json").read_text())
    # 494.5 TFLOP/s on each of two devices.
    a_step_at_peak = BY_HAND["linear"] / (2 * 494.5e12)
    assert len(lines) == 8
    for line in lines:
        assert line["flops_utilization"] == pytest.approx(a_step_at_peak * line["images_per_second"] / BATCH)
    # The first step compiles, and is excluded from the run's figure.
    seconds = [BATCH / line["images_per_second"] for line in lines[1:]]
    assert result["flops_utilization"] == pytest.approx(a_step_at_peak / np.mean(seconds))
    assert result["flops_per_step"] == BY_HAND["linear"]
    memory = [line["peak_memory"] for line in lines]
    assert memory == sorted(memory) and result["peak_memory"] >= memory[-1]
    # A process that has imported JAX has more than 50 MB, and this small run needs less than 100 GB.
    assert 50e6 < memory[0] <= result["peak_memory"] < 100e9


def test_peak_memory_is_that_of_the_fullest_gpu():
    def topology(*stats: dict | None) -> Topology:
        devices = [SimpleNamespace(platform="gpu", memory_stats=lambda each=each: each) for each in stats]
        mesh = SimpleNamespace(devices=np.array(devices), local_devices=devices)
        return Topology(mesh)  # pyright: ignore[reportArgumentType]

    assert topology({"peak_bytes_in_use": 3}, {"peak_bytes_in_use": 7}).peak_memory() == 7
    assert topology({}).peak_memory() is topology(None).peak_memory() is None
