"""Spellings of keys on the command line: short forms, a value after a flag, and misspelled names."""

import shlex

import pytest

from jaxddp.command_line.words import expand_short_forms, options_of
from jaxddp.commands.predict import PredictImages
from jaxddp.commands.train import Train
from jaxddp.config import Config
from jaxddp.config.values import SHORT, keys_of, similar_keys
from jaxddp.core.errors import InputError

OPTIONS, KEYS = options_of(Train), dict(keys_of(Config))


def test_the_options_of_a_command_are_its_own_and_the_keys_of_its_config():
    assert OPTIONS.keys() == {"workdir", "resume", *KEYS}
    # A positional argument is not an option.
    assert {"out", "top", "cpu_devices"} <= options_of(PredictImages).keys() and "run" not in options_of(PredictImages)
    assert set(SHORT.values()) <= OPTIONS.keys()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr 0.1 --seed 2", "--optimizer.learning-rate 0.1 --seed 2"),
        ("--batch-size 8 --data d --model resnet18", "--train.batch-size 8 --data.path d --model.name resnet18"),
        ("--epochs 5", "--train.duration '5 epochs'"),
        ("--epochs '5 steps'", "--train.duration '5 steps'"),
        ("--epochs --lr 1", "--train.duration --optimizer.learning-rate 1"),
        ("--data.augment.flip false --seed 1", "--data.augment.flip False --seed 1"),
        ("--data.augment.flip=False", "--data.augment.flip False"),
        ("--no-data.augment.flip", "--data.augment.flip False"),
        ("--data.augment.no-flip", "--data.augment.flip False"),
        ("--data.augment.flip maybe", "--data.augment.flip True maybe"),
        ("--optimizer.nesterov", "--optimizer.nesterov True"),
        ("--optimizer.nesterov false", "--optimizer.nesterov False"),
        ("--train.no-ema-warmup", "--train.ema-warmup False"),
    ],
)
def test_words_are_expanded_to_full_options(typed, meant):
    assert expand_short_forms(shlex.split(typed), OPTIONS) == shlex.split(meant)


@pytest.mark.parametrize("short", SHORT)
def test_a_short_form_beside_its_key_is_refused(short):
    option = "--" + SHORT[short].replace("_", "-")
    for words in ([f"--{short}", "1", option, "2"], [f"{option}=2", f"--{short}=1"]):
        message = f"^--{short} is short for {option}, which is given too; leave one of them"
        with pytest.raises(InputError, match=message):
            expand_short_forms(words, OPTIONS)


def test_without_a_config_there_are_no_short_forms():
    words = ["run", "--lr", "1", "--data", "d"]
    assert expand_short_forms(words, options_of(PredictImages)) == words
    assert similar_keys("batch_size", options_of(PredictImages)) == []


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("train.lr", ["optimizer.learning_rate"]),
        ("gradient-clip-val", ["optimizer.clip_norm"]),
        ("train.weight-decay", ["optimizer.weight_decay"]),
        ("loss", ["loss.name"]),
        ("every", ["eval.every", "checkpoint.every", "log.every"]),
        ("top", []),
        ("x" * 5000, []),
    ],
)
def test_a_similar_name_gets_the_key_as_a_suggestion(name, meant):
    assert similar_keys(name, KEYS) == meant


def test_a_key_with_an_additional_letter_gets_the_key_as_a_suggestion():
    assert {key: similar_keys(f"{key}x", KEYS) for key in KEYS} == {key: [key] for key in KEYS}


@pytest.mark.parametrize(
    ("change", "meant"),
    [
        ({"lr": 0.1}, "optimizer.learning_rate"),
        ({"optimizer": {"lr": 0.1}}, "optimizer.learning_rate"),
        ({"train": {"learning_rate": 0.1}}, "optimizer.learning_rate"),
        ({"batch_size": 8}, "train.batch_size"),
        ({"data": {"flip": True}}, "data.augment.flip"),
    ],
)
def test_from_python_a_key_is_found_in_another_section_too(change, meant):
    with pytest.raises(InputError, match=f"^unknown config key '.*'; did you mean '{meant}'[?] there are: "):
        Config().replace(**change)
