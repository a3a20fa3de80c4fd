"""The memory and the cores of a machine, read from the files of Linux."""

import resource
from pathlib import Path

import pytest

from jaxddp.core.cores import num_cores
from jaxddp.measure.memory import HostMemory, host_memory

KB, GB = 1024, 1024**3
USED = 70 * resource.getpagesize()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def write_machine(root: Path, cgroup: str, limits: dict[str, str], *, swap: int = 0) -> Path:
    meminfo = (
        f"MemTotal:       {16 * GB // KB} kB\nMemFree:  100 kB\nSwapTotal:  {swap // KB} kB\nHugePages_Total:       0\n"
    )
    files = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, "proc/sys/kernel/random/boot_id": "one\n"}
    files["proc/self/statm"] = "900 70 30 1 0 60 0\n"
    return write(root, files | {f"sys/fs/cgroup/{name}": f"{text}\n" for name, text in limits.items()})


MEMORY, QUOTA, PERIOD = "memory/a/memory.limit_in_bytes", "cpu/a/cpu.cfs_quota_us", "cpu/a/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("cgroup", "limits", "allowed", "cores"),
    [
        ("0::/", {}, 16, 8),
        ("0::/", {"memory.max": str(3 * GB), "cpu.max": "max 100000"}, 3, 8),
        ("0::/a/b", {"a/b/memory.max": "max", "a/memory.max": str(5 * GB), "a/cpu.max": "20000 100000"}, 5, 1),
        ("0::/a/b", {"a/b/memory.max": str(6 * GB), "a/memory.max": str(5 * GB)}, 5, 8),
        ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "250000 100000"}, 16, 3),
        ("0::/not/shown", {"memory.max": str(2 * GB)}, 2, 8),
        ("3:cpu,cpuacct:/a\n2:memory:/a\n0::/", {MEMORY: str(7 * GB), QUOTA: "100000", PERIOD: "50000"}, 7, 2),
        ("3:cpu:/a\n2:memory:/a", {MEMORY: str(2**63 - 4096), QUOTA: "-1", PERIOD: "100000"}, 16, 8),
        ("3:cpuset:/a", {MEMORY: str(7 * GB), QUOTA: "100000", PERIOD: "50000"}, 16, 8),
    ],
)
def test_the_smallest_limit_around_the_process_applies(tmp_path, monkeypatch, cgroup, limits, allowed, cores):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    root = write_machine(tmp_path, cgroup, limits)
    assert host_memory(root) == HostMemory("one", 16 * GB, allowed * GB, USED) and num_cores(root) == cores


def test_swap_is_added_to_memory(tmp_path):
    root = write_machine(tmp_path, "0::/", {"memory.max": str(3 * GB)}, swap=2 * GB)
    assert host_memory(root) == HostMemory("one", 18 * GB, 5 * GB, USED)


def test_without_the_files_the_memory_is_unknown(tmp_path):
    assert host_memory(tmp_path) is None
    write(tmp_path, {"proc/meminfo": "MemFree: 1 kB\n"})
    assert host_memory(tmp_path) is None


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="no Linux")
def test_this_machine_reports_some_memory():
    memory = host_memory()
    assert memory is not None and 0 < memory.used < memory.allowed <= memory.installed and memory.machine
