"""Import TensorFlow for the CPU only, without messages. The import takes seconds.

Other modules import TensorFlow from this module only:

from jaxddp.data.stream.tensorflow_cpu import tf
"""

import contextlib
import ctypes
import functools
import os
import sys

import jaxddp.core.libraries as libraries
from jaxddp.core.libraries import no_collections
from jaxddp.core.log import errors_only
from jaxddp.core.phases import doing

# TensorFlow reads this variable at its import. oneDNN does not speed up any op of this package, and writes to stderr.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# TensorFlow imports Keras, which this project does not use. Keras imports scikit-learn and half of SciPy if they are
# installed. Without Keras the import takes 2.0 s of CPU instead of 3.2 (2 cores). TensorFlow has no setting for this,
# but it can be imported without Keras, and `tf.keras` imports Keras on first use.
_HIDES_KERAS = "keras" not in sys.modules
if _HIDES_KERAS:
    sys.modules["keras"] = None  # pyright: ignore[reportArgumentType]: Python raises ModuleNotFoundError for None
try:
    with doing("importing TensorFlow"), errors_only(), no_collections():
        import tensorflow as tf
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    libraries.warn_missing("TensorFlow", "import without Keras", "every start takes a second longer")
    sys.modules.pop("keras", None)
    with errors_only():
        import tensorflow as tf
finally:
    if _HIDES_KERAS and sys.modules.get("keras") is None:
        sys.modules.pop("keras", None)

# JAX needs the GPU memory, and TensorFlow's first op would allocate the memory of every visible GPU. TensorFlow's build
# for TPUs would take the chips. A program may have run that op before this import; then the setting cannot change any
# more, and TensorFlow raises RuntimeError.
for _kind in ("GPU", "TPU"):
    with contextlib.suppress(RuntimeError):
        tf.config.set_visible_devices([], _kind)

# Parameters of glibc's malloc.h (trim threshold, top pad and mmap threshold), and their values in bytes.
_SETTINGS = {-1: 512 << 20, -2: 16 << 20, -3: 32 << 20}


@functools.cache
def keep_freed_memory() -> None:
    """Keep up to half a gigabyte of freed memory for the next images, instead of returning it to the system.

    Once TensorFlow has started its first generator data set, glibc maps every buffer above 128 kB anew and unmaps it
    after use: 304 page faults an image, and 650 images/s in one process. With these settings, there are 13 page faults
    an image, and 1,000 images/s (2 cores). Call this function after the data set has started. It has no effect with
    other C libraries.
    """
    with contextlib.suppress(AttributeError):
        for setting, value in _SETTINGS.items():
            ctypes.CDLL(None).mallopt(setting, value)
