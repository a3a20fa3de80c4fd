"""The libraries that are extras of the package."""

import importlib.util

from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import not_installed


def need(library: str, logger: str) -> None:
    """See that a logger's library is there, without importing it. Raises: InputError; says how to install it."""
    if importlib.util.find_spec(library) is None:
        raise InputError(Key.plain("log.to", logger), f": the package {not_installed(library, logger)}")
