"""usage: jaxddp train CONFIG [--workdir DIR] [--resume auto|never|must] [overrides]
       jaxddp sweep CONFIG --KEY A,B,C ... [--workdir DIR] [--jobs J] [--search optuna --trials N] [overrides]
       jaxddp eval RUN|WEIGHTS [--step latest|best|N] [--per-class] [overrides]
       jaxddp predict RUN|WEIGHTS IMAGES... --out FILE [--top K] [--format csv|jsonl|parquet|kaggle] [--step best|N]
       jaxddp features RUN|WEIGHTS DATA... --out FILE [--layer NAME] [--split train|val] [--step best|latest|N]
       jaxddp probe TRAIN.npz VAL.npz [--method knn|linear] [--neighbours K]
       jaxddp checkpoints RUN [--verify]
       jaxddp export RUN|WEIGHTS --out FILE [--format FORMAT] [--precision int8] [--step latest|best|N]
       jaxddp push RUN hf://OWNER/NAME [--private] [--step best|latest|N]
       jaxddp weights [NAME | inspect FILE [RECIPE]]
       jaxddp report RUN [RUN ...]|WEIGHTS --out FILE.html [--step latest|best|N | --no-predictions] [--features]
       jaxddp runs [DIR]
       jaxddp find-lr CONFIG [--lowest RATE] [--highest RATE] [--steps N] [--out FILE] [overrides]
       jaxddp doctor [CONFIG [overrides]] [--workdir DIR]
       jaxddp config CONFIG [--format table|yaml|json] [overrides]
       jaxddp data check PATH [--manifest FILE] [--threads N] [--train CSV] [--val CSV]
       jaxddp data show CONFIG [--step N] [--count N] [--out FILE] [overrides]
       jaxddp data pack PATH --out DIR [--short-side PIXELS] [--quality Q] [--train CSV] [--val CSV]
       jaxddp data split PATH [--folds N] [--group-column NAME] [--out FILE]
       jaxddp data get mnist|fashion_mnist|cifar10|cifar100 --out DIR
       jaxddp data sample digits --out DIR
       jaxddp completion bash|zsh
       jaxddp launch [--processes P | --gpus K] [--restarts N] [--nodes N|MIN:MAX --nr RANK --coordinator HOST:PORT]
                     -- train CONFIG ...

CONFIG is a name ({names}),
the path of a recipe file (Python with get_config(), YAML or JSON), or a RUN. RUN is the work directory of a run, whose
saved settings apply. WEIGHTS is a name of `jaxddp weights`, a file, hf://OWNER/NAME or a recipe with weights. PATH is a
data set, as in data.path. IMAGES is a folder, files, a CSV file with a column `path`, or a directory with a test
listing. `jaxddp train CONFIG --help` lists every key that can be overridden, with the config's values. The most used
keys have short forms: --lr X, --epochs N, --batch-size B, --model NAME, --data DIR and --seed N. Each command has its
own --help. `jaxddp --version` prints the installed versions."""

# The text above is what `jaxddp --help` prints; see `_usage`.
import contextlib
import gc
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator

from jaxddp.command_line.terminal import StatusLine, make_usable
from jaxddp.command_line.words import config_first, format_error
from jaxddp.config.values import HELP
from jaxddp.core import process_exit
from jaxddp.core.errors import HelpPrinted, InputError, JaxddpError, Preempted, choices, on_screen, with_notes
from jaxddp.core.files import current_directory
from jaxddp.core.peers import ALONE, joined
from jaxddp.core.phases import show_on
from jaxddp.core.user_code import describing_errors, place_of
from jaxddp.job.environment import report_work
from jaxddp.recipe.sources import config_names

COMMANDS = ("train", "sweep", "eval", "predict", "features", "probe", "checkpoints", "export", "push", "weights")
COMMANDS += ("report", "runs", "find-lr", "doctor", "config", "data", "completion", "launch")
"""The commands. Each has a module in `jaxddp.commands`."""
_ELSEWHERE = {"fit": "train", "resume": "train", "validate": "eval", "test": "eval", "lr_find": "find-lr"}
"""Commands for the words that other trainers use."""

_LONG = ("train", "sweep", "launch")
"""The commands that go on without standard output. It shows their progress, and their results are in files."""
_AFTER_INTERRUPT = {
    **dict.fromkeys(_LONG, "the same command resumes from the last checkpoint, if there is one"),
    "data": "its output was not written",
    "push": "nothing was committed",
    "features": "the same command continues with the images that have no features yet",
    "predict": "the same command continues with the images that have no prediction yet",
}


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Return the exit code: 0 done, 2 bad input, 75 stopped by SIGTERM, 130 interrupted, 1 another failure.
    """
    words = sys.argv[1:] if arguments is None else arguments
    is_long = bool({*words[:1]} & {*_LONG})
    make_usable(needs_output=not is_long or bool({*HELP} & {*words}))
    # Imports and tracing make many objects that stay. By default Python collects garbage so often that a start takes a
    # fifth longer: 7.9 s of CPU time in place of 6.3 for the digits.
    gc.set_threshold(50_000, 20, 20)
    is_program = arguments is None
    if is_program:
        # Without a handler, the signal would end the process, also a launcher with its job.
        process_exit.show_stacks_on_signal()
        if not is_long:
            # In a job JAX would catch SIGTERM, to which only a training reacts.
            os.environ["JAX_ENABLE_PREEMPTION_SERVICE"] = "false"
    stops = process_exit.stopping_on_signals(lambda error: _end(*_stopped(error, words), error), is_program=is_program)
    try:
        try:
            with stops, describing_errors(all_errors=True), report_work(), _status_line():
                code = _run(words)
        finally:
            sys.stdout.flush()
    except JaxddpError as error:
        return _end(format_error(error, words), error.exit_code, error, is_program=is_program)
    except KeyboardInterrupt as error:
        return _end(*_stopped(error, words), error, is_program=is_program)
    if is_program and code == process_exit.INTERRUPTED:
        process_exit.exit_at_once(code)
    return code


# CPython keeps the frames of calls in chunks of 16 kB. A loop whose calls cross the end of a chunk maps and unmaps
# memory each time, which takes a twentieth of a start. A chunk has at least twice the size of its first frame.
main.__code__ = main.__code__.replace(co_stacksize=1 << 16)


def _stopped(error: KeyboardInterrupt, arguments: list[str]) -> tuple[str, int]:
    """Return the last line and the exit code after Ctrl-C or another request to stop."""
    consequence = _AFTER_INTERRUPT.get(arguments[0] if arguments else "", "nothing was written")
    if isinstance(error, process_exit.StopRequested):
        return f"asked to stop; {consequence}", Preempted.exit_code
    return str(error) or f"interrupted; {consequence}", process_exit.INTERRUPTED


@contextlib.contextmanager
def _status_line() -> Iterator[None]:
    """Show long operations on standard error, in process 0 of a job or in a process without a job."""
    from jaxddp.job.environment import find_job

    try:
        # The place of a TPU host is not asked for: on a slice, each host shows the line on its own terminal.
        job = find_job({**os.environ, "TPU_SKIP_MDS_QUERY": "1"})
    except JaxddpError:
        job = None  # A command that joins the job raises the same error.
    line = StatusLine()
    with contextlib.nullcontext() if job is not None and job.process_id else show_on(line.show, line.clear):
        yield


def _end(line: str, code: int, error: BaseException, *, is_program: bool = False) -> int:
    """Write the last line, and return the exit code. A program that is in no job ends here."""
    line = on_screen(with_notes(line, error))
    if not isinstance(error, Preempted):
        joined().abandon(line, code)
    print(f"jaxddp: {line}\n", end="", file=sys.stderr, flush=True)
    if is_program and joined() is ALONE:
        # Python would wait for its threads: XLA may compile in one, which then crashes, and Orbax prints late errors. A
        # process of a job that is preempted leaves the job at exit.
        process_exit.exit_at_once(code)
    return code


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in HELP:
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        from jaxddp.core.libraries import versions

        print(versions())
        return 0
    command, rest = arguments[0], config_first(arguments[1:])
    if command not in COMMANDS:
        raise InputError(f"unknown command {command!r}; {choices(_ELSEWHERE.get(command, command), COMMANDS)}")
    current_directory()  # Many commands resolve relative paths.
    try:
        return command_named(command)(rest) or 0
    except HelpPrinted:
        return 0
    except ModuleNotFoundError as error:
        fault = f"the module {error.name} is missing; install jaxddp with its requirements: pip install . in its folder"
        # The user's code may import it.
        raise error if place_of(error) else InputError(fault) from None


def _usage() -> str:
    """Return the usage of all commands, the docstring of this module, with its text folded to the terminal's width."""
    lines, text = (__doc__ or "\n\n").format(names=", ".join(config_names())).split("\n\n")
    return f"{lines}\n\n{textwrap.fill(text, min(shutil.get_terminal_size((120, 24)).columns, 120))}"


def command_named(name: str) -> Callable[[list[str]], int | None]:
    """Return the function that runs a command. Only its module is imported, so the launcher needs no JAX."""
    return importlib.import_module(f"jaxddp.commands.{name.replace('-', '_')}").run
