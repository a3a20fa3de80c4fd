"""Batches as a `tf.data` pipeline, for programs that are written for it. Only this module imports TensorFlow."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any
from unittest import mock

from jaxddp.core.errors import requires
from jaxddp.core.phases import doing
from jaxddp.data.batch import Batch


def tensorflow(where: str) -> Any:
    """Import TensorFlow for the CPU, without messages. Raises: InputError, which names `where`, if it is missing."""
    quiet = mock.patch.dict("os.environ", TF_ENABLE_ONEDNN_OPTS="0")
    with requires(where, "tensorflow", "tensorflow"), doing("importing TensorFlow"), quiet:
        import tensorflow as tf
    # JAX needs the memory of the devices, all of which TensorFlow's first op would allocate. A program may have run
    # that op before this import; then the setting cannot change any more, and TensorFlow raises RuntimeError.
    for kind in ("GPU", "TPU"):
        with suppress(RuntimeError):
            tf.config.set_visible_devices([], kind)
    return tf


def dataset(batches: Callable[[], Iterable[Batch]], columns: Mapping[str, Any]) -> Any:
    """Return a `tf.data.Dataset` of dicts with some columns of batches; each iteration calls `batches` again.

    Args:
        columns: an object with the shape and the dtype of each column; the first axis may have any length.

    Raises: InputError if TensorFlow is not installed.
    """
    tf = tensorflow("tf_dataset")

    def produce() -> Iterator[dict[str, Any]]:
        for batch in batches():
            yield {name: getattr(batch, name) for name in columns}

    specs = {name: tf.TensorSpec([None, *column.shape[1:]], column.dtype) for name, column in columns.items()}
    return tf.data.Dataset.from_generator(produce, output_signature=specs)
