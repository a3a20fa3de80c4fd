"""Errors in Orbax's threads are logged, file errors in one line, except for errors that are also raised."""

import errno
import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.training.checkpoints.integrity import Integrity
from jaxddp.training.checkpoints.manager import Barrier, restoring, writing

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BY_TENSORSTORE = ValueError(f"RESOURCE_EXHAUSTED: Error writing [os_error_code='{errno.ENOSPC}' syscall='write']")


@pytest.fixture
def orbax_logger(tmp_path, monkeypatch) -> logging.Logger:
    """Return Orbax's logger, after a first write."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with writing(tmp_path):
        pass
    return logging.getLogger("absl")


def logged(orbax_logger: logging.Logger, caplog, module: str, error: BaseException) -> list[str]:
    record = orbax_logger.makeRecord(
        orbax_logger.name, logging.ERROR, f"{module}.py", 1, "Step %d failed", (3,), (type(error), error, None)
    )
    caplog.clear()
    orbax_logger.handle(record)
    return [logging.Formatter("%(message)s").format(entry) for entry in caplog.records]


@pytest.mark.parametrize("error", [FULL, BY_TENSORSTORE])
def test_an_error_that_a_save_also_raises_is_not_logged(orbax_logger, caplog, error):
    assert logged(orbax_logger, caplog, "future", error) == []
    assert logged(orbax_logger, caplog, "storage_backend", error) == ["Step 3 failed: No space left on device"]


def test_an_error_that_is_not_of_a_file_keeps_its_traceback(orbax_logger, caplog):
    assert logged(orbax_logger, caplog, "future", RuntimeError("a bug")) == ["Step 3 failed\nRuntimeError: a bug"]


@pytest.mark.parametrize("by_tensorstore", [False, True])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_failing_disk_or_server_is_not_a_mistake_of_the_user(tmp_path, number, by_tensorstore):
    message = os.strerror(number)
    of_tensorstore = ValueError(f"UNKNOWN: {message} [os_error_code='{number}']")
    error = of_tensorstore if by_tensorstore else OSError(number, message)
    line = f"^{tmp_path}: cannot be written \\({message}\\); check the disk or its server"
    with pytest.raises(Unreachable, match=line), writing(tmp_path):
        raise error
    (tmp_path / "4").mkdir()
    # An unreadable sector damages only this checkpoint, so the run resumes from an earlier step.
    error_type, line = (InputError, "cannot be restored") if number == errno.EIO else (Unreachable, "cannot be read")
    with pytest.raises(error_type, match=f"^{tmp_path / '4'}: .*{line}"), restoring(tmp_path, 4):
        raise error


def test_files_on_an_unreachable_server_are_not_damaged(tmp_path, monkeypatch):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "manifest.json").write_text("{}")
    manifests = Integrity(tmp_path)
    for number, damage in ((errno.ESTALE, None), (errno.EIO, "cannot be read (Input/output error)")):

        def fail(path, number=number):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(files, "read", fail)
        if damage is None:
            line = f"^{tmp_path / '4'}: cannot be read \\(Stale file handle\\); check the disk"
            with pytest.raises(Unreachable, match=line):
                manifests.check(4)
        else:
            assert manifests.check(4) == f"manifest.json {damage}"


def test_only_errors_in_orbaxs_threads_pass_the_barrier():
    waits = list[tuple[str, int]]()
    barrier = Barrier(lambda *, key, timeout_ms: waits.append((key, timeout_ms)))

    def fail_at_the_barrier() -> None:
        try:
            raise FULL
        except OSError:
            barrier(key="save", timeout_ms=1000)

    fail_at_the_barrier()
    with ThreadPoolExecutor(1) as thread, pytest.raises(OSError, match="No space left on device"):
        thread.submit(fail_at_the_barrier).result(10)
    assert waits == [("save", 1000)]
