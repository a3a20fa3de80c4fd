"""A trace of a few steps, for TensorBoard's profiler: `tensorboard --logdir WORKDIR`, with its plugin (xprof)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import jax

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, noted_on
from jaxddp.core.message import Key

FOLDER = "profile"
"""In a work directory; JAX writes `plugins/profile/TIME/HOST.xplane.pb` there."""
STEP_NAME = "train"
"""What each traced step is called; its number is `step_num`."""


class Profile:
    """Traces some steps of a run, on the host and on the devices.

    The device is idle where the trace begins and where it ends, so that its steps are whole and no others are in it.

    Args:
        directory: what TensorBoard is shown; None traces nothing.
        steps: their numbers, from 1. Steps that are dispatched together are one annotation, numbered as the first of
            them; such a chunk must lie within the steps, or outside.
        pause: entered while the profiler starts and writes, which does not count as training time.
    """

    def __init__(self, directory: Path | None, steps: range, pause: Callable[[], AbstractContextManager[None]]):
        self._directory, self._steps, self._pause = directory, steps, pause
        self._tracing = False

    @contextmanager
    def step(self, number: int, state: Any) -> Iterator[None]:
        """Annotates the block, which makes a step or a chunk that begins with it, if that is to be traced."""
        if self._directory is None or number not in self._steps:
            yield
            return
        if not self._tracing:
            jax.block_until_ready(state)
            with self._pause():
                jax.profiler.start_trace(files.create(self._directory))
            self._tracing = True
        with jax.profiler.StepTraceAnnotation(STEP_NAME, step_num=number):
            yield

    def done(self, number: int, state: Any) -> None:
        """Writes the trace, if this was the last step of it. Raises: as `stop`."""
        if self._tracing and number >= self._steps[-1]:
            jax.block_until_ready(state)
            with self._pause():
                self.stop()

    def stop(self) -> None:
        """Writes the trace so far, if there is one. Raises: InputError; it cannot be written."""
        if not self._tracing:
            return
        self._tracing = False
        try:
            jax.profiler.stop_trace()
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"{self._directory}: the trace cannot be written ({error})",
                advice=("free some space there, or drop ", Key("log.profile")),
            ) from error

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with noted_on(error):
            self.stop()
