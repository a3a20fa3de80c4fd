"""Read the memory of this Linux machine, and the memory limit of this process."""

import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """The memory of a machine in bytes, including swap."""

    machine: str
    """An ID of the machine, which Linux creates at boot."""
    installed: int
    """The memory of the machine."""
    allowed: int
    """The memory limit of the control groups of this process; at most `installed`."""
    used: int = 0
    """The memory that this process holds: Python, its libraries, compiled programs and data."""


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """Return the memory of this machine; None if the system does not report it.

    Args:
        root: the folder that contains /proc and /sys.
    """
    try:
        entries = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        installed, swap = (1024 * int(entries[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
        machine = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        allowed = min([installed, *_limits(root)])
        used = int((root / "proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, KeyError, ValueError, IndexError):
        return None
    return HostMemory(machine, installed + swap, allowed + swap, used)


def _limits(root: Path) -> Iterator[int]:
    """Yield the memory limits of this process's control groups and their ancestors, for cgroup versions 1 and 2."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        inner = Path(path.strip("/"))
        # In a container, the folders of ancestor groups may be missing.
        for folder in (top / inner, *(top / above for above in inner.parents)):
            limit = folder / name
            text = limit.read_text().strip() if limit.is_file() else ""
            if text.isdecimal():  # else "max"
                yield int(text)
