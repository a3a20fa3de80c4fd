"""Saves and stops on SIGTERM, which a scheduler sends some time before it takes the machine back."""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

import jaxddp.core.private_names as private_names

# JAX identifies the point at which all processes stop by a number that each process increments. The number of the step
# cannot serve for this, because one dispatch may have several steps, and validation has none. So `_calls` counts the
# calls, over all runs of the process. No other code may call JAX's function.
_calls = itertools.count(1)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[Callable[[int], bool]]:
    """Catch SIGTERM in the block. Yields a function to call between steps and batches; it returns whether to stop.

    In a job, JAX's coordination service catches the signal, and makes all processes stop at the same call, whichever
    process received it. So all processes must call the function at the same places.
    """
    if jax.process_count() > 1:
        # This function is in an experimental module, and a later JAX may not have it.
        reached = getattr(multihost_utils, "reached_preemption_sync_point", None)
        if reached is None:
            private_names.warn_missing("jax", "reached_preemption_sync_point", "SIGTERM ends a job without saving")
            yield lambda step: False
            return
        yield lambda step: reached(next(_calls))
        return
    # Python handles signals only in the main thread. A program that trains in another thread handles them itself.
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    asked = threading.Event()
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda step: asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)
