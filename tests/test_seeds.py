"""Several seeds of one setup give the results of fresh runs, and compile nothing after the first seed."""

import dataclasses
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support.data import CLASSES, random_table, write_arrays
from support.networks import largest_difference
from support.runs import LEAN, Recorder, setup_of, train
from support.shared import sgd

from jaxddp.cli import main
from jaxddp.config import AugmentConfig, DataConfig
from jaxddp.core.errors import InputError
from jaxddp.engine.programs import CompiledPrograms

TABLE, VAL = random_table(50), random_table(23, seed=1)
PLAN = {"train": {"duration": "16 steps"}, "log": {"every": "3 steps"}, "checkpoint": {"every": "8 steps"}}
COMPILED = "/jax/core/compile/backend_compile_duration"


class DropoutNet(nn.Module):
    """A network in which the seed determines the initialization and, in each step, dropout."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Dense(8)(images.reshape(len(images), -1))
        return nn.Dense(CLASSES)(nn.Dropout(0.5, deterministic=not train)(x))


def setup_with_seed(
    seed: int, cache: str = "none", devices: int = 2, augment: AugmentConfig | None = None, share=False
):
    data = DataConfig(augment=augment or AugmentConfig(pad=1), cache=cache)
    return setup_of(DropoutNet(), sgd(0.05, momentum=0.9), TABLE, devices=devices, data=data, seed=seed, share=share)


def results_of(setup):
    """Return all results of a run: its state, the metrics of its records and validations, and those of its epochs."""
    recorder = Recorder()
    state = train(setup, PLAN, val=VAL, listeners=[recorder])
    epoch_metrics = [record.epoch_end.metrics for record in recorder.steps if record.epoch_end]
    return jax.device_get(state), [record.metrics for record in recorder.steps + recorder.evaluations], epoch_metrics


@pytest.fixture
def compilations():
    """Yield a function that returns how often XLA compiled a program or loaded it from the cache on disk."""
    counts = Counter()
    listener = lambda event, seconds, **options: counts.update([event])  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield lambda: counts[COMPILED]
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.slow
@pytest.mark.parametrize(("cache", "devices"), [("none", 4), ("device", 1)])
def test_a_second_seed_compiles_nothing_and_gives_the_numbers_of_a_fresh_run(cache, devices, compilations):
    first = setup_with_seed(0, cache, devices)
    fresh = {7: results_of(setup_with_seed(7, cache, devices))}
    before = compilations()
    results = {0: results_of(first)}
    assert compilations() > before
    # The run of the first seed is a fresh run.
    fresh[0] = results[0]
    for seed in (7, 2**40 + 7, 0):
        before = compilations()
        results[seed] = results_of(first.with_seed(seed))
        assert compilations() == before
    for seed, (state, *metrics) in fresh.items():
        assert largest_difference(state, results[seed][0]) == 0 and metrics == list(results[seed][1:])
    losses = [{record["loss"] for record in records} for _, records, _ in results.values()]
    assert not losses[0] & losses[1]


def test_order_key_config_and_state_are_those_of_the_seed():
    first = setup_with_seed(0, share=True)
    for seed in (1, 2**40 + 3, 2**63 - 1):
        setup, fresh = first.with_seed(seed), setup_with_seed(seed, share=True)
        assert setup.feed.order == fresh.feed.order and setup.config == fresh.config
        assert (jax.random.key_data(setup.key) == jax.random.key_data(fresh.key)).all()
        assert largest_difference(jax.device_get(setup.state), jax.device_get(fresh.state)) == 0
        assert largest_difference(setup.state.params, first.state.params) > 1e-3
    with pytest.raises(InputError, match="seed"):
        first.with_seed(-1)


def test_a_cached_program_depends_on_its_objects_and_on_jaxs_settings():
    setup, programs = setup_with_seed(0), CompiledPrograms()

    def program(setup, resident=False):
        return dataclasses.replace(setup, programs=programs).compiled_steps(resident=resident)

    first = program(setup)
    assert program(setup) is program(setup.with_seed(1)) is first
    assert program(setup, resident=True) is not first
    assert program(setup.changed(schedule=lambda step: 0.5)) is not first
    assert program(setup.with_loss(lambda logits, labels: -logits[:, 0])) is not first
    with jax.default_matmul_precision("highest"):
        assert program(setup) is not first
    assert program(setup) is first
    # A notebook may train many networks, so programs that are no longer used are dropped.
    for number in range(40):
        programs(str, number)
    assert program(setup) is not first


class NNXDense(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(192, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.head(images.reshape(len(images), -1))


def test_a_second_seed_of_an_nnx_module_needs_a_function_that_makes_it():
    setup = setup_of(NNXDense(nnx.Rngs(0)), sgd(0.05), TABLE)
    setup.with_seed(setup.feed.order.seed)
    with pytest.raises(InputError, match=r"^with_seed\(1\): the NNX module has the same initial .* its weights$"):
        setup.with_seed(1)
    setup = setup_of(NNXDense, sgd(0.05), TABLE)
    first, fresh = setup.with_seed(1).state.params, setup_of(NNXDense, sgd(0.05), TABLE, seed=1).state.params
    assert largest_difference(first, fresh) == 0 < largest_difference(first, setup.with_seed(2).state.params)


def test_seeds_that_start_from_the_same_parameters_are_told(caplog):
    def constant(key, example):
        return {"kernel": jnp.ones((192, CLASSES))}

    setup_of((constant, lambda params, x: x.reshape(len(x), -1) @ params["kernel"]), sgd(0.05), TABLE).with_seed(1)
    assert [line for line in caplog.messages if line.startswith("every seed starts from the same parameters")]


HOOK = """
from flax import nnx
from jaxddp.config import Config

class Net(nnx.Module):
    def __init__(self, num_classes, rngs):
        self.head = nnx.Linear(3, num_classes, rngs=rngs)

    def __call__(self, images):
        return self.head(images.mean((1, 2)))

def get_config():
    return Config().replace(data={"image_size": 6, "crop": "whole"}, train={"batch_size": 8, "duration": "1 step"})

def get_model(config, num_classes):
    return Net(num_classes, nnx.Rngs(SEED))
"""


LAST_SEED = str(2**63 - 1)
INITIALIZE = """
def get_initialize(config, images):
    return lambda params, model_state: (params, model_state)
"""


@pytest.mark.parametrize(
    ("seed", "added", "refused"), [("0", "", True), ("config.seed % 1000", "", False), ("0", INITIALIZE, False)]
)
def test_a_hook_that_ignores_the_seed_is_refused_for_other_seeds(seed, added, refused, tmp_path, capfd, caplog):
    caplog.set_level("INFO", "jaxddp.experiment")
    write_arrays(tmp_path / "set.npz", random_table(20), random_table(9, seed=1))
    (tmp_path / "mine.py").write_text(HOOK.replace("SEED", seed) + added)
    words = ["train", str(tmp_path / "mine.py"), "--data.path", str(tmp_path / "set.npz"), *LEAN, "--seed", LAST_SEED]
    assert main([*words, "--workdir", str(tmp_path / "run")]) == (2 if refused else 0)
    message = f"get_model: --seed {LAST_SEED}: the NNX module has the same initial parameters for every seed"
    output, errors = capfd.readouterr()
    assert (message in errors) == refused and ("network: Net in float32 | " in output) != refused
    assert not any("every seed starts" in line for line in caplog.messages)
