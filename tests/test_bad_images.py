"""A bad image ends a run with a one-line error, or is substituted by another image, counted up to a limit."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.ilsvrc import write_tree
from support.networks import linear_model
from support.runs import train_config

from jaxddp.cli import main
from jaxddp.config import Config, load
from jaxddp.data.formats.ilsvrc import train_solutions

OPTIONS = ["--model.width", "4", "--train.batch-size", "8", "--eval.batch-size", "8", "--log.every", "1 step"]
# Each validation starts an input stream, so a run validates only once, at the end.
OPTIONS += ["--log.to", "jsonl", "--train.duration", "2 epochs", "--eval.every", "0 steps"]
OPTIONS += ["--parallel.self-test", "never"]
BAD = (3, 10)


@pytest.fixture(autouse=True)
def quick_network(monkeypatch: pytest.MonkeyPatch):
    """Use a linear network, which compiles fast, because these tests are about the input."""
    monkeypatch.setattr("jaxddp.models.resnet.build", lambda settings, classes, *_: linear_model(classes))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 24 training images, and cut two of them short, one with an end-of-image marker and one without."""
    root = write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=8, val=3)
    table = train_solutions(root)
    for row, end in zip(BAD, (b"", b"\xff\xd9"), strict=True):
        Path(table.name(row)).write_bytes(table.read(row)[:-200] + end)
    return root


def train(root: Path, workdir: Path, *options: str) -> int:
    return main(["train", "digits", "--data.path", str(root), "--workdir", str(workdir), *OPTIONS, *options])


def train_records(workdir: Path) -> list[dict]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["split"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_other_images_are_substituted_and_counted(root: Path, tmp_path: Path, devices: int):
    options = ["--data.bad-images", "substitute", "--data.max-bad-images", "0.1", "--parallel.devices", str(devices)]
    assert train(root, tmp_path / "run", *options) == 0
    records = train_records(tmp_path / "run")
    # Each of the two bad images appears once an epoch. `substituted` is a share of the batch of 8.
    assert [record["step"] for record in records] == list(range(1, 7))
    assert sum(record["substituted"] for record in records[:3]) == pytest.approx(2 / 8)
    assert sum(record["substituted"] for record in records[3:]) == pytest.approx(2 / 8)


@pytest.mark.slow
def test_too_many_bad_images_end_the_run(root: Path, tmp_path: Path, capfd):
    assert train(root, tmp_path / "run", "--data.bad-images", "substitute", "--data.max-bad-images", "0.04") == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert "2 images of this epoch were substituted, and --data.max-bad-images allows 1; find them with" in last
    assert last.startswith("jaxddp: step ")


@pytest.mark.slow
@pytest.mark.parametrize("share", ["0.1", "0.04"])
def test_bad_images_are_found_when_a_data_set_is_loaded_onto_the_devices(root: Path, tmp_path: Path, capfd, share: str):
    options = ["--data.bad-images", "substitute", "--data.max-bad-images", share, "--data.cache", "device"]
    code = train(root, tmp_path / "run", *options)
    if share == "0.1":
        assert code == 0
    else:
        assert code == 2
        assert "--data.cache device: 2 images" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.ci
def test_a_resumed_run_equals_an_uninterrupted_one(root: Path, tmp_path: Path):
    """A user may raise the limit on resume, after a run has ended at the limit."""
    config = config_of(root)
    uninterrupted = train_config(config, tmp_path / "whole")
    train_config(config.replace(train={"duration": "4 steps"}), tmp_path / "parts")
    resumed = train_config(config.replace(data={"max_bad_images": 0.5}), tmp_path / "parts", resume="must")
    assert int(resumed.step) == 6
    for expected, actual in zip(leaves(uninterrupted), leaves(resumed), strict=True):
        np.testing.assert_array_equal(expected, actual)
    assert [record["loss"] for record in train_records(tmp_path / "parts")] == [
        record["loss"] for record in train_records(tmp_path / "whole")
    ]


def config_of(root: Path) -> Config:
    return load("digits").replace(
        data={"path": str(root), "bad_images": "substitute", "max_bad_images": 0.1},
        model={"width": 4},
        train={"batch_size": 8, "duration": "6 steps"},
        eval={"batch_size": 8, "every": "0 steps"},
        parallel={"self_test": "never"},
        # By default, schedule and warm-up depend on the length of the run, and the first part is shorter.
        optimizer={"schedule": "constant", "warmup": "0 steps"},
        log={"every": "1 step", "to": ("jsonl",)},
    )


def leaves(state) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_a_bad_row_is_counted_once_an_epoch_where_a_batch_spans_two_epochs(root: Path, tmp_path: Path):
    """In batches of 10 of 24 examples, a bad row may be late in one epoch and early in the next."""
    options = ["--data.bad-images", "substitute", "--data.max-bad-images", "0.08", "--parallel.devices", "1"]
    options += ["--train.batch-size", "10", "--train.duration", "20 epochs", "--checkpoint.every", "100 steps"]
    assert train(root, tmp_path / "run", *options) == 0
    counts = [round(record["substituted"] * 10) for record in train_records(tmp_path / "run")]
    assert 20 <= sum(counts) <= 2 * 20
