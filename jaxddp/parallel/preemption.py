"""A scheduler that wants its machine back sends SIGTERM some time before it takes it."""

import signal
import threading
from collections.abc import Callable

import jax
from jax.experimental import multihost_utils


def stop_on_sigterm() -> Callable[[int], bool]:
    """Catch SIGTERM from now on; the result says, after each step, whether to save and stop.

    Among several processes JAX's coordination service has caught it already, and lets all of them stop at one step,
    whichever of them was told.
    """
    if jax.process_count() > 1:
        return multihost_utils.reached_preemption_sync_point
    asked = threading.Event()
    # Python delivers signals to the main thread alone; elsewhere whoever owns that thread decides.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
    return lambda step: asked.is_set()
