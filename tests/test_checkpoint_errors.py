"""Of what Orbax logs in its threads, only what it does not raise as well is printed, and of a file in one line."""

import errno
import logging
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxddp.training.checkpoint_errors import Barrier, writing

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BY_TENSORSTORE = ValueError(f"RESOURCE_EXHAUSTED: Error writing [os_error_code='{errno.ENOSPC}' syscall='write']")


@pytest.fixture
def absl(tmp_path, monkeypatch) -> logging.Logger:
    """Orbax's logger, after something was written."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with writing(tmp_path):
        pass
    return logging.getLogger("absl")


def logged(absl: logging.Logger, caplog, module: str, error: BaseException) -> list[str]:
    record = absl.makeRecord(
        absl.name, logging.ERROR, f"{module}.py", 1, "Step %d failed", (3,), (type(error), error, None)
    )
    caplog.clear()
    absl.handle(record)
    return [logging.Formatter("%(message)s").format(each) for each in caplog.records]


@pytest.mark.parametrize("error", [FULL, BY_TENSORSTORE])
def test_what_a_save_raises_as_well_is_not_printed(absl, caplog, error):
    assert logged(absl, caplog, "future", error) == []
    assert logged(absl, caplog, "storage_backend", error) == ["Step 3 failed: No space left on device"]


def test_an_error_that_is_not_of_a_file_keeps_its_traceback(absl, caplog):
    assert logged(absl, caplog, "future", RuntimeError("a bug")) == ["Step 3 failed\nRuntimeError: a bug"]


def test_of_a_loop_that_has_ended_nothing_is_printed(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    import jaxddp.training.checkpoint_errors as checkpoint_errors

    checkpoint_errors._keep_threads_brief.__wrapped__()
    for text in ("Event loop is closed", "another"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))  # type: ignore[arg-type]
    assert [str(of.exc_value) for of in seen] == ["another"]


def test_an_error_passes_the_barrier_in_the_threads_of_orbax_alone():
    waits = list[tuple[str, int]]()
    barrier = Barrier(lambda *, key, timeout_ms: waits.append((key, timeout_ms)))

    def meet() -> None:
        try:
            raise FULL
        except OSError:
            barrier(key="save", timeout_ms=1000)

    meet()
    with ThreadPoolExecutor(1) as thread, pytest.raises(OSError, match="No space left on device"):
        thread.submit(meet).result(10)
    assert waits == [("save", 1000)]
