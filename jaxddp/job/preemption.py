"""A scheduler that wants its machine back sends SIGTERM some time before it takes it."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

# JAX finds the moment at which all stop by numbers that every process counts up one by one. Steps may come several at a
# time, and validation has batches: so it counts the questions, over all runs of the process. Nobody else may ask.
_questions = itertools.count(1)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[Callable[[int], bool]]:
    """Catch SIGTERM in the block; what it gives says, asked between steps and batches, whether to save and stop.

    Among several processes JAX's coordination service has caught it already, and lets all of them stop at one
    question, whichever of them was told. For that all must ask at the same places.
    """
    if jax.process_count() > 1:
        yield lambda step: multihost_utils.reached_preemption_sync_point(next(_questions))
        return
    # Python delivers signals to the main thread alone; elsewhere whoever owns that thread decides.
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda step: asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
