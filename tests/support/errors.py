"""The messages of errors."""

from collections.abc import Callable
from typing import Any

import pytest

from jaxddp.core.errors import InputError


def error_line(
    call: Callable[..., Any], *arguments: Any, kind: type[Exception] = InputError, longest: int = 700, **named: Any
) -> str:
    """Return the message of the error that a call raises: one line, shorter than `longest`."""
    with pytest.raises(kind) as caught:
        call(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message and len(message) < longest
    return message
