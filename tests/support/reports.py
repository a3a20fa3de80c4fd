"""Input for reports without training: work directories of runs, predictions, and names with markup."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxddp.config import Config, DataConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.inference.predictions import Outcome
from jaxddp.reports.classes import ValidationImages, accuracy_tables, run_classes
from jaxddp.reports.compose import Page
from jaxddp.reports.tables import read_runs
from jaxddp.workdir.lock import LOCK_FILE
from support.data import random_table

BATCH_SIZE, EXAMPLES, EPOCHS, LOG_EVERY = 32, 320, 4, 5
"""10 steps an epoch."""
STEPS = EPOCHS * EXAMPLES // BATCH_SIZE

HOSTILE = '</script><script>alert(1)</script><b>"&amp;{{ 7 * 7 }}'


def write_run(directory: Path, seed: int = 0, status: str | None = "done", **changes: Any) -> Path:
    """Write a work directory of 40 steps, logged every 5 and validated every 10, with random metrics from its seed."""
    directory.mkdir(parents=True)
    (directory / LOCK_FILE).touch()
    train = {"batch_size": BATCH_SIZE, "duration": f"{EPOCHS} epochs"} | changes.pop("train", {})
    config = Config().replace(seed=seed, train=train, **changes).to_dict()
    config["fingerprint"] = {"train": "a" * 64, "val": "b" * 64}
    (directory / "config.json").write_text(json.dumps(config))
    rows = metric_rows(np.random.default_rng(seed))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if status is not None:
        result = {"status": status, "step": STEPS, "devices": 2, "processes": 1, "val": None, "peak_memory": 1e9}
        (directory / "result.json").write_text(json.dumps(result))
    return directory


def metric_rows(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Return the rows of a run with random metrics."""
    rows = []
    for step in range(LOG_EVERY, STEPS + 1, LOG_EVERY):
        at = {"step": step, "epoch": step * BATCH_SIZE / EXAMPLES}
        loss = float(np.exp(-step / 10) + 0.1 * rng.random())
        row = at | {"split": "train", "loss": loss, "top1": float(rng.random()), "learning_rate": 0.1 / step}
        row |= {"images_per_second": float(rng.uniform(2, 8)), "data_wait_fraction": float(rng.random() / 10)}
        row["peak_memory"] = 1_000_000 * step
        if step % 10 == 0:
            row |= {"epoch_loss": loss + 0.05, "epoch_top1": float(rng.random()), "epoch_seconds": 2.5}
        rows.append(row)
        if step % 10 == 0:
            measured = {"loss": loss + 0.1, "top1": float(rng.random()), "count": 100, "seconds": 0.5}
            rows.append(at | {"split": "val", **measured})
    return rows


def rows_of(directory: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of a split in metrics.jsonl."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]


def outcome_of_noise(count: int = 60, names: tuple[str, ...] = ("a", "b", "c", "d", "e")) -> ValidationImages:
    """Return random images with predictions that are usually right."""
    rng = np.random.default_rng(0)
    table = random_table(count, image=8)
    logits = rng.normal(size=(count, len(names))) + 1.5 * np.eye(len(names))[table.labels]
    source = ArrayTable(table.images, table.labels, names)
    # The features are the logits, without a network.
    network: Any = SimpleNamespace(features=lambda images: logits.astype(np.float32)[: len(images)])
    return ValidationImages(Outcome(table.labels, logits, names, 12), source, DataConfig(), network)


def hostile_page(folder: Path) -> Page:
    """Return a page on which every value from a run contains markup."""
    workdir = write_run(folder / "<img src=x onerror=alert(2)>", 0, model={"weights": HOSTILE})
    rows = metric_rows(np.random.default_rng(0))
    rows = [row | {HOSTILE: 1.0, "loss": row["loss"] + 2.1, "epoch_loss": None} for row in rows]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workdir / "result.json").write_text(json.dumps({"status": HOSTILE, "step": 40}))
    page = Page(read_runs([workdir]))
    classes = [run_classes(0, page.legend[0], outcome_of_noise(names=(HOSTILE, "<i>b</i>", "c", "d", "e")))]
    page.classes, page.accuracies, page.class_faults = classes, accuracy_tables(classes), [HOSTILE]
    return page
