"""The package's log has the format that the program has chosen, or else the package's own format.

TensorFlow logs only errors unless the user sets another level. A level that JAX has set is replaced.
"""

import logging
import os
from pathlib import Path

import pytest

import jaxddp.core.log as log

NAME = "TF_CPP_MIN_LOG_LEVEL"


@pytest.mark.parametrize(
    ("level", "may_be_of_jax", "expected"),
    [(None, True, "2"), ("1", True, "2"), ("1", False, "1"), ("0", True, "0"), ("3", True, "3")],
)
def test_tensorflow_reads_the_users_level_or_errors_only(monkeypatch, level, may_be_of_jax, expected):
    # The package determines only at import whether JAX may have set the level.
    monkeypatch.setattr(log, "_MAY_BE_OF_JAX", may_be_of_jax)
    monkeypatch.delenv(NAME, raising=False)
    if level is not None:
        monkeypatch.setenv(NAME, level)
    with log.errors_only():
        assert os.environ[NAME] == expected
    # The level is restored afterwards, for XLA's warnings and for processes that this one starts.
    assert os.environ.get(NAME) == level


def test_information_is_plain_and_warnings_have_the_format_of_errors(monkeypatch, capfd):
    # pytest installs handlers. Without them the program has not configured logging.
    monkeypatch.setattr(logging.root, "handlers", [])
    log = logging.getLogger("jaxddp.experiment")
    log.info("26 of the network's 32 arrays")
    log.warning("%s: is missing", "x")
    assert capfd.readouterr().err == "26 of the network's 32 arrays\njaxddp: warning: x: is missing\n"
    # absl also calls basicConfig, so this default handler does not mean that the program has chosen a format.
    logging.basicConfig()
    log.warning("again")
    assert capfd.readouterr().err == "jaxddp: warning: again\n"


def test_lines_appear_once_in_the_format_that_a_program_has_chosen(monkeypatch, tmp_path: Path, capfd):
    monkeypatch.setattr(logging.root, "handlers", [])
    logging.basicConfig(filename=tmp_path / "log", format="%(name)s says %(message)s")
    logging.getLogger("jaxddp.data").warning("damaged")
    logging.root.handlers[0].close()
    assert (tmp_path / "log").read_text() == "jaxddp.data says damaged\n" and capfd.readouterr().err == ""
