"""The config among the words of a command, which may follow `--config`."""

import itertools
from collections.abc import Sequence

from jaxddp.core.errors import InputError

CONFIG_OPTION = "--config"


def config_first(words: list[str]) -> list[str]:
    """Return the words of a command with the config in place of a leading `--config`: `--config my.yaml` is my.yaml."""
    name, equals, value = words[0].partition("=") if words else ("", "", "")
    if name != CONFIG_OPTION or not (equals or words[1:]):
        return words
    return [value, *words[1:]] if equals else words[1:]


def check_one_config(name: str, words: Sequence[str]) -> None:
    """Raise `InputError` if the words after a config contain another config, `--config my.yaml`."""
    for word, following in itertools.pairwise([*words, "FILE"]):
        option, equals, value = word.partition("=")
        if option == CONFIG_OPTION:
            other = value if equals else following
            advice = f"write `base: {name}` into {other}, and give {other} as the config"
            raise InputError(f"{CONFIG_OPTION} {other}: the config is {name} already; {advice}")
