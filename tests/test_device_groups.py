"""`train.sync_every`: groups of devices average their parameters every H steps. With H = 1 the run equals synchronous
training. With more steps it equals independent runs whose parameters are averaged by hand."""

from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.cases import essential_and_rare, rare_case
from support.collectives import collectives
from support.data import CLASSES, NO_AUGMENTATION, random_batch, random_table
from support.faults import poisoned, spoil
from support.networks import largest_difference, linear_model
from support.runs import Recorder, changed, setup_of, train
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.core.errors import InputError, NonFiniteError, Preempted, ReplicaError
from jaxddp.engine.parts.averages import Lookahead, ParameterAverage
from jaxddp.engine.parts.configured import Plateau
from jaxddp.engine.parts.guard import GradientNorm, Guard, LossScale
from jaxddp.engine.parts.part import Part
from jaxddp.engine.replicas import Replicas
from jaxddp.engine.state import EVAL_PARAMS, TrainState, is_sound
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.plan import Plan
from jaxddp.workdir.saved_state import restore_state

STEPS, BATCH = 20, 8
TABLE = random_table(48)
CHANGES = {"train": {"duration": f"{STEPS} steps"}, "log": {"every": "5 steps"}, "eval": {"every": "0 steps"}}
EACH_STEP = CHANGES | {"log": {"every": "1 step"}}
PLAIN, MOMENTUM = sgd(0.3), sgd(0.1, momentum=0.9)

pytestmark = pytest.mark.usefixtures("float64")


class Norm(nn.Module):
    """Normalizes each device's images, or those of all devices of `sync`. Flax's statistics would be float32."""

    sync: str | None = None

    @nn.compact
    def __call__(self, x, train: bool):
        mean = self.variable("batch_stats", "mean", jnp.zeros, x.shape[-1:])
        square = self.variable("batch_stats", "square", jnp.ones, x.shape[-1:])
        moments = mean.value, square.value
        if train:
            moments = x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))
            moments = jax.lax.pmean(moments, self.sync) if self.sync and not self.is_initializing() else moments
            if not self.is_initializing():
                mean.value, square.value = 0.9 * mean.value + 0.1 * moments[0], 0.9 * square.value + 0.1 * moments[1]
        return (x - moments[0]) / jnp.sqrt(jnp.maximum(moments[1] - moments[0] ** 2, 0.01))


class Net(nn.Module):
    """A convolution, a norm, dropout, and a dense layer."""

    dropout: float = 0.0
    sync: str | None = None

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.tanh(Norm(self.sync)(nn.Conv(4, (3, 3), strides=3, param_dtype=jnp.float64)(images), train))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(CLASSES, param_dtype=jnp.float64)(x.reshape(len(x), -1))


def make_setup(
    groups: int | None, devices: int, every: str = "1 step", optimizer: Any = MOMENTUM, net: Any = None, **more: Any
) -> Any:
    """Return a setup with groups of devices; without groups if `groups` is None."""
    sections = dict(more.pop("sections", {}))
    parallel = {"self_test": "never", "groups": groups, **sections.pop("parallel", {})}
    steps = {"sync_every": every if groups else None, **sections.pop("train", {})}
    config = Config().replace(parallel=parallel, train=steps, **sections)
    words: dict[str, Any] = {"data": NO_AUGMENTATION, "batch_size": BATCH, "seed": 5, **more}
    return setup_of(net or Net(), optimizer, words.pop("table", TABLE), devices=devices, config=config, **words)


def trained(*arguments: Any, changes: Any = CHANGES, **more: Any) -> tuple[Any, list[dict[str, float]]]:
    """Return the last state and the metrics of each record."""
    listener = Recorder()
    state = train(make_setup(*arguments, **more), changes, listeners=[listener])
    return jax.device_get(state), [dict(record.metrics) for record in listener.steps]


LAYOUTS = [(2, 2), (2, 4), rare_case(4, 8)]
"""Numbers of groups and of devices."""


@pytest.mark.parametrize(("groups", "devices"), LAYOUTS)
@pytest.mark.parametrize("optimizer", [MOMENTUM, rare_case(PLAIN)])
def test_an_average_in_each_step_equals_synchronous_training(groups, devices, optimizer):
    """Parameters, batch statistics, the averages of momenta, metrics, and dropout are the same."""
    net = Net(dropout=0.3)
    averaged, synchronous = (trained(count, devices, "1 step", optimizer, net) for count in (groups, None))
    assert largest_difference(averaged, synchronous) < 1e-9


PARTS: dict[str, tuple[tuple[Part, ...], dict[str, Any]]] = {
    "moving average": ((ParameterAverage(0.9),), {}),
    "lookahead": ((Lookahead(5, optax.constant_schedule(0.5), STEPS),), {}),
    "guard and loss scale": ((Guard(), LossScale(BATCH)), {}),
    "accumulation": ((), {"train": {"accumulate": 2}}),
    "buckets": ((), {"parallel": {"buckets": 3}}),
}


@pytest.mark.parametrize("case", essential_and_rare(("moving average", "lookahead", "guard and loss scale"), *PARTS))
def test_linear_parts_of_the_step_are_those_of_synchronous_training(case):
    """A moving average is linear in the parameters. So the average of the groups' averages needs no communication."""
    parts, sections = PARTS[case]
    averaged, synchronous = (trained(count, 4, parts=parts, sections=sections) for count in (2, None))
    assert largest_difference(averaged, synchronous) < 1e-9


def simulate(groups: int, every: int, net: Any, optimizer: Any, outer: tuple[float, float] | None = None) -> Any:
    """Train a run for each group, one device each, and average the runs by hand; `outer`: rate and momentum."""
    setup = make_setup(None, 1, optimizer=optimizer, net=net)
    images = setup.preprocess(random_batch(len(TABLE))._replace(image=TABLE.images), train=False).images

    @jax.jit
    def step(params, stats, opt_state, batch, labels):
        def loss(params):
            logits, after = net.apply({"params": params, **stats}, batch, train=True, mutable=["batch_stats"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), after

        (value, stats), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, value

    state = jax.device_get(setup.state)
    runs = [(state.params, state.model_state, state.opt_state)] * groups
    anchor, velocity, losses = state.params, jax.tree.map(np.zeros_like, state.params), []
    average = lambda place: jax.tree.map(lambda *each: np.mean(each, 0), *(run[place] for run in runs))  # noqa: E731
    for number in range(STEPS):
        parts = np.split(setup.feed.order.rows(number), groups)
        each = [step(*run, images[rows], TABLE.labels[rows]) for run, rows in zip(runs, parts, strict=True)]
        runs, losses = [result[:3] for result in each], [*losses, np.mean([result[3] for result in each])]
        if (number + 1) % every and number + 1 < STEPS:
            continue
        params, stats = average(0), average(1)
        if outer is not None:
            gradient = jax.tree.map(np.subtract, anchor, params)
            velocity = jax.tree.map(lambda v, g: outer[1] * v + g, velocity, gradient)
            anchor = jax.tree.map(lambda a, v, g: a - outer[0] * (g + outer[1] * v), anchor, velocity, gradient)
            params = anchor
        runs = [(params, stats, run[2]) for run in runs]
    return average(0), average(1), average(2), losses


@pytest.mark.parametrize("outer", [None, (0.7, 0.9), rare_case((0.3, 0.5))])
@pytest.mark.parametrize(("groups", "every"), [(2, 5), (4, 3)])
def test_a_run_equals_independent_runs_that_are_averaged_by_hand(groups, every, outer):
    net, words = Net(), {}
    if outer is not None:
        words = {"outer_optimizer": "nesterov", "outer_rate": outer[0], "outer_momentum": outer[1]}
    state, metrics = trained(
        groups, groups, f"{every} steps", MOMENTUM, net, sections={"train": words}, changes=EACH_STEP
    )
    params, stats, opt_state, losses = simulate(groups, every, net, MOMENTUM, outer)
    assert largest_difference((state.params, state.model_state, state.opt_state), (params, stats, opt_state)) < 1e-9
    assert largest_difference([each["loss"] for each in metrics], losses) < 1e-9


def test_an_outer_step_gives_all_groups_the_same_parameters_and_statistics():
    setup = make_setup(2, 4, "5 steps")
    (program, chunks), outer_step = setup.program(), setup.way.meet
    before, _ = program(setup.way.placed(setup.state), *next(iter(chunks(0))).feed)
    before = jax.tree.map(jnp.copy, before)
    after = outer_step(jax.tree.map(jnp.copy, before))
    for name in ("params", "model_state"):
        for old, new in zip(*(jax.tree.leaves(getattr(state, name)) for state in (before, after)), strict=True):
            assert not (old[0] == old[1]).all() and (new[0] == new[1]).all()
            np.testing.assert_allclose(new[0], np.asarray(old).mean(0), rtol=1e-12)
    assert largest_difference(after.opt_state, before.opt_state) == 0 and int(after.step) == 1


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
@example(60, 3, 4, 1)
def test_a_chunk_of_steps_ends_at_each_average(steps, every, length, done):
    words = {"train": {"duration": f"{steps} steps", "sync_every": f"{every} steps"}, "parallel": {"groups": 2}}
    plan = Plan.of(Config().replace(**words), 1000)
    ends = {chunk.stop for chunk in plan.chunks(min(done, steps), length)}
    due = {step for step in range(1, steps + 1) if plan.syncs(step)}
    assert due == {*range(every, steps + 1, every), steps}
    assert {step for step in due if step > done} <= ends


def test_every_example_is_used_once_an_epoch():
    """The state of the model counts the examples that each device uses; its averages are equal numbers."""

    def counting(supervised):
        def objective(params, model_state, batch, **words):
            sums, state = supervised(params, {"batch_stats": model_state["batch_stats"]}, batch, **words)
            return sums, {**state, "used": model_state["used"].at[batch.row].add(1.0)}

        return objective

    def init(key, example):
        variables = Net().init(key, example, train=False)
        return variables["params"], {"batch_stats": variables["batch_stats"], "used": jnp.zeros(len(TABLE))}

    def apply(params, model_state, images, train, key):
        variables = {"params": params, "batch_stats": model_state["batch_stats"]}
        return Net().apply(variables, images, train=train, mutable=["batch_stats"])

    model = SimpleNamespace(init=init, apply=apply)
    setup = make_setup(2, 4, "4 steps", net=model, objective=counting, share=False)
    state = train(setup, CHANGES | {"train": {"duration": "2 epochs"}})
    np.testing.assert_allclose(state.model_state["used"], 2 / 4, rtol=1e-12)


def program_texts(groups: int | None, devices: int, **words: Any) -> tuple[str, Any]:
    setup = make_setup(groups, devices, "5 steps", parts=(Guard(), GradientNorm(1.0), ParameterAverage(0.9)), **words)
    program, _ = setup.program()
    return program.prepare(setup.way.placed(setup.state), setup.feed.abstract_batch(), setup.key).as_text(), setup


@pytest.mark.parametrize(("groups", "devices"), LAYOUTS)
def test_a_step_communicates_only_within_groups(groups, devices):
    size = devices // groups
    # On CPUs, XLA keeps the all-reduce of a group of one device, which sends nothing.
    within = [each for each in collectives(program_texts(groups, devices)[0]) if len(each.devices[0]) > 1]
    assert not [each for each in within if each.crosses(size)]
    assert [each.name for each in within] == ["all-reduce"] * (size > 1)
    assert any(each.crosses(size) for each in collectives(program_texts(None, devices)[0]))


@pytest.mark.parametrize(("groups", "devices"), LAYOUTS)
@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_an_outer_step_sends_the_parameters_and_the_statistics_between_groups_once(groups, devices, outer):
    setup = make_setup(groups, devices, "5 steps", sections={"train": {"outer_optimizer": outer}})
    state = setup.way.placed(setup.state)
    found, size = collectives(setup.way.prepare_meeting(state).as_text()), devices // groups
    between = [each for each in found if each.crosses(size)]
    leaves = jax.tree.leaves((setup.like.params, setup.like.model_state))
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    assert [each.name for each in between] == ["all-reduce"]
    # Each device of a group sends a slice of equal length; the last slice is padded.
    assert whole <= size * between[0].num_bytes < whole + 8 * size
    assert [each.name for each in found if not each.crosses(size)] == ["all-gather"] * (size > 1)


NESTEROV = {"sections": {"train": {"outer_optimizer": "nesterov"}}}


@pytest.mark.parametrize("words", [NESTEROV, rare_case({})])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, words):
    """The run stops between two averages."""
    words = {"parts": (ParameterAverage(0.9), Guard()), **words}
    whole, resumed = Recorder(), Recorder()
    state = jax.device_get(train(make_setup(2, 4, "5 steps", **words), CHANGES, listeners=[whole]))
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(Preempted):
            train(make_setup(2, 4, "5 steps", **words), CHANGES, checkpoints=checkpoints, should_stop=lambda s: s == 7)
        again = train(
            make_setup(2, 4, "5 steps", **words), CHANGES, checkpoints=checkpoints, resume_step=7, listeners=[resumed]
        )
    assert largest_difference(jax.device_get(again), state) == 0
    assert [each.metrics for each in resumed.steps] == [each.metrics for each in whole.steps if each.step > 7]


@pytest.mark.parametrize("groups", [4, None])
def test_a_checkpoint_of_other_groups_is_rejected(tmp_path, groups):
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(Preempted):
            train(make_setup(2, 4, "5 steps"), CHANGES, checkpoints=checkpoints, should_stop=lambda step: step == 7)
        count = "4 groups; give parallel.groups=2" if groups else "1 group; use the config that wrote it"
        with pytest.raises(InputError, match=f"has the states of 2 groups of devices, and this run has {count}$"):
            train(make_setup(groups, 4, "5 steps"), CHANGES, checkpoints=checkpoints, resume_step=7)


def test_a_validation_measures_the_average_of_the_groups(tmp_path):
    """Between two averages the groups differ. A restored state for evaluation is their average, too."""
    listener, parts = Recorder(), (ParameterAverage(0.9),)
    changes = CHANGES | {"eval": {"every": "7 steps"}, "checkpoint": {"every": "7 steps"}}
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        setup = make_setup(2, 4, "5 steps", parts=parts)
        with pytest.raises(Preempted):
            stop = lambda step: step == 8  # noqa: E731
            train(setup, changes, val=TABLE, listeners=[listener], checkpoints=checkpoints, should_stop=stop)
        saved = checkpoints.restore_as_saved(7, setup.topology.replicated)
    arrays = saved.params, saved.model_state, saved.parts["average"][EVAL_PARAMS]
    params, model_state, average = jax.tree.map(lambda leaf: np.asarray(leaf).mean(0), arrays)
    one, other = (jax.tree.map(lambda leaf, at=at: leaf[at], saved.params) for at in (0, 1))
    assert largest_difference(one, other) > 1e-3
    evaluator, state = make_setup(None, 4).evaluator(TABLE), TrainState(jnp.int32(7), params, model_state, ())
    expected = {
        name: evaluator(setup.topology.replicate(state.replace(params=each)))["loss"]
        for name, each in {"val": params, "val_ema": average}.items()
    }
    records = {record.split: record.metrics["loss"] for record in listener.evaluations}
    assert largest_difference(records, expected) < 1e-9
    restored = restore_state(tmp_path, "7", setup.topology)
    assert restored.stacked is None and int(restored.step) == 7
    arrays = restored.params, restored.model_state, restored.eval_params
    assert largest_difference(arrays, (params, model_state, average)) < 1e-12


def test_a_group_skips_its_own_steps():
    """Group 0 gets the poisoned row in one step of each epoch, and group 1 trains on."""
    setup = make_setup(2, 2, "100 steps", parts=(Guard(),), table=poisoned(7, table=TABLE), augmentation=spoil)
    step = next(step for step in range(6) if 7 in setup.feed.order.rows(step))
    group = int(np.flatnonzero(setup.feed.order.rows(step) == 7)[0]) // (BATCH // 2)
    made = changed(setup, {**EACH_STEP, "train": {"duration": f"{step + 1} steps"}})
    state, (program, chunks) = made.way.placed(made.state), made.program()
    for chunk in chunks(0):
        before = jax.device_get(state)
        state, sums = program(state, *chunk.feed)
    (losses,), after = made.way.fetch([sums.values]), jax.device_get(state)
    assert int(after.step) == step + 1

    def is_equal(old, new):
        return (old == new).reshape(2, -1).all(1)

    same = jax.tree.leaves(jax.tree.map(is_equal, before.params, after.params))
    assert all(leaf[group] for leaf in same) and not all(leaf[1 - group] for leaf in same)
    assert not np.isfinite(losses[group, 0, 0]) and np.isfinite(losses[1 - group]).all()


def test_means_of_an_epoch_cover_all_groups():
    """They are the same as those of a run without groups, also if a group skips a step."""
    epochs = []
    for groups, table in ((2, TABLE), (None, TABLE), (2, poisoned(7, table=TABLE))):
        listener = Recorder()
        setup = make_setup(groups, 2, parts=(Guard(),), table=table, augmentation=spoil)
        train(setup, CHANGES | {"train": {"duration": "1 epoch", "max_bad_steps": 3}}, listeners=[listener])
        epochs += [record.epoch_end.metrics for record in listener.steps if record.epoch_end]
    assert largest_difference(dict(epochs[0]), dict(epochs[1])) < 1e-9
    assert np.isfinite(epochs[2]["loss"]) and epochs[2]["loss"] != epochs[0]["loss"]


def test_the_count_of_skipped_steps_survives_a_stop(tmp_path):
    table = poisoned(*range(len(TABLE)), table=TABLE)
    words = {"parts": (Guard(),), "table": table, "augmentation": spoil}
    changes = CHANGES | {"train": {"duration": "20 steps", "max_bad_steps": 4}}
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(Preempted):
            stop = lambda step: step == 3  # noqa: E731
            train(make_setup(2, 2, "5 steps", **words), changes, checkpoints=checkpoints, should_stop=stop)
        with pytest.raises(NonFiniteError, match="step 4, group 0: 4 steps in a row, from step 1"):
            train(make_setup(2, 2, "5 steps", **words), changes, checkpoints=checkpoints, resume_step=3)


def flipped(leaf: jax.Array, device: int) -> jax.Array:
    """Return an array of which one bit of the copy of a device is flipped."""
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)
    copies = [np.array(shard.data) for shard in shards]
    copies[device].reshape(-1).view(np.uint8)[0] ^= np.uint8(1)
    buffers = [jax.device_put(copy, shard.device) for copy, shard in zip(copies, shards, strict=True)]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, buffers)


def test_the_replicas_of_each_group_are_compared():
    setup = make_setup(2, 4, "5 steps", sections={"train": {"outer_optimizer": "nesterov"}})
    program, chunks = setup.program()
    state, _ = program(setup.way.placed(setup.state), *next(iter(chunks(0))).feed)
    replicas = Replicas(setup.way)
    replicas.check(1, state)
    dense = state.params["Dense_0"]
    bad = state.replace(params={**state.params, "Dense_0": {**dense, "bias": flipped(dense["bias"], 3)}})
    with pytest.raises(ReplicaError, match=r"device .* against device .*first in params/Dense_0/bias"):
        replicas.check(1, bad)
    shared = state.parts["device_groups"]
    anchor = jax.tree.map(lambda leaf: flipped(leaf, 3), shared["anchor"])
    bad = state.replace(parts={"device_groups": {**shared, "anchor": anchor}})
    with pytest.raises(ReplicaError, match="differs from the other 3, in .*first in parts/device_groups/anchor"):
        replicas.check(1, bad)


@pytest.mark.parametrize("place", ["params", "anchor"])
def test_a_state_with_a_group_that_is_not_finite_is_not_sound(place):
    setup = make_setup(2, 2, "5 steps", **NESTEROV)
    state = setup.way.placed(setup.state)
    assert is_sound(state)
    if place == "params":
        bad = state.replace(params=jax.tree.map(lambda leaf: leaf.at[1].set(np.nan), state.params))
    else:
        shared = state.parts["device_groups"]
        nan = jax.tree.map(lambda leaf: leaf * np.nan, shared["anchor"])
        bad = state.replace(parts={"device_groups": {**shared, "anchor": nan}})
    assert not is_sound(bad)


def test_frozen_parameters_keep_their_bits():
    """The mean of three equal numbers may differ from them in the last bit."""
    setup = make_setup(3, 3, "2 steps", batch_size=9, sections={"model": {"freeze": "Conv_0"}}, table=random_table(54))
    before = jax.device_get(setup.state.params)
    made = setup.way.placed(setup.state)
    program, chunks = setup.program()
    outer_step = setup.way.meet
    for number, chunk in zip(range(6), chunks(0), strict=False):
        made, _ = program(made, *chunk.feed)
        made = outer_step(made) if number % 2 else made
    after = jax.device_get(made.params)
    assert all((after["Conv_0"][name] == leaf).all() for name, leaf in before["Conv_0"].items())
    assert not (before["Dense_0"]["kernel"] == after["Dense_0"]["kernel"]).all()


def test_a_plateau_lowers_the_rate_of_all_groups():
    """The parameters stay the same, so the loss of no validation after the first is lower."""
    listener = Recorder()
    words = {"parts": (Plateau(0.5, 1),), "learning_rate": lambda step: 1.0}
    setup = make_setup(2, 2, "3 steps", sgd(0.0), linear_model(), **words)
    changes = EACH_STEP | {"eval": {"every": "6 steps"}}
    train(setup, changes, val=random_table(16, seed=7), listeners=[listener])
    assert [record.learning_rate for record in listener.steps] == [1.0] * 12 + [0.5] * 6 + [0.25] * 2


EVERY = 'train.sync_every="5 steps"'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"groups": None}, rf"{EVERY}: a single process is a single group of devices; give parallel.groups, or leave"),
        ({"groups": 3}, "parallel.groups=3 does not divide 4 devices; 2, 4 would do"),
        ({"parallel": {"shard_optimizer": True}}, rf"{EVERY}: parallel.shard_optimizer=True divides a state"),
        ({"parallel": {"reproducible": True}}, "parallel.reproducible: train.sync_every=5 steps does not apply to a"),
        ({"parallel": {"shares": "3,1,1,3"}}, "shares='3,1,1,3': train.sync_every=5 steps divides batches equally; "),
        ({"train": {"sync_every": "0 steps"}}, r'train.sync_every="0 steps" is no period; give at least "1 step"'),
        ({"optimizer": optax.contrib.schedule_free_sgd(0.1)}, "train.sync_every: a schedule-free optimizer averages"),
        (
            {"train": {"outer_optimizer": "nesterov"}, "parts": PARTS["lookahead"][0]},
            "train.outer_optimizer=nesterov: train.lookahead returns to slow weights, which the outer momentum",
        ),
    ],
)
def test_settings_that_do_not_fit_are_rejected_in_one_line(words, message):
    words = {"groups": 2, "parallel": {}, "train": {}, "parts": (), "optimizer": MOMENTUM, **words}
    parallel = {"self_test": "never", "groups": words["groups"], **words["parallel"]}
    config = Config().replace(parallel=parallel, train={"sync_every": "5 steps", **words["train"]})
    with pytest.raises(InputError, match=message) as error:
        setup_of(Net(), words["optimizer"], TABLE, devices=4, config=config, parts=words["parts"])
    assert "\n" not in str(error.value)
    # A step for a loop of one's own is rejected, too.
    with pytest.raises(InputError, match="train.sync_every: a loop of your own has no groups"):
        make_setup(2, 4).step()
