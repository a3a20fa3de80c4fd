"""The terminal's door: parse, delegate, print, and turn an error that the user can mend into one line."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from jaxddp.config import Config, config_names, load
from jaxddp.duration import Duration
from jaxddp.errors import InputError, JaxddpError
from jaxddp.wording import choices

_USAGE = """usage: jaxddp train CONFIG [--workdir DIR] [--resume auto|never|must] [overrides]
       jaxddp eval CONFIG --workdir DIR [--step latest|best|N] [overrides]
       jaxddp launch [--processes P | --gpus K] [--nodes N --nr RANK --coordinator HOST:PORT] -- train CONFIG ...

CONFIG is a name ({names}) or the path of a Python file with get_config().
`jaxddp train CONFIG --help` lists what can be overridden, with the config's values."""


Command = TypeVar("Command")


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


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 2 bad input, 75 preempted after saving, 1 another failure."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return _run(arguments)
    except JaxddpError as error:
        return _end(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _end("interrupted; the same command resumes from the last checkpoint", 130)


def _end(line: str, code: int) -> int:
    # A process that has not come as far as this module has joined no job.
    if "jaxddp.parallel.job" in sys.modules:
        from jaxddp.parallel.job import abandon

        abandon(line, code)
    print(f"jaxddp: {line}", file=sys.stderr, flush=True)
    return code


def _run(arguments: list[str]) -> int:
    usage = _USAGE.format(names=", ".join(config_names()))
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage)
        return 0 if arguments else 2
    of_a_config = {"train": _train, "eval": _evaluate}
    commands = {**of_a_config, "launch": _launch}
    command, rest = arguments[0], arguments[1:]
    if command not in commands:
        raise InputError(f"unknown command {command!r}; {choices(command, commands)}")
    if command not in of_a_config:
        return commands[command](rest)
    if not rest or rest[0].startswith("-"):
        print(usage, file=sys.stderr)
        raise InputError(f"{command}: the first argument is the config; there are: {', '.join(config_names())}")
    return of_a_config[command](rest[0], rest[1:])


def _train(name: str, arguments: list[str]) -> int:
    default = Train(load(name), Path("runs") / Path(name).stem)
    options = _parse(Train, default, f"jaxddp train {name}", arguments)
    from jaxddp.run.recipe import train_recipe
    from jaxddp.runtime.listeners.curves import CURVES
    from jaxddp.runtime.listeners.screen import progress

    train_recipe(options.config, options.workdir, resume=options.resume, listeners=[progress()])
    print(f"curves: {options.workdir / CURVES}  figures: {options.workdir / 'metrics.jsonl'}")
    return 0


def _evaluate(name: str, arguments: list[str]) -> int:
    default = Eval(load(name), Path("runs") / Path(name).stem)
    options = _parse(Eval, default, f"jaxddp eval {name}", arguments)
    from jaxddp.run.recipe import evaluate_recipe

    for figure, value in evaluate_recipe(options.config, options.workdir, options.step).items():
        print(f"{figure}: {value}")
    return 0


def _launch(arguments: list[str]) -> int:
    from jaxddp.cluster.launcher import Launch, launch, split

    own, command = split(arguments)
    return launch(_parse(Launch, Launch(), "jaxddp launch", own), command)


def _parse(command: type[Command], default: Command, prog: str, arguments: list[str]) -> Command:
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def duration(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type is not Duration:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="DURATION",
            instance_from_str=lambda words: Duration.parse(words[0]),
            is_instance=lambda value: isinstance(value, Duration),
            str_from_instance=lambda value: [str(value)],
        )

    return tyro.cli(command, default=default, prog=prog, args=arguments, registry=registry)
