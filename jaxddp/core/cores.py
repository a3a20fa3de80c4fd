"""The cores that this process may use, and the limits of its cgroup."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def local_cores() -> list[int]:
    """Return the cores that this process may use: a scheduler or `taskset` may give it fewer than all."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [*range(os.cpu_count() or 1)]


def num_cores(root: Path = Path("/")) -> int:
    """Return how many cores' time this process may use: a container may allow less than that of `local_cores`.

    Args:
        root: the folder that contains /proc and /sys.
    """
    quotas = cgroup_limits("cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"), ("cpu.max",), root)
    allowed = [-(-int(quota) // int(period)) for quota, period in quotas if quota.isdecimal()]
    return min([len(local_cores()), *allowed])


def cgroup_limits(
    controller: str, names: tuple[str, ...], names_of_2: tuple[str, ...], root: Path
) -> Iterator[list[str]]:
    """Yield the words in the files of a limit, for this process's cgroup and the ones above.

    The files have `names` in cgroups of version 1, and `names_of_2` in those of version 2. A limit that is not set is
    "max" or -1. Nothing is yielded if the system has no cgroups.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top, inner = root / "sys/fs/cgroup" / (controller if controllers else ""), Path(path.strip("/"))
            # In a container, the folders above may be missing.
            for folder in (top / inner, *(top / above for above in inner.parents)):
                with suppress(FileNotFoundError):
                    files = names if controllers else names_of_2
                    yield [word for name in files for word in (folder / name).read_text().split()]
