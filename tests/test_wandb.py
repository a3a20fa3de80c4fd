"""Weights & Biases, offline: what its own files hold of a run, of a resumed one and of one that ended otherwise."""

import json
import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import made
import numpy as np
import pytest
from small import random_table

from jaxddp.config import Config
from jaxddp.training import rows
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners.wandb import WandB, wandb_of

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4
TRAIN, VAL = random_table(24), random_table(9, seed=1)


def records(folder: Path) -> Iterator[Any]:
    """The records of a run's `.wandb` file: LevelDB's log format, of messages that the library defines."""
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


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows that were logged, without the library's own columns."""
    found = []
    for record in records(folder):
        if record.WhichOneof("record_type") == "history":
            row: dict[str, Any] = {}
            for item in record.history.item:
                value = json.loads(item.value_json)
                if item.nested_key and len(item.nested_key) > 1:
                    row.setdefault(item.nested_key[0], {})[item.nested_key[1]] = value
                else:
                    row[item.key or item.nested_key[0]] = value
            found.append({name: value for name, value in row.items() if not name.startswith("_")})
    return found


def config(folder: Path) -> dict[str, Any]:
    """The config as the whole run tells it."""
    found = {}
    for record in records(folder):
        for update in (*record.run.config.update, *record.config.update):
            found[update.key or ".".join(update.nested_key)] = json.loads(update.value_json)
    return found


def offline_runs(workdir: Path) -> list[Path]:
    """The folders of the library's runs, oldest first, once all that it was told has come to the disk."""
    import wandb

    wandb.teardown()
    return sorted((workdir / "wandb").glob("offline-run-*"), key=lambda folder: folder.stat().st_ctime_ns)


def numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not isinstance(value, dict)}


@pytest.fixture(scope="module", autouse=True)
def offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("WANDB_MODE", "offline")
        yield


@pytest.fixture
def anew() -> Iterator[None]:
    """The library reads its environment once in a process."""
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    workdir = tmp_path_factory.mktemp("runs") / "first"
    hooks = sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM)
    made.logged_in_two_parts(workdir, TRAIN, VAL, "wandb")
    assert (sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM)) == hooks
    return workdir


@pytest.mark.slow
def test_rows_are_those_of_metrics_jsonl(resumed):
    logged = [numbers(row) for folder in offline_runs(resumed) for row in history(folder)]
    written = [row for _, row in rows.parse(resumed / "metrics.jsonl")]
    assert [row["split"] for row in written] == ["train"] * 3 + ["val"] + ["train"] * 3 + ["val"]
    assert logged == [{"step": row["step"], **rows.scalars(row)} for row in written]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_one(resumed):
    first, second = offline_runs(resumed)
    ids = {record.run.run_id for folder in (first, second) for record in records(folder)} - {""}
    assert ids == {json.loads((resumed / "wandb.json").read_text())["id"]}
    assert [row["step"] for row in history(second)] == [4, 5, 6, 6]
    names = {(record.run.project, record.run.display_name) for record in records(first)} - {("", "")}
    assert names == {("jaxddp", "first")}


@pytest.mark.slow
def test_a_run_has_its_config_and_where_its_code_comes_from(resumed):
    own = json.loads((resumed / "config.json").read_text())
    first, second = (config(folder) for folder in offline_runs(resumed))
    assert (first["train.duration"], second["train.duration"]) == ("1 epoch", "2 epochs")
    assert second["fingerprint.train"] == own["fingerprint"]["train"]
    assert second["data.image_size"] == own["data"]["image_size"]
    assert second["objects.model"] == own["objects"]["model"]
    assert (second["run.devices"], second["run.parameters"]) == (2, 6 * 6 * 3 * 5)
    assert {"versions.jax", "versions.jaxddp", "seed"} <= second.keys()


@pytest.mark.slow
def test_each_evaluation_shows_its_predictions(resumed):
    from PIL import Image

    for folder in offline_runs(resumed):
        (row,) = (row for row in history(folder) if "val/predictions" in row)
        shown = row["val/predictions"]
        assert len(shown["captions"]) == len(shown["filenames"]) == len(VAL)
        for file, image in zip(shown["filenames"], VAL.images, strict=True):
            np.testing.assert_array_equal(np.asarray(Image.open(folder / "files" / file)), image)


@pytest.mark.slow
@pytest.mark.parametrize(("status", "code", "preempting"), [("done", 0, 0), ("failed", 1, 0), ("preempted", 75, 1)])
def test_the_end_of_a_run_is_told(status, code, preempting, tmp_path):
    logger = WandB(tmp_path)
    logger.start(RunStart(0, 9, 8, 9, 1, 1))
    logger.end(RunEnd(status, 3, 1.0))
    (folder,) = offline_runs(tmp_path)
    kinds = [record.WhichOneof("record_type") for record in records(folder)]
    (end,) = (record.exit for record in records(folder) if record.WhichOneof("record_type") == "exit")
    assert (end.exit_code, kinds.count("preempting")) == (code, preempting)


@pytest.mark.slow
def test_a_run_from_step_0_begins_another_and_the_environment_has_its_say(anew, tmp_path, monkeypatch, capfd):
    ids = []
    monkeypatch.setenv("WANDB_PROJECT", "flowers")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    for _ in range(2):
        logger = WandB(tmp_path / "run")
        logger.start(RunStart(0, 9, 8, 9, 1, 1))
        logger.end(RunEnd("done", 9, 1.0))
        ids.append(json.loads((tmp_path / "run" / "wandb.json").read_text())["id"])
    folders = offline_runs(tmp_path)
    assert [{record.run.run_id for record in records(folder)} - {""} for folder in folders] == [{own} for own in ids]
    assert ids[0] != ids[1]
    assert {record.run.project for record in records(folders[0])} - {""} == {"flowers"}
    said = capfd.readouterr()
    assert said.out.splitlines() == [f"wandb: offline; to send it: wandb sync {folder}" for folder in folders]
    assert said.err == ""


@pytest.mark.slow
def test_without_a_key_there_is_an_error_and_no_question(anew, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(Exception, match="No API key configured"):
        WandB(tmp_path).start(RunStart(0, 9, 8, 9, 1, 1))
    assert not (tmp_path / "wandb.json").exists()


def test_how_many_images_it_shows_is_the_configs_to_say(tmp_path):
    wanted = [wandb_of(Config().replace(log={"images": images}), tmp_path).wants_predictions for images in (None, 0, 5)]
    assert wanted == [16, 0, 5]
