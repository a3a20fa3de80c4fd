"""`benchmarks/tpu_program.py`: counts of compiled TPU programs, and the budgets of fusions and bytes."""

import functools
import json
import os
import re

import pytest
from jaxlib import _hlo
from support.programs import assert_a_wrong_config_is_one_line, counts_of, needs_plugin, run_script, uncached

from benchmarks import tpu_program
from benchmarks.programs import tpu_plugin
from benchmarks.programs.tpu_counts import HBM_BYTES, count_program

# Types with their layouts: the order of the axes from the minor one, and the tiles. S(1) is the memory on the chip.
TYPES = {
    "IMAGES": "bf16[16,8,8,3]{0,3,2,1:T(4,128)(2,1)}",
    "KERNEL_ON_CHIP": "bf16[3,3,3,64]{3,2,1,0:T(4,128)(2,1)S(1)}",
    "KERNEL": "bf16[3,3,3,64]{3,2,1,0:T(4,128)(2,1)}",
    "RESULT": "bf16[16,8,8,64]{3,0,2,1:T(8,128)(2,1)}",
    "TURNED": "bf16[16,8,8,64]{3,2,1,0:T(8,128)(2,1)}",
    "VECTOR": "f32[100]{0:T(128)}",
    "MATRIX": "f32[8,100]{1,0:T(8,128)}",
    "SQUARE": "f32[8,8]{1,0:T(8,128)}",
    "WINDOW": "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
    "CYCLES": 'backend_config={"window_config":{"estimated_cycles":"NUMBER"}}',
}
PROGRAM = """
HloModule made, is_scheduled=true

%convolved (images: bf16[16,8,8,3], kernel: bf16[3,3,3,64]) -> bf16[16,8,8,64] {
  %images = IMAGES parameter(0)
  %kernel = KERNEL parameter(1)
  %result = RESULT convolution(%images, %kernel), WINDOW
  ROOT %negated = RESULT negate(%result)
}

%moved (a: bf16[16,8,8,64]) -> bf16[16,8,8,64] {
  %a = RESULT parameter(0)
  ROOT %copied = TURNED copy(%a)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (images: bf16[16,8,8,3], kernel: bf16[3,3,3,64], vector: f32[100]) -> (bf16[16,8,8,64], f32[100]) {
  %images = IMAGES parameter(0)
  %kernel = KERNEL parameter(1)
  %vector = VECTOR parameter(2)
  %start = (KERNEL_ON_CHIP, KERNEL, u32[]{:S(2)}) copy-start(%kernel)
  %done = KERNEL_ON_CHIP copy-done(%start)
  %fusion = RESULT fusion(%images, %done), kind=kOutput, calls=%convolved, CYCLES300
  %all = VECTOR all-reduce(%vector), replica_groups={}, to_apply=%sum
  %turned = TURNED fusion(%fusion), kind=kLoop, calls=%moved, CYCLES100
  ROOT %results = (TURNED, VECTOR) tuple(%turned, %all)
}
"""


LOOP = """
HloModule looped, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%product (a: f32[8,100]) -> f32[8,8] {
  %a = MATRIX parameter(0)
  ROOT %dot = SQUARE dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%negated (a: f32[100]) -> f32[100] {
  %a = VECTOR parameter(0)
  ROOT %n = VECTOR negate(%a)
}

%summed (a: f32[100]) -> f32[100] {
  %a = VECTOR parameter(0)
  ROOT %r = VECTOR all-reduce(%a), replica_groups={}, to_apply=%sum
}

%step (carry: (s32[], f32[8,100], f32[100])) -> (s32[], f32[8,100], f32[100]) {
  %carry = (s32[], MATRIX, VECTOR) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %matrix = MATRIX get-tuple-element(%carry), index=1
  %vector = VECTOR get-tuple-element(%carry), index=2
  %started = VECTOR all-reduce-start(%vector), replica_groups={}, to_apply=%sum
  %square = SQUARE fusion(%matrix), kind=kOutput, calls=%product, CYCLES600
  %received = VECTOR all-reduce-done(%started)
  %changed = VECTOR fusion(%received), kind=kLoop, calls=%negated, CYCLES400
  %again = VECTOR fusion(%changed), kind=kCustom, calls=%summed
  ROOT %next = (s32[], MATRIX, VECTOR) tuple(%number, %matrix, %again)
}

%goes_on (carry: (s32[], f32[8,100], f32[100])) -> pred[] {
  %carry = (s32[], MATRIX, VECTOR) parameter(0)
  %number = s32[] get-tuple-element(%carry), index=0
  %last = s32[] constant(6)
  ROOT %less = pred[] compare(%number, %last), direction=LT
}

ENTRY %main (start: (s32[], f32[8,100], f32[100])) -> (s32[], f32[8,100], f32[100]) {
  %start = (s32[], MATRIX, VECTOR) parameter(0)
  ROOT %loop = (s32[], MATRIX, VECTOR) while(%start), condition=%goes_on, body=%step
}
"""


def counts(program=PROGRAM, **options):
    text = re.sub(r"CYCLES(\d+)", lambda found: TYPES["CYCLES"].replace("NUMBER", found[1]), program)
    text = functools.reduce(lambda text, name: text.replace(name, TYPES[name]), TYPES, text)
    return count_program(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto(), images=16, **options)


def test_a_loop_of_steps_is_counted_as_one_step():
    looped = counts(LOOP, steps_in_a_loop=True)
    assert looped == counts(LOOP)
    assert (looped["fusions"], looped["convolutions"], looped["estimated_cycles"]) == (2, 1, 1000)
    # A product of [8, 100] and [100, 8], whose contracted axis is padded to 128 and whose result to [8, 128].
    assert looped["flops_per_image"] * 16 == 2 * 8 * 8 * 100
    assert looped["padding"] == pytest.approx(1 - (100 / 128) * (8 / 128))


def test_an_asynchronous_collective_has_the_cycles_until_the_wait_for_it():
    started, fused = counts(LOOP)["collectives"]
    assert started == {"name": "started", "bytes": 400, "cycles_before": 0.0, "cycles_beside": 0.6}
    # A collective may be inside a fusion.
    assert fused == {"name": "again", "bytes": 400, "cycles_before": 1.0, "cycles_beside": 0.0}


def test_each_operation_is_counted_by_its_kind():
    found = counts()
    kinds = ("fusions", "convolutions", "data_movements", "prefetches")
    assert [found[kind] for kind in kinds] == [1, 1, 1, 1]
    assert (found["estimated_cycles"], found["estimated_cycles_of_movements"]) == (400, 100)
    json.dumps(found)


def test_bytes_are_those_in_hbm_with_the_padding_of_the_tiles():
    # Channels come second to last in the images' tiles of (4, 128) elements, and last in the results' of (8, 128).
    images, kernel, result, vector = 2 * 128 * 8 * 8 * 4, 2 * 3 * 3 * 4 * 128, 2 * 16 * 8 * 8 * 128, 4 * 128
    # The convolution reads its kernel from the chip's own memory, into which the prefetch has copied it.
    assert counts()["hbm_bytes_per_image"] * 16 == (images + result) + kernel + 2 * result + 2 * vector


def test_padding_is_the_fraction_of_multiplications_with_padding():
    # Along an axis of 8 pixels, 3 taps meet a pixel at 6 positions, and 2 taps at each border.
    assert counts()["flops_per_image"] * 16 == 2 * 16 * (6 * 3 + 2 * 2) ** 2 * 64 * 3
    # 64 features are padded to 128, and 3 channels to 4.
    assert counts()["padding"] == pytest.approx(1 - (64 / 128) * (3 / 4), abs=1e-6)


def test_a_collective_has_the_cycles_before_it():
    (collective,) = counts()["collectives"]
    assert collective == {"name": "all", "bytes": 400, "cycles_before": 0.75, "cycles_beside": 0.0}


def test_a_wrong_name_of_a_config_raises_a_one_line_error():
    assert_a_wrong_config_is_one_line(tpu_program)


needs_compiler = needs_plugin(tpu_plugin)


@needs_compiler
def test_an_unknown_topology_raises_a_one_line_error(capfd, tmp_path):
    assert run_script(tpu_program, "cifar10", "--topology", "v5e:eight", "--out", str(tmp_path / "out.json")) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert message.startswith("tpu_program.py: --topology v5e:eight: ") and "v5e:2x4" in message


@needs_compiler
@pytest.mark.parametrize(("topology", "chips"), [("v5e:2x4", 8), ("v4:2x2x1", 4), ("v5p:2x2x1", 4), ("v6e:2x2", 4)])
def test_a_described_slice_has_one_device_for_each_chip(topology, chips):
    before = dict(os.environ)
    devices = tpu_plugin.described_devices(topology)
    assert len(devices) == chips and devices[0].device_kind in HBM_BYTES
    assert dict(os.environ) == before


@functools.cache
def figures(*words):
    """Return the counts of a program."""
    return counts_of(tpu_program, *words)


SMALL = ("digits", "--classes", "10", "--model.width", "16", "--batch", "32", "--topology", "v5e:2x2")


@pytest.mark.ci
@needs_compiler
@uncached
def test_the_budget_of_a_small_step_on_four_chips():
    """The budget of a step on TPU v5e. A change that exceeds it must be justified."""
    found = figures(*SMALL)
    # XLA combines the gradients, the statistics and the metrics into one all-reduce, without a copy.
    assert len(found["collectives"]) == 1
    assert found["collectives"][0]["bytes"] == 2_814_600
    assert found["fusions"] <= 360 and found["hbm_bytes_per_image"] <= 790_000
    assert found["memory_bytes"] <= 30e6 and found["temporary_bytes"] == 0
