"""The terminal's door: parse, delegate, print, and turn an error that the user can mend into one line."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxddp.commands.parse import parse
from jaxddp.config import Config, config_names, load
from jaxddp.errors import InputError, JaxddpError
from jaxddp.wording import choices

if TYPE_CHECKING:
    from jaxddp.cluster.doctor import CheckRow

_USAGE = """usage: jaxddp train CONFIG [--workdir DIR] [--resume auto|never|must] [overrides]
       jaxddp eval CONFIG --workdir DIR [--step latest|best|N] [overrides]
       jaxddp doctor [CONFIG] [--workdir DIR] [overrides]
       jaxddp data check PATH [--manifest FILE] [--threads N] [--train CSV] [--val CSV]
       jaxddp data show CONFIG [--step N] [--count N] [--out FILE] [overrides]
       jaxddp data pack PATH --out DIR [--short-side PIXELS] [--quality Q] [--train CSV] [--val CSV]
       jaxddp launch [--processes P | --gpus K] [--nodes N --nr RANK --coordinator HOST:PORT] -- train CONFIG ...

CONFIG is a name ({names}), the path of a Python file with
get_config(), or of the config.json of a run; PATH is what data.path takes.
`jaxddp train CONFIG --help` lists what can be overridden, with the config's values."""


@dataclass(frozen=True)
class Train:
    """Train a config."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    workdir: Path
    """Where checkpoints, figures and curves go."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the latest checkpoint: where there is one, never, or always."""


@dataclass(frozen=True)
class Eval:
    """Evaluate a checkpoint of a run on the validation split."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    workdir: Path
    """Where the run left its checkpoints."""
    step: str = "latest"
    """Which checkpoint: latest, best, or its step."""


@dataclass(frozen=True)
class Doctor:
    """Check this machine, and all processes of the job that it is in."""

    workdir: Path | None = None
    """Also whether a run could write there."""


@dataclass(frozen=True)
class DoctorOfConfig:
    """Check this machine and what a run of the config needs: its data, its compiled step, room for its checkpoints."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    workdir: Path
    """Where the run would write."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 bad input, 75 preempted after saving, 1 another failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()
    except JaxddpError as error:
        return _end(str(error), error.exit_code, error)
    except BrokenPipeError as error:
        # As of `--help | head`. What is printed now, or at the exit, would raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _end("nobody reads what it prints", 1, error)
    except KeyboardInterrupt as error:
        return _end("interrupted; the same command resumes from the last checkpoint", 130, error)


def _end(line: str, code: int, error: BaseException) -> int:
    # Such as a checkpoint that could not be written, which ended nothing.
    line = "; ".join([line, *getattr(error, "__notes__", ())])
    # A process that has not come as far as this module has joined no job.
    if "jaxddp.job.membership" in sys.modules:
        from jaxddp.job.membership import abandon

        abandon(line, code)
    print(f"jaxddp: {line}", file=sys.stderr, flush=True)
    return code


def _run(arguments: list[str]) -> int:
    usage = _USAGE.format(names=", ".join(config_names()))
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return 0 if arguments else 2
    of_a_config = {"train": _train, "eval": _evaluate}
    commands = {**of_a_config, "doctor": _doctor, "data": _data, "launch": _launch}
    command, rest = arguments[0], arguments[1:]
    if command not in commands:
        raise InputError(f"unknown command {command!r}; {choices(command, commands)}")
    if command not in of_a_config:
        return commands[command](rest)
    if rest and rest[0] in ("-h", "--help"):
        print(usage)
        return 0
    if not rest or rest[0].startswith("-"):
        print(usage, file=sys.stderr)
        raise InputError(f"{command}: the first argument is the config; there are: {', '.join(config_names())}")
    return of_a_config[command](rest[0], rest[1:])


def _train(name: str, arguments: list[str]) -> int:
    default = Train(load(name), _workdir_of(name))
    options = parse(Train, default, f"jaxddp train {name}", arguments)
    from jaxddp.experiment.recipe import train_recipe
    from jaxddp.training.listeners.curves import CURVES
    from jaxddp.training.listeners.display import progress

    train_recipe(options.config, options.workdir, resume=options.resume, listeners=[progress()])
    print(f"curves: {options.workdir / CURVES}  figures: {options.workdir / 'metrics.jsonl'}")
    return 0


def _evaluate(name: str, arguments: list[str]) -> int:
    default = Eval(load(name), _workdir_of(name))
    options = parse(Eval, default, f"jaxddp eval {name}", arguments)
    from jaxddp.experiment.recipe import evaluate_recipe

    for figure, value in evaluate_recipe(options.config, options.workdir, options.step).items():
        print(f"{figure}: {value}")
    return 0


def _workdir_of(name: str) -> Path:
    """Where a run of this config is, if nothing else is said: that of a config.json around it."""
    return Path(name).parent if Path(name).name == "config.json" else Path("runs") / Path(name).stem


def _doctor(arguments: list[str]) -> int:
    if arguments and not arguments[0].startswith("-"):
        name, rest = arguments[0], arguments[1:]
        default = DoctorOfConfig(load(name), _workdir_of(name))
        options = parse(DoctorOfConfig, default, f"jaxddp doctor {name}", rest)
        config = options.config
    else:
        options, config = parse(Doctor, Doctor(), "jaxddp doctor", arguments), None
    from jaxddp.cluster.doctor import doctor, speaks

    rows = doctor(config, options.workdir)
    if speaks():
        _show(rows)
    return int(any(row.verdict == "fail" for row in rows))


def _show(rows: "list[CheckRow]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table("check", "verdict", "detail", box=box.SIMPLE)
    for row in rows:
        table.add_row(row.check, Text(row.verdict, styles[row.verdict]), Text(row.detail, overflow="fold"))
    # A file, or the prefix of a launcher, has no width that a row would have to keep to.
    Console(width=None if sys.stdout.isatty() else 1000).print(table)


def _data(arguments: list[str]) -> int:
    from jaxddp.commands.data import run

    try:
        return run(arguments)
    except KeyboardInterrupt as error:
        return _end("interrupted; what it was writing is not there", 130, error)


def _launch(arguments: list[str]) -> int:
    from jaxddp.cluster.launcher import Launch, launch, split

    own, command = split(arguments)
    return launch(parse(Launch, Launch(), "jaxddp launch", own), command)
