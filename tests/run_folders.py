"""Work directories as runs leave them, written without training."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxddp.config import Config
from jaxddp.experiment.lock import LOCK_FILE

BATCH_SIZE, EXAMPLES, EPOCHS, LOG_EVERY = 32, 320, 4, 5
"""10 steps an epoch."""
STEPS = EPOCHS * EXAMPLES // BATCH_SIZE


def write_run(directory: Path, seed: int = 0, status: str | None = "done", **changes: Any) -> Path:
    """A run of 40 steps that logs every 5, validates every 10, and has a random course that follows from its seed."""
    directory.mkdir(parents=True)
    (directory / LOCK_FILE).touch()
    train = {"batch_size": BATCH_SIZE, "duration": f"{EPOCHS} epochs"} | changes.pop("train", {})
    config = Config().replace(seed=seed, train=train, **changes).to_dict()
    config["fingerprint"] = {"train": "a" * 64, "val": "b" * 64}
    (directory / "config.json").write_text(json.dumps(config))
    rows = course(np.random.default_rng(seed))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status is not None:
        result = {"status": status, "step": STEPS, "devices": 2, "processes": 1, "val": None, "peak_memory": 1e9}
        (directory / "result.json").write_text(json.dumps(result))
    return directory


def course(rng: np.random.Generator) -> list[dict[str, Any]]:
    """The rows of a run, with an accuracy that need not rise."""
    rows = []
    for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY):
        at = {"step": step, "epoch": step * BATCH_SIZE / EXAMPLES}
        loss = float(np.exp(-step / 10) + 0.1 * rng.random())
        row = at | {"split": "train", "loss": loss, "top1": float(rng.random()), "learning_rate": 0.1 / step}
        row |= {"images_per_second": float(rng.uniform(50, 200)), "data_wait_fraction": float(rng.random() / 10)}
        row["peak_memory"] = 1_000_000 * step
        if step % 10 == 0:
            row |= {"epoch_loss": loss + 0.05, "epoch_top1": float(rng.random()), "epoch_seconds": 2.5}
        rows.append(row)
        if step % 10 == 0:
            measured = {"loss": loss + 0.1, "top1": float(rng.random()), "count": 100, "seconds": 0.5}
            rows.append(at | {"split": "val", **measured})
    return rows


def rows_of(directory: Path, split: str) -> list[dict[str, Any]]:
    """What metrics.jsonl holds of a split."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]
