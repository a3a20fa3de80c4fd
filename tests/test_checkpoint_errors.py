"""Orbax's threads log only errors that are not raised as well, and file errors in one line."""

import errno
import logging
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, Unreachable
from jaxddp.training.checkpoints.integrity import Integrity
from jaxddp.training.checkpoints.orbax_errors import Barrier, restoring, writing

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BY_TENSORSTORE = ValueError(f"RESOURCE_EXHAUSTED: Error writing [os_error_code='{errno.ENOSPC}' syscall='write']")


@pytest.fixture
def absl(tmp_path, monkeypatch) -> logging.Logger:
    """Orbax's logger, after a first write."""
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
def test_an_error_that_a_save_also_raises_is_not_logged(absl, caplog, error):
    assert logged(absl, caplog, "future", error) == []
    assert logged(absl, caplog, "storage_backend", error) == ["Step 3 failed: No space left on device"]


def test_an_error_that_is_not_of_a_file_keeps_its_traceback(absl, caplog):
    assert logged(absl, caplog, "future", RuntimeError("a bug")) == ["Step 3 failed\nRuntimeError: a bug"]


def test_an_ended_event_loop_prints_nothing(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    import jaxddp.training.checkpoints.orbax_errors as checkpoint_errors

    checkpoint_errors._shorten_thread_logs.__wrapped__()
    for text in ("Event loop is closed", "another"):
        sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))  # type: ignore[arg-type]
    assert [str(of.exc_value) for of in seen] == ["another"]


def raised(number: int, by_tensorstore: bool) -> Exception:
    words = os.strerror(number)
    return ValueError(f"UNKNOWN: {words} [os_error_code='{number}']") if by_tensorstore else OSError(number, words)


@pytest.mark.parametrize("by_tensorstore", [False, True])
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EHOSTDOWN, errno.ETIMEDOUT, errno.EIO])
def test_a_failing_disk_or_server_is_not_a_mistake_of_the_user(tmp_path, number, by_tensorstore):
    error = raised(number, by_tensorstore)
    line = f"^{tmp_path}: cannot be written \\({os.strerror(number)}\\); check the disk or its server"
    with pytest.raises(Unreachable, match=line), writing(tmp_path):
        raise error
    (tmp_path / "4").mkdir()
    # A sector that cannot be read is damage, so the run resumes from the step before.
    kind, line = (InputError, "cannot be restored") if number == errno.EIO else (Unreachable, "cannot be read")
    with pytest.raises(kind, match=f"^{tmp_path / '4'}: .*{line}"), restoring(tmp_path, 4):
        raise error


def test_files_on_an_unreachable_server_are_not_damaged(tmp_path, monkeypatch):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "manifest.json").write_text("{}")
    manifests = Integrity(tmp_path)
    for number, damage in ((errno.ESTALE, None), (errno.EIO, "cannot be read (Input/output error)")):

        def away(path, number=number):
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr(files, "read", away)
        if damage is None:
            with pytest.raises(
                Unreachable, match=f"^{tmp_path / '4'}: cannot be read \\(Stale file handle\\); check the disk"
            ):
                manifests.check(4)
        else:
            assert manifests.check(4) == f"manifest.json {damage}"


def test_only_errors_in_orbaxs_threads_pass_the_barrier():
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
