"""How a contender tells what it found: lines of JSON in a file, the last of which may say that it failed, and why.

Needs only the standard library. What a library prints is no sign of a failure: while they tune, XLA and Inductor report
candidates that ran out of memory, and go on without them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = "out of memory"


def attempt(main: Callable[[Any], None], options: Any) -> None:
    """Call a contender's main function; what ends it is told in the file `options.out`, and raised again."""
    try:
        main(options)
    except Exception as error:
        add_result(options.out, {"failed": reason(error)})
        raise


def add_result(out: Path, figures: Mapping[str, Any], key: str | None = None) -> None:
    """Append one line. `key` tells the results of a contender that has several apart."""
    named = figures if key is None else {"key": key, **figures}
    with out.open("a") as file:
        file.write(json.dumps(named) + "\n")


def reason(error: BaseException) -> str:
    """Why a contender ended, in one line."""
    if ran_out_of_memory(error):
        return OUT_OF_MEMORY
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}"[:300]


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Whether an exception is of that kind, or was raised from one.

    JAX and the CUDA runtime have no class for it. Inductor keeps what ended a compilation in `inner_exception`.
    """
    if error is None:
        return False
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and str(error).startswith(("RESOURCE_EXHAUSTED", "CUDA error: out of memory")):
        return True
    return ran_out_of_memory(getattr(error, "inner_exception", None)) or ran_out_of_memory(error.__cause__)
