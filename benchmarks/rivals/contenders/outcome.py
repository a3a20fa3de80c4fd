"""Writes a contender's results as lines of JSON, the last of which may report a failure.

It needs only the standard library. Printed errors do not mean a failure: XLA and Inductor report autotuning candidates
that ran out of memory, and continue without them.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

OUT_OF_MEMORY = "out of memory"


def attempt(main: Callable[[Any], None], options: Any) -> None:
    """Call a contender's main function. Writes an exception to the file `options.out`, and raises it again."""
    try:
        main(options)
    except Exception as error:
        add_result(options.out, {"failed": reason(error)})
        raise


def add_result(out: Path, figures: Mapping[str, Any], key: str | None = None) -> None:
    """Append a line of results. A contender with several results gives each a `key`."""
    named = figures if key is None else {"key": key, **figures}
    with out.open("a") as file:
        file.write(json.dumps(named) + "\n")


def reason(error: BaseException) -> str:
    """Describe an exception in one line."""
    if ran_out_of_memory(error):
        return OUT_OF_MEMORY
    line = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {line}"[:300]


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an exception, or one of its causes, means out of memory.

    JAX and the CUDA runtime have no class for it. Inductor keeps the cause of a failed compilation in
    `inner_exception`.
    """
    if error is None:
        return False
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    if isinstance(error, RuntimeError) and str(error).startswith(("RESOURCE_EXHAUSTED", "CUDA error: out of memory")):
        return True
    return ran_out_of_memory(getattr(error, "inner_exception", None)) or ran_out_of_memory(error.__cause__)
