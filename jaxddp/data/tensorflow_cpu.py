"""TensorFlow as this project uses it: on the CPU, and quiet. The one place that imports it (it takes seconds).

from jaxddp.data.tensorflow_cpu import tf
"""

import contextlib
import os

# Both are read once, when TensorFlow is imported. Nothing here computes what oneDNN would speed up, and it greets and
# warns on stderr, where the last line is to be ours.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import tensorflow as tf

# TensorFlow's first op claims the memory of every GPU that it sees, and JAX needs it. Where TensorFlow has run already,
# whoever ran it has decided.
with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], "GPU")

__all__ = ["tf"]
