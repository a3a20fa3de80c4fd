"""Damage to checkpoints and to the files beside them is detected before use, and raises a one-line error."""

import contextlib
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from orbax.checkpoint import CheckpointManager
from support import runs
from support.cases import essential_and_ci, essential_and_rare
from support.data import random_table, write_arrays
from support.networks import largest_difference, linear_model
from support.runs import fails
from support.shared import sgd

import jaxddp.core.files as files
from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers
from jaxddp.engine.state import TrainState
from jaxddp.training.checkpoints.integrity import Integrity, ValidationFile, sealed
from jaxddp.training.checkpoints.manager import Checkpoints
from jaxddp.training.events import RunEnd, RunStart
from jaxddp.training.listeners import jsonl as rows
from jaxddp.training.listeners.jsonl import JsonLines
from jaxddp.workdir.claim import Claim, claim
from jaxddp.workdir.session import rename_damaged, session

RECIPE = str(Path(__file__).parent / "recipes" / "small_recipe.py")
DEEP_JSON = "[" * 100_000


def state_of(setup=None) -> TrainState:
    return runs.setup_of(linear_model(), sgd(0.05, momentum=0.9)).state if setup is None else setup.state


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a folder with the validated checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        for step in (2, 4):
            checkpoints.save(step, state_of(), {"epoch_seconds": 0.5})
            checkpoints.validations.put(step, {"top1": step / 10, "loss": 1.0})
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "run" / "checkpoints")


def files_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def flip_bit(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def largest_array_file(step: Path) -> Path:
    """Return the largest file with array data in the directory of a step."""
    return max(files_in(step / "state" / "ocdbt.process_0" / "d"), key=lambda file: file.stat().st_size)


@pytest.mark.ci
@pytest.mark.parametrize("count", essential_and_rare((200,), 1000))
def test_each_of_a_thousand_random_damages_is_detected(folder, count):
    def list_faults() -> list[str]:
        manifests = Integrity(folder)
        problems = [fault for step in (2, 4) if (fault := manifests.check(step))] + [manifests.fault or ""]
        try:
            ValidationFile(folder, manifests)
        except InputError as error:
            problems.append(str(error))
        if manifests.expects_validations() and not (folder / "validation.json").exists():
            problems.append("validation.json is missing")
        return [fault for fault in problems if fault]

    files, rng, missed = files_in(folder), random.Random(0), []
    # Orbax 0.11.36 writes 29 files, and Orbax 0.12.8 writes more.
    assert len(files) > 25 and list_faults() == []
    for number in range(count):
        file = rng.choice(files)
        content = file.read_bytes()
        if number % 3 == 0:
            flip_bit(file, rng.randrange(8 * len(content)))
        elif number % 3 == 1:
            file.write_bytes(content[: rng.randrange(len(content))])
        else:
            file.unlink()
        if not list_faults():
            missed.append((number, file))
        file.write_bytes(content)
    assert missed == [] and list_faults() == []


def test_reading_and_restoring_a_checkpoint_do_not_change_its_files(folder):
    for read_only in (False, True):
        with Checkpoints(folder, read_only=read_only) as checkpoints:
            state, progress = checkpoints.restore(4, state_of())
        assert largest_difference(state.params, state_of().params) == 0 and progress == {"epoch_seconds": 0.5}
    # A hidden file of a file server or desktop is no damage. An additional file that Orbax could read is damage.
    (folder / "4" / "state" / ".nfs0001").write_text("")
    assert [Integrity(folder).check(step) for step in (2, 4)] == [None, None]
    (folder / "4" / "state" / "array_metadatas" / "process_7").write_text("{}")
    assert Integrity(folder).check(4) == "state/array_metadatas/process_7 does not belong to it"


def test_a_save_compiles_no_slices_of_arrays_that_all_devices_hold(tmp_path, caplog):
    state = runs.setup_of(linear_model(), sgd(0.05, momentum=0.9), devices=4).state
    with Checkpoints(tmp_path / "checkpoints") as checkpoints, jax.log_compiles(), caplog.at_level("WARNING"):
        checkpoints.save(1, state, {})
        checkpoints.wait()
        assert largest_difference(checkpoints.restore(1, state)[0], state) == 0
    assert "jit(slice)" not in caplog.text


def test_a_damaged_checkpoint_is_not_restored(folder):
    file = largest_array_file(folder / "4")
    flip_bit(file, 5)
    with Checkpoints(folder) as checkpoints:
        for read in (lambda: checkpoints.restore(4, state_of()), lambda: checkpoints.restore_as_saved(4, None)):
            with pytest.raises(InputError, match="step 4 is damaged: .* does not hold what was saved; undamaged "):
                read()
    assert Integrity(folder).check(4, quick=True) is None
    assert Integrity(folder).check(4) == f"{file.relative_to(folder / '4')} does not hold what was saved"
    os.truncate(file, 7)
    assert "has 7 bytes, and " in (Integrity(folder).check(4, quick=True) or "")


def test_every_process_gets_the_error_of_a_damaged_checkpoint(folder):
    class OtherProcess(Peers):
        def from_first(self, name, make):
            if name == "whole checkpoints":
                raise InputError("step 4 is damaged")
            return make()

    with pytest.raises(InputError, match="^step 4 is damaged$"), session(folder.parent, OtherProcess()):
        pass


def test_a_run_resumes_from_a_checkpoint_whose_manifest_was_not_written(saved, folder, monkeypatch, caplog):
    order = list[str]()
    shutil.rmtree(folder / "4")
    with monkeypatch.context() as patch, Checkpoints(folder) as checkpoints:
        patch.setattr(Integrity, "write", lambda self, step: order.append("manifest"))
        checkpoints.save(4, state_of(), {})
        wait, name = CheckpointManager.wait_until_finished, "wait_until_finished"
        patch.setattr(CheckpointManager, name, lambda manager: order.append("wait") or wait(manager))
        checkpoints.wait()
        # Ctrl-C may end a wait of the main thread before the save is complete.
        assert order[-2:] == ["manifest", "wait"]
    with session(folder.parent) as run_session:
        assert run_session.resume_step == 4
        run_session.checkpoints.restore(4, state_of())
    assert "step 4 has no manifest" in caplog.text


def test_a_deleted_manifest_is_damage(folder, caplog):
    (folder / "4" / "manifest.json").unlink()
    assert Integrity(folder).check(4) == "manifest.json is missing"
    # Without the index, the manifests of other steps show that this run writes them.
    (folder / "manifests.json").unlink()
    assert Integrity(folder).check(4) == "manifest.json is missing"
    with session(folder.parent) as run_session:
        assert run_session.resume_step == 2
        run_session.checkpoints.save(4, state_of(), {})
    assert "manifests.json: is missing; it is rebuilt" in caplog.text
    manifests = Integrity(folder)
    assert manifests.fault is None and [manifests.check(step) for step in (2, 4)] == [None, None]


def test_a_manifest_of_another_step_or_run_is_not_accepted(folder, tmp_path):
    for number in ("3", "6"):
        shutil.copytree(folder / "4", folder / number)
    assert Integrity(folder).check(3) == "its manifest is of step 4"
    assert rename_damaged(folder) == "6.damaged" and Integrity(folder).check(4) is None
    with Checkpoints(tmp_path / "other") as other:
        other.save(4, state_of(runs.setup_of(linear_model(), sgd(0.05, momentum=0.9), seed=1)), {})
    shutil.rmtree(folder / "4")
    shutil.copytree(tmp_path / "other" / "4", folder / "4")
    assert Integrity(folder).check(4) == "manifest.json is not the one that was written"


@pytest.mark.parametrize("content", [{}, {"steps": ["4"], "validations": []}])
def test_a_malformed_index_is_rewritten(content, folder, caplog):
    (folder / "manifests.json").write_bytes(sealed(content))
    with session(folder.parent) as run_session:
        assert run_session.resume_step == 4
        run_session.checkpoints.save(6, state_of(), {})
    assert "manifests.json: is damaged (" in caplog.text
    manifests = Integrity(folder)
    assert [manifests.fault, *map(manifests.check, (4, 6))] == [None] * 3 and ValidationFile(folder, manifests).by_step


def test_the_validations_are_sound_after_two_failed_writes(folder, monkeypatch):
    ValidationFile(folder, Integrity(folder)).put(4, {"top1": 0.5})
    replace = files.replace

    def fail_for_validations(path, data):
        if path.name == "validation.json":
            raise InputError(f"{path}: cannot be written (No space left on device)")
        replace(path, data)

    monkeypatch.setattr(files, "replace", fail_for_validations)
    for _ in range(2):
        with pytest.raises(InputError, match="No space left"):
            ValidationFile(folder, Integrity(folder)).put(6, {"top1": 0.6})
    monkeypatch.undo()
    assert ValidationFile(folder, Integrity(folder)).by_step[4] == {"top1": 0.5}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "images.npz"
    return write_arrays(file, random_table(16, image=16), random_table(9, seed=1, image=16))


def train_arguments(data: Path, workdir: Path, *more_options: str) -> list[str]:
    options = ["--checkpoint.every", "2 steps", "--log.to", "jsonl", "--checkpoint.keep", "3"]
    return ["train", RECIPE, "--data.path", str(data), "--workdir", str(workdir), *options, *more_options]


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Path:
    """Return the work directory of a run of four steps from the command line, saved after steps 2 and 4."""
    workdir = tmp_path_factory.mktemp("trained") / "run"
    assert main(train_arguments(data, workdir, "--train.duration", "4 steps")) == 0
    return workdir


@pytest.fixture
def workdir(trained, tmp_path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


# Functions that damage the directory of a step, each with a text of the expected message.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is missing": (lambda step: largest_array_file(step).unlink(), " is missing"),
    "a file is cut": (lambda step: os.truncate(largest_array_file(step), 10), " has 10 bytes, and "),
    "a flipped bit": (lambda step: flip_bit(largest_array_file(step), 99), " does not hold what was saved"),
    # The release of Orbax determines which missing file comes first.
    "no progress": (lambda step: shutil.rmtree(step / "progress"), " is damaged: progress/"),
    "a pipe": (lambda step: [file := largest_array_file(step), file.unlink(), os.mkfifo(file)], "not a regular file"),
    "no manifest": (lambda step: (step / "manifest.json").unlink(), "manifest.json is missing"),
    "an emptied step": (lambda step: [shutil.rmtree(step), step.mkdir()], "manifest.json is missing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", essential_and_ci(("a flipped bit",), DAMAGES))
def test_a_damaged_checkpoint_raises_a_one_line_error(case, data, workdir, capfd):
    damage, expected = DAMAGES[case]
    folder = workdir / "checkpoints"
    damage(folder / "4")
    names_before = sorted(file.name for file in folder.iterdir())
    line = fails(["eval", *train_arguments(data, workdir)[1:6], "--step", "4"], capfd)
    assert line.startswith(f"jaxddp: {folder / '4'}: step 4 is damaged: ") and expected in line
    assert line.endswith("; undamaged steps: 2")
    assert sorted(file.name for file in folder.iterdir()) == names_before
    shutil.rmtree(folder / "2")
    line = fails(train_arguments(data, workdir, "--train.duration", "6 steps"), capfd)
    assert line.startswith(f"jaxddp: {folder / '4'}: step 4 is damaged: ") and expected in line
    assert line.endswith("; no checkpoint there is whole, so restore the files, or start in another --workdir")


@pytest.mark.slow
def test_a_run_resumes_from_the_newest_undamaged_checkpoint_and_sets_damaged_ones_aside(data, workdir, capfd, caplog):
    folder = workdir / "checkpoints"

    def read_metrics() -> list[tuple]:
        rows_of_file = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        return [(row["split"], row["step"], row["loss"]) for row in rows_of_file]

    before = read_metrics()
    flip_bit(largest_array_file(folder / "4"), 1234)
    # Orbax treats this directory as a later checkpoint.
    (folder / "99").mkdir()
    assert main(train_arguments(data, workdir, "--train.duration", "4 steps", "--resume", "must")) == 0
    log = caplog.text
    assert f"{folder / '99'}: step 99 is damaged: _CHECKPOINT_METADATA is missing; the run resumes from step 2" in log
    assert f"{folder / '4'}: step 4 is damaged: " in log and "this one is kept as 4.damaged" in log
    folders = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    assert folders == ["2", "4", "4.damaged", "99.damaged"]
    # The metrics equal those of the uninterrupted run.
    assert read_metrics() == before and ("train", 4) in [line[:2] for line in before]
    # The command lists both checkpoints as verified. With --verify, a damaged checkpoint sets exit code 1.
    capfd.readouterr()
    assert main(["checkpoints", str(workdir), "--verify"]) == 0
    output = capfd.readouterr().out
    assert output.count("verified") == 2 and f"set aside: {folder / '4.damaged'}" in output and "latest" in output
    flip_bit(largest_array_file(folder / "4"), 77)
    assert [main(["checkpoints", str(workdir), *options]) for options in ([], ["--verify"])] == [0, 1]
    assert "damaged: state/" in capfd.readouterr().out


def test_listing_checkpoints_reports_a_missing_index_and_a_damaged_validation_file(workdir, capfd):
    folder = workdir / "checkpoints"
    (folder / "manifests.json").unlink()
    (folder / "validation.json").write_text(DEEP_JSON)
    assert main(["checkpoints", str(workdir), "--verify"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert lines[-2] == f"{folder / 'manifests.json'}: is missing"
    assert lines[-1].startswith(f"{folder / 'validation.json'}: is damaged (")
    assert main(["checkpoints", str(workdir / "nothing")]) == 2
    (workdir / "empty").mkdir()
    assert main(["checkpoints", str(workdir / "empty")]) == 2
    assert f"{workdir}/empty: contains neither checkpoints nor config.json" in capfd.readouterr().err


DAMAGED_CONFIGS = {
    b"[1]": r"cannot be read \(it holds \[1\]\)",
    DEEP_JSON.encode(): r"cannot be read \(",
    b"\xff\xfe": r"cannot be read \(",
    b'{"recipe": [3], "fingerprint": 4, "data": 5}': "was .* and is now",
}


@pytest.mark.slow
def test_damaged_files_beside_the_checkpoints_raise_a_one_line_error(data, workdir, capfd):
    config = workdir / "config.json"
    intact = config.read_bytes()
    for content, expected in DAMAGED_CONFIGS.items():
        config.write_bytes(content)
        assert re.search(expected, fails(train_arguments(data, workdir, "--train.duration", "6 steps"), capfd))
        assert str(config) in fails(["eval", str(config)], capfd)
    config.write_bytes(intact)
    file = workdir / "checkpoints" / "validation.json"
    file.write_text('{"2": {"top1": "x"}}')
    line = fails(train_arguments(data, workdir, "--train.duration", "6 steps"), capfd)
    assert line.startswith(f"jaxddp: {file}: is damaged (") and line.endswith("so copy the best checkpoint first")
    # After the file is removed, as the message advises, the checkpoints open without the earlier metrics.
    file.unlink()
    with Checkpoints(file.parent) as checkpoints:
        assert checkpoints.best() is None and checkpoints.latest() == 4


@pytest.mark.parametrize("line", (DEEP_JSON, '{"step": 3, "split": "train", "loss": "x"}'))
def test_a_damaged_line_of_metrics_raises_an_error_and_an_unfinished_last_line_is_ignored(line, tmp_path):
    valid_line = '{"step": 1, "epoch": 0.5, "split": "train", "loss": 2.5}\n'
    (tmp_path / "metrics.jsonl").write_text(f'{valid_line}{line}\n{valid_line}{{"step": 2, "ep')
    with pytest.raises(InputError, match=r"metrics.jsonl:2: not a JSON object with a step and a split"):
        rows.parse(tmp_path / "metrics.jsonl")
    (tmp_path / "metrics.jsonl").write_text(f'{valid_line}{valid_line}{{"step": 2, "ep')
    assert [row["step"] for _, row in rows.parse(tmp_path / "metrics.jsonl")] == [1, 1]


@pytest.mark.ci
def test_a_reader_never_reads_a_partly_written_file(tmp_path):
    finished, incomplete = threading.Event(), []
    names = ("config.json", "result.json", "validation.json", "manifests.json")

    def read() -> None:
        while not finished.is_set():
            for name in names:
                try:
                    with contextlib.suppress(FileNotFoundError):
                        json.loads((tmp_path / name).read_bytes())
                except ValueError:
                    incomplete.append(name)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        listener = JsonLines(tmp_path)
        start = RunStart(start_step=0, total_steps=1, batch_size=1, num_examples=1, devices=1, processes=1)
        validations = ValidationFile(tmp_path, Integrity(tmp_path))
        long_text = "x" * 200_000
        for number in range(20):
            claim(tmp_path, Claim({"seed": number, "text": long_text}, {}), resuming=False)
            listener.start(start)
            listener.end(RunEnd("failed", number, 1.0, {}, long_text))
            validations.put(number, {f"metric_{index}": np.float32(index) for index in range(500)})
    finally:
        finished.set()
        reader.join()
    assert incomplete == []
    assert [json.loads((tmp_path / name).read_bytes()) is not None for name in names] == [True] * 4
