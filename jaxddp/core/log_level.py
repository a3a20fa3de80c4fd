"""How much TensorFlow logs: errors, where the user has not set it. The package imports this before anything else."""

import contextlib
import os
import sys
from collections.abc import Iterator

_NAME = "TF_CPP_MIN_LOG_LEVEL"
# JAX sets it to this as it is imported, where nobody has set it.
_OF_JAX = "1"
_MAY_BE_OF_JAX = "jax" in sys.modules or os.environ.get(_NAME) != _OF_JAX


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """For TensorFlow's import, which reads the level: what it warns of is raised as well, or nothing to act on.

    XLA's warnings and child processes have the level that was set before. One that the user has set stays.
    """
    level = os.environ.get(_NAME)
    if level is not None and not (level == _OF_JAX and _MAY_BE_OF_JAX):
        yield
        return
    os.environ[_NAME] = "2"
    try:
        yield
    finally:
        os.environ.pop(_NAME)
        if level is not None:
            os.environ[_NAME] = level
