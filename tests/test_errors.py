"""Errors have fields, and each entry point names keys as its user wrote them: arguments, options, lines of a file."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxddp.arguments import errors_name_arguments
from jaxddp.cli import main
from jaxddp.command_line.words import format_error
from jaxddp.config import Config
from jaxddp.config.layers import BatchStatistics, Layers
from jaxddp.config.registry import MODELS, check_read
from jaxddp.core.errors import (
    InputError,
    JaxddpError,
    Key,
    Option,
    Unreachable,
    about,
    error_from,
    joined,
    requires,
    with_keys_of_file,
)
from jaxddp.mesh import Topology
from jaxddp.training.checkpoints.manager import reading

RECIPE = """from jaxddp.config import Config


def get_config():
    return Config(seed=-1).replace(
        train={"batch_size": 30, "accumulate": 0, "max_bad_steps": 1},
        model={"batch_norm": "both", "name": "resnet5", "freeze": "conv"},
        eval={
            "every": "soon",
        },
        optimizer=dict(groups=("fc:rate=x",)),
        objective=ObjectiveConfig(threshold=0.9),
    )
"""


def read_without_permission():
    with reading(Path("runs/a")):
        raise PermissionError(13, "Permission denied")


@dataclass(frozen=True)
class ErrorCase:
    """An error, its fields, and its message, in which each entry point has its own names for the keys.

    Attributes:
        line: the beginning of the message, with {} for each key.
        dotted, python, typed: the names of the keys in a config, in Python and on the command line.
        words: the words of a command line that sets the key.
        number: the number of the line of RECIPE that sets the key.
    """

    fail: Callable[[], Any]
    key: str
    value: Any
    line: str
    dotted: tuple[str, ...]
    python: tuple[str, ...]
    words: tuple[str, ...]
    typed: tuple[str, ...]
    number: int | None = None
    advice: str = ""


CASES = {
    "a batch": ErrorCase(
        lambda: Topology.create(4).check_batch_size(30),
        *("train.batch_size", 30, "{} cannot be divided among 4 devices; 28 or 32 would do"),
        *(("train.batch_size=30",), ("a global batch of 30",)),
        *(("--batch-size", "30"), ("--batch-size 30",), 6, "28 or 32 would do"),
    ),
    "a range": ErrorCase(
        lambda: Config().replace(train={"accumulate": 0}),
        *("train.accumulate", 0, "{}: expected 1 to 65,536"),
        *(("train.accumulate=0",), ("accumulate=0",)),
        *(("--train.accumulate", "0"), ("--train.accumulate 0",), 6),
    ),
    "a text value": ErrorCase(
        lambda: BatchStatistics.parse("both"),
        *("model.batch_norm", "both", "{}: expected 'local', 'sync' or 'ghost:K'"),
        *(("model.batch_norm='both'",), ("batch_norm='both'",)),
        *(("--model.batch-norm", "both"), ("--model.batch-norm both",), 7),
    ),
    "a name": ErrorCase(
        lambda: MODELS.check("resnet5"),
        *("model.name", "resnet5", "{} is unknown; did you mean 'resnet50'?"),
        *(("model.name='resnet5'",), ("model='resnet5'",)),
        *(("--model", "resnet5"), ("--model resnet5",), 7, "did you mean 'resnet50'?"),
    ),
    "the subject of an error": ErrorCase(
        lambda: Config().replace(eval={"every": "soon"}),
        *("eval.every", None, "{}: 'soon' is not a duration; write"),
        *(("eval.every",), ("eval_every",)),
        *(("--eval.every", "soon"), ("--eval.every",), 9),
    ),
    "layers": ErrorCase(
        lambda: Layers.parse("conv", "model.freeze").check(["fc/kernel"], "model.freeze"),
        *("model.freeze", None, "{}: no layer's name begins with 'conv'; there are: fc"),
        *(("model.freeze",), ("freeze",)),
        *(("--model.freeze", "conv"), ("--model.freeze",), 7, "there are: fc"),
    ),
    "a key that is not read": ErrorCase(
        lambda: check_read(Config().replace(objective={"threshold": 0.9})),
        *("objective.threshold", 0.9, "{} is read by {}, and not by supervised; leave it out"),
        *(("objective.threshold=0.9", "objective.name=fixmatch"), ("threshold=0.9", "objective=fixmatch")),
        *(("--objective.threshold", "0.9"), ("--objective.threshold 0.9", "objective.name=fixmatch"), 12),
        advice="leave it out",
    ),
    "advice with an option": ErrorCase(
        read_without_permission,
        *("workdir", None, "runs/a: cannot be read (Permission denied); check {}"),
        *(("--workdir",), ("workdir",)),
        *(("--workdir", "runs/a"), ("--workdir",)),
        advice="check --workdir",
    ),
}


def raised_error(fail: Callable[[], Any]) -> JaxddpError:
    with pytest.raises(JaxddpError) as error:
        fail()
    return error.value


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_entry_point_names_the_keys_of_an_error_as_its_user_writes_them(case, tmp_path):
    error, dotted = raised_error(case.fail), case.line.format(*case.dotted)
    assert (error.key, error.value) == (case.key, case.value) and str(error).startswith(dotted)
    assert "".join(map(str, error.advice)).startswith(case.advice)
    assert str(raised_error(errors_name_arguments()(case.fail))).startswith(case.line.format(*case.python))
    assert format_error(raised_error(case.fail), ["train", "digits", *case.words]).startswith(
        case.line.format(*case.typed)
    )
    assert format_error(raised_error(case.fail), ["train", "digits"]).startswith(dotted)
    (recipe := tmp_path / "my.py").write_text(RECIPE)
    line = format_error(raised_error(case.fail), ["train", str(recipe), "--data", "d"])
    assert line.startswith(dotted if case.number is None else f"{recipe}:{case.number}: {dotted}")


@pytest.mark.parametrize(
    ("problem", "python"),
    [
        ((Option("train.accumulate", 4), " would do"), "accumulate=4 would do"),
        ((Option("train.batch_size", 32), " would do"), "a global batch of 32 would do"),
        (("lower ", Option("eval.batch_size")), "lower batch_size_per_device"),
        ((Key("train.duration"), " differs"), "epochs differs"),
        (("config.json: ", Key("objects.metric half"), " was None"), "config.json: metric half was None"),
        (("use ", Key("the config"), " that wrote it"), "use the model and optimizer that wrote it"),
        # Text that is not a key does not change.
        (("/runs/train.precision: cannot be read",), "/runs/train.precision: cannot be read")
    ]
)  # fmt: skip
def test_in_python_messages_name_arguments_instead_of_keys(problem, python):
    with pytest.raises(InputError) as error, errors_name_arguments():
        raise InputError(*problem)
    assert str(error.value) == python


def test_an_option_is_quoted_as_it_was_typed(tmp_path):
    def format_typed(key, *words):
        return format_error(InputError(key, ": no"), ["train", "digits", *words])

    assert format_typed(Key("train.duration", "0 steps"), "--epochs=0") == "--epochs '0 steps': no"
    assert format_typed(Key("data.augment.flip", True), "--data.augment.no-flip") == "--data.augment.flip True: no"
    assert format_typed(Key("data.std", (0.2, 0.3)), "--data.std", "0.2", "0.3") == "--data.std 0.2 0.3: no"
    # Control characters are escaped and long values are shortened, as in other messages.
    assert format_typed(Key("model.name", "\x1b[2J"), "--model", "x") == r"--model '\x1b[2J': no"
    assert len(format_typed(Key("model.name", "x" * 1000), "--model", "x")) < 110
    error = InputError(Key("seed", 1), ": no")
    assert format_error(error, ["data", "show", str(tmp_path / "none.py"), "--step", "3"]) == "seed=1: no"
    assert format_error(error, ["train"]) == "seed=1: no"


def test_the_command_line_names_the_option_or_the_line_of_the_recipe(tmp_path, capfd):
    recipe = tmp_path / "my.py"
    config = "from jaxddp.config import Config\n\n\ndef get_config():\n    return Config().replace({})\n"
    recipe.write_text(config.format('loss={"name": "hinge"}'))
    assert main(["config", str(recipe)]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"jaxddp: {recipe}:5: loss.name='hinge' is unknown; ")
    assert main(["config", str(recipe), "--loss.name", "square"]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith("jaxddp: --loss.name square is unknown; ")
    # If the file itself makes an invalid config, the message names the file, even if the command sets the key.
    recipe.write_text(config.format("seed=-1"))
    assert main(["config", str(recipe), "--seed", "2"]) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"jaxddp: {recipe}:5: seed=-1: expected 0 to ")


def test_the_innermost_of_several_entry_points_names_the_keys():
    def fail():
        raise InputError(Key("train.batch_size", 30), ": no; see ", Key("data.path"))

    typed = ["train", "digits", "--train.batch-size", "30", "--data.path", "d"]
    error = raised_error(errors_name_arguments()(fail))
    assert format_error(error, typed) == "a global batch of 30: no; see data.path"
    assert format_error(raised_error(with_keys_of_file()(fail)), typed) == "train.batch_size=30: no; see data.path"
    assert (error.key, error.value) == ("train.batch_size", 30)


def test_a_message_begins_with_the_subject_of_the_error():
    @about("my.py")
    @about(Key("data.unlabelled"), " with ", Key("objective.unlabelled_ratio", 7))
    def fail():
        raise Unreachable("no answer", advice="try again")

    error = raised_error(fail)
    line = "my.py: data.unlabelled with objective.unlabelled_ratio=7: no answer; try again"
    assert isinstance(error, Unreachable) and str(error) == line and error.problem[-1] == "no answer"
    assert error.key == "data.unlabelled" and error.value is None
    assert str(raised_error(errors_name_arguments()(fail))) == line.replace("data.unlabelled", "unlabelled", 1).replace(
        "objective.", ""
    )
    with pytest.raises(InputError, match=r"^f: jax cannot be imported \(broken\); pip"), requires("f", "jax", "x"):
        raise ImportError("broken")


def test_an_error_is_sent_to_other_processes_with_its_keys():
    keys = (Key("a.b", (1, 2)), Key("c.d", 3), Option("e.f", "x"), Key.plain("g.h", "y"), Key("i.j"))
    error = InputError(*joined(" ", keys), advice=("give ", Option("k.l"))).within("k.json")
    received = error_from(2, error.to_json())
    assert isinstance(received, InputError) and str(received) == str(error)
    assert str(received) == "k.json: a.b=(1, 2) c.d=3 --e.f x g.h=y i.j; give --k.l"
    assert (received.key, received.problem[4], received.advice) == ("a.b", Key("c.d", 3, "3"), error.advice)
    with pytest.raises(Unreachable) as caught, errors_name_arguments({"i.j": "own"}):
        raise error_from(1, error.to_json())
    assert str(caught.value) == str(error).replace("i.j", "own")
    error.add_note("then: lost")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, InputError) and str(copy) == str(error) and copy.__notes__ == ["then: lost"]
    # The value may be anything.
    assert str(pickle.loads(pickle.dumps(InputError(Key("a", len), ": no")))) == f"a={len!r}: no"


def test_a_message_is_one_line_whatever_its_values_contain():
    error = InputError("a\nb \x1b[2J", Key.plain("c", "d\ne"), advice="f\n")
    assert str(error) == r"a b \x1b[2Jc=d e; f"
    error.rename_keys(lambda key: "g\n\x1b")
    assert str(error) == r"a b \x1b[2Jg \x1b; f"
