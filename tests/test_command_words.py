"""The words of a command that takes a config: its most used options, `--config`, and corrections of mistyped words."""

import itertools
import re

import pytest

from jaxddp.cli import main
from jaxddp.config.values import SHORT
from jaxddp.core.errors import format_option

OF_CONFIG = ["train", "eval", "find-lr", "config", "doctor", "data show"]
FIRST = ["--lr", "--epochs", "--batch-size", "--model", "--data", "--seed"]


def options_of_page(words: list[str], capsys) -> list[str]:
    """Return the options of a help page, in order."""
    assert main([*words, "--help"]) == 0
    rows = [line.strip("│| ") for line in capsys.readouterr().out.splitlines()]
    return [row.split()[0] for row in rows if re.match("--[a-z]", row)]


@pytest.mark.parametrize("command", OF_CONFIG)
def test_the_most_used_options_are_the_first_of_each_page(command, capsys):
    words = command.split()
    assert options_of_page(words, capsys)[: len(FIRST)] == FIRST
    options = options_of_page([*words, "digits"], capsys)
    assert options[: len(FIRST)] == FIRST and len({*options}) == len(options)
    # The config has no weights to download, so its page omits `model.offline`.
    assert {format_option(key) for key in SHORT.values()} - {*options} <= {"--model.offline"}


def test_the_page_of_a_config_describes_every_key_and_shows_the_values_of_its_short_forms(capsys):
    assert main(["train", "digits", "--help"]) == 0
    lines = [line.strip("│ ") for line in capsys.readouterr().out.splitlines()]
    descriptions = {row.split()[0]: following for row, following in itertools.pairwise(lines) if row.startswith("--")}
    assert [name for name, text in descriptions.items() if not text or text.startswith("(")] == []
    assert len(descriptions) > 100
    page = " ".join(" ".join(lines).split())
    for words in (
        "--lr X Short for --optimizer.learning-rate. (default: 0.005)",
        "--epochs N Short for --train.duration. (default: 6 epochs)",
        "--seed N Seed of all random values. (default: 0)",
    ):
        assert words in page


def error_of(words: list[str], capsys) -> str:
    assert main(words) == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        (["train.batch_size=64"], "--train.batch-size 64"),
        (["--set", "train.batch_size=64"], "--train.batch-size 64"),
        (["--set", "lr=0.1"], "--optimizer.learning-rate 0.1"),
        (["seed=3"], "--seed 3"),
        (["train.batch_sise=3", "train.ema=0.9"], "--train.batch-size 3 or --train.ema 0.9"),
        (["--train.batch-sise", "3"], "--train.batch-size"),
    ],
)
def test_an_assignment_is_corrected_to_an_option(words, correction, capsys):
    error = error_of(["config", "digits", *words], capsys)
    assert error.endswith(f"; perhaps you mean {correction}; see jaxddp config digits --help")


@pytest.mark.parametrize("words", [["--config", "my.yaml"], ["--config=my.yaml"]])
@pytest.mark.parametrize("command", ["config", "data show"])
def test_a_leading_config_option_names_the_config(words, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text("base: digits\nseed: 3\ntrain.batch_sise: 1")
    assert error_of([*command.split(), *words], capsys).startswith("jaxddp: my.yaml:3: unknown config key")


def test_a_second_config_is_an_error(capsys):
    advice = "write `base: digits` into my.yaml, and give my.yaml as the config"
    for words in (["--config", "my.yaml"], ["--seed", "1", "--config=my.yaml"]):
        error = error_of(["config", "digits", *words], capsys)
        assert error == f"jaxddp: --config my.yaml: the config is digits already; {advice}"


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_the_text_below_the_usage_fits_the_terminal(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["--help"]) == 0
    text = capsys.readouterr().out.partition("\n\n")[2]
    assert max(map(len, text.splitlines())) <= min(columns, 120)
