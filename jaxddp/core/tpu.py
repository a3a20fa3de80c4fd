"""TPU chips without JAX: the chips of this machine, and the errors with which JAX does not start on them.

libtpu, the library through which JAX uses TPUs, permits one process on a machine. It locks a file, and its own error
names the process only if both processes belong to the same user.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxddp.core.errors import InputError, Unreachable, counted, show

_GOOGLE = "0x1ae0"
"""The vendor of TPU chips on the PCI bus. Network cards and disks of Google's machines have the same vendor."""
_NO_CHIPS = ("0x01", "0x02")
"""The beginning of the PCI classes of disks and of network cards."""


def permits(environ: Mapping[str, str], *platforms: str) -> bool:
    """Return whether JAX_PLATFORMS permits one of some platforms, in lower case. If it is not set, it permits all."""
    listed = {word.strip() for word in environ.get("JAX_PLATFORMS", "").lower().split(",")} - {""}
    return not listed or not listed.isdisjoint(platforms)


def local_chips(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> list[Path]:
    """Return the device files of this machine's TPU chips. The list is empty if JAX_PLATFORMS excludes TPUs.

    Older chips have the files `/dev/accel0`, `/dev/accel1` and so on, newer ones `/dev/vfio/0` and so on, one for each
    IOMMU group. In a container, there are only the container's files.

    Args:
        root: the folder that holds `dev` and `sys`.
    """
    if not permits(environ, "tpu"):
        return []
    numbered = [file for file in (root / "dev/vfio").glob("*") if file.name.isdecimal()]
    files = [file for file in numbered if _has_chip(root / "sys/kernel/iommu_groups" / file.name / "devices")]
    # A kernel's own class of accelerators has the folder /dev/accel, and its files belong to other vendors.
    accelerators = [file for file in (root / "dev").glob("accel*") if file.name.removeprefix("accel").isdecimal()]
    if accelerators and _has_chip(root / "sys/bus/pci/devices"):
        files += accelerators
    return sorted(files, key=lambda file: (len(file.name), file.name))


def _has_chip(devices: Path) -> bool:
    """Return whether a folder of PCI devices has a device of Google that is neither a network card nor a disk."""
    of_google = [vendor.parent for vendor in devices.glob("*/vendor") if _text(vendor) == _GOOGLE]
    return any(not _text(device / "class").startswith(_NO_CHIPS) for device in of_google)


def _text(file: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return file.read_text().strip()
    return ""


LOCK_FILE = Path("/tmp/libtpu_lockfile")
"""The file that libtpu locks with `lockf`."""
_NOT_STARTED = "Unable to initialize backend"
_IN_USE = ("already in use", "multi-process lockfile", "resource busy")
_TRY_AGAIN = ("UNAVAILABLE", "DEADLINE_EXCEEDED")
_ADVICE = "set JAX_PLATFORMS=cpu to compute without TPUs"
_LONGEST_REASON = 300


@contextlib.contextmanager
def readable_start_errors() -> Iterator[None]:
    """Replace the error with which JAX does not start on this machine's devices by an error of one line.

    Raises:
        InputError: another process uses the chips, libtpu does not start for another reason, or JAX has no other
            platform of JAX_PLATFORMS.
        Unreachable: another host of the slice does not answer.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        reason = _reason_of(str(error))
        if not str(error).startswith(f"{_NOT_STARTED} 'tpu'"):
            # If no platform that is set is installed, JAX raises an AssertionError without text.
            if str(error) and not str(error).startswith(_NOT_STARTED):
                raise
            platforms = os.environ.get("JAX_PLATFORMS") or "the platforms that are set"
            advice = "install the extra of jaxddp for your devices, such as cuda12, or set JAX_PLATFORMS=cpu"
            raise InputError(f"JAX does not start on {platforms} ({reason or 'not installed'}); {advice}") from error
        if any(words in str(error) for words in _IN_USE):
            raise _in_use(reason) from error
        kind = Unreachable if reason.startswith(_TRY_AGAIN) else InputError
        chips = f"this machine has {counted(len(local_chips()), 'TPU chip')}"
        raise kind(f"JAX does not start on the TPU ({reason}): {chips}; {_ADVICE}") from error


def _reason_of(text: str) -> str:
    """Return the platform's reason in an error of JAX, without JAX's words around it, and shortened."""
    reason = text.partition(": ")[2].partition("\n")[0]
    return reason.partition(" (set JAX_PLATFORMS")[0].partition(" (you may need")[0].rstrip(" .")[:_LONGEST_REASON]


def _in_use(reason: str) -> InputError:
    chips = [str(chip) for chip in local_chips()]
    stated = re.search(r"process with pid (\d+)", reason)
    # libtpu names the process only if it belongs to this user.
    pid = int(stated[1]) if stated else _lock_holder()
    if pid is not None:
        process = f"process {pid}{_program(pid)}"
        return InputError(f"the TPU is in use by {process}, which holds {LOCK_FILE}; end that process, or {_ADVICE}")
    look = f"`sudo lsof {chips[0] if chips else '/dev/accel0'}` shows it: end it or remove the file, or {_ADVICE}"
    left = f"{LOCK_FILE} is left over from one"
    return InputError(f"the TPU is in use by a process that this user may not see, or {left}", advice=look)


def _lock_holder() -> int | None:
    """Return the process that holds the lock of `LOCK_FILE`; None if it is in another container, or there is none."""
    with contextlib.suppress(OSError):
        # `1: POSIX  ADVISORY  WRITE 812 fe:01:1234 0 EOF`. For a process that waits, `->` follows the number.
        line = rf"^\d+: \w+ +\w+ +\w+ +([1-9]\d*) \w+:\w+:{LOCK_FILE.stat().st_ino} "
        held = re.search(line, Path("/proc/locks").read_text(), re.MULTILINE)
        return int(held[1]) if held else None
    return None


def _program(pid: int) -> str:
    """Return the command of a process in parentheses; empty if this user may not read it."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").replace("\0", " ").strip()
        return f" ({show(command)})" if command else ""
    return ""
