"""TensorFlow as this project uses it: on the CPU, and quiet. The one place that imports it (it takes seconds).

from jaxddp.data.tensorflow_cpu import tf
"""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

# Both are read once, when TensorFlow is imported. Nothing here computes what oneDNN would speed up, and it greets and
# warns on stderr, where the last line is to be ours.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


@contextlib.contextmanager
def _quick_import() -> Iterator[None]:
    """Import TensorFlow alone, in 1.7 s of CPU instead of 4.4.

    Its import ends with an import of Keras, which brings scikit-learn and half of SciPy where they are installed; it
    does without where Keras is missing, and `tf.keras` looks for it anew when somebody asks. And a quarter of a million
    objects come into being that all stay, which the garbage collector goes through again and again.
    """
    hides, collects = "keras" not in sys.modules, gc.isenabled()
    if hides:
        sys.modules["keras"] = None  # pyright: ignore[reportArgumentType]: how Python marks what is not to be imported
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if hides:
            sys.modules.pop("keras", None)


with _quick_import():
    import tensorflow as tf

# TensorFlow's first op claims the memory of every GPU that it sees, and JAX needs it. Where TensorFlow has run already,
# whoever ran it has decided.
with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")

__all__ = ["tf"]
