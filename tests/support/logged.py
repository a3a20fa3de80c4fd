"""Reads back what loggers wrote: TensorBoard, Weights & Biases and MLflow."""

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxddp.training.listeners import jsonl as rows

Series = dict[str, list[tuple[int, float]]]
"""(step, value) pairs of each scalar, in the order of writing."""

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def alone(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make loggers write into a folder, without the user's accounts and servers."""
    for name in [name for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))]:
        patch.delenv(name)
    patch.setenv("WANDB_MODE", "offline")
    patch.chdir(folder)


def remove_mlflow_variables() -> None:
    """Remove the environment variables that the logger has set."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        del os.environ[name]


def of_rows(results: list[rows.Row]) -> Series:
    """Return the scalars of lines of metrics.jsonl, with NaN for null."""
    series: Series = {}
    for row in results:
        for name, value in rows.scalars(row).items():
            series.setdefault(name, []).append((row["step"], float("nan") if value is None else value))
    return series


def of_jsonl(workdir: Path) -> Series:
    return of_rows([row for _, row in rows.parse(workdir / "metrics.jsonl")])


# TensorBoard


def tensorboard_events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0}).Reload()


def of_tensorboard(directory: Path) -> Series:
    events = tensorboard_events(directory)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# Weights & Biases


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records of a run's `.wandb` file, the library's messages in LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("*.wandb")
    data, at, parts = file.read_bytes(), HEADER, b""
    while at < len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER])
        parts += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return the logged rows, without the library's columns."""
    results = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                value = json.loads(item.value_json)
                if item.nested_key and len(item.nested_key) > 1:
                    row.setdefault(item.nested_key[0], {})[item.nested_key[1]] = value
                else:
                    row[item.key or item.nested_key[0]] = value
            results.append({name: value for name, value in row.items() if not name.startswith("_")})
    return results


def wandb_config(folder: Path) -> dict[str, Any]:
    """Return the config, merged from all records of the run."""
    results = {}
    for record in wandb_records(folder):
        for update in (*record.run.config.update, *record.config.update):
            results[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
    return results


def wandb_ids(folder: Path) -> set[str]:
    return {record.run.run_id for record in wandb_records(folder)} - {""}


def offline_runs(workdir: Path) -> list[Path]:
    """Wait until everything is written, and return the folders of the library's runs, oldest first."""
    import wandb

    wandb.teardown()
    return sorted((workdir / "wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_ctime_ns)


def of_wandb(workdir: Path) -> Series:
    """Return the scalars of the run that the work directory names."""
    run_ids = {json.loads((workdir / "wandb.json").read_text())["id"]}
    series: Series = {}
    for row in [
        row for folder in offline_runs(workdir) if wandb_ids(folder) == run_ids for row in wandb_history(folder)
    ]:
        for name, value in row.items():
            if name != "step" and not isinstance(value, dict):
                series.setdefault(name, []).append((row["step"], float(value)))
    return series


# MLflow


def mlflow_client() -> Any:
    from mlflow import MlflowClient

    return MlflowClient()


def mlflow_run(workdir: Path) -> Any:
    """Return the run that the work directory names."""
    return mlflow_client().get_run(json.loads((workdir / "mlflow.json").read_text())["id"])


def of_mlflow(workdir: Path) -> Series:
    run, client = mlflow_run(workdir), mlflow_client()
    logged = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(point.step, point.value) for point in points] for name, points in logged.items()}
