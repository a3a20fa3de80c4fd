"""TensorFlow logs only errors unless the user sets another level. A level that JAX has set is replaced."""

import os

import pytest

import jaxddp.core.log_level as log_level

NAME = "TF_CPP_MIN_LOG_LEVEL"


@pytest.mark.parametrize(
    ("level", "may_be_of_jax", "expected"),
    [(None, True, "2"), ("1", True, "2"), ("1", False, "1"), ("0", True, "0"), ("3", True, "3")],
)
def test_tensorflow_reads_the_users_level_or_errors_only(monkeypatch, level, may_be_of_jax, expected):
    # The package determines only at import whether JAX may have set the level.
    monkeypatch.setattr(log_level, "_MAY_BE_OF_JAX", may_be_of_jax)
    monkeypatch.delenv(NAME, raising=False)
    if level is not None:
        monkeypatch.setenv(NAME, level)
    with log_level.errors_only():
        assert os.environ[NAME] == expected
    # The level is restored afterwards, for XLA's warnings and for processes that this one starts.
    assert os.environ.get(NAME) == level
