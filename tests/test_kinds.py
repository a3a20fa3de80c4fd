"""The kinds of choices: names, settings, and choices that a program adds."""

import subprocess
import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import random_batch
from support.errors import error_line

import jaxddp.config.registry as registry
from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import AugmentConfig, Config
from jaxddp.config.registry import AUGMENTATIONS, LOSSES, MODELS, SCHEDULES, Registry, check_read
from jaxddp.core.errors import InputError
from jaxddp.models.adapt import adapt
from jaxddp.recipe.file import read_recipe
from jaxddp.schedules import Steps, make_schedule

BUILT_IN = {
    "model.name": {"resnet10", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"},
    "loss.name": {"cross_entropy"},
    "objective.name": {"supervised"},
    "eval.metrics": {"top1", "top5", "top10"},
    "optimizer.name": {"sgd", "rmsprop", "momentum", "adamw", "lars", "lamb", "muon", "schedule_free"},
    "optimizer.schedule": {"cosine", "linear", "step", "constant", "polynomial", "one_cycle", "wsd"},
    "data.augment.then": {"vertical_flip", "grayscale"},
    "data.augment.policy": {"trivial_augment", "auto_augment_cifar10", "augmix", "three_augment"},
    "log.to": {"jsonl", "curves", "parameters", "tensorboard", "wandb", "mlflow"},
}
KINDS = {kind.key: kind for kind in vars(registry).values() if isinstance(kind, Registry)}


@pytest.fixture
def add(monkeypatch):
    """Return a function that adds a choice under the name "added" for the time of a test."""

    def add(kind: Registry, choice):
        monkeypatch.setattr(kind, "_added", dict(kind._added))
        return kind.add("added")(choice)

    for kind in KINDS.values():
        kind.names()
    return add


@pytest.mark.parametrize("kind", BUILT_IN)
def test_the_built_in_entries_are_found_in_their_folder(kind):
    # Other tests may have added entries.
    assert BUILT_IN[kind] <= set(KINDS[kind].names())


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_is_an_error_with_its_key_the_nearest_name_and_all_names(kind):
    names = KINDS[kind].names()
    line = error_line(KINDS[kind].get, f"{names[0]}x", longest=5000)
    assert line.startswith(f"{kind}='{names[0]}x' is unknown; did you mean '")
    assert line.endswith(f"there are: {', '.join(names)}")


PROGRAM = """
import sys
from jaxddp.config.registry import *
for kind in (AUGMENTATIONS, LOGGERS, LOSSES, METRICS, MODELS, OBJECTIVES, OPTIMIZERS, POLICIES, SCHEDULES):
    for name in kind.names():
        kind.check(name)
assert len(MODELS.names()) > 20 and "lars" in OPTIMIZERS.names()
assert not {"jax", "flax", "optax", "tensorflow"} & {*sys.modules}
"""


def test_names_and_settings_are_known_without_an_import_of_jax():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_of_a_kind_is_where_its_table_says(kind):
    assert all(KINDS[kind].choice(name) is not None for name in KINDS[kind].names())


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_name_is_no_name(kind):
    with pytest.raises(InputError, match="is unknown"):
        KINDS[kind].check(KINDS[kind].names()[0][:-1])


def test_the_settings_of_a_choice_are_its_fields(add):
    @dataclass(frozen=True)
    class Added:
        width: int = 5

        def make(self, config, num_classes):
            return lambda key, example: jnp.ones(num_classes) * self.width, lambda params, images: params

    add(MODELS, Added)
    config = Config().replace(model={"width": 7, "stem": "small"}).replace(model={"name": "added"})
    assert (config.model.width, config.model.stem) == (7, None)
    check_read(config)
    with pytest.raises(InputError, match="model.stem='small' is read by model.name=resnet10, .*, and not by added"):
        check_read(config.replace(model={"stem": "small"}))
    for variant, value in ((config, 7), (Config().replace(model={"name": "added"}), 5), (Config(), 5)):
        params, _ = adapt(MODELS.get("added")(variant, 3)).init(jax.random.key(0), jnp.zeros((1, 4, 4, 3)))
        assert params.tolist() == [value] * 3


def test_a_choice_without_settings_is_a_function(add):
    add(SCHEDULES, lambda config, steps: lambda step: config.optimizer.learning_rate * (1 - step / steps.after_warmup))
    schedule = make_schedule(Config().replace(optimizer={"schedule": "added", "learning_rate": 8.0}), Steps(6, 2))
    np.testing.assert_allclose([schedule(step) for step in range(6)], [4, 8, 8, 6, 4, 2])


def test_an_augmentation_is_added(add):
    def change(key, image):
        return image // 2 + jax.random.randint(key, (), 0, 9, image.dtype)

    add(AUGMENTATIONS, lambda settings: change)
    augment = AugmentConfig(flip=False, then=("added",))
    batch = random_batch(8)
    images = np.array(Preprocess((0.0,), (1.0,), augment)(batch, train=True).images * 255).round()
    changes = (images - batch.image // 2).reshape(8, -1)
    assert (np.ptp(changes, 1) == 0).all() and {*changes[:, 0]} <= {*range(9)} and len({*changes[:, 0]}) > 3


def test_a_name_added_twice_is_refused_and_a_recipe_that_adds_one_may_run_twice(add, tmp_path):
    kind = Registry("model.name", "", {})
    kind.add("mine")(min)
    with pytest.raises(ValueError, match="model.name: 'mine' is added twice, by .*min.* and .*max"):
        kind.add("mine")(max)
    add(LOSSES, min)
    text = "from jaxddp.config import Config as get_config\nfrom jaxddp.config.registry import LOSSES\n"
    (tmp_path / "own.py").write_text(f"{text}@LOSSES.add('own')\ndef own(config):\n    pass\n")
    # The run keeps a copy of such a recipe.
    assert [*read_recipe(tmp_path / "own.py").files()] == [*read_recipe(tmp_path / "own.py").files()] == ["own.py"]
    with pytest.raises(InputError, match="^other: loss.flip is no key of a config; make it a constant"):
        LOSSES.add("other")(AugmentConfig)
