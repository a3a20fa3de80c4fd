"""A choice by name, such as an optimizer, reads only the keys of its settings.

A key that is set without effect is rejected, and an inherited key without effect is reset to its default.
"""

import dataclasses
import functools
import re
import shlex
import typing
from operator import attrgetter

import jax
import jax.numpy as jnp
import pytest
from support.data import random_table
from support.networks import linear_model
from support.optimizers import make_optimizer
from support.shared import sgd

import jaxddp
import jaxddp.config.registry as registry
from jaxddp.cli import main
from jaxddp.command_line.words import format_option
from jaxddp.config import Config, load
from jaxddp.config.layers import LayerSettings
from jaxddp.config.values import bare, keys_of, plain
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, some
from jaxddp.engine.parts.configured import configured_parts
from jaxddp.models.resnet import ARCHITECTURES
from jaxddp.recipe.file import Hook, read_recipe
from jaxddp.recipe.sources import config_names
from jaxddp.schedules import Steps, make_schedule
from jaxddp.training.checkpoints.integrity import RunIdentity
from jaxddp.workdir.claim import Claim, claim

HINTS, DEFAULTS = dict(keys_of(Config)), Config()
NEEDS = registry.needs(Config)
OTHER_TEXTS = {
    "model.batch_norm": "sync",
    "model.weight_init": "orthogonal",
    "model.stem": "small",
    "objective.teacher": "runs/teacher",
    "optimizer.step_at": (0.25,),
}
"""For each setting that is neither a number nor a truth value, a value that is not the default of any choice."""


def config_with(kind, name: str, *pairs: tuple[str, typing.Any]) -> Config:
    """Return a config with a choice, the keys that the choice needs to read all of its settings, and more keys."""
    needed = {"distillation": ("objective.teacher", "runs/other"), "sgd": ("optimizer.momentum", 0.5)}
    needed["rmsprop"] = needed["sgd"]
    return DEFAULTS.replace(**dict([(kind.key, name), *([needed[name]] if name in needed else []), *pairs]))


def other_value(key: str, default: typing.Any) -> typing.Any:
    """Return a value of a key that is not the default of a choice."""
    if key in OTHER_TEXTS:
        return OTHER_TEXTS[key]
    if bare(HINTS[key]) is bool:
        return not default
    return 0.625 * (default or 1) if bare(HINTS[key]) is float else 2 * (default or 1)


ENTRIES = [(kind, name) for kind in registry.CHOICES for name in kind.names()]


@pytest.mark.parametrize(("kind", "name"), ENTRIES, ids=[f"{kind.key}={name}" for kind, name in ENTRIES])
def test_a_key_is_read_or_rejected_with_the_choices_that_read_it(kind, name):
    default = built(kind, config_with(kind, name))
    settings = registry.resolved(DEFAULTS.replace(**{kind.key: name}).flat())
    for key, readers in kind.readers().items():
        value = other_value(key, settings[key])
        config = config_with(kind, name, (key, value))
        if name in readers:
            registry.check_read(config)
            assert built(kind, config) != default, key
            continue
        message = f"{key}={plain(value)!r} is read by {kind.key}={some(readers, 8)}, and not by {name}; leave it out"
        with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
            registry.check_read(config)


def built(kind, config: Config) -> typing.Any:
    """Return the object of a config's choice, or its jaxpr or settings, for comparison."""
    if kind is registry.MODELS:
        return registry.MODELS.get(config.model.name)(config, 10)
    if kind is registry.OPTIMIZERS:
        config = config.replace(optimizer={"schedule": "constant"})
        optimizer, params = make_optimizer(config, lambda step: 0.5), {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
        return str(jax.make_jaxpr(optimizer.update)(params, jax.eval_shape(optimizer.init, params), params))
    if kind is registry.LOSSES:
        loss = registry.LOSSES.get(config.loss.name)(config)
        return str(jax.make_jaxpr(loss)(jnp.ones((2, 3)), jnp.full((2, 3), 1 / 3)))
    if kind is registry.SCHEDULES:
        schedule = make_schedule(config, Steps(20, 2))
        return [str(schedule(step)) for step in range(21)], repr(configured_parts(config, Steps(20, 2)))
    objective = registry.OBJECTIVES.get(config.objective.name)(config, None)
    fields = dict(vars(objective)) if dataclasses.is_dataclass(objective) else {}
    fields.pop("restore", None)
    return fields, config.objective.teacher, config.objective.unlabelled_ratio  # `Recipe.of` reads the ratio.


@pytest.mark.parametrize("kind", registry.CHOICES, ids=[kind.key for kind in registry.CHOICES])
def test_the_settings_of_all_choices_are_keys_of_the_section_with_one_type_and_one_description(kind):
    for key, readers in kind.readers().items():
        name = key.rpartition(".")[2]
        hints = [typing.get_type_hints(kind.choice(reader), include_extras=True)[name] for reader in readers]
        assert all(hint | None == HINTS[key] for hint in hints) and registry.description(key)
        assert attrgetter(key)(Config()) is None


@pytest.mark.parametrize("name", config_names())
def test_another_choice_replaces_inherited_settings(name):
    config, file = load(name), read_recipe(name)
    registry.check_read(config, file.hooks)
    choices = {
        kind: {frozenset(kind.keys_read(choice)): choice for choice in kind.names()} for kind in registry.CHOICES
    }
    for kind, choice in ((kind, choice) for kind, names in choices.items() for choice in names.values()):
        changed = config.replace(**{kind.key: choice})
        registry.check_read(changed)
        before, after = config.flat(), changed.flat()
        unread = {key for key, names in kind.readers().items() if choice not in names}
        assert {key for key in after if after[key] != before[key]} <= {kind.key, *unread}
        assert all(after[key] is None for key in unread)


def test_an_inherited_choice_keeps_its_settings():
    lars = Config().replace(optimizer={"name": "lars", "trust_coefficient": 0.5})
    assert lars.replace(optimizer={"momentum": 0.5}).optimizer.trust_coefficient == 0.5
    assert lars.replace(optimizer={"name": "lamb", "momentum": 0.5}).optimizer.trust_coefficient is None
    with pytest.raises(InputError, match="optimizer.trust_coefficient=0.25 is read by optimizer.name=lars, and not by"):
        registry.check_read(lars.replace(optimizer={"name": "adamw", "trust_coefficient": 0.25}))
    # A hook may read any key, whatever the name of the choice.
    registry.check_read(
        Config().replace(optimizer={"trust_coefficient": 0.25, "step_at": [0.5]}), {"get_optimizer": None}
    )


FIXMATCH, PLAIN = {"objective.name": "fixmatch"}, {"optimizer.momentum": None}
OF_OTHER_CHOICES = {
    "objective.strong_rand_magnitude": (FIXMATCH | {"objective.strong_rand_augment": 0}, FIXMATCH),
    "optimizer.nesterov": ({"optimizer.name": "sgd", **PLAIN}, {"optimizer.name": "momentum", **PLAIN}),
}
"""For keys of choices: other keys that disable the key, and other keys that enable it."""
VALUES = {"data.manifest": "a.jsonl", "data.crop_area": (0.5, 1.0), "data.augment.erase_area": (0.1, 0.2)}
VALUES |= {"data.split_column": "fold", "data.val_fold": "2", "model.lora_layers": "body"}
VALUES |= {"log.project": "a", "log.name": "b", "log.config": ("c=d",)}


def changed_value(key: str) -> typing.Any:
    """Return a valid value of a key that is not its default."""
    kind, default = bare(HINTS[key]), attrgetter(key)(Config())
    if key in VALUES:
        return VALUES[key]
    if kind is Duration:
        return "10%"
    if typing.get_origin(kind) is typing.Literal:
        return next(value for value in typing.get_args(kind) if value != default)
    return {bool: not default, int: (default or 0) + 3, float: 0.625}[kind]


def enabling(key: str) -> dict[str, typing.Any]:
    """Return other keys with which a key has an effect."""
    if key in OF_OTHER_CHOICES:
        return OF_OTHER_CHOICES[key][1]
    need = NEEDS[key]
    value = need.values[0] if need.values else changed_value(need.key)
    names = typing.get_origin(bare(HINTS[need.key])) is tuple
    return (enabling(need.key) if need.key in NEEDS else {}) | {need.key: (value,) if names else value}


def disabling(key: str) -> dict[str, typing.Any]:
    """Return other keys with which a key has no effect."""
    if key in OF_OTHER_CHOICES:
        return OF_OTHER_CHOICES[key][0]
    need, kind = NEEDS[key], bare(HINTS[NEEDS[key].key])
    choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else (("jsonl",),)
    others = [attrgetter(need.key)(Config()), *choices]
    return {need.key: next(value for value in others if not need.is_met(value))}


def with_keys(config: Config, values: dict[str, typing.Any]) -> Config:
    for key, value in values.items():
        for name in reversed(key.split(".")):
            value = {name: value}
        config = config.replace(**value)
    return config


@pytest.mark.parametrize("key", NEEDS)
def test_a_key_without_the_key_that_it_needs_is_rejected_with_both_names(key):
    value = changed_value(key)
    with pytest.raises(InputError) as error:
        registry.check_read(with_keys(Config(), disabling(key) | {key: value}))
    assert re.match(rf"{re.escape(key)}=.* has no effect with(out)? .*{re.escape(NEEDS[key].key)}", str(error.value))
    assert str(error.value).endswith("; leave it out") and error.value.key == key
    config = with_keys(Config(), enabling(key) | {key: value})
    registry.check_read(config)
    # An inherited value is reset to the default.
    disabled, default = with_keys(config, disabling(key)), Config()
    registry.check_read(disabled)
    assert disabled.flat()[key] == default.flat()[key] != config.flat()[key]


def recipe_with(tmp_path, changes: str):
    """Write a recipe file, whose line 3 changes the config of digits."""
    recipe = tmp_path / "mine.py"
    head = "from jaxddp.config import load\ndef get_config():\n"
    recipe.write_text(f"{head}    return load('digits').replace({changes})\n")
    return recipe


def test_an_option_without_the_key_that_it_needs_is_rejected_with_a_working_command(tmp_path, capfd):
    line = error_line("train digits --data d --train.ema-every 5 --train.stop-min-gain=0.1 --epochs 2", capfd)
    assert line == (
        "jaxddp: --train.ema-every 5 has no effect without train.ema; --train.stop-min-gain 0.1 has no effect without "
        "train.stop_after; jaxddp train digits --data d --epochs 2 would do"
    )
    recipe = recipe_with(tmp_path, "data={'bad_images': 'fail', 'max_bad_images': 0.5}")
    message = "data.max_bad_images=0.5 has no effect without substitute in data.bad_images; leave data.max_bad_images"
    assert error_line(f"train {recipe}", capfd) == f"jaxddp: {recipe}:3: {message} out of {recipe}"


def test_a_key_without_effect_is_no_change_on_resume(tmp_path):
    config = Config().replace(train={"ema_every": 5}, data={"grow_by": 8})
    first, _ = claim(tmp_path, Claim(config.to_dict(), {}), resuming=False)
    resumed, is_same = claim(tmp_path, Claim(Config().to_dict(), {}), resuming=True)
    assert resumed == first and is_same
    # If the key that it needs is set, the error names that key.
    with pytest.raises(InputError, match="train.ema was None and is now 0.9"):
        claim(tmp_path, Claim(config.replace(train={"ema": 0.9}).to_dict(), {}), resuming=True)


def error_line(command: str, capfd) -> str:
    assert main(shlex.split(command)) == 2
    (line,) = capfd.readouterr().err.splitlines()
    return line


def test_all_unused_options_are_reported_at_once_with_a_working_command(capfd):
    line = error_line(
        "train digits --data d --model vit_ti16 --optimizer.trust-coefficient=0.5 --model.no-blur-pool "
        "--objective.threshold 0.1 --data.augment.flip false --optimizer.step-at 0.3 0.6 --epochs 2",
        capfd,
    )
    command = "jaxddp train digits --data d --model vit_ti16 --data.augment.flip false --epochs 2"
    assert line.endswith(f"; {command} would do")
    resnets = f"{', '.join(sorted(ARCHITECTURES)[:8])}, ..."
    for message in (
        f"--model.blur-pool False is read by --model={resnets}, and not by vit_ti16",
        "--objective.threshold 0.1 is read by objective.name=fixmatch, and not by supervised",
        "--optimizer.trust-coefficient 0.5 is read by optimizer.name=lars, and not by adamw",
        "--optimizer.step-at 0.3 0.6 is read by optimizer.schedule=step, and not by cosine",
    ):
        assert message in line


def test_an_unused_key_in_a_recipe_file_is_reported_for_removal_from_the_file(tmp_path, capfd):
    recipe = recipe_with(tmp_path, "model={'drop_path': 0.5}")
    networks = f"{', '.join(registry.MODELS.readers()['model.drop_path'][:8])}, ..."
    message = f"jaxddp: {recipe}:3: model.drop_path=0.5 is read by model.name={networks}, and not by resnet18"
    message = f"{message}; leave model.drop_path out of {recipe}"
    assert error_line(f"train {recipe}", capfd) == message
    line = error_line(f"train {recipe} --model.width 4 --objective.threshold 0.5", capfd)
    assert line.endswith(f"; leave model.drop_path out of {recipe}; jaxddp train {recipe} --model.width 4 would do")


def help_text(arguments: str, capfd) -> str:
    assert main(["train", *arguments.split(), "--help"]) == 0
    return " ".join(capfd.readouterr().out.replace("│", "").split())


def test_help_for_a_config_lists_the_keys_of_its_choices_with_their_values(capfd):
    text = help_text("digits", capfd)
    shown = {key for key in registry.keys_of_choices() if re.search(rf"{format_option(key)}\b(?!-)", text)}
    values = load("digits").flat()
    assert shown == {
        key for kind in registry.CHOICES for key, names in kind.readers().items() if values[kind.key] in names
    }
    assert "beta 1 of Adam and similar optimizers. (default: 0.9)" in text
    assert "prevents division by zero. (default: 1e-08)" in text
    assert text.index("data options") < text.index("model options") < text.index("train options")
    # Choices on the command line replace those of the config.
    text = help_text("digits --model vit_ti16 --optimizer.schedule=wsd", capfd)
    assert "--model.drop-path" in text and "--optimizer.decay-share" in text and "--model.stem" not in text


def test_a_choices_default_value_is_no_change_on_resume_but_any_other_value_is(tmp_path):
    def claim_with(**optimizer) -> dict:
        config = Config().replace(optimizer={"name": "sgd"} | optimizer)
        return claim(tmp_path, Claim(config.to_dict(), {}), resuming=(tmp_path / "config.json").exists())[0]

    first = claim_with(momentum=0.0)
    assert claim_with() == first and RunIdentity.of(claim_with(nesterov=False)) == RunIdentity.of(first)
    with pytest.raises(InputError, match="optimizer.momentum was 0.0 and is now 0.9"):
        claim_with(momentum=0.9)
    with pytest.raises(InputError, match="optimizer.name was 'sgd' and is now 'adamw'"):
        claim_with(name="adamw")


def test_a_hook_receives_default_settings(tmp_path):
    config = Hook(tmp_path, lambda config: config)(Config().replace(model={"width": 8}))
    assert (config.model.width, config.model.stem, config.optimizer.momentum) == (8, "imagenet", 0.9)
    assert config.optimizer.epsilon is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"objective": "supervised", "threshold": 0.5, "temperature": 2.0},
            "temperature=2.0 is read by objective=distillation, and not by supervised; threshold=0.5 is read by "
            "objective=fixmatch, and not by supervised; leave them out",
        ),
        (
            {"objective": lambda supervised: supervised, "threshold": 0.5},
            "threshold=0.5: the objective is a function; pass the value to the function instead",
        ),
        ({"ema_every": 5}, "ema_every=5 has no effect without ema; leave it out"),
        (
            {"data": jaxddp.DataConfig(crop="whole", grow_by=8)},
            "data.grow_by=8 has no effect without data.grow_from; leave it out",
        ),
    ],
)
def test_options_of_the_python_api_are_read_by_its_objective(options, expected):
    with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
        jaxddp.prepare_training(linear_model(), random_table(20), 1, sgd(0.1), 4, **options)


def test_a_value_with_its_own_syntax_is_parsed_once_and_kept(monkeypatch):
    config = Config().replace(
        optimizer={"groups": ["fc:rate=2"], "rate_factors": ["conv1=0.5"]},
        model={"freeze": "bn1", "unfreeze": ["layer4=1 epoch"], "batch_norm": "ghost:8"},
        loss={"class_weights": "1,2"},
    )
    for kind in (LayerSettings, Duration):
        monkeypatch.setattr(kind, "parse", functools.partial(pytest.fail, "read again"))
    assert config.optimizer.layer_rate_factors == {"fc": 2.0, "conv1": 0.5}
    assert config.optimizer.layer_rate_factors is config.optimizer.layer_rate_factors
    assert config.model.unfreeze_times is config.model.unfreeze_times and config.frozen_norms is config.frozen_norms
    assert config.loss.weights == (1.0, 2.0) and config.model.batch_statistics.group == 8
