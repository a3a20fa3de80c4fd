"""TensorFlow as this project uses it: on the CPU, and quiet. The one place that imports it (it takes seconds).

from jaxddp.data.stream.tensorflow_cpu import tf
"""

import contextlib
import ctypes
import functools
import os
import sys

import jaxddp.core.private_names as private_names
from jaxddp.core.log_level import errors_only
from jaxddp.core.phases import doing

# Read once, when TensorFlow is imported. Nothing here computes what oneDNN would speed up, and it writes to stderr.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# TensorFlow's import ends with an import of Keras, which nothing here needs, and which imports scikit-learn and half of
# SciPy where they are installed. Without it the import takes 2.0 s of CPU instead of 3.2 (2 cores). There is no setting
# for this, but TensorFlow accepts that Keras is missing, and `tf.keras` looks for it again when it is asked for.
_HIDES_KERAS = "keras" not in sys.modules
if _HIDES_KERAS:
    sys.modules["keras"] = None  # pyright: ignore[reportArgumentType]: Python's mark of what is not to be imported
try:
    with doing("importing TensorFlow"), errors_only():
        import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    private_names.say_lost("TensorFlow", "import without Keras", "every start takes a second longer")
    sys.modules.pop("keras", None)
    with errors_only():
        import tensorflow as tf
finally:
    if _HIDES_KERAS and sys.modules.get("keras") is None:
        sys.modules.pop("keras", None)

# TensorFlow's first op claims the memory of every GPU that it sees, and JAX needs it. After that first op, which a
# program may have run before this import, the setting can no longer change.
with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")

# Of glibc's malloc.h, and the values given to them: bytes.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = {_TRIM_THRESHOLD: 512 << 20, _TOP_PAD: 16 << 20, _MMAP_THRESHOLD: 32 << 20}


@functools.cache
def keep_freed_memory() -> None:
    """Keep up to half a gigabyte of freed memory for the next images, instead of returning it after each one.

    TensorFlow's first generator data set makes glibc map every buffer above 128 kB anew and unmap it after use: 304
    page faults an image, and 650 images/s in one process. With these settings there are 13, and 1,000 images/s (2
    cores). It must be called after that data set has started. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in _SETTINGS.items():
            mallopt(setting, value)


__all__ = ["keep_freed_memory", "tf"]
