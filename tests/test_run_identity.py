"""A run distinguishes its checkpoints and files from those of another run, which differs in the seed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from support.data import random_table
from support.networks import largest_difference, linear_model
from support.shared import sgd, shared

import jaxddp
from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.reports.tables import read_runs
from jaxddp.training.checkpoints.integrity import Integrity, RunIdentity

TABLE, VAL = random_table(24), random_table(9, seed=1)


def train(workdir: Path, seed: int, epochs: int = 2):
    """Train a run that saves after steps 2 and 3 (the end of the first epoch), 4 and 6 (the end of the second)."""
    setup = jaxddp.prepare_training(linear_model(), TABLE, 1, sgd(0.05), 8, seed=seed, epochs=2)
    cadences = {"log_every": "1 step", "save_every": "2 steps"}
    state, _ = jaxddp.train(
        jaxddp.softmax_cross_entropy, shared(setup), val=VAL, epochs=epochs, workdir=workdir, listeners=(), **cadences
    )
    return jax.device_get(state)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """The work directories of two runs after one epoch."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate("ab"):
        train(folder / name, seed, epochs=1)
    return folder / "a", folder / "b"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The result of the first run."""
    return train(tmp_path_factory.mktemp("whole") / "a", 0)


@pytest.fixture
def run(runs, tmp_path) -> tuple[Path, Path]:
    """A copy of the first run, which a test may change, and the second run."""
    return shutil.copytree(runs[0], tmp_path / "run"), runs[1]


def id_of(workdir: Path) -> str:
    return json.loads((workdir / "config.json").read_text())["run_id"]


def copy(*names: str) -> Callable[[Path, Path], None]:
    """Return a function that replaces files and folders of a run with those of the other run."""

    def spoil(workdir: Path, other: Path) -> None:
        for name in names:
            if (other / name).is_dir():
                shutil.rmtree(workdir / name, ignore_errors=True)
                shutil.copytree(other / name, workdir / name)
            else:
                shutil.copy(other / name, workdir / name)

    return spoil


OTHER_RUN = "step 3 is damaged: it belongs to run {other}, and config.json names run {own}; restore the right one; "
INDEX, VALIDATION = "checkpoints/manifests.json", "checkpoints/validation.json"
REJECTED = {
    "all checkpoints": (copy("checkpoints"), f"{OTHER_RUN}no checkpoint there is whole"),
    "the validations": (copy(VALIDATION), "validation.json: is damaged (its SHA-256 is not that in manifests.json)"),
    "validations and index": (
        copy(INDEX, VALIDATION),
        "is damaged (manifests.json, which lists it, is of run {other}, and config",
    ),
    "the metrics": (copy("metrics.jsonl"), "metrics.jsonl: the loss of step 3 is "),
}


@pytest.mark.parametrize("case", REJECTED)
def test_files_of_another_run_raise_a_one_line_error(case, run):
    spoil, expected = REJECTED[case]
    workdir, other = run
    ids = {"own": id_of(workdir), "other": id_of(other)}
    spoil(workdir, other)
    with pytest.raises(InputError) as raised:
        train(workdir, 0)
    assert expected.format(**ids) in str(raised.value) and str(workdir) in str(raised.value)


RESUMED = {
    "the index": (copy(INDEX), "manifests.json: is of run {other}, and config.json names run {own}; it is rebuilt"),
    "a step and its number": (
        lambda workdir, other: shutil.copytree(workdir / "checkpoints/3", workdir / "checkpoints/5"),
        "step 5 is damaged: its manifest is of step 3; the run resumes from step 3",
    ),
    "the signature": (copy("signature.json"), ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RESUMED)
def test_a_run_resumes_from_its_own_checkpoints(case, run, uninterrupted, caplog):
    spoil, expected = RESUMED[case]
    workdir, other = run
    ids = {"own": id_of(workdir), "other": id_of(other)}
    spoil(workdir, other)
    assert largest_difference(train(workdir, 0), uninterrupted) == 0
    assert expected.format(**ids) in caplog.text and id_of(workdir) == ids["own"]
    manifests = Integrity(workdir / "checkpoints")
    assert manifests.fault is None and [manifests.check(step) for step in (4, 6)] == [None, None]
    assert all(ids["own"] in (workdir / f"checkpoints/{step}/manifest.json").read_text() for step in (4, 6))


def test_a_resumed_run_keeps_the_names_of_its_classes(run):
    """The fingerprints of a data set with ids, such as synsets, do not cover the readable names."""
    file = run[0] / "signature.json"
    saved = json.loads(file.read_text())
    names = saved["class_names"]
    for place, other in ((-1, [*names[:-1], "crane"]), (0, [names[1], names[0], *names[2:]])):
        file.write_text(json.dumps({**saved, "class_names": other}))
        before = file.read_bytes(), (run[0] / "config.json").read_bytes()
        message = f"class {names[place]!r} was called {other[place]!r} and is now {names[place]!r}; restore the name"
        with pytest.raises(InputError, match=f"signature.json: {message}"):
            train(run[0], 0)
        assert (file.read_bytes(), (run[0] / "config.json").read_bytes()) == before


def test_commands_that_read_a_run_compare_its_identity_too(run, runs, capfd):
    (workdir, other), (unchanged, _) = run, runs
    ids = {"own": id_of(workdir), "other": id_of(other)}
    assert jaxddp.load_run(workdir, model=linear_model()).step == 3
    copy("signature.json")(workdir, other)
    with pytest.raises(InputError, match=f"it belongs to run '{ids['other']}', and config.json names run {ids['own']}"):
        jaxddp.load_run(workdir, model=linear_model())
    copy("signature.json")(workdir, unchanged)
    copy("checkpoints")(workdir, other)
    for last in (" is of run", "step 3 is damaged: it belongs to run"):
        with pytest.raises(InputError, match=f"{last} {ids['other']}, and config.json names run {ids['own']}"):
            jaxddp.load_run(workdir, model=linear_model())
        (workdir / VALIDATION).unlink(missing_ok=True)
    # The report compares identities without JAX, too.
    assert main(["checkpoints", str(workdir)]) == 0
    output = capfd.readouterr().out
    assert output.startswith(f"run {ids['own']}\n") and output.count(f"damaged: it belongs to run {ids['other']}") == 2
    assert main(["checkpoints", str(other), "--verify"]) == 0
    assert capfd.readouterr().out.startswith(f"run {ids['other']}\n")


def test_a_report_names_curves_of_another_run_as_a_fault(run):
    workdir, other = run
    assert read_runs([workdir])[0].faults == ()
    copy("metrics.jsonl")(workdir, other)
    expected = "metrics.jsonl and validation.json have different losses for step 3; one of them belongs to another run"
    assert read_runs([workdir])[0].faults == (expected,)


def test_a_config_that_was_changed_after_the_start_is_rejected(run):
    """Test also a command that sets the other seed."""
    workdir, _ = run
    content = json.loads((workdir / "config.json").read_text())
    (workdir / "config.json").write_text(json.dumps(content | {"seed": 1}))
    with pytest.raises(InputError, match="step 3 is damaged: its settings differ from config.json"):
        train(workdir, 1)
    # The place of the data, and keys that a resumed run may change, are not compared.
    moved = content | {"data": content["data"] | {"path": "elsewhere"}}
    (workdir / "config.json").write_text(json.dumps(moved))
    assert Integrity(workdir / "checkpoints").check(3) is None
    # Another release may compare more keys.
    (workdir / "config.json").write_text(json.dumps(content | {"seed": 1, "data": content["data"] | {"new": 0}}))
    assert Integrity(workdir / "checkpoints").check(3) is None


@pytest.mark.slow
def test_each_new_run_has_its_own_id_and_resuming_keeps_it(run):
    before = id_of(run[0])
    train(run[0], 0)
    assert id_of(run[0]) == before != id_of(run[1])


def test_equal_numbers_of_different_types_are_the_same_setting():
    integer, decimal = RunIdentity.of({"run_id": "a", "x": [1, 0.5]}), RunIdentity.of({"run_id": "a", "x": [1.0, 0.5]})
    assert integer == decimal != RunIdentity.of({"run_id": "a", "x": [1.0, 0.25]})
    assert RunIdentity.of({"run_id": 5}) is RunIdentity.of({}) is None
