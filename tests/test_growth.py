"""Growing images: the side at each step, decoding and resizing, and the equality of resumed and uninterrupted runs."""

import dataclasses
import functools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import runs
from support.cases import rare_case
from support.data import CLASSES, random_batch, random_table, write_arrays
from support.ilsvrc import write_tree
from support.networks import SmallNet, largest_difference, linear_model, objective_of, train_steps
from support.runs import LEAN, RECIPE, Recorder, fails, metrics
from support.shared import sgd, topology_of

import jaxddp
from jaxddp.augment.geometry import Side, resized
from jaxddp.cli import main
from jaxddp.config import AugmentConfig, Config, DataConfig
from jaxddp.core.errors import InputError, Preempted
from jaxddp.data.batch import Batch, Growth
from jaxddp.data.formats.ilsvrc import train_solutions, val_solutions
from jaxddp.data.order import EvalOrder
from jaxddp.engine.ways.way import Way
from jaxddp.measure.cost import Cost, MeanCost, compile_with_cost
from jaxddp.measure.memory import Needs, bytes_on_a_device
from jaxddp.mesh import Topology
from jaxddp.setup.feed import eval_batches
from jaxddp.setup.run_training import make_run
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.workdir.signature import Signature

PIXELS = st.integers(1, 300)


@st.composite
def growths(draw):
    first = draw(PIXELS)
    last = first + draw(PIXELS)
    ends = sorted(draw(st.tuples(*2 * [st.fractions(0, 5000, max_denominator=7)])))
    return Growth(first, last, draw(st.integers(1, last - first)), *ends, draw(st.integers(1, 64)))


@given(growths(), st.integers(1, 300))
def test_the_image_side_grows_from_the_first_to_the_last_in_multiples(growth, total):
    sides = [growth.side(step) for step in range(total)]
    assert sides == sorted(sides) and {growth.first, growth.last}.issuperset(side for side in sides if side % growth.by)
    for step, side in enumerate(sides):
        seen = step * growth.batch_size
        assert growth.first <= side <= growth.last
        if seen <= growth.start < growth.end:
            assert side == growth.first
        if seen >= growth.end:
            assert side == growth.last
        if growth.start < seen < growth.end and side not in (growth.first, growth.last):
            share = (seen - growth.start) / (growth.end - growth.start)
            assert abs(side - growth.first - (growth.last - growth.first) * share) <= Fraction(growth.by, 2)


def test_sides_equal_those_of_ffcv():
    """Compare with `get_resolution` of FFCV's training script, which rounds with NumPy (halves to even numbers)."""

    def resolution(epoch: int, low: int, high: int, start: int, end: int) -> int:
        if epoch <= start:
            return low
        if epoch >= end:
            return high
        return int(np.round(np.interp([epoch], [start, end], [low, high])[0] / 32)) * 32

    for low, high, start, end, epochs in ((160, 192, 65, 76, 88), (160, 192, 11, 13, 16), (96, 224, 3, 17, 20)):
        growth = Growth(low, high, 32, Fraction(100 * start), Fraction(100 * end), 100)
        expected = [resolution(epoch, low, high, start, end) for epoch in range(epochs)]
        assert [growth.side(epoch) for epoch in range(epochs)] == expected
        assert len(set(expected)) == 1 + (high - low) // 32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grow_from": 32}, r"grow_from=32: images grow to 32 pixels; give a smaller side, or leave .* out"),
        ({"grow_from": 16}, r"grow_by=32: the side grows by only 16 pixels, from 16 to 32; give at most 16"),
        (
            {"grow_by": 8, "grow_start": "90%"},
            r'grow_start="90%" comes after data.grow_end="80%"; give an earlier start',
        ),
    ],
)
def test_impossible_growth_is_an_error(keys, message):
    with pytest.raises(InputError, match=rf"^data\.{message}$"):
        Growth.of(DataConfig(**{"grow_from": 16, **keys}), 32, num_examples=100, batch_size=10, total_steps=100)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize(("height", "width", "side"), [(32, 32, 20), (32, 32, 16), (9, 14, 7), (8, 8, 8)])
@pytest.mark.parametrize(("interpolation", "method"), [("bilinear", "bilinear"), ("bicubic", "cubic")])
def test_resizing_on_the_device_equals_jaxs_rounded_resize(dtype, height, width, side, interpolation, method):
    white = np.iinfo(dtype).max
    images = np.random.default_rng(0).integers(0, white, (5, height, width, 3), dtype, endpoint=True)
    images[0], images[1] = 0, white
    result = np.asarray(jax.jit(lambda x: resized(x, Side(side, interpolation), jnp.float32))(images))
    with jax.enable_x64(True):
        expected = np.asarray(jax.image.resize(images.astype(np.float64), (5, side, side, 3), method)).clip(0, white)
    assert result.dtype == dtype and result.shape == (5, side, side, 3)
    assert np.abs(result - expected).max() <= 0.5 + 1 / 16
    assert (result[0] == 0).all() and (result[1] == white).all()


@pytest.mark.slow
def test_any_number_of_devices_gives_the_same_step_with_resizing():
    """The steps are plain SGD in float64, with random crops and flips of resized images, and sync batch norm."""
    with jax.enable_x64(True):
        net = SmallNet(batch_norm=True, sync="data", dtype=jnp.float64)
        objective = objective_of(net, augment=AugmentConfig(pad=1, flip=True))
        batches = [random_batch(8, masked=number, seed=number)._replace(side=Side(4)) for number in range(2)]
        results = {}
        for devices in (1, 4):
            params, sums, state = train_steps(objective, Way(topology_of(devices)), batches)
            results[devices] = (state.params, state.model_state), [each.means() for each in sums]
        changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), params[0], results[1][0][0])
        assert min(jax.tree.leaves(changes)) > 1e-9
        assert largest_difference(results[4], results[1]) < 1e-9


TABLE, VAL = random_table(40, image=12), random_table(11, seed=1, image=12)
GROWING = {"grow_from": 6, "grow_start": "4 steps", "grow_end": "16 steps", "grow_by": 3, "image_size": 12}
SIDES = [6] * 7 + [9] * 6 + [12] * 11
"""The side at each step. The linear growth reaches 7.5 pixels at step 7 and 10.5 at step 13, which are rounded up."""
STEPS = len(SIDES)
CACHES = ("none", "device")


@functools.cache
def statistics_model(classes: int = CLASSES):
    """Return a linear model of the mean and the mean square of each channel, for images of any size."""

    def init(key, example):
        return {"weight": 0.1 * jax.random.normal(key, (2 * example.shape[-1], classes), example.dtype)}

    def apply(params, images):
        return jnp.concatenate([images.mean((1, 2)), (images**2).mean((1, 2))], -1) @ params["weight"]

    return init, apply


def setup_of(*, devices: int = 2, net=None, table=TABLE, cache: str = "none", **data):
    config = Config().replace(parallel={"self_test": "never"}, train={"duration": f"{STEPS} steps"})
    data = {**GROWING, "cache": cache, "augment": AugmentConfig(pad=1), **data}
    model, optimizer = net or statistics_model(table.num_classes), sgd(0.05, momentum=0.9)
    return runs.setup_of(model, optimizer, table, devices=devices, data=DataConfig(**data), config=config)


def run(setup, *, log: str = "1 step", every: str = "1000 steps", **more):
    recorder = Recorder()
    changes = {"log": {"every": log}, "eval": {"every": every}, "checkpoint": {"every": "1000 steps"}}
    return jax.device_get(runs.train(setup, changes, val=VAL, listeners=[recorder], **more)), recorder


def copy_of(setup):
    """Return a copy of the setup with the same compiled programs. Training consumes the state of a setup."""
    return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))


class UninterruptedRun(NamedTuple):
    """A setup, the results of its run, and the image sides for which its programs were compiled, in order."""

    setup: Any
    state: Any
    recorder: Recorder
    compiled: list[int]


@pytest.fixture(scope="module")
def uninterrupted_runs():
    """Return runs of streamed images, and of images in device memory."""
    runs_of_caches = {}
    for cache in CACHES:
        setup, compiled = setup_of(cache=cache), []

        def compiling(function, state, *feed, compiled=compiled):
            (batch,) = (part for part in feed if isinstance(part, Batch))
            compiled.append(12 if batch.side is None else batch.side.pixels)
            return compile_with_cost(function, state, *feed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxddp.engine.programs.compile_with_cost", compiling)
            runs_of_caches[cache] = UninterruptedRun(setup, *run(copy_of(setup)), compiled)
            # A second run compiles no program.
            run(copy_of(setup))
    return runs_of_caches


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_each_step_has_its_image_side_and_each_size_is_compiled_once_the_largest_first(uninterrupted_runs, cache):
    recorder = uninterrupted_runs[cache].recorder
    assert [record.image_size for record in recorder.steps] == SIDES
    assert all(np.isfinite(record.metrics["loss"]) for record in recorder.steps)
    assert uninterrupted_runs[cache].compiled == [6, 12, 9]


@pytest.mark.slow
def test_images_on_the_devices_train_like_streamed_ones(uninterrupted_runs):
    """The states and metrics are equal bit for bit, also if a dispatch has several steps."""
    records = {record.step: record.metrics for record in uninterrupted_runs["none"].recorder.steps}
    several = run(copy_of(uninterrupted_runs["device"].setup), log="6 steps")
    for state, recorder in (uninterrupted_runs["device"][1:3], several):
        assert largest_difference(state, uninterrupted_runs["none"].state) == 0
        assert [record.metrics for record in recorder.steps] == [records[record.step] for record in recorder.steps]


@pytest.mark.parametrize(
    ("cache", "stop"), [("none", 7), ("device", 14), rare_case("none", 6), rare_case("none", 8), rare_case("device", 7)]
)
def test_a_run_resumed_around_a_change_of_the_side_is_the_same_bit_for_bit(uninterrupted_runs, cache, stop, tmp_path):
    setup, state, expected, _ = uninterrupted_runs[cache]
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(Preempted, match=f"saved step {stop} of {STEPS}"):
        run(copy_of(setup), checkpoints=checkpoints, should_stop=lambda step: step == stop)
    resumed, recorder = run(copy_of(setup), checkpoints=checkpoints, resume_step=stop)
    assert largest_difference(resumed, state) == 0
    for record, same in zip(recorder.steps, expected.steps[stop:], strict=True):
        assert (record.step, record.metrics, record.image_size) == (same.step, same.metrics, same.image_size)


@pytest.mark.slow
def test_a_lack_of_memory_for_the_largest_side_is_an_error_before_the_first_step(monkeypatch):
    setup = setup_of(devices=1, net=SmallNet(width=4))
    program, chunks = setup.program()
    feed = next(chunks(0)).feed
    largest, needs = setup.feed.growing(STEPS).largest(feed), []
    for arguments in (feed, largest):
        program.prepare(setup.state, *arguments)
        needs.append(Needs.of(program.cost, setup.state.params, setup.topology).total)
    missing = needs[1] - bytes_on_a_device((setup.state, feed))
    assert needs[0] < needs[1] - 1 and missing > 0
    monkeypatch.setattr(Topology, "free_memory", lambda _: missing - 1)
    recorder = Recorder()
    with pytest.raises(InputError, match="the step needs "):
        runs.train(setup, {"log": {"every": "1 step"}}, listeners=[recorder])
    assert not recorder.steps


def test_the_mean_cost_weights_each_size_by_its_number_of_steps():
    costs = MeanCost()
    assert costs.mean() is None
    for steps, flops in ((3, 10), (1, 50)):
        costs.add(steps, Cost({"float32": flops}, memory=flops))
    mean = costs.mean()
    assert mean is not None and (mean.flops, mean.memory) == (20, 50)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return write_tree(tmp_path_factory.mktemp("ilsvrc"), images=8, val=7, size=(40, 52))


FILES = {**GROWING, "grow_by": 6, "image_size": 18, "resize": 20, "grow_start": "1 step", "grow_end": "5 steps"}
FILE_SIDES = [6, 6, 12, 12, 18, 18]


@pytest.mark.ci
def test_files_are_decoded_to_the_side_of_the_step_by_the_crops_of_that_step(tree):
    """Each example appears once in an epoch. Its pixels equal those of a run in which all images have its side."""
    setup = setup_of(table=train_solutions(tree), **FILES)
    batches = list(setup.batches(0, 6))
    assert [batch.image.shape[1:] for batch in batches] == [(side, side, 3) for side in FILE_SIDES]
    assert all(batch.side is None for batch in batches)
    rows = np.concatenate([np.asarray(batch.row) for batch in batches])
    assert all(sorted(epoch) == list(range(24)) for epoch in rows.reshape(2, 24).tolist())
    fixed = setup_of(table=train_solutions(tree), **{**FILES, "grow_from": None, "image_size": 12})
    for batch, expected in zip(batches[2:4], fixed.batches(2, 4), strict=True):
        np.testing.assert_array_equal(batch.image, expected.image)
    # A run that resumes between two changes of the side has the same batches.
    for batch, expected in zip(setup.batches(3, 6), batches[3:], strict=True):
        for column, other in zip(batch[:5], expected[:5], strict=True):
            np.testing.assert_array_equal(column, other)


@pytest.mark.slow
def test_the_self_test_uses_the_first_images_of_a_run(tree):
    """A run that resumes at step 5 has larger images, but its self-test uses the size of the first step."""
    setup = setup_of(table=train_solutions(tree), **FILES)
    run = make_run(runs.changed(setup, {"parallel": {"self_test": "always"}, "train": {"duration": "6 steps"}}))
    for step in (0, 5):
        run.self_test(run.state, *next(run.chunks(step)).feed)
    assert run.self_test.operations > 0


@pytest.mark.slow
def test_evaluation_and_training_have_separate_image_sizes(tree, caplog):
    keys = {"grow_from": None, "image_size": 12, "resize": 20, "eval_size": 20}
    setup, val = setup_of(table=train_solutions(tree), **keys), val_solutions(tree)
    assert next(setup.batches(0, 1)).image.shape[1:] == (12, 12, 3)
    expected = next(iter(val.eval_batches(EvalOrder(7, 8), DataConfig(image_size=20, resize=20))))
    batch = next(eval_batches(val, setup.config.data, EvalOrder(7, 8), setup.topology))
    np.testing.assert_array_equal(batch.image, expected.image)
    assert setup.evaluator(val)(setup.state)["count"] == 7
    for size in (14, 13):
        make_run(runs.changed(setup, {"data": {"eval_size": size}}, val))
    message = "data.resize=20: evaluation crops the central 13 pixels of this short side; 14 is usual"
    assert [line for line in caplog.messages if "resize" in line] == [message]
    data = dataclasses.replace(setup.config.data, cache="device", crop="whole")
    resident = dataclasses.replace(setup.feed, data=data)
    resident.place(val)
    assert [placed.images.shape[1:] for placed in resident.resident.values()] == [(12, 12, 3), (20, 20, 3)]
    assert Signature.of(setup.resources.train, setup.config.data).image_shape == (20, 20, 3)
    # A resize below the crop is an error.
    data = DataConfig(image_size=12, resize=16, eval_size=20)
    match = r"^data.resize=16: validation crops data.eval_size=20 .* set data.resize to 20"
    with pytest.raises(InputError, match=match):
        val_solutions(tree).check_evaluation(data.of_evaluation)
    with pytest.raises(InputError, match=r"^data.eval_size=20: images in memory are used as they are; set data.eval"):
        setup_of(eval_size=20, grow_from=None, net=SmallNet()).evaluator(VAL)


@pytest.mark.parametrize(
    ("data", "key", "side"),
    [({}, "data.grow_from=6", 6), ({"grow_from": None, "eval_size": 20, "resize": 20}, "data.eval_size=20", 20)],
)
def test_a_network_for_one_size_is_refused_before_anything_is_compiled(tree, data, key, side):
    with pytest.raises(InputError, match=rf"^{key}: the network that is made for 18x18 pixels does not take {side}x"):
        setup_of(table=train_solutions(tree), net=linear_model(), **{**FILES, **data})


def test_images_that_cannot_grow_are_rejected():
    with pytest.raises(InputError, match=r"^data.augment.cutout=8: expected 0 to 6 pixels"):
        setup_of(augment=AugmentConfig(cutout=8))
    table = jaxddp.ArrayTable(np.zeros((16, 12, 8, 3), np.uint8), np.arange(16) % 2, ("a", "b"))
    with pytest.raises(InputError, match=r"^data.grow_from=6: these images are 12x8, and only square images can grow"):
        setup_of(table=table)


@pytest.mark.slow
def test_growth_as_a_share_of_a_run_whose_length_changed_is_rejected():
    data = DataConfig(**{**GROWING, "grow_end": "80%"})
    setup = jaxddp.prepare_training(statistics_model(), TABLE, 2, sgd(0.05), 4, epochs=2, data=data)
    message = r"^data.grow_end: 80% is a fraction of a run of 2 epochs, but the length is now 3 epochs; give"
    with pytest.raises(InputError, match=message):
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, epochs=3, listeners=())
    _, history = jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), log_every="1 step")
    assert history.train["image_size"].tolist() == [6] * 5 + [9] * 2 + [12] * 3


@pytest.mark.slow
def test_a_recipe_with_growing_images_is_trained_and_not_resumed_with_other_sizes(tmp_path, capfd):
    arrays = write_arrays(tmp_path / "images.npz", random_table(39, image=16), random_table(11, seed=1, image=16))
    keys = ["--data.grow-from", "8", "--data.grow-by", "8", "--data.grow-end", "80%"]
    recipe, workdir = [RECIPE, "--data.path", str(arrays), *keys, *LEAN], tmp_path / "run"
    assert main(["train", *recipe, "--workdir", str(workdir), "--train.duration", "10 steps"]) == 0
    lines = [line for line in metrics(workdir) if line["split"] == "train"]
    assert [line["image_size"] for line in lines] == [8] * 4 + [16] * 6
    assert json.loads((workdir / "result.json").read_text())["status"] == "done"
    message = fails(["train", *recipe, "--workdir", str(workdir), "--data.grow-by", "4"], capfd)
    assert "--data.grow-by was 8 and is now 4" in message
