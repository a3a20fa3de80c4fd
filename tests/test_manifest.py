"""Checkpoints and the files beside them: damage is found before they are used, and reported in one line."""

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support import runs
from support.cases import few
from support.data import random_table, write_arrays
from support.networks import largest_difference, linear_model
from support.shared import sgd

import jaxddp
from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers
from jaxddp.engine.state import TrainState
from jaxddp.training.checkpoints.integrity import Integrity
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.checkpoints.manifest_format import sealed, sha256
from jaxddp.training.checkpoints.validation_file import ValidationFile
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners import metric_rows as rows
from jaxddp.training.listeners.jsonl import JsonLines
from jaxddp.workdir.claim import Claim, claim
from jaxddp.workdir.session import rename_damaged, session

RECIPE = str(Path(__file__).parent / "recipes" / "small_recipe.py")
DEEP = "[" * 100_000


def state_of(setup=None) -> TrainState:
    return runs.setup_of(linear_model(), sgd(0.05, momentum=0.9)).state if setup is None else setup.state


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """The validated checkpoints of steps 2 and 4."""
    place = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(place) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state_of(), {"epoch_values": 0.5})
            checkpoints.validations.put(step, {"top1": step / 10, "loss": 1.0})
    return place


@pytest.fixture
def place(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run" / "checkpoints")


def files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def arrays(step: Path) -> Path:
    """Returns the largest of the files with arrays."""
    return max(files_in(step / "state" / "ocdbt.process_0" / "d"), key=lambda file: file.stat().st_size)


# Damage that is found


@pytest.mark.slow
@pytest.mark.parametrize("count", few((200,), 1000))
def test_all_of_a_thousand_damages_are_found(place, count):
    """Damages bits, lengths and files of a whole directory of checkpoints, with its manifests and other files."""

    def faults() -> list[str]:
        manifests = Integrity(place)
        found = [fault for step in (2, 4) if (fault := manifests.check(step))] + [manifests.fault or ""]
        try:
            ValidationFile(place, manifests)
        except InputError as error:
            found.append(str(error))
        if manifests.expects_validations() and not (place / "validation.json").exists():
            found.append("validation.json is missing")
        return [fault for fault in found if fault]

    names, rng, missed = files_in(place), random.Random(0), []
    # Orbax 0.11.36 writes 29, Orbax 0.12.8 more.
    assert len(names) > 25 and faults() == []
    for number in range(count):
        file = rng.choice(names)
        content = file.read_bytes()
        kind = ("flip", "cut", "delete")[number % 3]
        if kind == "flip":
            flip(file, rng.randrange(8 * len(content)))
        elif kind == "cut":
            file.write_bytes(content[: rng.randrange(len(content))])
        else:
            file.unlink()
        if not faults():
            missed.append((kind, file))
        file.write_bytes(content)
    assert missed == [] and faults() == []


def test_reading_and_restoring_a_checkpoint_do_not_change_its_files(place):
    for read_only in (False, True):
        with Checkpoints(place, read_only=read_only) as checkpoints:
            state, progress = checkpoints.restore(4, state_of())
        assert largest_difference(state.params, state_of().params) == 0 and progress == {"epoch_values": 0.5}
    # Hidden files of file servers and desktops are not damage; a file that could be read as data is.
    (place / "4" / "state" / ".nfs0001").write_text("")
    assert [Integrity(place).check(step) for step in (2, 4)] == [None, None]
    (place / "4" / "state" / "array_metadatas" / "process_7").write_text("{}")
    assert Integrity(place).check(4) == "state/array_metadatas/process_7 does not belong to it"


def test_a_damaged_checkpoint_is_not_restored(place):
    flip(arrays(place / "4"), 5)
    with Checkpoints(place) as checkpoints:
        for read in (lambda: checkpoints.restore(4, state_of()), lambda: checkpoints.restore_as_saved(4, None)):
            with pytest.raises(
                InputError, match="step 4 is damaged: .* does not hold what was saved; undamaged steps: 2"
            ):
                read()


def test_a_quick_check_compares_names_and_sizes(place):
    file = arrays(place / "4")
    flip(file, 5)
    assert Integrity(place).check(4, quick=True) is None
    assert Integrity(place).check(4) == f"{file.relative_to(place / '4')} does not hold what was saved"
    os.truncate(file, 7)
    assert "has 7 bytes, and " in (Integrity(place).check(4, quick=True) or "")


def test_every_process_gets_the_error_of_a_damaged_checkpoint(place):
    """Process 0 verifies, and its message ends the other processes."""

    class Told(Peers):
        """The peers of another process, which receives the result."""

        def from_first(self, name, make):
            if name == "whole checkpoints":
                raise InputError("step 4 is damaged")
            return make()

    with pytest.raises(InputError, match="^step 4 is damaged$"), session(place.parent, Told()):
        pass


# Manifests that are not there


def test_a_checkpoint_of_an_older_release_restores_and_a_line_says_that_it_was_not_verified(place, caplog):
    (place / "manifests.json").unlink()
    for step in (2, 4):
        (place / str(step) / "manifest.json").unlink()
    with session(place.parent) as own:
        assert own.resume_step == 4
        own.checkpoints.restore(4, state_of())
        assert f"{place / '4'}: step 4 has no manifest" in caplog.text
        own.checkpoints.save(6, state_of(), {})
    manifests = Integrity(place)
    assert [manifests.needs_manifest(step) for step in (4, 6)] == [False, True]
    # Without a manifest, the files that every checkpoint has are checked.
    (place / "4" / "state" / "_METADATA").unlink()
    assert manifests.check(4) == "state/_METADATA is missing"


def test_a_run_that_was_killed_before_the_manifest_resumes_there(saved, place, monkeypatch, caplog):
    monkeypatch.setattr(Integrity, "write", lambda self, step: None)
    with Checkpoints(place) as checkpoints:
        checkpoints.save(6, state_of(), {})
    monkeypatch.undo()
    with session(place.parent) as own:
        assert own.resume_step == 6
        own.checkpoints.restore(6, state_of())
    assert "step 6 has no manifest" in caplog.text


def test_a_manifest_that_was_deleted_is_damage(place, caplog):
    (place / "4" / "manifest.json").unlink()
    assert Integrity(place).check(4) == "manifest.json is missing"
    # Without the index, the manifests of other steps show that this run writes them.
    (place / "manifests.json").unlink()
    assert Integrity(place).check(4) == "manifest.json is missing"
    with session(place.parent) as own:
        assert own.resume_step == 2
        own.checkpoints.save(4, state_of(), {})
    assert "manifests.json: is missing; it is rebuilt" in caplog.text
    manifests = Integrity(place)
    assert manifests.fault is None and [manifests.check(step) for step in (2, 4)] == [None, None]


def test_a_manifest_of_another_run_is_not_accepted(place, tmp_path):
    with Checkpoints(tmp_path / "other") as other:
        other.save(4, state_of(runs.setup_of(linear_model(), sgd(0.05, momentum=0.9), seed=1)), {})
    shutil.rmtree(place / "4")
    shutil.copytree(tmp_path / "other" / "4", place / "4")
    assert Integrity(place).check(4) == "manifest.json is not the one that was written"


LISTED = {"step": 4, "files": {}}
MISTYPED = {
    "no step": {"files": {}},
    "a step that is text": LISTED | {"step": "4"},
    "files in a list": LISTED | {"files": []},
    "a file without a digest": LISTED | {"files": {"x": {"bytes": 1}}},
    "a size that is text": LISTED | {"files": {"x": {"bytes": "1", "sha256": "0"}}},
    "a file elsewhere": LISTED | {"files": {"../2/x": {"bytes": 1, "sha256": "0"}}},
    "half a character": LISTED | {"files": {"\ud800": {"bytes": 1, "sha256": "0"}}},
    "a run that is text": LISTED | {"run": "x"},
    "a run without digests": LISTED | {"run": {"id": "x"}},
}


@pytest.mark.parametrize("content", MISTYPED.values(), ids=MISTYPED)
def test_a_manifest_of_another_form_is_damage_even_with_a_valid_digest(content, place):
    manifest = sealed(content)
    (place / "4" / "manifest.json").write_bytes(manifest)
    index = json.loads((place / "manifests.json").read_bytes())
    index["steps"]["4"] = sha256(manifest)
    del index["sha256"]
    (place / "manifests.json").write_bytes(sealed(index))
    assert (Integrity(place).check(4) or "").startswith("manifest.json is damaged (")
    assert rename_damaged(place) == "4.damaged"


INDICES = {
    "nothing": {},
    "steps in a list": {"steps": ["4"], "validations": []},
    "a digest that is none": {"steps": {"4": 5}, "validations": []},
    "validations in text": {"steps": {}, "validations": "x"},
    "a run that is a number": {"run_id": 5, "steps": {}, "validations": []},
}


@pytest.mark.parametrize("content", INDICES.values(), ids=INDICES)
def test_an_index_of_another_form_is_written_anew(content, place, caplog):
    (place / "manifests.json").write_bytes(sealed(content))
    with session(place.parent) as own:
        assert own.resume_step == 4
        own.checkpoints.save(6, state_of(), {})
    assert "manifests.json: is damaged (" in caplog.text
    manifests = Integrity(place)
    assert manifests.fault is None and [manifests.check(step) for step in (4, 6)] == [None, None]


MEASURED = {
    "a list": "[]",
    "no metrics": '{"2": []}',
    "no step": '{"x": {}}',
    "a step before the first": '{"-2": {}}',
    "a step in other digits": '{"\u0662": {}}',
    "truth": '{"2": {"top1": true}}',
    "beyond all floats": f'{{"2": {{"top1": 1{400 * "0"}}}}}',
    "infinity": '{"2": {"top1": Infinity}}',
    "a goal that is none": '{"goal": 5}',
    "a goal without its side": '{"goal": {"best": "val loss", "smoothing": 0}}',
    "a goal that smooths all away": '{"goal": {"best": "val loss", "is": "min", "smoothing": 1}}',
}


@pytest.mark.parametrize("text", MEASURED.values(), ids=MEASURED)
def test_validations_of_another_form_are_damage_even_if_the_index_lists_them(text, place):
    manifests = Integrity(place)
    manifests.expect_validations(text.encode())
    (place / "validation.json").write_text(text)
    with pytest.raises(InputError, match=r"validation.json: is damaged \("):
        ValidationFile(place, Integrity(place))


def test_a_copy_of_a_step_under_another_number_is_set_aside(place):
    for number in ("3", "6"):
        shutil.copytree(place / "4", place / number)
    assert Integrity(place).check(3) == "its manifest is of step 4"
    assert rename_damaged(place) == "6.damaged" and Integrity(place).check(4) is None


def test_a_manifest_that_cannot_be_written_ends_the_run(tmp_path, monkeypatch):
    def full(self, step):
        raise InputError("x: cannot be written (No space left on device)")

    monkeypatch.setattr(Integrity, "write", full)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state_of(), {})
    with pytest.raises(InputError, match="No space left"):
        checkpoints.wait()
    checkpoints.close()


def test_a_large_file_is_hashed_early_and_again_if_it_changes(tmp_path):
    """A digest that was computed while a step is written is used for the renamed file, and for no other file."""
    growing, place = tmp_path / "8.orbax-checkpoint-tmp" / "d.lock", tmp_path / "8"
    other = growing.with_name("other")
    growing.parent.mkdir()
    for file in (growing, other):
        file.write_bytes(os.urandom(1 << 21))
    manifests, give_up = Integrity(tmp_path), time.monotonic() + 20
    with manifests.hashing_early(8):
        while len(manifests._early_digests) < 2 and time.monotonic() < give_up:
            time.sleep(0.01)
        growing.rename(growing.with_name("d"))
        growing.parent.rename(place)
    early = sorted(manifests._early_digests.values())
    assert early == sorted(sha256((place / name).read_bytes()) for name in ("d", "other"))
    with (place / "other").open("ab") as file:
        file.write(b"more")
    manifests.write(8)
    listed = json.loads((place / "manifest.json").read_text())["files"]
    assert {name: entry["sha256"] for name, entry in listed.items()} == {
        name: sha256((place / name).read_bytes()) for name in ("d", "other")
    }
    assert Integrity(tmp_path).check(8) is None


# Commands and the Python API


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "images.npz"
    return write_arrays(file, random_table(16, image=16), random_table(9, seed=1, image=16))


def words(data: Path, workdir: Path, *more: str) -> list[str]:
    own = ["--checkpoint.every", "2 steps", "--log.to", "jsonl", "--checkpoint.keep", "3"]
    return ["train", RECIPE, "--data.path", str(data), "--workdir", str(workdir), *own, *more]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """A run of four steps from the command line, saved after steps 2 and 4."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    assert main(words(data, workdir, "--train.duration", "4 steps")) == 0
    return workdir


@pytest.fixture
def workdir(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> tuple[Callable[[Path], object], Path]:
    """Returns a function that trains from Python in a work directory, and a directory with the checkpoint of step 2."""
    setup = jaxddp.prepare_training(linear_model(), random_table(16), 1, sgd(0.1), 8)
    workdir = tmp_path_factory.mktemp("python") / "run"

    def train(place: Path) -> object:
        return jaxddp.train(jaxddp.softmax_cross_entropy, setup, workdir=place, listeners=())

    train(workdir)
    return train, workdir


def line_of(arguments: list[str], capfd) -> str:
    """Returns the last line of a command that ends with code 2."""
    assert main(arguments) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    return error.rstrip("\n").split("\n")[-1]


def zeros(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[:4096] = bytes(min(4096, len(content)))
    file.write_bytes(content)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.unlink()
        make(file)

    return change


# Changes to a step's directory, with the message of each.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda step: arrays(step).unlink(), " is missing"),
    "a file is cut": (lambda step: os.truncate(arrays(step), 10), " has 10 bytes, and "),
    "zeros": (lambda step: zeros(arrays(step)), " does not hold what was saved"),
    "a flipped bit": (lambda step: flip(arrays(step), 99), " does not hold what was saved"),
    "no OCDBT manifest": (lambda step: (step / "state/manifest.ocdbt").unlink(), "state/manifest.ocdbt is missing"),
    # The first missing file depends on Orbax.
    "no progress": (lambda step: shutil.rmtree(step / "progress"), " is damaged: progress/"),
    "no metadata": (lambda step: (step / "state/_METADATA").unlink(), "state/_METADATA is missing"),
    "a directory": (lambda step: instead(Path.mkdir)(arrays(step)), " is not a regular file"),
    "a pipe": (lambda step: instead(os.mkfifo)(arrays(step)), " is not a regular file"),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "manifest.json is missing"),
    "an emptied step": (lambda step: [shutil.rmtree(step), step.mkdir()], "manifest.json is missing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_checkpoint_raises_a_one_line_error(case, data, workdir, python, tmp_path, capfd):
    damage, expected = DAMAGES[case]
    place = workdir / "checkpoints"
    damage(place / "4")
    before = sorted(file.name for file in place.iterdir())
    # How a step is named does not depend on its damage, and a reader looks again before it reports damage.
    for which in ("latest", "4") if case == "zeros" else ("4",):
        line = line_of(["eval", *words(data, workdir)[1:6], "--step", which], capfd)
        assert line.startswith(f"jaxddp: {place / '4'}: step 4 is damaged: ") and expected in line
        assert line.endswith("; undamaged steps: 2")
    assert sorted(file.name for file in place.iterdir()) == before
    # There is no earlier checkpoint.
    shutil.rmtree(place / "2")
    line = line_of(words(data, workdir, "--train.duration", "6 steps"), capfd)
    assert line.startswith(f"jaxddp: {place / '4'}: step 4 is damaged: ") and expected in line
    assert line.endswith("; no checkpoint there is whole, so restore the files, or start in another --workdir")
    train, trained = python
    other = shutil.copytree(trained, tmp_path / "python")
    damage(other / "checkpoints" / "2")
    with pytest.raises(InputError, match="step 2 is damaged: .*; no checkpoint there is whole") as raised:
        train(other)
    assert expected in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_run_resumes_from_the_newest_undamaged_checkpoint_and_sets_damaged_ones_aside(data, workdir, capfd, caplog):
    place = workdir / "checkpoints"

    def lines() -> list[tuple]:
        found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return [(row["split"], row["step"], row["loss"]) for row in found]

    before = lines()
    flip(arrays(place / "4"), 1234)
    # Orbax treats this directory as a later checkpoint.
    (place / "99").mkdir()
    assert main(words(data, workdir, "--train.duration", "4 steps", "--resume", "must")) == 0
    said = caplog.text
    assert f"{place / '99'}: step 99 is damaged: _CHECKPOINT_METADATA is missing; the run resumes from step 2" in said
    assert f"{place / '4'}: step 4 is damaged: " in said and "this one is kept as 4.damaged" in said
    folders = sorted(entry.name for entry in place.iterdir() if entry.is_dir())
    assert folders == ["2", "4", "4.damaged", "99.damaged"]
    # The run equals one that was never interrupted.
    assert lines() == before and ("train", 4) in [line[:2] for line in before]
    # All its checkpoints are undamaged and listed; with --verify a damaged one sets the exit code.
    capfd.readouterr()
    assert main(["checkpoints", str(workdir), "--verify"]) == 0
    listed = capfd.readouterr().out
    assert listed.count("verified") == 2 and f"set aside: {place / '4.damaged'}" in listed and "latest" in listed
    flip(arrays(place / "4"), 77)
    assert [main(["checkpoints", str(workdir), *more]) for more in ([], ["--verify"])] == [0, 1]
    assert "damaged: state/" in capfd.readouterr().out


def test_listing_checkpoints_shows_their_damage(workdir, capfd):
    place = workdir / "checkpoints"
    (place / "manifests.json").unlink()
    (place / "validation.json").write_text(DEEP)
    assert main(["checkpoints", str(workdir), "--verify"]) == 1
    said = capfd.readouterr().out.splitlines()
    assert said[-2] == f"{place / 'manifests.json'}: is missing"
    assert said[-1].startswith(f"{place / 'validation.json'}: is damaged (")
    assert main(["checkpoints", str(workdir / "nothing")]) == 2
    (workdir / "empty").mkdir()
    assert main(["checkpoints", str(workdir / "empty")]) == 0
    assert "contains no checkpoints" in capfd.readouterr().out


CONTENTS = {
    "a list": ("[1]", r"cannot be read \(it holds \[1\]\)"),
    "deep": (DEEP, r"cannot be read \("),
    "cut": ('{"seed": 1, "da', r"cannot be read \("),
    "not text": ("\udcff\udcfe", r"cannot be read \("),
    "other kinds": ('{"recipe": [3], "fingerprint": 4, "data": 5}', "was .* and is now"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTENTS)
def test_a_damaged_config_raises_a_one_line_error(case, data, workdir, python, tmp_path, capfd):
    text, expected = CONTENTS[case]
    content = text.encode(errors="surrogateescape")
    config = workdir / "config.json"
    config.write_bytes(content)
    with pytest.raises(InputError, match=expected):
        raise InputError(line_of(words(data, workdir, "--train.duration", "6 steps"), capfd))
    assert str(config) in line_of(["eval", str(config)], capfd)
    train, trained = python
    other = shutil.copytree(trained, tmp_path / "python")
    (other / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=expected):
        train(other)


VALIDATIONS = {"emptied": "{}", "text": '{"2": {"top1": "x"}}', "changed": '{"2": {"top1": 0.75}}', "deep": DEEP}


@pytest.mark.parametrize("text", VALIDATIONS.values(), ids=VALIDATIONS)
def test_damaged_metrics_of_validation_raise_a_one_line_error(text, data, workdir, capfd):
    file = workdir / "checkpoints" / "validation.json"
    file.write_text(text)
    line = line_of(words(data, workdir, "--train.duration", "6 steps"), capfd)
    assert line.startswith(f"jaxddp: {file}: is damaged (") and line.endswith("so copy the best checkpoint first")
    # The advice of the message helps, and the loss of the earlier metrics is logged.
    file.unlink()
    with Checkpoints(file.parent) as checkpoints:
        assert checkpoints.best() is None and checkpoints.latest() == 4


@pytest.mark.parametrize(
    "line", (DEEP, "[3]", '{"step": 3, "split": "train", "loss": "x"}', '{"step": 3, "split": [1]}')
)
def test_a_damaged_line_of_metrics_is_named_and_a_torn_one_is_cut(line, tmp_path):
    whole = '{"step": 1, "epoch": 0.5, "split": "train", "loss": 2.5}\n'
    (tmp_path / "metrics.jsonl").write_text(f'{whole}{line}\n{whole}{{"step": 2, "ep')
    with pytest.raises(InputError, match=r"metrics.jsonl:2: not a JSON object with a step and a split"):
        rows.parse(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(f'{whole}{whole}{{"step": 2, "ep')
    assert [row["step"] for _, row in rows.parse(tmp_path / "metrics.jsonl")] == [1, 1]


# Atomicity


@pytest.mark.slow
def test_a_reader_never_finds_half_a_file(tmp_path):
    """config.json, result.json, validation.json and the index are complete whenever they exist."""
    done, torn = threading.Event(), []
    names = ("config.json", "result.json", "validation.json", "manifests.json")

    def read() -> None:
        while not done.is_set():
            for name in names:
                try:
                    json.loads((tmp_path / name).read_bytes())
                except FileNotFoundError:
                    pass
                except ValueError:
                    torn.append(name)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        listener = JsonLines(tmp_path)
        start = RunStart(start_step=0, total_steps=1, batch_size=1, num_examples=1, devices=1, processes=1)
        validations = ValidationFile(tmp_path, Integrity(tmp_path))
        long = "x" * 200_000
        for number in range(20):
            claim(tmp_path, Claim({"seed": number, "text": long}, {}), resuming=False)
            listener.start(start)
            listener.end(RunEnd("failed", number, 1.0, {}, long))
            validations.put(number, {f"metric_{each}": np.float32(each) for each in range(500)})
    finally:
        done.set()
        reader.join()
    assert torn == []
    assert [json.loads((tmp_path / name).read_bytes()) is not None for name in names] == [True] * 4
