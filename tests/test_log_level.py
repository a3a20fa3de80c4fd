"""TensorFlow is quiet unless the user wants to hear it; what JAX sets by itself is not what a user wants."""

import os

import pytest

import jaxddp.core.log_level as log_level

NAME = "TF_CPP_MIN_LOG_LEVEL"


@pytest.mark.parametrize(
    ("level", "may_be_of_jax", "seen"),
    [(None, True, "2"), ("1", True, "2"), ("1", False, "1"), ("0", True, "0"), ("3", True, "3")],
)
def test_tensorflow_reads_the_users_level_or_errors_only(monkeypatch, level, may_be_of_jax, seen):
    # Whether JAX set the level is found out once, when the package is imported.
    monkeypatch.setattr(log_level, "_MAY_BE_OF_JAX", may_be_of_jax)
    monkeypatch.delenv(NAME, raising=False)
    if level is not None:
        monkeypatch.setenv(NAME, level)
    with log_level.errors_only():
        assert os.environ[NAME] == seen
    # XLA's warnings, and the processes that this one starts.
    assert os.environ.get(NAME) == level
