"""A bad image ends a run with a one-line error, or is substituted by another image, counted up to a limit."""

import json
from pathlib import Path

import pytest
from support.ilsvrc import write_tree

from jaxddp.cli import main
from jaxddp.data.formats.ilsvrc import train_solutions

# Each validation starts an input stream, so a run validates only once, at the end.
OPTIONS = ["--train.batch-size", "8", "--eval.batch-size", "8", "--train.duration", "2 epochs", "--log.to", "jsonl"]
OPTIONS += ["--eval.every", "0 steps", "--log.every", "1 step", "--parallel.self-test", "never"]
BAD = (0, 10)
pytestmark = pytest.mark.usefixtures("linear_resnet")


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
    few = ["--data.bad-images", "substitute", "--data.max-bad-images", "0.04"]
    assert train(root, tmp_path / "run", *few) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert "2 images of this epoch were substituted, and --data.max-bad-images allows 1; find them with" in last
    assert last.startswith("jaxddp: step ")
    # They are found when a data set is loaded onto the devices, too.
    assert train(root, tmp_path / "device", *few, "--data.cache", "device") == 2
    assert "--data.cache device: 2 images" in capfd.readouterr().err.splitlines()[-1]
    assert train(root, tmp_path / "more", *few[:-1], "0.1", "--data.cache", "device") == 0
    # The same command continues the run with a higher limit.
    assert train(root, tmp_path / "run", *few[:-1], "0.1") == 0
    resumed, whole = ([row["loss"] for row in train_records(tmp_path / name)] for name in ("run", "more"))
    assert resumed == whole


@pytest.mark.slow
def test_a_bad_row_is_counted_once_an_epoch_where_a_batch_spans_two_epochs(root: Path, tmp_path: Path):
    """In batches of 10 of 24 examples, a bad row may be late in one epoch and early in the next."""
    options = ["--data.bad-images", "substitute", "--data.max-bad-images", "0.08", "--parallel.devices", "1"]
    options += ["--train.batch-size", "10", "--train.duration", "20 epochs", "--checkpoint.every", "100 steps"]
    assert train(root, tmp_path / "run", *options) == 0
    counts = [round(record["substituted"] * 10) for record in train_records(tmp_path / "run")]
    assert 20 <= sum(counts) <= 2 * 20
