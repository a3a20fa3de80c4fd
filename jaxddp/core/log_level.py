"""Sets TensorFlow's log level to errors if the user has set no level. The package imports this module first."""

import contextlib
import os
import sys
from collections.abc import Iterator

_NAME = "TF_CPP_MIN_LOG_LEVEL"
# When JAX is imported and the variable is not set, JAX sets it to this value.
_OF_JAX = "1"
_MAY_BE_OF_JAX = "jax" in sys.modules or os.environ.get(_NAME) != _OF_JAX


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Set the level to errors in the block. TensorFlow reads the level when it is imported, so import it in the block.

    TensorFlow's warnings are hidden, because they either precede an exception or need no action. After the block the
    variable has its previous value, for XLA and for child processes. A level that the user has set does not change.
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
