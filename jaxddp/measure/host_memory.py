"""The memory that this machine has, and what of it this process may use, as Linux tells."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    """Bytes, swap included: more is there for nobody."""

    machine: str
    """Tells machines apart: it is made when one starts."""
    installed: int
    """For all processes of the machine."""
    allowed: int
    """For this process and those of its control groups; at most what is installed."""


def host_memory(root: Path = Path("/")) -> HostMemory | None:
    """None where the system does not say; `root` is the folder that holds /proc and /sys."""
    try:
        told = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
        installed, swap = (1024 * int(told[key].split()[0]) for key in ("MemTotal", "SwapTotal"))
        machine = (root / "proc/sys/kernel/random/boot_id").read_text().strip()
        allowed = min([installed, *_limits(root)])
    except (OSError, KeyError, ValueError):
        return None
    return HostMemory(machine, installed + swap, allowed + swap)


def _limits(root: Path) -> Iterator[int]:
    """Of the control groups that this process is in and of those around them, in both versions of their files."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        inner = Path(path.strip("/"))
        # In a container the groups around its own do not show, whatever their path says.
        for folder in (top / inner, *(top / above for above in inner.parents)):
            limit = folder / name
            text = limit.read_text().strip() if limit.is_file() else ""
            if text.isdecimal():  # else "max"
                yield int(text)
