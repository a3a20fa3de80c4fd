"""Saves and stops on SIGTERM, which a scheduler sends shortly before it reclaims the machine.

On a TPU VM, this process also sends the signal to itself when Google announces that it evicts the machine.
"""

import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator

import jax
from jax.experimental import multihost_utils

import jaxddp.core.libraries as libraries
from jaxddp.job.tpu.eviction_notice import sigterm_on_eviction

# JAX's `reached_preemption_sync_point` needs a number that increases by 1 in each call. The step number is unsuitable,
# because one dispatch may have several steps, and validation has none. So `_calls` counts the calls over all runs of
# the process. No other code may call JAX's function.
_calls = itertools.count(1)


@contextlib.contextmanager
def stop_on_sigterm() -> Iterator[Callable[[int], bool]]:
    """Catch SIGTERM in the block. Yield a function to call between steps and batches; it returns whether to stop.

    In a job, JAX's coordination service catches the signal in any process, and makes all processes stop at the same
    call. So all processes must call the function equally often.
    """
    if jax.process_count() > 1:
        # This function is in an experimental module, so later versions of JAX may not have it.
        reached_sync_point = getattr(multihost_utils, "reached_preemption_sync_point", None)
        if reached_sync_point is None:
            libraries.warn_missing("jax", "reached_preemption_sync_point", "SIGTERM ends a job without saving")
            yield lambda step: False
            return
        with sigterm_on_eviction():
            yield lambda step: reached_sync_point(next(_calls))
        return
    # Python handles signals only in the main thread. A program that trains in another thread handles SIGTERM itself.
    if threading.current_thread() is not threading.main_thread():
        yield lambda step: False
        return
    stop_requested = threading.Event()
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: stop_requested.set())
    try:
        with sigterm_on_eviction():
            yield lambda step: stop_requested.is_set()
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
