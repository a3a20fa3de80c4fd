"""Reads runs from their work directories. A missing or damaged file becomes a line in the faults of its run."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError
from jaxddp.core.wording import show
from jaxddp.recipe_files.find_recipe import CONFIG_FILE
from jaxddp.reports.run_files import RunFiles
from jaxddp.sections.goal import Goal, by_split
from jaxddp.training.checkpoints.integrity import CHECKPOINTS
from jaxddp.training.checkpoints.validation_file import VALIDATION_FILE, ValidationFile
from jaxddp.training.listeners.jsonl import METRICS, RESULT
from jaxddp.training.listeners.metric_rows import Columns, Series, parse, series
from jaxddp.workdir.lock import is_locked


def is_run(directory: Path) -> bool:
    """Return whether a directory is the work directory of a run."""
    # `isfile` is also false for a directory that is not readable.
    if os.path.isfile(directory / METRICS):
        return True
    # The config.json of another program has other keys.
    config, _ = _object(directory / CONFIG_FILE)
    return "seed" in config and "data" in config


def read_runs(directories: Sequence[Path]) -> list[RunFiles]:
    """Read the runs of some work directories. Raises: InputError if one is no work directory or is given twice."""
    places = [directory.resolve() for directory in directories]
    for directory, place in zip(directories, places, strict=True):
        if not is_run(place):
            raise InputError(
                f"{directory}: not the work directory of a run, which contains {CONFIG_FILE} and {METRICS}; "
                "give one that a run wrote into"
            )
        if places.count(place) > 1:
            raise InputError(f"{directory}: is given twice; give each run once")
    return [_read(place, name) for place, name in zip(places, _names(places), strict=True)]


def _names(places: Sequence[Path]) -> list[str]:
    """Return the paths without the first folders that all paths have in common."""
    parts = [place.parts for place in places]
    shortest = min(map(len, parts)) - 1
    common = next((i for i in range(shortest) if len({path[i] for path in parts}) > 1), shortest)
    # The page must be valid UTF-8, but a path may contain other bytes.
    return [os.fsencode("/".join(path[common:])).decode(errors="replace") for path in parts]


def _read(directory: Path, name: str) -> RunFiles:
    config, config_fault = _object(directory / CONFIG_FILE)
    result, result_fault = _object(directory / RESULT)
    columns, rows_fault = _series(directory)
    faults = []
    if config_fault is not None:
        faults.append(f"{config_fault}; its settings and its time are left out")
    if (rows_fault := rows_fault or _other_losses(directory, columns.val)) is not None:
        faults.append(rows_fault)
    if result_fault is not None and (directory / RESULT).exists():
        faults.append(f"{result_fault}; its status is left out")
    saved = result.get("status")
    status = {True: "running", False: "ended", None: "unknown"}[is_locked(directory)]
    if status != "running" and isinstance(saved, str):
        status = saved
    return RunFiles(directory, name, config, columns, result, status, tuple(faults), _goal(directory))


def _object(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return the JSON object in a file and None. If the file cannot be read, return an empty dict and the fault."""
    try:
        content = files.parse_json(files.read(path))
    except FileNotFoundError:
        return {}, f"{path.name} is missing"
    except OSError as error:
        return {}, f"{path.name} cannot be read ({error.strerror})"
    except ValueError as error:
        return {}, f"{path.name} is damaged ({error})"
    return (
        (content, None) if isinstance(content, dict) else ({}, f"{path.name} is damaged (it contains {show(content)})")
    )


def _other_losses(directory: Path, val: Columns) -> str | None:
    """Return a fault if metrics.jsonl and the validation file have different losses for a step; else None."""
    try:
        validations = ValidationFile(directory / CHECKPOINTS, None)
    except InputError:
        return None
    losses = dict(zip(val["step"].tolist(), val["loss"].tolist(), strict=True)) if "loss" in val else {}
    for step in validations.steps:
        loss = validations.of(step).get("loss")
        if loss is not None and losses.get(step, loss) != loss:
            files = f"{METRICS} and {VALIDATION_FILE}"
            return f"{files} have different losses for step {step}; one of them belongs to another run"
    return None


def _goal(directory: Path) -> Goal:
    """Return the goal in the run's validation file, or the default goal."""
    try:
        return ValidationFile(directory / CHECKPOINTS, None).goal
    except InputError:
        return Goal()


def _series(directory: Path) -> tuple[Series, str | None]:
    """Return the rows of metrics.jsonl and None. If it is unreadable, return the validation file's rows and a fault."""
    path = directory / METRICS
    try:
        columns = series(row for _, row in parse(path))
        if columns.train and (np.diff(columns.train["step"]) < 0).any():
            return columns, f"{METRICS} goes back to earlier steps; more than one run wrote into it"
        return columns, None
    except InputError as error:
        fault = str(error).removeprefix(f"{directory}/") if path.exists() else f"{METRICS} is missing"
    try:
        validations = ValidationFile(directory / CHECKPOINTS, None)
    except InputError:
        return series([]), f"{fault}; its curves are left out"
    rows = [
        {"step": step, "split": split, **metrics}
        for step in validations.steps
        for split, metrics in by_split(validations.of(step)).items()
    ]
    return series(rows), f"{fault}; its curves are left out, except for the validations of checkpoints"
