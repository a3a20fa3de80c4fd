"""The built-in optimizers against optax called by hand, and as runs: on any number of devices, resumed, by layer."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from made import setup_of, train
from optax import contrib
from small import SmallNet, largest_difference, linear_model, random_table, randomized, write_arrays
from test_find_lr import RECIPE
from test_optimizer import assert_equal, by_hand, config_of, gradients, parameters, rate, run

import jaxddp
from jaxddp.cli import main
from jaxddp.config import Config
from jaxddp.engine.layerwise import only_trained, thawing, with_factors
from jaxddp.engine.parts.schedule_free_average import ScheduleFreeAverage
from jaxddp.engine.schedule_free_state import averaged
from jaxddp.errors import InputError, Preempted
from jaxddp.experiment.saved_state import restored
from jaxddp.layers import NO_LAYERS, Layers
from jaxddp.mesh import Topology
from jaxddp.models.frozen import trained, whole
from jaxddp.optimizers.decay import decayed
from jaxddp.registry import OPTIMIZERS
from jaxddp.schedules.warmup import Steps, make_schedule
from jaxddp.training.checkpoints import Checkpoints

NEW = ["lars", "lamb", "muon", "schedule_free"]
TABLE, VAL = random_table(50), random_table(23, seed=1)
EIGHT_STEPS = {"train": {"duration": "8 steps"}, "log": {"every": "4 steps"}}


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def by_optax(optimizer, steps: int, params=None, frozen=NO_LAYERS) -> dict:
    """The parameters after some steps of an optimizer, which keeps nothing of the frozen ones."""
    params = jax.tree.map(jnp.asarray, params or parameters())
    state = optimizer.init(params)
    for step in range(steps):
        grads = gradients(step)
        updates, state = optimizer.update({layer: grads[layer] for layer in params}, state, params)
        params = whole(optax.apply_updates(trained(params, frozen), updates), params)
    return jax.device_get(params)


# --- Against optax by hand, on the same gradients ---


def test_lars_is_optax_with_kernels_decayed_and_scaled(float64):
    config = config_of(name="lars", momentum=0.8, nesterov=False, weight_decay=0.05, trust_coefficient=0.02)
    optimizer = optax.lars(rate, 0.05, decayed, 0.02, 0.0, decayed, 0.8, False)
    assert_equal(run(config, 5), by_optax(optimizer, 5))


def test_lars_is_yous(float64):
    """arXiv:1708.03888, algorithm 1, with the norm of the decayed gradient; vectors are plain SGD with momentum."""
    config = config_of(name="lars", momentum=0.7, nesterov=False, weight_decay=0.02, trust_coefficient=0.01)

    def update(p, g, memory, step, decays):
        g = g + 0.02 * p * decays
        local = 0.01 * np.linalg.norm(p) / np.linalg.norm(g) if decays else 1
        memory[0] = 0.7 * memory[0] + rate(step) * local * g
        p -= memory[0]

    assert_equal(run(config, 5), by_hand(update, 5))


@pytest.mark.parametrize("epsilon", [None, 1e-3])
def test_lamb_is_yous(float64, epsilon):
    """arXiv:1904.00962, algorithm 2; vectors keep Adam's update."""
    config = config_of(name="lamb", momentum=0.85, beta2=0.98, weight_decay=0.05, epsilon=epsilon)

    def update(p, g, memory, step, decays):
        memory[0] = 0.85 * memory[0] + 0.15 * g
        memory[1] = 0.98 * memory[1] + 0.02 * g**2
        mean, square = memory[0] / (1 - 0.85 ** (step + 1)), memory[1] / (1 - 0.98 ** (step + 1))
        u = mean / (np.sqrt(square) + (epsilon or 1e-6)) + 0.05 * p * decays
        p -= rate(step) * u * (np.linalg.norm(p) / np.linalg.norm(u) if decays else 1)

    assert_equal(run(config, 5), by_hand(update, 5))


def test_muon_is_optax_with_convolutions_as_matrices(float64):
    config = config_of(name="muon", momentum=0.95, beta2=0.98, weight_decay=0.05)
    matrix = contrib.MuonDimensionNumbers
    numbers = {
        "conv": {"kernel": matrix((0, 1, 2), 3)},
        "norm": {"scale": None, "bias": None},
        "head": {"kernel": matrix(0, 1), "bias": None},
    }
    optimizer = contrib.muon(
        rate, weight_decay=0.05, adam_b2=0.98, muon_weight_dimension_numbers=numbers, consistent_rms=0.2
    )
    assert_equal(run(config, 5), by_optax(optimizer, 5))


def test_muon_s_kernels_move_as_far_as_adam_s_arrays():
    """In the root of the mean square, by which one rate suits both."""
    optimizer = OPTIMIZERS.get("muon")(config_of(name="muon", weight_decay=0.0, nesterov=False), lambda step: 1.0)
    params = {"wide": jnp.zeros((8, 64)), "conv": jnp.zeros((3, 3, 8, 16)), "bias": jnp.zeros(32)}
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    size = jax.tree.map(lambda u: float(jnp.sqrt(jnp.mean(u**2))), updates)
    assert 0.1 < size["wide"] < 0.3 and 0.1 < size["conv"] < 0.3 and size["bias"] == pytest.approx(1, abs=1e-3)


def test_schedule_free_is_optax_with_kernels_decayed(float64):
    config = config_of(name="schedule_free", momentum=0.8, beta2=0.98, weight_decay=0.0, schedule="constant")
    assert_equal(run(config, 5), by_optax(contrib.schedule_free_adamw(rate, b1=0.8, b2=0.98), 5))
    step = optax.adamw(rate, b1=0.0, b2=0.98, weight_decay=0.05, mask=decayed)
    config = config.replace(optimizer={"weight_decay": 0.05})
    assert_equal(run(config, 5), by_optax(contrib.schedule_free(step, rate, b1=0.8), 5))


def test_schedule_free_takes_no_other_average():
    optimizer = contrib.schedule_free_sgd(0.1)
    for key, value in (("ema", 0.9), ("lookahead", 3)):
        with pytest.raises(InputError, match=f"^{key}: a schedule-free optimizer averages .*; leave one of them out"):
            jaxddp.prepare_training(linear_model(), random_table(50), 2, optimizer, 4, **{key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "optimizer.schedule='cosine': schedule_free averages in place of a rate that falls; set it to constant"),
        ({"schedule": "constant", "momentum": 0.0}, "optimizer.momentum=0.0: schedule_free divides by it; give a num"),
    ],
)
def test_what_schedule_free_cannot_do_is_one_line(change, message):
    with pytest.raises(InputError, match=f"^{message}"):
        OPTIMIZERS.get("schedule_free")(config_of(name="schedule_free", **change), rate)


@pytest.mark.parametrize("name", ["momentum", "adamw", *NEW])
def test_the_decay_of_a_group_stands_for_the_config_s(name, float64):
    """For every optimizer: a decay of all kernels by groups is the config's, another changes its own group alone."""
    schedule = {"schedule": "constant"}
    usual = run(config_of(name=name, weight_decay=0.03, **schedule), 3)
    grouped = ["head:decay=0.03", "conv:decay=0.03"]
    assert_equal(run(config_of(name=name, weight_decay=0.5, groups=grouped, **schedule), 3), usual)
    found = run(config_of(name=name, weight_decay=0.03, groups=["head:decay=0"], **schedule), 3)
    none = run(config_of(name=name, weight_decay=0.0, **schedule), 3)
    assert_equal(found, {**usual, "head": none["head"]})
    # LARS' rate of a kernel is a thousandth of its norm.
    assert largest_difference(usual["head"], none["head"]) > 1e-5


def test_the_longest_layer_that_begins_a_name_decides(float64):
    config = config_of(name="adamw", weight_decay=0.4, groups=["head:decay=0.1", "head.kernel:decay=0.2"])
    assert_equal(run(config, 2)["head"], run(config_of(name="adamw", weight_decay=0.2), 2)["head"])


@pytest.mark.parametrize("name", ["momentum", "adamw", *NEW])
def test_layers_are_frozen_and_have_rates_in_any_of_them(name, float64):
    """What is frozen has no update, and the others are as they would be without it; a rate of 0 keeps every bit."""
    config = config_of(name=name, schedule="constant", weight_decay=0.02)
    optimizer, params = OPTIMIZERS.get(name)(config, rate), jax.tree.map(jnp.asarray, parameters())
    alone = by_optax(optimizer, 3, {layer: params[layer] for layer in ("conv", "norm")})
    frozen = by_optax(only_trained(optimizer, Layers(("head",))), 3, params, Layers(("head",)))
    assert_equal({layer: frozen[layer] for layer in alone}, alone)
    stopped = by_optax(with_factors(optimizer, {"head/kernel": 0.0}), 3, params)
    np.testing.assert_array_equal(stopped["head"]["kernel"], params["head"]["kernel"])
    assert_equal({layer: stopped[layer] for layer in alone}, alone)


# --- As runs ---


def optimizer_of(name: str) -> optax.GradientTransformation:
    rates = {"lars": 1.0, "lamb": 0.02, "muon": 0.02, "schedule_free": 0.02}
    changes = {"name": name, "learning_rate": rates[name], "schedule": "constant", "weight_decay": 0.01}
    config = Config().replace(optimizer=changes)
    return OPTIMIZERS.get(name)(config, make_schedule(config, Steps(8, 3)))


def made(optimizer, devices: int = 1, net=None, **more):
    net = net or SmallNet(batch_norm=True, sync="data")
    setup = setup_of(net, optimizer, TABLE, devices=devices, seed=5, **more)
    params = randomized(setup.state.params)
    state = setup.state.replace(params=params, opt_state=setup.optimizer.init(params))
    return dataclasses.replace(setup, state=setup.topology.replicate(state))


def again(setup):
    return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_resumed_is_uninterrupted_bit_for_bit(tmp_path, name):
    setup = made(optimizer_of(name))
    whole = jax.device_get(train(again(setup), EIGHT_STEPS))
    with Checkpoints(tmp_path / "c") as checkpoints:
        with pytest.raises(Preempted):
            train(again(setup), EIGHT_STEPS, checkpoints=checkpoints, should_stop=lambda step: step == 3)
        resumed = train(again(setup), EIGHT_STEPS, checkpoints=checkpoints, resume_step=3)
    assert largest_difference(jax.device_get(resumed), whole) == 0
    moved = largest_difference(whole.params, jax.device_get(setup.state.params))
    assert 1e-3 < moved < 10 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(whole))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_any_number_of_devices_equals_one(name, float64):
    """Their norms are those of whole arrays, on every device."""
    found = []
    for devices in (1, 4):
        setup = made(optimizer_of(name), devices, SmallNet(dtype=jnp.float64))
        step, state, begin = setup.step(), setup.state, jax.device_get(setup.state.params)
        for batch in setup.batches(0, 4):
            state, _ = step(state, batch)
        found.append(jax.device_get(state.params))
    assert largest_difference(*found) < 1e-9
    assert min(jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max(), begin, found[0]))) > 1e-4


@pytest.mark.slow
def test_what_validation_measured_is_what_a_checkpoint_gives(tmp_path, capsys):
    """From the terminal, with a peak that is said once: eval and predictions need the average alone."""
    write_arrays(tmp_path / "set.npz", TABLE, VAL)
    (tmp_path / "recipe.py").write_text(RECIPE)
    work, recipe = tmp_path / "run", str(tmp_path / "recipe.py")
    words = [recipe, "--data.path", str(tmp_path / "set.npz"), "--optimizer.name", "schedule_free"]
    words += ["--optimizer.schedule", "constant", "--optimizer.warmup", "2 steps", "--optimizer.learning-rate", "0.03"]
    words += ["--optimizer.reference-batch", "16", "--parallel.devices", "1", "--log.to", "jsonl"]
    assert main(["train", *words, "--workdir", str(work), "--train.duration", "9 steps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = "learning rate 0.015 = 0.03 x 8 / 16 (linear, for optimizer.reference_batch=16)"
    assert [line for line in lines if line.startswith("learning rate")] == [said]
    rows = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    assert last["split"] == "val" and max(row.get("learning_rate", 0) for row in rows) == pytest.approx(0.015)
    assert main(["eval", *words, "--workdir", str(work)]) == 0
    measured = dict(line.split(": ") for line in capsys.readouterr().out.splitlines())
    assert float(measured["loss"]) == last["loss"] and float(measured["top1"]) == last["top1"]
    asked = jaxddp.load_run(work, "latest", devices=1)
    state = checkpointed(work)
    assert largest_difference(asked.state.params, state.eval_params) == 0
    assert largest_difference(asked.state.params, state.params) > 1e-4
    told = np.asarray(asked.predict(VAL.images).probabilities).argmax(-1)
    assert (told == VAL.labels).mean() == pytest.approx(last["top1"])


def checkpointed(work):
    return jax.device_get(restored(work, "latest", Topology.create(1)))


# --- The average of a schedule-free optimizer ---


@pytest.fixture(scope="module")
def averaging():
    """A setup whose optimizer came as an object, under a frozen layer and a rate of its own."""
    config = Config().replace(
        model={"freeze": "Conv_0"},
        optimizer={"groups": ["Dense_0.bias:rate=0.5"]},
        parallel={"self_test": "never"},
    )
    optimizer = optax.chain(optax.clip(1.0), contrib.schedule_free_adamw(0.05, warmup_steps=2))
    return made(optimizer, 2, config=config)


def test_evaluation_measures_the_average_which_joins_by_itself(averaging):
    setup, state = averaging, again(averaging).state
    assert [type(part) for part in setup.recipe.parts] == [ScheduleFreeAverage]
    for batch in setup.batches(0, 5):
        state, _ = setup.step()(state, batch)
    (_, inner), params = state.opt_state, state.params
    z, dense = inner.z, {"Dense_0": params["Dense_0"], "BatchNorm_0": params["BatchNorm_0"]}
    assert z["Conv_0"]["kernel"] is None
    x = contrib.schedule_free_eval_params(inner._replace(z={name: z[name] for name in dense}), dense)
    found = jax.device_get(state.eval_params)
    assert largest_difference({name: found[name] for name in dense}, jax.device_get(x)) < 1e-6
    assert largest_difference(found["Conv_0"], jax.device_get(params["Conv_0"])) == 0
    assert largest_difference(found["Dense_0"], jax.device_get(params["Dense_0"])) > 1e-4
    swapped = state.replace(params=state.eval_params, parts={})
    evaluator = setup.evaluator(VAL)
    assert evaluator(state) == evaluator(swapped) != evaluator(state.replace(parts={}))


def test_other_optimizers_have_no_such_part():
    assert made(optax.adam(0.1)).recipe.parts == ()


def scaled_inside(factor):
    """Schedule-free Adam whose base takes steps that are multiplied by a function of the array's name and the step."""

    def by_layer():
        def update(updates, count, params=None):
            scaled = jax.tree_util.tree_map_with_path(lambda path, u: u * factor(path[0].key, count), updates)
            return scaled, count + 1

        return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)

    base = optax.chain(optax.scale_by_rms(0.999, 1e-8, eps_in_sqrt=False, bias_correction=True))
    return contrib.schedule_free(optax.chain(base, optax.scale_by_learning_rate(rate), by_layer()), rate)


PLAIN = contrib.schedule_free_adamw(rate)


@pytest.mark.parametrize(
    ("outside", "factor"),
    [
        (with_factors(PLAIN, {"a/b": 0.3}), lambda name, step: 0.3 if name == "a" else 1),
        (with_factors(PLAIN, {"a/b": 0.0}), lambda name, step: 0.0 if name == "a" else 1),
        (with_factors(PLAIN, {"a/b": 4.0}), lambda name, step: 4.0 if name == "a" else 1),
        (thawing(PLAIN, {"a/b": 3}), lambda name, step: jnp.where(step < 3, 0, 1) if name == "a" else 1),
    ],
)
def test_rates_by_layer_are_those_of_its_steps(outside, factor, float64):
    """What multiplies y's updates multiplies z's, so that the average is that of such steps."""
    rng = np.random.default_rng(0)
    params = {"a": {"b": jnp.asarray(rng.normal(size=(3, 2)))}, "c": jnp.asarray(rng.normal(size=4))}
    inside, ours, theirs = scaled_inside(factor), params, params
    one, other = outside.init(params), inside.init(params)
    for step in range(6):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), params)
        updates, one = outside.update(grads, one, ours)
        ours = optax.apply_updates(ours, updates)
        updates, other = inside.update(grads, other, theirs)
        theirs = optax.apply_updates(theirs, updates)
        assert largest_difference(ours, theirs) < 1e-12
        assert largest_difference(averaged(one, ours), averaged(other, theirs)) < 1e-12
        if not factor("a", step):
            assert ours["a"]["b"].tobytes() == params["a"]["b"].tobytes()


def test_a_schedule_from_python_multiplies_its_steps():
    setup = made(contrib.schedule_free_sgd(0.1), net=linear_model())
    halved = dataclasses.replace(setup, recipe=dataclasses.replace(setup.recipe, schedule=lambda step: 0.5))
    batch, before = next(setup.batches(0, 1)), np.asarray(setup.state.params["weight"])
    (full, _), (half, _) = (each.step()(again(setup).state, batch) for each in (setup, halved))
    for tree in (lambda state: state.params, lambda state: state.opt_state.z, lambda state: state.eval_params):
        moved, twice = (np.asarray(tree(state)["weight"]) - before for state in (half, full))
        assert largest_difference(2 * moved, twice) < 1e-6 and np.abs(moved).max() > 1e-3


def test_a_frozen_layer_has_no_place_in_it():
    optimizer = only_trained(PLAIN, Layers(("a",)))
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params)
    assert updates["a"] is None and averaged(state, params)["a"] is params["a"]
