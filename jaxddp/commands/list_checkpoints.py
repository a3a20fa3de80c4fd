"""`jaxddp checkpoints RUN`: the checkpoints of a run, what validation measured of them, and whether they are whole.

It reads files alone: it needs no JAX, and a run may go on meanwhile.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import tyro

import jaxddp.core.files as files
from jaxddp.command_line.parse import check_run, parse
from jaxddp.command_line.terminal import Row, print_table
from jaxddp.core.errors import InputError
from jaxddp.core.wording import figure, on_screen, size
from jaxddp.training.checkpoints.integrity import ASIDE, CHECKPOINTS, INDEX, METADATA, Integrity, steps_in
from jaxddp.training.checkpoints.validation_file import VALIDATION_FILE, ValidationFile


@dataclass(frozen=True)
class ListCheckpoints:
    """List the checkpoints of a run; the exit code is 1 where --verify finds one that is damaged."""

    run: tyro.conf.Positional[Path] = tyro.MISSING
    """The work directory."""
    verify: bool = False
    """Compare every file with the SHA-256 that it had when it was saved, and not its size alone."""


def run(arguments: list[str]) -> int:
    """Run the command; returns the exit code. Raises: InputError."""
    options = parse(ListCheckpoints, ListCheckpoints(), "jaxddp checkpoints", arguments)
    check_run(options.run)
    place = options.run / CHECKPOINTS
    manifests, beside = Integrity(place), []
    if manifests.fault is not None:
        beside.append(f"{place / INDEX}: {manifests.fault}")
    try:
        validations = ValidationFile(place, manifests)
        if manifests.expects_validations() and not (place / VALIDATION_FILE).exists():
            beside.append(f"{place / VALIDATION_FILE}: is missing")
    except InputError as error:
        validations = None
        beside.append(str(error))
    listed = _listed(manifests, validations, quick=not options.verify)
    if manifests.run is not None:
        print(f"run {manifests.run.id}")
    if listed:
        print_table(("step", "saved", "size", "validation", "", "files"), [row for _, row in listed])
    else:
        print(f"{place}: holds no checkpoints")
    for aside in sorted(place.glob(f"*{ASIDE}")):
        print(on_screen(f"set aside: {aside} ({size(_bytes(aside))})"))
    print(*map(on_screen, beside), sep="\n", end="\n" if beside else "")
    return int(options.verify and (bool(beside) or any(damaged for damaged, _ in listed)))


def _listed(manifests: Integrity, validations: ValidationFile | None, *, quick: bool) -> list[tuple[bool, Row]]:
    """For each step whether it is damaged, and its row of the table."""
    steps, rows = steps_in(manifests.directory), []
    best = None if validations is None else validations.best(steps)
    for step in steps:
        folder = manifests.directory / str(step)
        try:
            fault = manifests.check(step, quick=quick)
            whole = "sizes agree" if quick else "verified"
            unnamed = manifests.run is not None and manifests.run_id(step) is None
            state = f"{whole}{', names no run' * unnamed}" if manifests.has(step) else "no manifest"
            metrics = {} if validations is None else validations.of(step)
            shown = "  ".join(f"{name} {figure(name, value)}" for name, value in metrics.items() if value is not None)
            marks = " ".join(mark for mark, which in (("latest", steps[-1]), ("best", best)) if which == step)
            last = (f"damaged: {fault}", "bold red") if fault else state
            rows.append((bool(fault), (str(step), _saved(folder), size(_bytes(folder)), shown, marks, last)))
        except FileNotFoundError:
            pass  # A run goes on, and has removed it meanwhile.
    return rows


def _saved(folder: Path) -> str:
    """When Orbax says that it was complete; in local time."""
    try:
        moment = json.loads(files.read(folder / METADATA))["commit_timestamp_nsecs"] / 1e9
        return f"{datetime.fromtimestamp(moment):%Y-%m-%d %H:%M:%S}"
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return "?"


def _bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
