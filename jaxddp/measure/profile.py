"""Trace a few steps for the profiler of TensorBoard: `tensorboard --logdir WORKDIR`, with the plugin xprof."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Key, added_as_note_to

FOLDER = "profile"
"""The folder of the trace in a work directory. JAX writes `plugins/profile/TIME/HOST.xplane.pb` into this folder."""
STEP_NAME = "train"
"""The name of the annotation of each traced step; its `step_num` is the number of the step."""


class Profile:
    """A trace of some steps of a run, on the host and on the devices.

    The devices are idle when the trace starts and stops, so the trace contains only complete steps.

    Args:
        directory: the log directory for TensorBoard; None disables tracing.
        steps: the numbers of the traced steps, from 1. A chunk (several steps in one dispatched program) has one
            annotation, with the number of its first step. A chunk must be completely inside or outside the range.
        pause: returns a context in which the profiler is started and the trace is written; its time does not count as
            training time.
    """

    def __init__(self, directory: Path | None, steps: range, pause: Callable[[], AbstractContextManager[None]]):
        self._directory, self._steps, self._pause = directory, steps, pause
        self._tracing = False

    def step(self, number: int, state: Any) -> AbstractContextManager[Any]:
        """Return a context that annotates step `number`, or the chunk that starts with it, if the step is traced."""
        if self._directory is None or number not in self._steps:
            return nullcontext()
        if not self._tracing:
            jax.block_until_ready(state)
            with self._pause():
                jax.profiler.start_trace(files.create(self._directory))
            self._tracing = True
        return jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=number)

    def done(self, number: int, state: Any) -> None:
        """Write the trace if step `number` is the last traced step. Raises: see `stop`."""
        if self._tracing and number >= self._steps[-1]:
            jax.block_until_ready(state)
            with self._pause():
                self.stop()

    def stop(self) -> None:
        """Stop tracing and write the trace, if there is one. Raises: InputError if the trace cannot be written."""
        if not self._tracing:
            return
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            advice = "free some space there, or drop ", Key("log.profile")
            raise InputError(f"{self._directory}: the trace cannot be written ({error})", advice=advice) from error

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with added_as_note_to(error):
            self.stop()
