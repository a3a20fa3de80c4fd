"""`jaxddp checkpoints RUN`: list the checkpoints of a run with their validation metrics, and verify their files.

The command reads files only. It needs no JAX, and the run may still be training.
"""

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

import jaxddp.core.files as files
import jaxddp.training.checkpoints.integrity as integrity
from jaxddp.command_line.parse import RunDirectory, parse
from jaxddp.command_line.terminal import TableRow, print_table
from jaxddp.core.errors import InputError, measure, on_screen, size
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.training.checkpoints.integrity import Integrity, ValidationFile


@dataclass(frozen=True)
class ListCheckpoints:
    """List the checkpoints of a run. The exit code is 1 if --verify finds a damaged one."""

    run: tyro.conf.Positional[RunDirectory] = tyro.MISSING
    """The work directory of the run."""
    verify: bool = False
    """Compare every file's SHA-256 with the manifest. Without this option only sizes are compared."""


def run(arguments: list[str]) -> int:
    """Run the command, and return the exit code. Raises: InputError."""
    options = parse(ListCheckpoints, ListCheckpoints(), "jaxddp checkpoints", arguments)
    directory, validations = options.run / integrity.CHECKPOINTS, None
    manifests = Integrity(directory)
    faults = [] if manifests.fault is None else [f"{directory / integrity.INDEX}: {manifests.fault}"]
    try:
        validations = ValidationFile(directory, manifests)
        if manifests.expects_validations() and not (directory / integrity.VALIDATION_FILE).exists():
            faults.append(f"{directory / integrity.VALIDATION_FILE}: is missing")
    except InputError as error:
        faults.append(str(error))
    listed = _rows(manifests, validations, quick=not options.verify)
    if manifests.run is not None:
        print(f"run {manifests.run.id}")
    if listed:
        print_table(("step", "saved", "size", "validation", "", "files"), [row for _, row in listed])
    elif (options.run / CONFIG_FILE).exists():
        print(f"{on_screen(str(directory))}: contains no checkpoints")
    else:
        raise InputError(f"{options.run}: contains neither checkpoints nor {CONFIG_FILE}", advice="give a run")
    for path in sorted(directory.glob(f"*{integrity.DAMAGED_SUFFIX}")):
        print(on_screen(f"set aside: {path} ({size(_bytes(path))})"))
    for fault in faults:
        print(on_screen(fault))
    return int(options.verify and (bool(faults) or any(damaged for damaged, _ in listed)))


def _rows(manifests: Integrity, validations: ValidationFile | None, *, quick: bool) -> list[tuple[bool, TableRow]]:
    """Return a pair for each checkpoint: whether it is damaged, and its row of the table."""
    steps, rows = integrity.steps_in(manifests.directory), []
    best = None if validations is None else validations.best(steps)
    for step in steps:
        folder = manifests.directory / str(step)
        # A run that is still training may have just removed the checkpoint.
        with suppress(FileNotFoundError):
            fault, intact = manifests.check(step, quick=quick), "sizes match" if quick else "verified"
            state = intact if manifests.needs_manifest(step) else "no manifest"
            metrics = {} if validations is None else validations.by_step.get(step, {})
            shown = "  ".join(measure(name, value) for name, value in metrics.items() if value is not None)
            marks = " ".join(mark for mark, which in (("latest", steps[-1]), ("best", best)) if which == step)
            last = (f"damaged: {fault}", "bold red") if fault else state
            rows.append((bool(fault), (str(step), _saved(folder), size(_bytes(folder)), shown, marks, last)))
    return rows


def _saved(folder: Path) -> str:
    """Return the local time at which Orbax completed a checkpoint; "?" if its metadata cannot be read."""
    with suppress(OSError, ValueError, KeyError, TypeError, OverflowError):
        moment = files.parse_json(files.read(folder / integrity.METADATA))["commit_timestamp_nsecs"] / 1e9
        return f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"
    return "?"


def _bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
