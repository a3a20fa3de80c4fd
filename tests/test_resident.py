"""Data sets in device memory: the steps equal those from a stream, several steps are dispatched together, and such a
chunk of steps ends where a log line, a validation or a save is due."""

import signal
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.experimental import multihost_utils
from support.data import random_table
from support.ilsvrc import IMAGES, write_tree
from support.networks import SmallNet, fresh_state, largest_difference, linear_model, objective_of, randomized
from support.runs import LEAN, SMALL, Recorder, exploding, fails, plan_of, setup_of, train
from support.shared import sgd

from jaxddp.cli import main
from jaxddp.config import AugmentConfig, Config, DataConfig
from jaxddp.core.errors import InputError, NonFiniteError, Preempted
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.formats.ilsvrc import train_solutions, val_solutions
from jaxddp.data.order import EvalOrder, SampleOrder, stacked_columns
from jaxddp.data.table import ExampleTable
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.job.membership import stop_on_signals
from jaxddp.measure.cost import compile_with_cost
from jaxddp.mesh import Topology
from jaxddp.setup import feed
from jaxddp.setup.feed import LONGEST_CHUNK, Feed
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.plan import Plan, cut

TABLE, VAL = random_table(50), random_table(23, seed=1)
STEPS = 45
COMPARED_STEPS = 6


def float64_parts(net, devices: int):
    """Return an objective with flips and padded crops, an optimizer with momentum, a mesh and a state, in float64."""
    objective = objective_of(net, augment=AugmentConfig(flip=True, pad=1))
    topology, optimizer = Topology.create(devices), sgd(0.05, momentum=0.9)
    return objective, optimizer, topology, fresh_state(objective, optimizer, topology)


def placed_chunk(order: SampleOrder, steps: range, topology: Topology):
    return topology.place(stacked_columns(TABLE, order, steps))


CONVOLUTION = SmallNet(batch_norm=True, sync="data", dtype=jnp.float64)
LINEAR = linear_model()


@pytest.mark.slow
@pytest.mark.parametrize(("net", "devices", "length"), [(LINEAR, 1, 4), (LINEAR, 4, 1), (CONVOLUTION, 4, 4)])
def test_several_steps_in_one_dispatch_equal_single_steps(net, devices, length):
    with jax.enable_x64(True):
        objective, optimizer, topology, state = float64_parts(net, devices)
        order, key = SampleOrder(len(TABLE), 8, seed=5), topology.replicate(jax.random.key(5))
        images = topology.replicate(TABLE.images)
        step = Way(topology).step(Phases(objective, optimizer))
        expected, one_by_one = [], jax.tree.map(jnp.copy, state)
        for batch in TABLE.train_batches(order, DataConfig(), range(COMPARED_STEPS)):
            one_by_one, sums = step(one_by_one, topology.place(batch), key)
            expected.append(np.asarray(sums.values))
        program = Way(topology).step(Phases(objective, optimizer), resident=True)
        actual = []
        for steps in cut(range(COMPARED_STEPS), length):
            state, sums = program(state, images, placed_chunk(order, steps, topology), key)
            assert len(sums.values) == len(steps) and sums.names == ("loss", "top1")
            actual += list(np.asarray(sums.values))
        assert np.abs(np.array(actual) - np.array(expected)).max() < 1e-9
        assert largest_difference(jax.device_get(state), jax.device_get(one_by_one)) < 1e-9


def test_a_step_in_the_loop_has_one_collective():
    with jax.enable_x64(True):
        objective, optimizer, topology, state = float64_parts(LINEAR, 4)
        chunk = placed_chunk(SampleOrder(len(TABLE), 8, seed=5), range(4), topology)
        program = Way(topology).step(Phases(objective, optimizer), resident=True)
        text = program.lower(state, topology.replicate(TABLE.images), chunk).as_text()  # pyright: ignore
        assert text.count("stablehlo.all_reduce") == 1


LONG_CHUNKS = {"log": "1000 steps", "eval": "0 steps", "checkpoint": "0 steps"}
"""Cadences that give long chunks, because chunks end only at the ends of epochs (steps 7, 13, 19, 25, …)."""


def run(cache: str, plan: dict, *, net=LINEAR, optimizer=None, devices: int = 4, share: bool = True, **options):
    data = DataConfig(augment=AugmentConfig(pad=1), cache=cache)
    optimizer, recorder = optimizer or sgd(0.05, momentum=0.9), Recorder()
    setup = setup_of(net, optimizer, TABLE, devices=devices, data=data, seed=5, share=share)
    return jax.device_get(train(setup, plan, val=VAL, listeners=[recorder], **options)), recorder


SYNC = SmallNet(batch_norm=True, sync="data")


@pytest.mark.slow
@pytest.mark.parametrize(("net", "devices"), [(LINEAR, 4), (SYNC, 4)])
def test_a_run_on_resident_data_equals_one_from_a_stream(net, devices):
    state, recorder = run("device", plan_of(STEPS), devices=devices, net=net)
    expected, streamed = run("none", plan_of(STEPS), devices=devices, net=net)
    assert recorder.moments == streamed.moments
    assert largest_difference(state, expected) < 1e-5
    for ours, theirs in zip(recorder.steps + recorder.evaluations, streamed.steps + streamed.evaluations, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, abs=1e-5)
        if getattr(ours, "epoch_end", None):
            assert ours.epoch_end.metrics == pytest.approx(theirs.epoch_end.metrics, abs=1e-5)


def test_every_example_is_trained_on_once_an_epoch():
    """A network with a parameter for each row, which grows by 1 / batch size whenever the row's image is trained on."""
    size, batch_size, epochs = 48, 8, 3
    images = np.broadcast_to(np.arange(size, dtype=np.uint8)[:, None, None, None], (size, 2, 2, 3))
    table = ArrayTable(images, np.zeros(size, int), ("a", "b"))
    net = (
        lambda key, example: {"seen": jnp.zeros(size)},
        lambda params, images: jnp.stack([params["seen"][images[:, 0, 0, 0].round().astype(int)]] * 2, axis=1),
    )
    data = DataConfig(augment=AugmentConfig(flip=False), mean=(0.0,) * 3, std=(1 / 255,) * 3, cache="device")
    sizes = {"devices": 4, "batch_size": batch_size, "seed": 5}
    setup = setup_of(net, sgd(1.0), table, data=data, loss=lambda logits, labels: -logits[:, 0], **sizes)
    state = train(setup, {"train": {"duration": f"{epochs} epochs"}})
    assert (np.asarray(state.params["seen"]) * batch_size).tolist() == [epochs] * size


@pytest.mark.slow
def test_the_reported_speed_excludes_compilation(monkeypatch):
    """Test with a clock that advances at each reading, and by much more with each compilation."""
    now = [0.0]

    def read_clock() -> float:
        now[0] += 1.0
        return now[0]

    def slow(*arguments, work=compile_with_cost):
        now[0] += 1e6
        return work(*arguments)

    monkeypatch.setattr("jaxddp.training.epoch_sums.time", SimpleNamespace(perf_counter=read_clock))
    monkeypatch.setattr("jaxddp.engine.programs.compile_with_cost", slow)
    _, recorder = run("device", plan_of(8, **LONG_CHUNKS), share=False, learning_rate=lambda step: slow(step, work=abs))
    # The second program is compiled for step 7, and the learning rate for its record.
    assert now[0] > 3e6 and [record.step for record in recorder.steps] == [7, 8]
    assert all(record.images_per_second > 8 / 100 for record in recorder.steps)
    assert recorder.steps[0].epoch_end.seconds < 100


@pytest.mark.slow
def test_a_run_interrupted_and_resumed_equals_an_uninterrupted_run_bit_for_bit(tmp_path):
    (expected, uninterrupted), stop = run("device", plan_of(STEPS, **LONG_CHUNKS)), 39
    checkpoints = Checkpoints(tmp_path / "c")
    # Other cadences dispatch the same steps in other chunks.
    plan = plan_of(STEPS, log=f"{stop} steps", eval="0 steps", checkpoint="0 steps")
    with pytest.raises(Preempted, match=f"saved step {stop} of"):
        run("device", plan, checkpoints=checkpoints, should_stop=lambda step: step == stop)
    resumed, recorder = run("device", plan_of(STEPS, **LONG_CHUNKS), checkpoints=checkpoints, resume_step=stop)
    assert largest_difference(resumed, expected) == 0
    records = {record.step: record for record in uninterrupted.steps}
    assert [record.step for record in recorder.steps] == [step for step in records if step > stop]
    for record in recorder.steps:
        assert record.metrics == records[record.step].metrics
        assert (record.epoch_end and record.epoch_end.metrics) == (
            records[record.step].epoch_end and records[record.step].epoch_end.metrics
        )


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_reported_with_its_step():
    # Update number 16 makes the parameters NaN, so the next step is the first to see them, within a chunk.
    with pytest.raises(NonFiniteError, match="^step 17: the loss is nan"):
        run("device", plan_of(STEPS, **LONG_CHUNKS), optimizer=exploding(16))


def test_a_run_checks_for_a_stop_once_a_chunk_and_processes_count_the_checks(monkeypatch):
    checked_steps, numbers, sent = [], [], []
    run("device", plan_of(16, **LONG_CHUNKS), should_stop=lambda step: bool(checked_steps.append(step)))
    # Chunks have 6 steps, the length of the shortest epoch. Single steps follow up to the end of an epoch and of the
    # run.
    assert checked_steps == [6, 7, 13, 14, 15, 16]
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: bool(numbers.append(step)))
    for _ in range(2):
        with stop_on_signals() as stop:
            assert not any([stop(step) for step in checked_steps])
            monkeypatch.setattr("os.kill", lambda process, number: sent.append(number))
            signal.raise_signal(signal.SIGINT)
    assert numbers == list(range(numbers[0], numbers[0] + 2 * len(checked_steps)))
    assert sent == [signal.SIGTERM] * 2


EVERY = st.one_of(
    st.just("0 steps"),
    st.builds("{} steps".format, st.integers(1, 90)),
    st.builds("{} examples".format, st.integers(1, 999)),
    st.sampled_from(("1 epoch", "0.3 epochs", "5%", "33%")),
)


def planned(num_examples: int, batch_size: int, steps: int, every: tuple[str, str, str]) -> Plan:
    """Return the plan of a run, whose steps are logged, validated and saved `every` so often."""
    cadences = {name: {"every": value} for name, value in zip(("log", "eval", "checkpoint"), every, strict=True)}
    train = {"batch_size": batch_size, "duration": f"{steps} steps"}
    return Plan.of(Config().replace(train=train, **cadences), num_examples)


PLANS = st.integers(1, 300).flatmap(
    lambda n: st.builds(planned, st.just(n), st.integers(1, n), st.integers(1, 400), st.tuples(EVERY, EVERY, EVERY))
)


@given(plan=PLANS, length=st.integers(1, 70), begin=st.integers(0, 400))
# Only a log line is due, then only a validation, then only a save.
@example(planned(300, 1, 20, ("7 steps", "0 steps", "0 steps")), 5, 0)
@example(planned(300, 1, 20, ("0 steps", "7 steps", "0 steps")), 5, 0)
@example(planned(300, 1, 20, ("0 steps", "0 steps", "7 steps")), 5, 0)
def test_chunks_are_full_or_single_steps_and_nothing_is_due_within_a_chunk(plan, length, begin):
    done = min(begin, plan.total_steps)
    steps = range(1, plan.total_steps + 1)
    # The last step is always due.
    dues = [step for step in steps if plan.logs(step) or plan.evaluates(step) or plan.saves(step)]
    chunks = list(plan.chunks(done, length))
    assert [step for chunk in chunks for step in chunk] == list(range(done, plan.total_steps))
    for chunk in chunks:
        due = next(step for step in dues if step > chunk.start)
        assert chunk.stop <= due
        assert len(chunk) == (length if chunk.start + length <= due else 1)


@given(plan=PLANS, longest=st.integers(1, 70), data=st.data())
def test_a_run_resumed_at_any_chunk_has_the_same_later_chunks(plan, longest, data):
    length = plan.chunk_length(longest)
    chunks = list(plan.chunks(0, length))
    number = data.draw(st.integers(0, len(chunks) - 1))
    assert list(plan.chunks(chunks[number].stop, length)) == chunks[number + 1 :]


@pytest.mark.parametrize(
    ("every", "num_examples", "length"),
    [
        (("50 steps", "1 epoch", "1 epoch"), 5000, 25),
        # An epoch of 625 steps is 20 chunks and 5 steps.
        (("0 steps", "0 steps", "0 steps"), 5000, 31),
        # An epoch of 50 examples in batches of 8 has 6 or 7 steps.
        (("1000 steps", "0 steps", "1000 steps"), 50, 6),
        (("3 examples", "0 steps", "0 steps"), 5000, 1),
    ],
)
def test_a_full_chunk_is_as_long_as_the_shortest_cadence_permits(every, num_examples, length):
    assert planned(num_examples, 8, 999, every).chunk_length(LONGEST_CHUNK) == length


@pytest.mark.parametrize(("net", "size"), [(LINEAR, 5), (LINEAR, 400), (SYNC, 299)])
def test_validation_on_the_devices_equals_that_from_a_stream_bit_for_bit(net, size):
    """The sets are smaller than a batch, or take two dispatches: of 25 batches, or of 19 with padding."""
    setup = setup_of(net, sgd(0.1), TABLE, devices=4, data=DataConfig(cache="device"))
    state, source = setup.state.replace(params=randomized(setup.state.params)), random_table(size, seed=1)
    streamed, resident = (setup.evaluator(source, 8, resident=in_memory) for in_memory in (False, True))
    assert resident(state) == streamed(state) and streamed(state)["count"] == size


def test_validation_can_be_stopped_between_two_dispatches():
    setup = setup_of(LINEAR, sgd(0.1), TABLE, data=DataConfig(cache="device"))
    evaluator, calls = setup.evaluator(random_table(8 * 70 + 1, seed=1), 8, resident=True), []
    # 71 batches: 3 dispatches of 23, and 2 of one batch.
    evaluator.measure(setup.state, between=lambda: calls.append(1))
    assert len(calls) == 4

    def stop():
        raise Preempted("now")

    with pytest.raises(Preempted):
        evaluator.measure(setup.state, between=stop)


@pytest.mark.slow
def test_validation_files_are_decoded_once_as_the_stream_decodes_them(root, monkeypatch):
    table, val = train_solutions(root), val_solutions(root)
    data = DataConfig(image_size=16, resize=18, crop="whole", cache="device")
    (batch,) = val.eval_batches(EvalOrder(len(val), len(val)), data)
    decoded = []
    eval_batches = ExampleTable.eval_batches
    monkeypatch.setattr(ExampleTable, "eval_batches", lambda *arguments: decoded.append(1) or eval_batches(*arguments))
    setup = setup_of(linear_model(3), sgd(0.05), table, devices=4, data=data)
    recorder = Recorder()
    train(setup, {"train": {"duration": "6 steps"}, "eval": {"every": "2 steps"}}, val=val, listeners=[recorder])
    assert len(decoded) == 1 and len(recorder.evaluations) == 3
    np.testing.assert_array_equal(np.asarray(setup.feed.resident["validation"].images)[: len(val)], batch.image)


def images_of(table, data: DataConfig, devices: int):
    """Return the images of a table in device memory."""
    feed = Feed(table, SampleOrder(len(table), 1, 0), data, Topology.create(devices))
    return next(feed.resident_chunks([range(1)])).feed[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=13, val=11, size=20)


def train_words(root, workdir, *words: str) -> list[str]:
    options = ["--train.duration", "12 steps", "--log.every", "2 steps", "--checkpoint.every", "3 steps"]
    return ["train", "digits", "--data.path", str(root), "--workdir", str(workdir), *SMALL, *LEAN, *options, *words]


@pytest.mark.slow
def test_a_damaged_file_and_a_too_large_data_set_raise_a_one_line_error(linear_resnet, tmp_path, capfd):
    root = write_tree(tmp_path / "tree", classes=3, images=13, val=3, size=20)
    device = ("--data.cache", "device")
    with pytest.MonkeyPatch.context() as patch:
        # Each set alone would fit.
        patch.setattr(Topology, "free_memory", lambda _: 300_000)
        needed = "each device needs memory for 197 kB of training and 197 kB of validation images, and has 300 kB free"
        assert f"--data.cache device: {needed}; lower" in fails(train_words(root, tmp_path / "w", *device), capfd)
        short_run = ("--eval.every", "0 steps", "--train.duration", "1 step")
        assert main(train_words(root, tmp_path / "w", *device, *short_run)) == 0
    for split, *options in (("val", "--data.bad-images", "substitute"), ("train",)):
        image = sorted((root / IMAGES / split).rglob("*.JPEG"))[2]
        image.write_bytes(image.read_bytes()[:-40])
        # The error is raised before the first step. Validation substitutes no image.
        message = fails(train_words(root, tmp_path / f"w {split}", *device, *options), capfd)
        assert str(image) in message and "end-of-image" in message
        assert not (tmp_path / f"w {split}" / "metrics.jsonl").exists()


def test_running_out_of_memory_while_images_are_copied_to_the_devices_raises_a_one_line_error(monkeypatch):
    def run_out(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(feed, "place_images", run_out)
    expected = (
        r"^memory ran out while the training images were copied to the devices \(Out of memory allocating 9 bytes\): "
        "lower data.image_size"
    )
    with pytest.raises(InputError, match=expected):
        images_of(random_table(8), DataConfig(), 2)


def test_the_free_memory_is_that_of_the_fullest_device():
    assert Topology.create(2).free_memory() is None

    def free(*used_and_limit: tuple[int, int]) -> int | None:
        stats = [{"bytes_in_use": used, "bytes_limit": limit} for used, limit in used_and_limit]
        mesh: Any = SimpleNamespace(local_devices=[SimpleNamespace(memory_stats=each.copy) for each in stats])
        return Topology(mesh).free_memory()

    assert free((300, 1000), (900, 1000)) == 100
    # An allocator without a limit.
    assert free((300, 1000), (900, 0)) is None
