"""`jaxddp checkpoints RUN`: list the checkpoints of a run with their validation metrics, and verify their files.

The command reads files only. It needs no JAX, and the run may still be training.
"""

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

import jaxddp.core.files as files
from jaxddp.command_line.parse import check_run, parse
from jaxddp.command_line.terminal import TableRow, print_line, print_table
from jaxddp.core.errors import InputError, figure, size
from jaxddp.training.checkpoints.integrity import (
    CHECKPOINTS,
    DAMAGED_SUFFIX,
    INDEX,
    METADATA,
    VALIDATION_FILE,
    Integrity,
    ValidationFile,
    steps_in,
)


@dataclass(frozen=True)
class ListCheckpoints:
    """List the checkpoints of a run. The exit code is 1 if --verify finds a damaged one."""

    run: tyro.conf.Positional[Path] = tyro.MISSING
    """The work directory of the run."""
    verify: bool = False
    """Compare every file's SHA-256 with the manifest. Without this option only sizes are compared."""


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code. Raises: InputError."""
    options = parse(ListCheckpoints, ListCheckpoints(), "jaxddp checkpoints", arguments)
    check_run(options.run)
    directory, validations = options.run / CHECKPOINTS, None
    manifests = Integrity(directory)
    faults = [] if manifests.fault is None else [f"{directory / INDEX}: {manifests.fault}"]
    try:
        validations = ValidationFile(directory, manifests)
        if manifests.expects_validations() and not (directory / VALIDATION_FILE).exists():
            faults.append(f"{directory / VALIDATION_FILE}: is missing")
    except InputError as error:
        faults.append(str(error))
    listed = _rows(manifests, validations, quick=not options.verify)
    if manifests.run is not None:
        print(f"run {manifests.run.id}")
    if listed:
        print_table(("step", "saved", "size", "validation", "", "files"), [row for _, row in listed])
    else:
        print_line(f"{directory}: contains no checkpoints")
    aside = [f"set aside: {path} ({size(_bytes(path))})" for path in sorted(directory.glob(f"*{DAMAGED_SUFFIX}"))]
    for line in (*aside, *faults):
        print_line(line)
    return int(options.verify and (bool(faults) or any(damaged for damaged, _ in listed)))


def _rows(manifests: Integrity, validations: ValidationFile | None, *, quick: bool) -> list[tuple[bool, TableRow]]:
    """Return a pair for each checkpoint: whether it is damaged, and its row of the table."""
    steps, rows = steps_in(manifests.directory), []
    best = None if validations is None else validations.best(steps)
    for step in steps:
        folder = manifests.directory / str(step)
        try:
            fault, intact = manifests.check(step, quick=quick), "sizes match" if quick else "verified"
            unnamed = manifests.run is not None and manifests.run_id(step) is None
            state = f"{intact}{', no run id' * unnamed}" if manifests.needs_manifest(step) else "no manifest"
            metrics = {} if validations is None else validations.of(step)
            shown = "  ".join(f"{name} {figure(name, value)}" for name, value in metrics.items() if value is not None)
            marks = " ".join(mark for mark, which in (("latest", steps[-1]), ("best", best)) if which == step)
            last = (f"damaged: {fault}", "bold red") if fault else state
            rows.append((bool(fault), (str(step), _saved(folder), size(_bytes(folder)), shown, marks, last)))
        except FileNotFoundError:
            pass  # The run is still training and has just removed the checkpoint.
    return rows


def _saved(folder: Path) -> str:
    """Return the local time at which Orbax completed a checkpoint; "?" if its metadata cannot be read."""
    try:
        moment = files.parse_json(files.read(folder / METADATA))["commit_timestamp_nsecs"] / 1e9
        return f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return "?"


def _bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
