"""`model.batch_norm` is parsed to the same values, and rejected with the same error, at every entry point."""

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.errors import error_line

import jaxddp
from jaxddp.cli import main
from jaxddp.config import Config, ModelConfig, load
from jaxddp.config.layers import BatchStatistics
from jaxddp.core.errors import InputError
from jaxddp.mesh import AXIS

RECIPE = """
from jaxddp.config import Config

def get_config():
    return Config().replace(model=dict(batch_norm={!r}))
"""


@pytest.mark.parametrize(
    ("value", "suggestion"), [("ghost:0", ""), ("ghost:٣", ""), ("locale", ", did you mean 'local'?")]
)
def test_an_invalid_batch_norm_raises_the_same_error_at_every_entry_point(value, suggestion, tmp_path, capfd):
    expected = "expected 'local', 'sync' or 'ghost:K' (K images are normalized together, 1 to 99,999,999)"
    command_error = f"--model.batch-norm {shlex.quote(value)}: {expected}{suggestion}"
    expected = f"model.batch_norm={value!r}: {expected}{suggestion}"
    assert error_line(lambda: Config().replace(model={"batch_norm": value})) == expected
    assert error_line(lambda: Config(model=ModelConfig(batch_norm=value))) == expected
    # The batch norm is an argument of `resnet`, and not a key of a config.
    assert error_line(lambda: jaxddp.resnet("resnet18", 5, batch_norm=value)) == expected.removeprefix("model.")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(value))
    assert error_line(lambda: load(recipe)) == f"{recipe}:5: {expected}"
    for command in ("train", "doctor"):
        assert main([command, "digits", "--data.path", str(tmp_path), "--model.batch-norm", value]) == 2
        assert capfd.readouterr().err == f"jaxddp: {command_error}\n"


@pytest.mark.parametrize(
    ("batch_norm", "axis_name", "group"), [("local", None, None), ("sync", AXIS, None), ("ghost:32", None, 32)]
)
def test_the_config_and_resnet_parse_batch_norm_to_the_same_values(batch_norm, axis_name, group):
    statistics = Config().replace(model={"batch_norm": batch_norm}).model.batch_statistics
    assert statistics == BatchStatistics(axis_name, group)
    network = jaxddp.resnet("resnet18", 5, batch_norm=batch_norm)
    assert (network.axis_name, network.group) == (axis_name, group)


@pytest.mark.parametrize(
    ("group", "batch_size", "shares", "expected"),
    [
        (32, 48, 1, "48 is computed in 1 part of 48; a batch of 32, 64, or ghost:24, would do"),
        (32, 320, 8, "320 is computed in 8 parts of 40; a batch of 256, 512, or ghost:20, would do"),
    ],
)
def test_a_batch_that_does_not_fill_whole_groups_raises_a_one_line_error(group, batch_size, shares, expected):
    start = f"model.batch_norm=ghost:{group} normalizes {group} images together, but train.batch_size="
    with pytest.raises(InputError, match=f"^{start}{expected}$"):
        BatchStatistics(group=group).check(batch_size, shares)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_the_batch_sizes_and_the_group_that_the_error_suggests_work(group, share, shares):
    statistics, batch_size = BatchStatistics(group=group), share * shares
    for ungrouped in (BatchStatistics(), BatchStatistics(axis_name=AXIS)):
        ungrouped.check(batch_size, shares)
    if share % group == 0:
        statistics.check(batch_size, shares)
        return
    line = error_line(statistics.check, batch_size, shares)
    *batches, smaller_group = map(int, re.findall(r"[0-9]+", line.split(";")[1]))
    assert 1 <= len(batches) <= 2 and smaller_group < group
    for size in batches:
        statistics.check(size, shares)
    BatchStatistics(group=smaller_group).check(batch_size, shares)
