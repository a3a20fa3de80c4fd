"""A key that is set for a choice has an effect beside the hooks of a recipe, or it is an error.

A name that a later layer sets, such as a command with `--optimizer.name`, replaces an inherited hook.
"""

import pickle
import textwrap
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import pytest
from support.data import random_table, write_arrays

from jaxddp.command_line.parse import parse_recipe
from jaxddp.commands.train import Train
from jaxddp.config import Config
from jaxddp.config.registry import OPTIMIZERS
from jaxddp.config.values import keys_of, observed
from jaxddp.core.errors import InputError
from jaxddp.recipe.file import RecipeFile, read_recipe
from jaxddp.setup.recipe import Recipe
from jaxddp.setup.run_setup import open_recipe
from jaxddp.workdir.claim import Claim, claim

IMPORTS = """
import flax.linen as nn
import optax
from jaxddp.config import Config, load
"""
FILES = {
    # Hooks that read some keys when they are called, and some only when their functions are traced.
    "base.py": """
        def get_config():
            return Config().replace(
                data={"path": "set.npz", "image_size": 6, "crop": "whole"}, optimizer={"momentum": 0.5},
                train={"batch_size": 10, "duration": "2 steps"}, model={"width": 4}, parallel={"devices": 1},
            )
        def get_optimizer(config, learning_rate):
            rate = lambda step: learning_rate(step) * (1 - config.optimizer.beta2 if config.optimizer.beta2 else 1)
            return optax.sgd(rate, momentum=config.optimizer.momentum)
        class Net(nn.Module):
            config: Config
            classes: int
            @nn.compact
            def __call__(self, images):
                return nn.Dense(self.classes)(nn.Dense(self.config.model.width)(images.mean((1, 2))))
        def get_model(config, num_classes):
            return Net(config, num_classes)
        def get_loss(config):
            return optax.softmax_cross_entropy_with_integer_labels
        """,
    "inherits.py": "def get_config(): return load('base.py').replace(seed=1)",
    "names.py": "def get_config(): return load('base.py').replace(optimizer={'name': 'momentum'})",
    "built.py": """
        import dataclasses
        def get_config():
            config = load('base.py')
            return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, name='lamb'))
        """,
    "constant.py": """
        def get_config(): return load("base.py")
        def get_optimizer(config, learning_rate): return optax.sgd(0.1)
        """,
    "both.py": """
        def get_config(): return load("base.py").replace(optimizer={"name": "lamb"})
        def get_optimizer(config, learning_rate): return optax.sgd(learning_rate)
        """,
    "objective.py": """
        def get_config(): return load("base.py").replace(objective={"name": "fixmatch"})
        def get_objective(config, topology): return lambda supervised: supervised
        """,
    "named.yaml": "base: base.py\noptimizer.name: adamw\n",
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    write_arrays(tmp_path / "set.npz", random_table(20), random_table(10, seed=1))
    for name, source in FILES.items():
        (tmp_path / name).write_text(source if name.endswith("yaml") else IMPORTS + textwrap.dedent(source))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(*arguments: str) -> tuple[RecipeFile, Recipe]:
    _, file = parse_recipe(Train, "jaxddp train", [*arguments])
    return file, open_recipe(file)


@pytest.mark.parametrize("name", ["base.py", pytest.param("inherits.py", marks=pytest.mark.ci)])
def test_a_key_that_a_hook_or_another_part_of_the_run_reads_is_accepted(name, folder):
    """`base.py` reads `beta2` and `model.width` only while its optimizer and its network are traced."""
    options = "--optimizer.momentum 0.1 --optimizer.beta2 0.9 --lr 0.3 --optimizer.schedule linear --model.width 8 "
    options += "--optimizer.rate-factors Dense_0=2 --optimizer.clip-norm 1 --batch-size 5 "
    options += "--optimizer.reference-batch 20"
    file, experiment = opened(name, *options.split())
    assert file.hooks.keys() == {"get_optimizer", "get_model", "get_loss"}
    assert type(experiment.config) is Config


@pytest.mark.parametrize(
    ("name", "hook", "settings", "advice"),
    [
        (
            "base.py",
            "get_optimizer of base.py",
            {"optimizer.nesterov": True, "optimizer.trust_coefficient": 0.5, "optimizer.weight_decay": 5.0},
            "leave them out, or replace the hook by setting optimizer.name",
        ),
        (
            "constant.py",
            "get_optimizer of constant.py",
            {"optimizer.momentum": 0.3, "optimizer.learning_rate": 0.3, "optimizer.schedule": "linear"},
            "leave them out, or replace the hook by setting optimizer.name",
        ),
        ("both.py", "get_optimizer of both.py", {"optimizer.name": "lamb"}, "leave it out"),
        ("objective.py", "get_objective of objective.py", {"objective.name": "fixmatch"}, "leave it out"),
    ],
)
def test_a_key_that_nothing_reads_is_an_error(name, hook, settings, advice, folder):
    words = [word for key, value in settings.items() for word in (f"--{key}".replace("_", "-"), str(value))]
    with pytest.raises(InputError) as caught:
        opened(name, *([] if any(key.endswith(".name") for key in settings) else words))
    lines = [f"{key}={value!r} has no effect, because {hook} does not read it" for key, value in settings.items()]
    assert str(caught.value).replace(f"{folder}/", "") == f"{'; '.join(lines)}; {advice}"


@pytest.mark.parametrize(
    ("name", "option", "lost"),
    [
        ("base.py", ("--optimizer.name", "lamb"), "get_optimizer"),
        ("inherits.py", ("--optimizer.name", "momentum"), "get_optimizer"),
        ("names.py", (), "get_optimizer"),
        ("named.yaml", (), "get_optimizer"),
        ("both.py", ("--model", "resnet18", "--model.stem", "small"), "get_model"),
    ],
    ids=str,
)
def test_a_name_of_a_later_layer_replaces_an_inherited_hook(name, option, lost, folder, monkeypatch):
    _, file = parse_recipe(Train, "jaxddp train", [name, *option])
    assert file.hooks.keys() == {"get_optimizer", "get_model", "get_loss"} - {lost}


def test_a_run_keeps_the_choice_that_replaced_a_hook(folder):
    command = ["base.py", "--optimizer.momentum", "0.5"]
    of_hook, named = (
        parse_recipe(Train, "jaxddp train", [*command, *more])[1] for more in ([], ["--optimizer.name", "momentum"])
    )
    assert of_hook.config == named.config
    claim(folder / "run", Claim(named.config.to_dict(), {}, named), resuming=False)
    stored = read_recipe(folder / "run")
    assert stored.hooks.keys() == {"get_model", "get_loss"}
    claim(folder / "run", Claim(stored.config.to_dict(), {}, stored), resuming=True)
    # Without the option, the run would continue with the hook.
    with pytest.raises(InputError, match="recipe.hooks was .* and is now .*'get_optimizer'.*; a resumed run keeps its"):
        claim(folder / "run", Claim(of_hook.config.to_dict(), {}, of_hook), resuming=True)


def test_an_observed_config_records_reads_and_nothing_else():
    read = set[str]()
    config = observed(Config(), read)
    assert config == Config() and Config() == config and hash(config) == hash(Config())
    assert repr(config) == repr(Config()) and type(pickle.loads(pickle.dumps(config))) is Config
    changed = config.replace(optimizer={"name": "lars"})
    assert isinstance(changed, Config) and not read
    assert changed.optimizer.name == "lars" and config.model.initialization and config.data.augment.flip
    assert read == {"optimizer.name", "model.weight_init", "data.augment.flip"}
    assert type(replace(config, seed=1).replace(seed=2)) is Config
    read.clear()
    settings = OPTIMIZERS.settings(changed.optimizer)
    assert not read and settings.momentum == 0.9 and read == {"optimizer.momentum"}
    for key, _ in keys_of(Config):
        attrgetter(key)(config)
    assert read == Config().flat().keys()
