"""The rows of `jaxddp doctor`: those of a good machine, and a row for each fault while other checks continue."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ilsvrc import IMAGES, write_tree
from support.runs import RECIPE

from jaxddp.cli import main
from jaxddp.cluster import doctor as checklist
from jaxddp.cluster.doctor import CheckRow, doctor, merge
from jaxddp.config import load
from jaxddp.core.errors import InputError
from jaxddp.core.peers import Peers
from jaxddp.recipe.file import RecipeFile, read_recipe

ROOT = Path(__file__).parent.parent
MACHINE_CHECKS = ["environment", "coordinator", "devices", "versions", "all-reduce"]
CONFIG_CHECKS = ["data", "images", "recipe", "step", "work directory"]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch):
    """Sum small arrays, because the real sizes take seconds. `_SIZES` is private, because users need not change it."""
    monkeypatch.setattr(checklist, "_SIZES", {"4 kB": 4_000, "1 MB": 1_000_000})


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=13, val=11, size=20)


def small_recipe(tree: Path, **changes) -> RecipeFile:
    """Return a recipe whose network compiles in a second."""
    data = {"path": str(tree), "image_size": 16, "resize": 16, "augment": {"pad": 1}}
    small = {"model": {"name": "resnet10", "width": 2}, "train": {"batch_size": 8}, "eval": {"batch_size": 8}}
    config = load("digits").replace(**{"data": data, **small, **changes})
    return dataclasses.replace(read_recipe(RECIPE), config=config)


def by_check(rows: list[CheckRow]) -> dict[str, CheckRow]:
    assert len({row.check for row in rows}) == len(rows)
    return {row.check: row for row in rows}


@pytest.mark.slow
def test_a_good_machine_and_config_pass_every_check(tree, tmp_path):
    rows = by_check(doctor(small_recipe(tree), tmp_path / "w"))
    assert list(rows) == MACHINE_CHECKS + CONFIG_CHECKS
    assert {row.verdict for row in rows.values()} == {"ok"}, rows
    details = {check: row.detail for check, row in rows.items()}
    assert "a single process" in details["environment"] and details["devices"] == "8 x cpu"
    assert details["coordinator"] == "not in a job"
    assert f"jax {jax.__version__}," in details["versions"]
    assert "sums are right; 4 kB in " in details["all-reduce"]
    assert details["data"].startswith("39 rows to train, 11 to validate, 3 classes")
    assert details["images"].startswith("48 read for training") and "11 for validation" in details["images"]
    # 39 images in batches of 8, 6 epochs.
    assert "30 steps of 8 images" in details["recipe"]
    assert "arguments" in details["step"] and "GFLOP" in details["step"]
    assert "checkpoints up to" in details["work directory"]
    assert list((tmp_path / "w").iterdir()) == []
    # The run there could not be resumed.
    (tmp_path / "w/checkpoints/3").mkdir(parents=True)
    (tmp_path / "w/config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config.json: model.name was .* and is now 'resnet10'"):
        checklist.recipe(small_recipe(tree), tmp_path / "w")
    # Without a config only the machine is checked.
    assert list(by_check(doctor(None, None))) == MACHINE_CHECKS


@pytest.mark.slow
def test_a_check_names_an_image_that_does_not_decode_and_the_others_continue(tmp_path):
    tree = write_tree(tmp_path / "tree", classes=3, images=13, val=3, size=20)
    broken = sorted((tree / IMAGES / "train").rglob("*.JPEG"))[7]
    broken.write_bytes(broken.read_bytes()[:-40])
    rows = by_check(doctor(small_recipe(tree), tmp_path / "w"))
    assert rows["images"].verdict == "fail" and str(broken) in rows["images"].detail
    assert [row.check for row in rows.values() if row.verdict != "ok"] == ["images"]


def test_unreadable_data_does_not_stop_the_other_checks(tree, tmp_path):
    rows = by_check(doctor(small_recipe(tree / "nowhere"), tmp_path / "w"))
    assert list(rows) == [*MACHINE_CHECKS, "data", "work directory"]
    assert rows["data"].verdict == "fail" and "nowhere" in rows["data"].detail
    assert rows["work directory"].verdict == "ok"


def test_too_little_disk_space_for_the_checkpoints_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"checkpoints will take up to 1000000 TB; free some space"):
        checklist.work_directory(tmp_path, 10**18)
    assert "free, checkpoints up to 1.0 kB" in checklist.work_directory(tmp_path, 1000).detail


@pytest.mark.parametrize("device", [0, 5])
def test_a_wrong_sum_on_any_device_is_caught(device, monkeypatch):
    make = checklist.make_all_reduce

    def make_wrong(topology):
        reduce = make(topology)

        def wrong(parts):
            total = reduce(parts)
            copies = [np.array(shard.data) for shard in total.addressable_shards]
            copies[device][3] += 1
            placed = [*map(jax.device_put, copies, topology.mesh.devices.flat)]
            return jax.make_array_from_single_device_arrays(total.shape, total.sharding, placed)

        return wrong

    monkeypatch.setattr(checklist, "make_all_reduce", make_wrong)
    row = by_check(doctor(None, None))["all-reduce"]
    assert row.verdict == "fail"
    # Element 3 of device i is (i + 3) mod 5: 3 4 0 1 2 3 4 0.
    assert "element 3 is 18, expected 17" in row.detail and f"{jax.devices()[device]}:" in row.detail


def test_any_exception_is_reported_as_a_row_of_one_line():
    def broken() -> checklist.Finding:
        raise RuntimeError("no such\ndriver")

    assert checklist.add(rows := [], "devices", broken) is None
    assert rows[0].verdict == "fail" and rows[0].detail.endswith("RuntimeError: no such driver")


def test_a_slurm_batch_script_is_advised_to_use_srun(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    finding = checklist.environment()
    assert finding.verdict == "warn" and finding.value is None
    assert finding.detail.endswith("a single process; SLURM has 4 tasks for this job; start them with srun")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert checklist.environment().verdict == "ok"


def test_an_incomplete_environment_is_reported_as_a_row(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    rows = by_check(doctor(None, None))
    assert rows["environment"].verdict == "fail" and "JAX_PROCESS_ID" in rows["environment"].detail
    assert (rows["coordinator"].verdict, rows["coordinator"].detail[:11]) == ("fail", "not joined:")
    assert rows["all-reduce"].verdict == "ok"


FINE, BAD = CheckRow("images", "ok", "fine"), CheckRow("images", "fail", "bad")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([[FINE], [FINE]], [FINE]),
        ([[FINE], [BAD], [FINE], [BAD]], [FINE, CheckRow("images", "fail", "processes 1, 3: bad")]),
        ([[BAD], [BAD]], [BAD]),
        ([[], [BAD]], [CheckRow("images", "fail", "process 1: bad")]),
    ],
)
def test_rows_of_processes_are_merged_and_failures_name_their_process(reports, expected):
    assert merge(reports) == expected


check_rows = st.builds(CheckRow, st.sampled_from("ab"), st.sampled_from(["ok", "warn", "fail"]), st.just("x"))


@given(st.lists(st.lists(check_rows)))
def test_no_failure_is_lost_in_merging(reports):
    merged = merge(reports := [[], *reports])
    for verdict in ("warn", "fail"):
        checks_with_verdict = {row.check for rows in reports for row in rows if row.verdict == verdict}
        assert {row.check for row in merged if row.verdict == verdict} == checks_with_verdict


class TwoProcesses(Peers):
    """This process 0, and a process 1 without devices."""

    process_count = 2

    def __init__(self):
        self.exchanges = list[tuple[str, object]]()

    def exchange(self, name, value):
        self.exchanges.append((name, value))
        answers = {"doctor: ready": False, "doctor: rows": [("devices", "fail", "no GPU answers")]}
        return [value, answers[name]]

    def agree(self, values):
        pass


@pytest.mark.parametrize("has_devices", [True, False])
def test_no_collective_check_starts_if_a_process_has_no_devices(has_devices, monkeypatch):
    job_peers = TwoProcesses()
    monkeypatch.setattr(checklist, "join_job", lambda job, parallel: job_peers)
    if not has_devices:
        monkeypatch.setattr(checklist, "devices", MagicMock(side_effect=InputError("no TPU answers")))
    rows = doctor(None, None)
    names = ["environment", "coordinator", "devices", "devices", "versions", "settings"]
    assert [row.check for row in rows] == names
    assert [row.detail for row in rows if row.verdict == "fail"] == [
        *["no TPU answers"] * (not has_devices),
        "process 1: no GPU answers",
    ]
    # Each process makes the same exchanges.
    assert job_peers.exchanges[0] == ("doctor: ready", has_devices)
    assert [name for name, _ in job_peers.exchanges] == ["doctor: ready", "doctor: rows"]


@pytest.mark.slow
def test_the_command_prints_a_table_and_returns_1_after_a_failed_check(tmp_path, capfd):
    assert main(["doctor", "--workdir", str(tmp_path / "w")]) == 0
    table = capfd.readouterr().out
    assert all(name in table for name in [*MACHINE_CHECKS, "work directory", "verdict"])
    (tmp_path / "[bold]").write_text("")
    assert main(["doctor", "--workdir", str(tmp_path / "[bold]")]) == 1
    lines = capfd.readouterr().out.splitlines()
    # The table does not shorten the reason, and does not interpret a path as markup.
    assert any("fail" in line and str(tmp_path / "[bold]") in line for line in lines)


@pytest.mark.ci
def test_two_processes_print_one_table(tmp_path):
    launcher = [sys.executable, "-m", "jaxddp", "launch", "--processes", "2", "--logs", str(tmp_path / "logs")]
    command = [*launcher, "--", "doctor", "--workdir", str(tmp_path / "w")]
    # Pytest's own readline sets COLUMNS to 80, where the paths do not fit.
    environ = os.environ | {"COLUMNS": "400"}
    completed = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    rows = [line for line in completed.stdout.splitlines() if " ok " in line]
    assert all(line.startswith("[0] ") for line in rows)
    names = [*(name.split()[0] for name in MACHINE_CHECKS), "settings", "work", "shared"]
    assert [line.split()[1] for line in rows] == names
    assert "2 x cpu in 2 processes" in completed.stdout and "2 processes met at 127.0.0.1:" in completed.stdout
