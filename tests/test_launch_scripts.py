"""The scripts in launch/, run with fake programs."""

import os
import subprocess
from pathlib import Path

import pytest
from support.launches import HANGING, ROOT

SCRIPTS = sorted((ROOT / "launch").glob("*.s*"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_bash_of_at_most_50_lines(script):
    result = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert len(script.read_text().splitlines()) <= 50
    assert script.suffix == ".sbatch" or os.access(script, os.X_OK)


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """Return a function that adds a program to PATH. The program writes each of its arguments to a line of a file."""

    def program(name: str, more: str = "") -> Path:
        arguments_file = tmp_path / f"{name}.arguments"
        (tmp_path / name).write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >>{arguments_file}\n{more}\n')
        (tmp_path / name).chmod(0o755)
        return arguments_file

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program


def script(name: str, *arguments: str, **environ: str) -> int:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    command = ["bash", str(ROOT / "launch" / name), *arguments]
    return subprocess.run(command, env=outer | environ, timeout=HANGING).returncode


def test_the_local_script_starts_the_launcher_and_returns_its_exit_code(fake_program):
    arguments_file = fake_program("jaxddp", "exit 7")
    assert script("local.sh", "digits", "--seed", "1", PROCESSES="2") == 7
    assert arguments_file.read_text().split() == ["launch", "--processes", "2", "--", "train", "digits", "--seed", "1"]
    arguments_file.unlink()
    assert script("local.sh", "digits") == 7
    assert arguments_file.read_text().split() == ["launch", "--", "train", "digits"]
    assert script("local.sh", "digits", RESTARTS="4") == 7
    assert arguments_file.read_text().split()[-6:] == ["launch", "--restarts", "4", "--", "train", "digits"]


def test_the_ssh_script_starts_every_host_and_returns_the_first_failure(fake_program):
    arguments_file = fake_program("ssh", '[[ "$*" == *"--nr 1"* ]] && exit 5\nexit 0')
    options = {"HOSTS": "h0 h1 h2", "PORT": "77", "LAUNCH": "--gpus 4"}
    assert script("ssh.sh", "digits", "--train.duration", "2 epochs", **options) == 5
    commands = sorted(line for line in arguments_file.read_text().splitlines() if line.startswith("cd "))
    train = "train digits --train.duration 2\\ epochs"
    job = "exec jaxddp launch --nodes 3 --nr {} --coordinator h0:77 --gpus 4 -- " + train
    assert [command.partition(" && ")[2].rstrip() for command in commands] == [job.format(nr) for nr in range(3)]
    assert script("ssh.sh", "digits", HOSTS="h0 h1", NODES="1:2") == 5
    elastic = [f"launch --nodes 1:2 --nr {nr} --coordinator h0:" in arguments_file.read_text() for nr in range(3)]
    assert elastic == [True, True, False]
    arguments_file.unlink()
    assert script("ssh.sh", "digits", HOSTS="ubuntu@10.0.0.1 ubuntu@10.0.0.2") == 5
    text = arguments_file.read_text()
    assert "ubuntu@10.0.0.1\n" in text and text.count(" --coordinator 10.0.0.1:12321 ") == 2
    assert script("ssh.sh", "digits", HOSTS="") == 2


def test_the_openmpi_script_starts_mpirun_and_returns_its_exit_code(fake_program):
    arguments_file = fake_program("mpirun", "exit 3")
    address = {"JAX_COORDINATOR_ADDRESS": "a:77"}
    assert script("openmpi.sh", "digits", PROCESSES="2", HOSTS="a:1,b:1", **address) == 3
    text = arguments_file.read_text().split()
    assert text[-3:] == ["jaxddp", "train", "digits"] and "--bind-to" in text and {*address} < {*text}
    assert text[text.index("-np") + 1] == "2" and text[text.index("--host") + 1] == "a:1,b:1"
    # After SIGTERM, each rank has time to save. The fake rank sends it to the script, the parent of its shell.
    fake_program("mpirun", 'while [[ $1 != bash ]]; do shift; done; exec "$@"')
    rank = "trap 'exit 75' TERM; read -ra shell </proc/$PPID/stat; kill ${shell[3]}; while :; do sleep 0.1; done"
    fake_program("jaxddp", rank)
    assert script("openmpi.sh", "digits") == 75


@pytest.mark.parametrize(
    ("code", "restarts", "limit", "is_requeued"),
    [(75, "9", "0", True), (137, "2", "", True), (1, "3", "", False), (2, "", "", False)],
)
def test_the_slurm_script_requeues_only_for_certain_exit_codes(code, restarts, limit, is_requeued, fake_program):
    requeued, arguments_file = fake_program("scontrol"), fake_program("srun", f"exit {code}")
    environ = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": restarts, "RESTARTS": limit}
    assert script("slurm.sbatch", "digits", **environ) == code
    assert arguments_file.read_text().split()[-3:] == ["jaxddp", "train", "digits"]
    assert (requeued.read_text().split() if requeued.exists() else []) == ["requeue", "12"] * is_requeued


@pytest.mark.parametrize("search", [[], ["--search", "optuna"]])
@pytest.mark.parametrize(("code", "is_requeued"), [(75, True), (2, False)])
def test_a_task_of_the_sweep_script_trains_its_trial_or_joins_the_search(search, code, is_requeued, fake_program):
    requeued, arguments_file = fake_program("scontrol"), fake_program("srun", f"exit {code}")
    words = ["digits", "--seed", "0:3", *search]
    assert script("sweep.sbatch", *words, SLURM_JOB_ID="12", SLURM_ARRAY_TASK_ID="2") == code
    command = arguments_file.read_text().split()
    assert command[command.index("jaxddp") :] == ["jaxddp", "sweep", *words, *([] if search else ["--index", "2"])]
    assert (requeued.read_text().split() if requeued.exists() else []) == ["requeue", "12"] * is_requeued


@pytest.mark.parametrize(("array", "requeued_id"), [({"SLURM_ARRAY_JOB_ID": "12"}, "12_2"), ({}, "12")])
def test_the_sweep_script_requeues_its_task_and_not_the_whole_array(array, requeued_id, fake_program):
    requeued, _ = fake_program("scontrol"), fake_program("srun", "exit 1")
    # This is the last task of the array, whose SLURM_JOB_ID is the id of the array.
    assert script("sweep.sbatch", "digits", SLURM_JOB_ID="12", SLURM_ARRAY_TASK_ID="2", **array) == 1
    assert requeued.read_text().split() == ["requeue", requeued_id]


GCLOUD = """
case "$*" in
  *" describe "*) state=$(head -1 {states}); sed -i 1d {states}; [[ $state ]] && echo "$state" ;;
  *"jaxddp train"*) exit 75 ;;
esac
"""
SLICE = {"NAME": "first", "ZONE": "us-west4-a", "TYPE": "v5litepod-16", "RUNTIME": "v2-alpha-tpuv5-lite"}


@pytest.mark.parametrize("is_new", [True, False])
def test_the_tpu_script_creates_a_slice_and_trains_on_all_hosts(is_new, fake_program, tmp_path):
    states = tmp_path / "states"
    states.write_text("\nWAITING_FOR_RESOURCES\nACTIVE\n" if is_new else "ACTIVE\nACTIVE\n")
    arguments_file = fake_program("gcloud", GCLOUD.format(states=states))
    more, command = {"SPOT": "1", "DELETE": "1"} if is_new else {}, ["digits", "--train.duration", "2 epochs"]
    assert script("tpu_vm.sh", *command, PERIOD="0", **SLICE, **more) == 75
    calls = arguments_file.read_text().replace("\n", " ").split("compute tpus ")[1:]
    verbs = [" ".join(call.split()[:2]) for call in calls]
    ssh, described = ["tpu-vm scp", "tpu-vm ssh", "tpu-vm ssh"], "queued-resources describe"
    if is_new:
        assert verbs == [described, "queued-resources create", *[described] * 2, *ssh, "queued-resources delete"]
        create = "queued-resources create first --node-id=first --zone=us-west4-a --accelerator-type=v5litepod-16 "
        assert calls[1].strip() == f"{create}--runtime-version=v2-alpha-tpuv5-lite --spot"
        assert calls[-1].strip() == "queued-resources delete first --zone=us-west4-a --force --quiet"
    else:
        assert verbs == [described, described, *ssh]
    scp, install, train = calls[verbs.index(ssh[0]) :][:3]
    assert all("--worker=all" in call and "--zone=us-west4-a" in call for call in (scp, install, train))
    assert "'./jaxddp[tpu]'" in install
    end = "--command=JAXDDP_JOB_KEY=$(cat key) exec venv/bin/jaxddp train digits --train.duration 2\\ epochs"
    assert train.strip().endswith(end)


@pytest.mark.parametrize("before", [["SUSPENDING", "SUSPENDED"], ["DELETING", ""]])
def test_the_tpu_script_creates_a_slice_again_that_google_took_back(before, fake_program, tmp_path):
    states = tmp_path / "states"
    states.write_text("\n".join([*before, "PROVISIONING", "ACTIVE", ""]))
    arguments_file = fake_program("gcloud", GCLOUD.format(states=states))
    assert script("tpu_vm.sh", "digits", PERIOD="0", SPOT="1", **SLICE) == 75
    calls = arguments_file.read_text().replace("\n", " ").split("compute tpus ")[1:]
    verbs = [call.split()[1] for call in calls]
    deleted = ["delete"] if before[-1] else []
    again = [*deleted, "create", "describe", "describe", "scp", "ssh", "ssh"]
    assert verbs == ["describe"] * len(before) + again
    if deleted:
        assert calls[len(before)].strip() == "queued-resources delete first --zone=us-west4-a --force --quiet"


# A new request that fails would fail again.
@pytest.mark.parametrize(("states", "wait"), [(["FAILED", "FAILED"], "60"), (["SUSPENDING"] * 9, "0")])
def test_the_tpu_script_does_not_wait_for_a_slice_that_does_not_come(states, wait, fake_program, tmp_path):
    (tmp_path / "states").write_text("\n".join([*states, ""]))
    arguments_file = fake_program("gcloud", GCLOUD.format(states=tmp_path / "states"))
    assert script("tpu_vm.sh", "digits", PERIOD="0", WAIT=wait, **SLICE) == 1
    calls = arguments_file.read_text().split()
    assert "tpu-vm" not in calls and calls.count("delete") == (states[0] == "FAILED")
    assert script("tpu_vm.sh", "digits", NAME="first") == 2
