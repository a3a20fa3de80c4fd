"""A new model, loss, metric, optimizer, schedule, augmentation or logger needs only one new file in the folder of its
kind."""

import importlib
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.data import random_batch
from support.networks import linear_model
from support.runs import setup_of, train
from support.shared import sgd

from jaxddp.augment.preprocess import Preprocess
from jaxddp.choices import CHOICES, check_read
from jaxddp.config import AugmentConfig, Config
from jaxddp.core.errors import InputError
from jaxddp.models.adapt import adapt
from jaxddp.registry import (
    AUGMENTATIONS,
    LOGGERS,
    LOSSES,
    METRICS,
    MODELS,
    OBJECTIVES,
    OPTIMIZERS,
    POLICIES,
    SCHEDULES,
    Registry,
    check_names,
)
from jaxddp.schedules.warmup import Steps, make_schedule

KINDS = {
    "models": MODELS,
    "losses": LOSSES,
    "objectives": OBJECTIVES,
    "metrics": METRICS,
    "optimizers": OPTIMIZERS,
    "schedules": SCHEDULES,
    "augment": AUGMENTATIONS,
    "augment.policies": POLICIES,
    "training.listeners": LOGGERS,
}
BUILT_IN = {
    "models": {"resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"},
    "losses": {"cross_entropy"},
    "objectives": {"supervised"},
    "metrics": {"top1", "top5", "top10"},
    "optimizers": {"sgd", "rmsprop", "momentum", "adamw", "lars", "lamb", "muon", "schedule_free"},
    "schedules": {"cosine", "linear", "step", "constant", "polynomial", "one_cycle", "wsd"},
    "augment": {"vertical_flip", "grayscale"},
    "augment.policies": {"trivial_augment", "auto_augment_cifar10", "augmix", "three_augment"},
    "training.listeners": {"jsonl", "curves", "parameters", "tensorboard", "wandb", "mlflow"},
}
IMPORTS = """
import jax
import jax.numpy as jnp
import optax
from dataclasses import dataclass
from jaxddp.choices import settings_of
from jaxddp.registry import AUGMENTATIONS, LOGGERS, LOSSES, METRICS, MODELS, OBJECTIVES, OPTIMIZERS, POLICIES, SCHEDULES
"""
FILES = {
    "models": """
        @dataclass(frozen=True)
        class Settings:
            width: int = 5

        @MODELS.add("added", Settings)
        def model(config, num_classes):
            width = settings_of(config.model, Settings).width
            return lambda key, example: jnp.ones(num_classes) * width, lambda params, images: params
        """,
    "losses": """
        @LOSSES.add("added")
        def loss(config):
            return lambda logits, labels: config.train.label_smoothing + 0 * labels
        """,
    "objectives": """
        @OBJECTIVES.add("added")
        def objective(config, topology):
            return lambda supervised: (supervised, config.seed)
        """,
    "metrics": """
        @METRICS.add("added")
        def metric(logits, labels):
            return logits.max(-1)
        """,
    "optimizers": """
        @dataclass(frozen=True)
        class Settings:
            beta2: float = 0.25

        @OPTIMIZERS.add("added", Settings)
        def optimizer(config, learning_rate):
            settings = settings_of(config.optimizer, Settings)
            return optax.chain(optax.clip(settings.beta2), optax.sgd(learning_rate))
        """,
    "schedules": """
        @SCHEDULES.add("added")
        def schedule(config, steps):
            return lambda step: config.optimizer.learning_rate * (1 - step / (steps.total - steps.warmup))
        """,
    "augment": """
        @AUGMENTATIONS.add("added")
        def augmentation(settings):
            return lambda key, image: image // 2 + jax.random.randint(key, (), 0, 9, image.dtype)
        """,
    "augment.policies": """
        @POLICIES.add("added")
        def policy(settings):
            return lambda key, image: image // 2 + jax.random.randint(key, (), 1, 9).astype(image.dtype)
        """,
    "training.listeners": """
        class Steps:
            def __init__(self, file):
                self.file = file

            def step(self, record):
                with self.file.open("a") as file:
                    file.write(f"{record.step} ")

        @LOGGERS.add("added")
        def steps(config, workdir):
            return Steps(workdir / "steps.txt")
        """,
}


@pytest.fixture
def added(tmp_path, monkeypatch):
    """Return a function that adds one file to the folder of a kind that has not been searched yet."""

    def add(kind: str) -> None:
        registry, package = KINDS[kind], importlib.import_module(f"jaxddp.{kind}")
        registry.names()
        (tmp_path / "added_file.py").write_text(IMPORTS + textwrap.dedent(FILES[kind]))
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        # A registry searches once, and has no public way to search again.
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
        monkeypatch.setattr(registry, "_settings", dict(registry._settings))
        monkeypatch.setattr(registry, "_complete", False)

    yield add
    for kind in KINDS:
        sys.modules.pop(f"jaxddp.{kind}.added_file", None)


@pytest.mark.parametrize("kind", KINDS)
def test_the_built_in_entries_are_found_in_their_folder(kind):
    # Other tests may have added entries.
    assert BUILT_IN[kind] <= set(KINDS[kind].names())


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_is_an_error_with_its_key_the_nearest_name_and_all_names(kind):
    registry, names = KINDS[kind], KINDS[kind].names()
    name = names[0]
    with pytest.raises(InputError) as caught:
        registry.get(name + "x")
    key = {"models": "model.name", "losses": "loss.name", "metrics": "eval.metrics", "optimizers": "optimizer.name"}
    key |= {
        "objectives": "objective.name",
        "schedules": "optimizer.schedule",
        "augment": "data.augment.then",
        "augment.policies": "data.augment.policy",
        "training.listeners": "log.to",
    }
    assert str(caught.value).startswith(f"{key[kind]}='{name}x' is unknown; did you mean '")
    assert str(caught.value).endswith(f"there are: {', '.join(names)}")


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_known_without_an_import(kind):
    registry, names = KINDS[kind], KINDS[kind].names()
    new_registry = Registry("some.key", f"jaxddp.{kind}")
    # Other tests of this worker may have added entries.
    for name in names:
        if getattr(registry.get(name), "__module__", "jaxddp.").startswith("jaxddp."):
            new_registry.check(name)
    # A part of a name, which stands in the source of a module.
    with pytest.raises(InputError) as caught:
        new_registry.check(names[0][:-1])
    built_in = {name for name in names if f" {name}" in str(caught.value).partition("there are:")[2]}
    assert str(caught.value).endswith(f"there are: {', '.join(sorted(built_in))}") and built_in >= BUILT_IN[kind]
    registry.check(names[0])


def test_a_name_that_a_file_adds_is_known_without_an_import(added):
    added("models")
    MODELS.check("added")
    with pytest.raises(InputError, match="model.name='adde' is unknown; did you mean 'added'"):
        Registry("model.name", "jaxddp.models").check("adde")
    assert "jaxddp.models.added_file" not in sys.modules


def test_a_model_is_added_by_one_file(added):
    added("models")
    config = Config().replace(model={"width": 7, "stem": "small"}).replace(model={"name": "added"})
    # Its settings are known from its source before it is imported.
    assert (config.model.width, config.model.stem) == (7, None)
    check_read(config)
    with pytest.raises(InputError, match="model.stem='small' is read by model.name=resnet10, .*, and not by added"):
        check_read(config.replace(model={"stem": "small"}))
    for variant, value in ((config, 7), (Config().replace(model={"name": "added"}), 5)):
        model = adapt(MODELS.get("added")(variant, 3))
        params, _ = model.init(jax.random.key(0), jnp.zeros((1, 4, 4, 3)))
        assert params.tolist() == [value] * 3


def test_a_loss_is_added_by_one_file(added):
    added("losses")
    config = Config().replace(loss={"name": "added"}, train={"label_smoothing": 0.25})
    assert LOSSES.get(config.loss.name)(config)(jnp.zeros((2, 3)), jnp.arange(2)).tolist() == [0.25, 0.25]


def test_an_objective_is_added_by_one_file(added):
    added("objectives")
    config = Config().replace(objective={"name": "added"}, seed=3)
    assert OBJECTIVES.get(config.objective.name)(config, None)("supervised") == ("supervised", 3)


def test_a_metric_is_added_by_one_file(added):
    added("metrics")
    config = Config().replace(eval={"metrics": ["top1", "added"]})
    values = [METRICS.get(name)(jnp.array([[1.0, 3.0]]), jnp.array([0])).tolist() for name in config.eval.metrics]
    assert values == [[0], [3]]


def test_an_optimizer_is_added_by_one_file(added):
    added("optimizers")
    config = Config().replace(optimizer={"name": "added", "beta2": 0.5})
    optimizer = OPTIMIZERS.get(config.optimizer.name)(config, lambda step: 2.0)
    updates, _ = optimizer.update(jnp.ones(1), optimizer.init(jnp.ones(1)), jnp.ones(1))
    assert optax.apply_updates(jnp.ones(1), updates) == jnp.zeros(1)


def test_a_schedule_is_added_by_one_file_and_follows_the_warm_up(added):
    added("schedules")
    schedule = make_schedule(Config().replace(optimizer={"schedule": "added", "learning_rate": 8.0}), Steps(6, 2))
    np.testing.assert_allclose([schedule(step) for step in range(6)], [4, 8, 8, 6, 4, 2])


def test_an_augmentation_is_added_by_one_file(added):
    added("augment")
    augment = AugmentConfig(flip=False, then=("added",))
    batch = random_batch(8)
    images = np.array(Preprocess((0.0,), (1.0,), augment)(batch, train=True).images * 255).round()
    changes = (images - batch.image // 2).reshape(8, -1)
    assert (np.ptp(changes, 1) == 0).all() and {*changes[:, 0]} <= {*range(9)} and len({*changes[:, 0]}) > 3


def test_a_policy_is_added_by_one_file(added):
    added("augment.policies")
    config = Config().replace(data={"augment": {"flip": False, "policy": "added"}, "mean": (0.0,), "std": (1.0,)})
    check_names(config)
    batch = random_batch(8)
    images = np.array(Preprocess.of(config, config.data.augment)(batch, train=True).images * 255).round()
    changes = (images - batch.image // 2).reshape(8, -1)
    assert (np.ptp(changes, 1) == 0).all() and {*changes[:, 0]} <= {*range(1, 9)} and len({*changes[:, 0]}) > 3


def test_a_logger_is_added_by_one_file(added, tmp_path):
    added("training.listeners")
    config = Config().replace(log={"to": ["added", "jsonl"]})
    setup = setup_of(linear_model(), sgd(0.1))
    changes = {"log": {"every": "1 step"}, "train": {"duration": "3 steps"}}
    train(setup, changes, listeners=[LOGGERS.get(name)(config, tmp_path) for name in config.log.to])
    assert (tmp_path / "steps.txt").read_text() == "1 2 3 "


def test_a_name_added_twice_is_refused():
    registry = Registry("model.name", "jaxddp.models")
    registry.add("mine")(min)
    registry.add("mine")(min)
    with pytest.raises(ValueError, match="model.name: 'mine' is added twice, by .*min.* and .*max"):
        registry.add("mine")(max)


def test_settings_of_a_kind_without_settings_are_rejected():
    assert {*CHOICES} == {registry for registry in KINDS.values() if registry.has_settings}
    with pytest.raises(ValueError, match="log.to: 'mine' is given settings, which this kind does not have; read the"):
        LOGGERS.add("mine", dict)
