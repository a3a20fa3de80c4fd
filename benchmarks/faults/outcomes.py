"""Reads the results of a finished run that `benchmarks/chaos.py` compares: checkpoints, metrics and validations."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

Outcome = dict[str, Any]

# Orbax warns about a file that these checkpoints do not have.
logging.getLogger("absl").setLevel(logging.ERROR)

MEASURED = (
    *("images_per_second", "data_wait_fraction", "peak_memory", "flops_utilization", "flops_per_step"),
    *("epoch_seconds", "seconds"),
)
"""Fields that may differ between equal runs: measurements, and the FLOPs of a step, which are unknown to a run that
resumes after its last step."""


def outcome(workdir: Path) -> Outcome:
    """Return the results that must equal those of an undisturbed run. Raises OSError or ValueError for bad files."""
    checkpoints = workdir / "checkpoints"
    steps = sorted(int(place.name) for place in checkpoints.iterdir() if place.name.isdecimal())
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    result = json.loads((workdir / "result.json").read_bytes())
    return {
        "metrics.jsonl": [without_times(row) for row in rows],
        "result.json": without_times(result),
        "validation.json": json.loads((checkpoints / "validation.json").read_bytes()),
        "checkpoints": {str(step): digests(checkpoints / str(step) / "state") for step in steps},
        "left over": sorted(place.name for place in checkpoints.iterdir() if "tmp" in place.name),
    }


def without_times(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in MEASURED}


def digests(place: Path) -> dict[str, str]:
    """Return the SHA-256 of the bytes of each array. Reads the checkpoint without jaxddp."""
    reader = ocp.PyTreeCheckpointer()
    metadata = reader.metadata(place).item_metadata
    if metadata is None:
        raise ValueError(f"{place}: no checkpoint")
    as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata.tree)
    state = reader.restore(place, args=ocp.args.PyTreeRestore(restore_args=as_arrays))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest() for path, leaf in leaves}


def difference(actual: Outcome, expected: Outcome) -> str:
    """Return the first difference between two outcomes, or "" if they are equal."""
    for name, value in expected.items():
        if actual[name] != value:
            return f"{name}: {_first(actual[name], value)}"
    return ""


def _first(actual: Any, expected: Any) -> str:
    if isinstance(expected, dict) and actual.keys() == expected.keys():
        name = next(name for name in expected if actual[name] != expected[name])
        return f"{name}: {_first(actual[name], expected[name])}"
    if isinstance(expected, list) and len(actual) == len(expected):
        pair = next(pair for pair in zip(actual, expected, strict=True) if pair[0] != pair[1])
        return _first(*pair)
    return f"{str(actual)[:200]} instead of {str(expected)[:200]}"
