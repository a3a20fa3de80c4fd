"""Samples of the resources that a job and its work directory use, read from /proc and the disk. Needs Linux."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

Sample = dict[str, float]
"""Values by "process: quantity"; "seconds" and "step" belong to the whole job."""

TICKS = os.sysconf("SC_CLK_TCK")
GROWING = "metrics.jsonl", "events.out.tfevents", "validation.json", "curves.png", ".log"
"""Parts of the names of files in a work directory that have a line for each record, or plot the records."""
TEMPORARY = ".orbax-checkpoint-tmp"


def process_sample(pid: int) -> dict[str, float]:
    """Sample one process: resident and anonymous memory in MB, open files, threads, CPU seconds since its start.

    Raises:
        OSError: The process has ended.
    """
    folder = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    if "VmRSS" not in status:
        raise ProcessLookupError(f"process {pid} has ended")
    # The name of the program, in brackets, may contain spaces and brackets.
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    return {
        "resident MB": int(status["VmRSS"].split()[0]) / 1024,
        "anonymous MB": int(status["RssAnon"].split()[0]) / 1024,
        "open files": len(os.listdir(folder / "fd")),
        "threads": int(status["Threads"]),
        "CPU seconds": (int(fields[11]) + int(fields[12])) / TICKS,
    }


def children(pid: int) -> list[int]:
    """Return the pids of a process's running children."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def job_processes(launcher: int) -> dict[str, int]:
    """Return the pids of a job by role: "launcher", "process 0", "keeper 0", …, and "child of 0" for other children.

    A keeper holds the connection of its process to JAX's coordinator.
    """
    results = {"launcher": launcher}
    for worker in children(launcher):
        rank = rank_of(worker)
        if rank is None:
            continue
        results[f"process {rank}"] = worker
        with suppress(OSError):
            for child in children(worker):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                results[f"keeper {rank}" if b"coordinator_proxy.py" in command else f"child of {rank}"] = child
    return results


def rank_of(pid: int) -> int | None:
    """Return the process id within the job, from JAX_PROCESS_ID; None without it, or if the process has ended."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_text().split("\0"):
            name, _, value = entry.partition("=")
            if name == "JAX_PROCESS_ID":
                return int(value)
    return None


def disk_sample(workdir: Path) -> dict[str, float]:
    """Sample a work directory: its complete and unfinished checkpoints, the size of a checkpoint, and other files.

    Files that grow with each record are counted separately.
    """
    sizes: dict[str, list[int]] = {"checkpoint": [], "in the making": [], "records": [], "other": []}
    steps, unfinished = set[str](), set[str]()
    for file in files_below(workdir):
        folder = file.relative_to(workdir).parts[1] if file.is_relative_to(workdir / "checkpoints") else ""
        with suppress(FileNotFoundError):
            sizes[group_of(file, folder)].append(file.stat().st_size)
            steps |= {folder} if folder.isdecimal() else set()
            unfinished |= {folder} if TEMPORARY in folder else set()
    num_complete = max(1, len(steps))
    return {
        "checkpoints: whole": len(steps),
        "checkpoints: in the making": len(unfinished),
        "a checkpoint: files": len(sizes["checkpoint"]) / num_complete,
        "a checkpoint: MB": sum(sizes["checkpoint"]) / num_complete / 1e6,
        "other files": len(sizes["other"]),
        "records: files": len(sizes["records"]),
        "records: MB": sum(sizes["records"]) / 1e6,
    }


def group_of(file: Path, folder: str) -> str:
    """Return the group of a file in a folder of `checkpoints`, or in no such folder ("")."""
    if folder.isdecimal():
        return "checkpoint"
    if TEMPORARY in folder:
        return "in the making"
    return "records" if any(name in file.name for name in GROWING) else "other"


def files_below(folder: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(folder):
        yield from (Path(parent, name) for name in names)


def last_step(workdir: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, or 0."""
    with suppress(FileNotFoundError):
        size = (workdir / "metrics.jsonl").stat().st_size
        with (workdir / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, size - 4096))
            num_complete = file.read().split(b"\n")[:-1]
        if num_complete:
            return int(json.loads(num_complete[-1])["step"])
    return 0
