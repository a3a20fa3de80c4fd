"""The words of a command line become a dataclass: tyro, with one rule for durations."""

from typing import TypeVar

import tyro

from jaxddp.duration import Duration

Command = TypeVar("Command")


def parse(command: type[Command], default: Command, prog: str, arguments: list[str]) -> Command:
    """The command with what the words override; tyro answers `--help` and mistyped options, and ends the program.

    Raises:
        InputError: a duration that is none.
    """
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def duration(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        # A union of a dataclass and None would be a choice of subcommands.
        optional = info.type == Duration | None
        if info.type is not Duration and not optional:
            return None
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="{None}|DURATION" if optional else "DURATION",
            instance_from_str=lambda words: None if optional and words == ["None"] else Duration.parse(words[0]),
            is_instance=lambda value: isinstance(value, Duration) or (optional and value is None),
            str_from_instance=lambda value: [str(value)],
        )

    return tyro.cli(command, default=default, prog=prog, args=arguments, registry=registry)
