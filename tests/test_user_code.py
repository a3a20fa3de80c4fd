"""Errors in a user's code: the message names the user's line, and a run that any such error ends has failed."""

import json
import signal
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from support.data import random_table
from support.networks import linear_model
from support.shared import sgd, shared

import jaxddp
from jaxddp.cli import main
from jaxddp.config.values import flatten
from jaxddp.core.errors import InputError, JaxddpError
from jaxddp.core.user_code import UserCodeExit, describe_error, describing_errors, errors_name_line, place_of

HERE = Path(__file__)
TABLE = random_table(24)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Leave the directory of this file: messages name files below the current directory by relative paths."""
    monkeypatch.chdir(tmp_path)


class Net:
    """A user's code that raises errors in many ways."""

    def __call__(self, images):
        return images @ jnp.ones((images.shape[-1] + 1, 5))  # A shape that does not fit.

    def leave(self):
        sys.exit(0)

    def generate(self):
        raise GeneratorExit

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)

    def called_by_xla(self):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        jax.block_until_ready(jax.jit(lambda: jax.pure_callback(self.leave, shape))())

    def inside(self):
        return sorted([3, 4], key=lambda number: number / 0)


def line_of(words: str) -> int:
    """Return the number of the first line of this file that contains these words."""
    return next(number for number, line in enumerate(HERE.read_text().splitlines(), 1) if words in line)


def last_line(error: BaseException) -> str:
    """Return the last line of the traceback that Python prints for an error."""
    return "".join(traceback.format_exception(error)).rstrip("\n").split("\n")[-1]


def test_a_traceback_ends_with_the_users_line_and_not_with_a_note_of_jax():
    with pytest.raises(TypeError) as raised, describing_errors():
        jax.jit(Net())(jnp.ones((2, 3)))
    place = f"{HERE}:{line_of('A shape that does not fit')}: Net.__call__"
    assert last_line(raised.value).startswith(f"jaxddp: {place}: TypeError: dot_general requires contracting")


def test_the_place_is_the_innermost_line_of_the_user_and_of_no_library(monkeypatch):
    monkeypatch.chdir(HERE.parent)
    with pytest.raises(ZeroDivisionError) as raised, describing_errors(), describing_errors():
        Net().inside()
    words = f"{HERE.name}:{line_of('number / 0')}: Net.inside.<lambda>: ZeroDivisionError: division by zero"
    assert raised.value.__notes__ == [f"jaxddp: {words}"]


@pytest.mark.parametrize(("method", "expected"), [("leave", "SystemExit: 0"), ("generate", "GeneratorExit")])
def test_exceptions_that_would_end_the_process_are_ordinary_errors(method, expected):
    line = rf"test_user_code.py:\d+: Net.{method}: {expected}; to end a run, raise an error"
    with pytest.raises(UserCodeExit, match=line) as end, describing_errors():
        getattr(Net(), method)()
    assert end.value.exit_code == 1
    line = rf"^my.py: get_loss: {expected.split(':')[0]}.* \(in .*:\d+: Net.{method}\)$"
    with pytest.raises(InputError, match=line), errors_name_line(Path("my.py"), "get_loss: "):
        getattr(Net(), method)()


def test_an_error_in_a_callback_of_xla_has_its_place_in_the_text(capfd):
    with pytest.raises(jax.errors.JaxRuntimeError) as raised, describing_errors():
        Net().called_by_xla()
    assert last_line(raised.value) == f"jaxddp: {HERE}:{line_of('sys.exit(0)')}: leave: SystemExit: 0"


def test_ctrl_c_in_the_users_code_stays_a_keyboard_interrupt():
    with pytest.raises(KeyboardInterrupt) as raised, describing_errors():
        Net().interrupted()
    assert not hasattr(raised.value, "__notes__")


def test_an_error_of_the_package_or_without_a_traceback_has_no_place():
    with pytest.raises(JaxddpError) as raised, describing_errors():
        raise InputError("train.csv:7: empty ImageId")
    assert last_line(raised.value).endswith("train.csv:7: empty ImageId")
    assert describe_error(RuntimeError("of nowhere")) == "RuntimeError: of nowhere"


def test_code_of_the_package_is_not_the_user_s():
    with pytest.raises(AttributeError) as raised:
        flatten([1])  # type: ignore[arg-type]
    assert traceback.extract_tb(raised.value.__traceback__)[-1].filename.endswith("jaxddp/config/values.py")
    place = place_of(raised.value)
    assert place is not None and place.file == HERE


class LeavingListener:
    """A listener that ends the process at a moment, and once more at the end."""

    def __init__(self, moment: str, error: type[BaseException]):
        def leave(record):
            raise error(0)

        for method in (moment, "end"):
            setattr(self, method, leave)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "error"), [("evaluation", SystemExit), ("step", GeneratorExit)])
def test_a_listener_that_ends_the_process_has_failed_the_run(moment, error, tmp_path):
    setup = shared(jaxddp.prepare_training(linear_model(), TABLE, 1, sgd(0.1), 8))
    options = {"listeners": [LeavingListener(moment, error)], "workdir": tmp_path, "val": TABLE, "log_every": "1 step"}
    place = rf"test_user_code.py:\d+: LeavingListener.__init__.leave: {error.__name__}: 0"
    with pytest.raises(UserCodeExit, match=f"{place}; to end a run, raise an error"):
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, **options)
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "failed"


def test_the_command_prints_the_place_of_the_error_and_exits_with_1(monkeypatch, capfd):
    monkeypatch.setattr("jaxddp.cli._run", lambda arguments: Net().leave())
    assert main(["train", "digits"]) == 1
    line = rf"jaxddp: {HERE}:{line_of('sys.exit(0)')}: Net.leave: SystemExit: 0; to end a run, raise an error"
    assert capfd.readouterr().err.splitlines() == [line]
