"""Invalid values for every key of a config: each is rejected in one line, or has its documented effect."""

import dataclasses
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import ci_case, rare_case
from support.data import random_table, write_arrays
from support.recipes import NETWORK

from jaxddp.cli import main
from jaxddp.cluster.options import Launch
from jaxddp.config import Config
from jaxddp.config.registry import needs
from jaxddp.config.values import notes
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, format_option
from jaxddp.core.ranges import Range

LONG = "x" * 3000
"""A text that is short enough for a path, and longer than a file name can be."""
ODD = (math.nan, math.inf, -math.inf, -1, 0, 10**400, True, None, "", "x" * 100_000, "a\0b")
ODD_WORDS = ("nan", "inf", "-inf", "-1", "-1.5", "0", "1e30", "1e400", "", LONG)


def keys(tree: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of nested dataclasses with its type."""
    for name, hint in typing.get_type_hints(tree, include_extras=True).items():
        if dataclasses.is_dataclass(hint) and hint is not Duration:
            yield from keys(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


HINTS, DEFAULTS = dict(keys(Config)), Config()
NEEDS = needs(Config)


def numbers(hint: Any) -> Iterator[Any]:
    """Yield the range of each number in a type, or None."""
    if typing.get_origin(hint) is Annotated and typing.get_args(hint)[0] in (int, float):
        yield next(iter(notes(hint, Range)), None)
    elif hint in (int, float):
        yield None
    else:
        for part in typing.get_args(hint):
            yield from numbers(part)


@pytest.mark.parametrize("tree", [Config, Launch])
def test_every_number_in_a_config_has_a_range(tree):
    ranges_by_key = {key: list(numbers(hint)) for key, hint in keys(tree)}
    assert [key for key, ranges in ranges_by_key.items() if None in ranges] == []
    assert sum(map(len, ranges_by_key.values())) >= 7


def config_with(key: str, value: Any) -> Config:
    *sections, name = key.split(".")
    change: Any = {name: value}
    for section in reversed(sections):
        change = {section: change}
    return DEFAULTS.replace(**change)


@pytest.mark.parametrize("key", HINTS)
def test_values_outside_the_range_of_a_key_are_rejected(key):
    for value in ODD:
        for candidate in (value, [value] * 2, [value] * 3):
            try:
                config = config_with(key, candidate)
            except InputError as error:
                assert str(error).startswith(f"{key}") and len(str(error)) < 300
            else:
                accepted = config.to_dict()
                for name in key.split("."):
                    accepted = accepted[name]
                # The config has the accepted value. No infinity or NaN is accepted.
                if isinstance(accepted, list):
                    # A text is a list of names, without empty ones.
                    texts = [candidate] if isinstance(candidate, str) else candidate
                    candidate = [text for text in texts if text != ""]
                assert accepted == candidate
                assert not isinstance(accepted, float) or math.isfinite(accepted)


def test_a_standard_deviation_of_0_is_rejected():
    with pytest.raises(InputError, match="^data.std=.*0"):
        config_with("data.std", (0.2, 0.0, 0.2))


@given(st.floats() | st.integers(), st.floats(-10, 10), st.floats(0, 10), st.booleans(), st.booleans())
def test_a_range_contains_the_values_between_its_ends(value, least, width, above, below):
    bounds = Range(least, least + width, above, below)
    # NaN lies between no two numbers.
    between = least <= value <= least + width
    at_an_open_end = (above and value == least) or (below and value == least + width)
    assert (value in bounds) == (between and not at_an_open_end)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "set.npz"
    return write_arrays(file, random_table(20), random_table(9, seed=1))


RECIPE = """
from jaxddp.config import Config

def get_config():
    return Config().replace(
        data={"image_size": 6, "crop": "whole"},
        train={"batch_size": 8, "duration": "1 step", "precision": "float32"},
        eval={"batch_size": 8},
        log={"to": ()},
        parallel={"self_test": "never"},
    )

def get_model(config, num_classes):
    config.to_dict()  # Reads all keys, so that a key of another network is no error.
    return Network(num_classes)
"""


def bare_type(hint: Any) -> Any:
    """Return the type of a key without its range and without None."""
    parts = typing.get_args(hint)
    return bare_type(parts[0]) if parts and typing.get_origin(hint) not in (tuple, typing.Literal) else hint


def words_to_try(key: str) -> list[str]:
    """Return the odd words to try for a key: one invalid word, and all valid words."""
    if bare_type(HINTS[key]) is str:
        return ["nan", "", LONG]
    if bare_type(HINTS[key]) is Duration:
        return ["0 steps", "-1 step", "1e999999999 epochs", "1e18 epochs"]
    if bare_type(HINTS[key]) not in (int, float):
        return [LONG] if bare_type(HINTS[key]) is not bool else []

    def is_rejected(word: str) -> bool:
        try:
            config_with(key, bare_type(HINTS[key])(word))
        except (InputError, ValueError):
            return True
        return False

    rejected = [word for word in ODD_WORDS if is_rejected(word)]
    return [rejected[len(key) % len(rejected)], *(word for word in ODD_WORDS if word not in rejected)]


def range_properties(hint: Any) -> Any:
    """Return the properties that distinguish ranges: the type, the open ends, and whether the range contains zero."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = parts[1]
        is_range = isinstance(bounds, Range)
        return (parts[0], bounds.above, bounds.below, 0 in bounds) if is_range else range_properties(parts[0])
    return origin or hint if origin is typing.Literal or not parts else (origin, *map(range_properties, parts))


ONE_KEY_OF_EACH_RANGE = list({range_properties(hint): key for key, hint in reversed(HINTS.items())}.values())
"""The first key of each group of ranges with equal properties."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "runs", "refusals"),
    [ci_case(ONE_KEY_OF_EACH_RANGE, 5, 22), rare_case(list(HINTS), 15, 70)],
    ids=["one key of each range", "all keys"],
)
def test_odd_values_on_the_command_line_raise_a_one_line_error_or_start_a_run(
    keys, runs, refusals, data, tmp_path, capfd, monkeypatch
):
    """The exit code is 0 or 2, without a traceback or a wait."""
    (tmp_path / "recipe.py").write_text(NETWORK + RECIPE)
    monkeypatch.chdir(tmp_path)
    counts = {0: 0, 2: 0}
    for key in keys:
        for word in words_to_try(key):
            code, stderr = run_with_odd_value(key, word, f"run-{sum(counts.values())}", data, capfd)
            assert code in counts and "Traceback" not in stderr, (key, word, stderr)
            if code == 2:
                last = stderr.rstrip("\n").split("\n")[-1]
                assert last.startswith("jaxddp: ") and len(last) < 5000, (key, word, last)
            counts[code] += 1
    assert counts[0] > runs and counts[2] > refusals


NEEDED = {
    **{"data.augment.erase": "0.5", "data.augment.pad": "1", "data.augment.rand_augment": "1"},
    **{"data.bad_images": "substitute", "data.grow_from": "4 --data.grow-by 2", "data.labels_per_class": "2"},
    **{"data.verify": "manifest", "data.crop": "random_area", "data.split_column": "fold"},
    "log.to": "confusion,tensorboard",
    **{"objective.strong_rand_augment": "1", "optimizer.momentum": "0.5", "train.sync_every": "50%"},
    **{"train.outer_optimizer": "nesterov --train.sync-every 50% --parallel.groups 2"},
    **{"optimizer.reference_batch": "8", "train.ema": "0.5", "train.lookahead": "1", "train.stop_after": "1"},
    "model.lora": "1",
}
"""Values of the keys that other keys need."""


def run_with_odd_value(key: str, word: str, workdir: str, data: Path, capfd) -> tuple[int, str]:
    path_option = [] if key == "data.path" else ["--data.path", str(data)]
    needed_options = [format_option(NEEDS[key].key), *NEEDED[NEEDS[key].key].split()] if key in NEEDS else []
    # One process is one group of devices.
    needed_options += ["--parallel.groups", "2"] if key == "train.sync_every" else []
    code = main(["train", "recipe.py", "--workdir", workdir, *path_option, *needed_options, format_option(key), word])
    return code, capfd.readouterr().err
