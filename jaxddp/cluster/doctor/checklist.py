"""Checks a machine, a job and a config before a run, and reports a row for each check.

The checks are independent: a failed check becomes a row of the report, and the other checks still run. In a job, every
process makes every check. At the end the processes exchange their rows, so each process reports the failures of all
processes. A collective check starts only if all processes are ready. Otherwise some processes would wait for the
others.
"""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxddp.cluster.doctor import checks
from jaxddp.cluster.doctor.checks import Finding, Verdict
from jaxddp.config import ParallelConfig
from jaxddp.core.errors import JaxddpError, plural
from jaxddp.core.peers import Peers, joined
from jaxddp.core.phases import doing
from jaxddp.recipe.file import RecipeFile
from jaxddp.training.listeners.step_seconds import FILE

_LONGEST_REASON = 500


@dataclass(frozen=True)
class CheckRow:
    """One line of the report."""

    check: str
    verdict: Verdict
    detail: str


@dataclass
class Checklist:
    """Collects the rows of the report."""

    rows: list[CheckRow] = field(default_factory=list)

    def add(self, check: str, run: Callable[..., Finding], *arguments: Any) -> Any | None:
        """Run a check, add its row, and return the value of its finding; None if the check failed."""
        try:
            with doing(f"checking {check}"):
                finding = run(*arguments)
        except JaxddpError as error:
            finding = Finding(str(error), verdict="fail")
        except Exception as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            finding = Finding(f"{type(error).__name__}: {reason}", verdict="fail")
        self.rows.append(CheckRow(check, finding.verdict, finding.detail))
        return finding.value


def doctor(file: RecipeFile | None, workdir: Path | None) -> list[CheckRow]:
    """Check this machine, and return the rows of the report.

    In a job, all processes must call this function. It returns the same rows in all processes.

    Args:
        file: a recipe, whose data, training step and checkpoint size are also checked.
        workdir: a work directory, which is also checked.
    """
    report = Checklist()
    parallel = file.config.parallel if file else ParallelConfig()
    jobs = report.add("environment", checks.environment)
    job = next(iter(jobs or []), None)
    job_peers = report.add("coordinator", checks.coordinator, job, parallel, jobs is not None) or joined()
    topology = report.add("devices", checks.devices, parallel, job_peers)
    report.add("versions", checks.versions)
    if _all_are_ready(job_peers, topology is not None):
        report.add("all-reduce", checks.all_reduce, topology)
    # In the checks below, processes with different arguments would wait for each other.
    if job_peers.is_alone or report.add("settings", checks.settings, file, workdir, job_peers):
        process = job.process_id if job else 0
        setup = _rehearse(report, file, job_peers, process, topology is not None) if file else None
        if workdir is not None:
            _check_directory(report, file, workdir, setup, job_peers)
    rows = json.dumps([(row.check, row.verdict, row.detail) for row in report.rows])
    reports = job_peers.exchange("doctor: rows", rows)
    return merge([[CheckRow(*row) for row in json.loads(text)] for text in reports])


def _rehearse(report: Checklist, file: RecipeFile, job_peers: Peers, process: int, has_devices: bool) -> Any | None:
    """Check the recipe, and return the setup of its run; None if a check failed."""
    tables = report.add("data", checks.data, file.config, process)
    if tables is not None:
        report.add("images", checks.images, file.config, tables, process)
    if not _all_are_ready(job_peers, has_devices and tables is not None):
        return None
    setup = report.add("recipe", checks.recipe, file)
    if setup is not None:
        report.add("step", checks.step, setup)
    return setup


def _check_directory(
    report: Checklist, file: RecipeFile | None, workdir: Path, setup: Any | None, job_peers: Peers
) -> None:
    needed = None
    if file is not None and setup is not None:
        needed = checks.checkpoint_bytes(setup.state, file.config.checkpoint.keep)
    written = report.add("work directory", checks.work_directory, workdir, needed)
    if written is not None and (written / FILE).exists():
        report.add("processes", checks.slow_processes, workdir)
    if not job_peers.is_alone and _all_are_ready(job_peers, written is not None):
        report.add("shared", checks.shared, workdir, job_peers)


def _all_are_ready(job_peers: Peers, ready: bool) -> bool:
    """Return whether every process is ready for a collective check. The processes exchange this without devices."""
    return all(answer == str(True) for answer in job_peers.exchange("doctor: ready", str(ready)))


def merge(reports: Sequence[Sequence[CheckRow]]) -> list[CheckRow]:
    """Return the rows of process 0. The other processes' warnings and failures follow the rows of the same check."""
    merged = []
    for name in dict.fromkeys(row.check for rows in reports for row in rows):
        first_rows, *other_rows = ([row for row in rows if row.check == name] for rows in reports)
        processes_by_row: dict[CheckRow, list[str]] = {}
        for process, rows in enumerate(other_rows, start=1):
            for row in rows:
                if row.verdict != "ok" and row not in first_rows:
                    processes_by_row.setdefault(row, []).append(str(process))
        merged += first_rows
        for row, processes in processes_by_row.items():
            names = f"{plural(len(processes), 'process')} {', '.join(processes)}"
            merged.append(CheckRow(name, row.verdict, f"{names}: {row.detail}"))
    return merged


def prints_rows() -> bool:
    """Return whether this process prints the rows: it is process 0, or it has no devices."""
    # If JAX finds no devices, its first error is a RuntimeError, and its later ones are AssertionErrors.
    with contextlib.suppress(Exception):
        return joined().is_first
    return True
