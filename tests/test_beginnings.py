"""An error at the start of a run leaves no work directory behind, and removes no earlier files."""

import errno
import logging
import os
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from support.data import random_table, write_arrays
from support.networks import linear_model
from support.peers import as_processes
from support.runs import fails
from support.shared import sgd

import jaxddp
from jaxddp import ArrayTable, InputError
from jaxddp.recipe.file import COPY_FOLDER
from jaxddp.workdir.lock import locked
from jaxddp.workdir.session import check_shared, session

RECIPE = str(Path(__file__).parent / "recipes" / "small_recipe.py")


@pytest.fixture
def words(tmp_path) -> list[str]:
    data = write_arrays(tmp_path / "images.npz", random_table(16, image=16), random_table(8, image=16))
    return ["--data.path", str(data), "--workdir", str(tmp_path / "w")]


def test_a_mistake_in_a_recipe_leaves_no_work_directory(words, tmp_path, capfd):
    assert "nosuch" in fails(["train", RECIPE, *words, "--model.freeze", "nosuch"], capfd)
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_a_network_for_other_classes_is_rejected_before_anything_is_written(words, tmp_path, capfd):
    (tmp_path / "mine.py").write_text(
        f"from jaxddp.config import load\nfrom jaxddp.models.resnet import build\n"
        f"def get_config():\n    return load({RECIPE!r})\n"
        f"def get_model(config, num_classes):\n    return build(config.model, 7)\n"
    )
    assert fails(["train", str(tmp_path / "mine.py"), *words], capfd) == (
        f"jaxddp: {tmp_path}/mine.py: get_model: the model returned float32[2, 7] for 2 images; return logits, "
        "float[2, 5], one for each of the 5 classes of the data: the network's last layer has 7 outputs; give it 5"
    )
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("existing", [None, "notes.txt", "checkpoints/4.damaged", "config.json", COPY_FOLDER])
def test_existing_files_stay_after_an_error_at_the_start(existing, tmp_path):
    if existing:
        (tmp_path / existing).mkdir(parents=True)
    with pytest.raises(InputError, match="^a mistake$"), session(tmp_path) as started:
        if existing != "config.json":
            (started.directory / "config.json").write_text("{}")
        raise InputError("a mistake")
    assert tmp_path.is_dir()
    assert not existing or (tmp_path / existing).is_dir()
    assert existing or not os.listdir(tmp_path)


def test_a_later_error_and_a_finished_run_keep_the_work_directory(tmp_path):
    with pytest.raises(ZeroDivisionError), session(tmp_path / "error"):
        raise ZeroDivisionError
    with session(tmp_path / "end"):
        pass
    assert (tmp_path / "error" / ".lock").exists() and (tmp_path / "end" / ".lock").exists()


def test_a_lock_whose_file_was_removed_is_not_held(tmp_path, monkeypatch):
    tries = []

    def try_lock(file):
        """Fail at the first attempt; at the second, replace the lock file first, as the end of another run does."""
        tries.append(file)
        if len(tries) == 2:
            (tmp_path / ".lock").unlink()
            (tmp_path / ".lock").touch()
        return len(tries) > 1

    monkeypatch.setattr("jaxddp.workdir.lock.try_lock", try_lock)
    with pytest.raises(jaxddp.core.errors.Unreachable, match="another run is writing there"), locked(tmp_path):
        pass


def test_an_error_names_the_directory_that_cannot_be_written(tmp_path, monkeypatch):
    places = tmp_path, tmp_path / "link"
    places[1].symlink_to(tmp_path)
    monkeypatch.setattr(os, "access", lambda place, mode: place == tmp_path)
    errors = as_processes(2, lambda peers: check_shared(places[peers.process_index], peers))
    reason = "process 1 cannot write there; give a --workdir that all hosts share"
    assert [*map(str, errors)] == [f"{place}: {reason}" for place in places]
    monkeypatch.setattr(Path, "touch", MagicMock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS))))
    with pytest.raises(InputError) as error, session(tmp_path / "w"):
        pass
    assert str(error.value) == f"{tmp_path / 'w'}: cannot be written (Read-only file system); choose another place"


@pytest.mark.slow
def test_validation_classes_without_training_examples_are_logged(caplog):
    images, names = random_table(8).images, tuple("abcdef")
    setup = jaxddp.prepare_training(linear_model(6), ArrayTable(images, np.arange(8) % 2, names), 1, sgd(0.1), 4)
    warnings = []
    for labels in ([0, 1, 1, 1, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 2, 2]):
        with caplog.at_level(logging.WARNING, "jaxddp.experiment"):
            val = ArrayTable(images, labels, names)
            jaxddp.train(jaxddp.softmax_cross_entropy, setup, val=val, listeners=(), self_test="never")
        warnings.append([record.message for record in caplog.records if record.message.startswith("validation data")])
    line = "validation data: 6 of 8 examples are of classes without any training examples: 'c', 'd', 'e', ..."
    assert warnings == [[], [line]]
