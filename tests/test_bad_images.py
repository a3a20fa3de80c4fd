"""A run over data with bad images ends with one line, or substitutes them: counted, limited, equal on any hosts."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.ilsvrc import write_tree
from support.networks import linear_model
from support.runs import train_config
from support.shared import sgd

from jaxddp.cli import main
from jaxddp.config import Config, load
from jaxddp.data.formats.ilsvrc import train_solutions

WORDS = ["--model.width", "4", "--train.batch-size", "8", "--eval.batch-size", "8", "--log.every", "1 step"]
# Each validation starts a stream, so there is only one, at the end.
WORDS += ["--log.to", "jsonl", "--train.duration", "2 epochs", "--eval.every", "0 steps"]
WORDS += ["--parallel.self-test", "never"]
BAD = (3, 10)


@pytest.fixture(autouse=True)
def quick_network(monkeypatch: pytest.MonkeyPatch):
    """Use a linear network, which compiles fast: these tests are about the input."""
    monkeypatch.setattr("jaxddp.models.resnet.build", lambda settings, classes, *_: linear_model(classes))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training images; two are cut short, one of them closed with an end marker."""
    root = write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=8, val=3)
    table = train_solutions(root)
    for row, end in zip(BAD, (b"", b"\xff\xd9"), strict=True):
        Path(table.name(row)).write_bytes(table.read(row)[:-200] + end)
    return root


def train(root: Path, workdir: Path, *more: str) -> int:
    return main(["train", "digits", "--data.path", str(root), "--workdir", str(workdir), *WORDS, *more])


def lines(workdir: Path) -> list[dict]:
    records = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["split"] == "train"]


@pytest.mark.slow
def test_a_bad_image_ends_the_run(root: Path, tmp_path: Path, capfd):
    assert train(root, tmp_path / "run") == 2
    last = capfd.readouterr().err.splitlines()[-1]
    table = train_solutions(root)
    assert any(last.startswith(f"jaxddp: {table.name(row)}: ") for row in BAD), last


@pytest.mark.slow
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_other_images_are_substituted_and_counted(root: Path, tmp_path: Path, devices: int):
    allowed = ["--data.bad-images", "substitute", "--data.max-bad-images", "0.1", "--parallel.devices", str(devices)]
    assert train(root, tmp_path / "run", *allowed) == 0
    records = lines(tmp_path / "run")
    # Each bad image appears once an epoch, as a share of its batch.
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
    allowed = ["--data.bad-images", "substitute", "--data.max-bad-images", share, "--data.cache", "device"]
    code = train(root, tmp_path / "run", *allowed)
    if share == "0.1":
        assert code == 0
    else:
        assert code == 2
        assert "--data.cache device: 2 images" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(root: Path, tmp_path: Path):
    """Test also a higher limit on resume, which a user sets after a run has ended at the limit."""
    config = substituting(root)
    whole = train_config(config, tmp_path / "whole")
    train_config(config.replace(train={"duration": "4 steps"}), tmp_path / "parts")
    resumed = train_config(config.replace(data={"max_bad_images": 0.5}), tmp_path / "parts", resume="must")
    assert int(resumed.step) == 6
    for one, other in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    assert [line["loss"] for line in lines(tmp_path / "parts")] == [line["loss"] for line in lines(tmp_path / "whole")]


def substituting(root: Path) -> Config:
    return load("digits").replace(
        data={"path": str(root), "bad_images": "substitute", "max_bad_images": 0.1},
        model={"width": 4},
        train={"batch_size": 8, "duration": "6 steps"},
        eval={"batch_size": 8, "every": "0 steps"},
        parallel={"self_test": "never"},
        # Schedule and warm-up are shares of a run, so a shorter run would have others.
        optimizer={"schedule": "constant", "warmup": "0 steps"},
        log={"every": "1 step", "to": ("jsonl",)},
    )


def leaves(state) -> list[np.ndarray]:
    import jax

    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


@pytest.mark.slow
def test_a_bad_row_is_counted_once_an_epoch_where_a_batch_spans_two_epochs(root: Path, tmp_path: Path):
    """24 examples in batches of 10: the bad rows may be late in one epoch and early in the next."""
    more = ["--data.bad-images", "substitute", "--data.max-bad-images", "0.08", "--parallel.devices", "1"]
    more += ["--train.batch-size", "10", "--train.duration", "20 epochs", "--checkpoint.every", "100 steps"]
    assert train(root, tmp_path / "run", *more) == 0
    counts = [round(record["substituted"] * 10) for record in lines(tmp_path / "run")]
    assert 20 <= sum(counts) <= 2 * 20


@pytest.mark.slow
def test_the_python_api_takes_the_limit_of_bad_images(root: Path):

    import jaxddp

    images = {"image_size": 32, "crop": "whole", "augment": jaxddp.AugmentConfig(flip=False)}
    data = jaxddp.DataConfig(bad_images="substitute", max_bad_images=0.1, **images)
    table = train_solutions(root)
    setup = jaxddp.prepare_training(linear_model(table.num_classes), table, 1, sgd(0.01), 8, data=data)
    _, history = jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=())
    assert history.train["loss"].size
