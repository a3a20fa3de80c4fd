"""The scripts in launch/, with pretended programs in the place of real ones."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.launches import HANGING, ROOT

SCRIPTS = sorted((ROOT / "launch").glob("*.s*"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_bash_and_fit_a_screen(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(script.read_text().splitlines()) <= 50
    assert script.suffix == ".sbatch" or os.access(script, os.X_OK)


@pytest.fixture
def pretend(tmp_path, monkeypatch):
    """Programs that write their words, one each line, to a file."""

    def program(name: str, more: str = "") -> Path:
        words = tmp_path / f"{name}.words"
        (tmp_path / name).write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >>{words}\n{more}\n')
        (tmp_path / name).chmod(0o755)
        return words

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return program


def script(name: str, *words: str, **environ: str) -> int:
    return subprocess.run([ROOT / "launch" / name, *words], env=os.environ | environ, timeout=HANGING).returncode


def test_the_local_script(pretend):
    words = pretend("jaxddp", "exit 7")
    assert script("local.sh", "digits", "--seed", "1", PROCESSES="2") == 7
    assert words.read_text().split() == ["launch", "--processes", "2", "--", "train", "digits", "--seed", "1"]
    words.unlink()
    assert script("local.sh", "digits") == 7
    assert words.read_text().split() == ["launch", "--", "train", "digits"]
    assert script("local.sh", "digits", RESTARTS="4") == 7
    assert words.read_text().split()[-6:] == ["launch", "--restarts", "4", "--", "train", "digits"]


def test_the_ssh_script_starts_every_host_and_returns_the_first_failure(pretend):
    words = pretend("ssh", '[[ "$*" == *"--nr 1"* ]] && exit 5\nexit 0')
    assert (
        script("ssh.sh", "digits", "--train.duration", "2 epochs", HOSTS="h0 h1 h2", PORT="77", LAUNCH="--gpus 4") == 5
    )
    commands = sorted(line for line in words.read_text().splitlines() if line.startswith("cd "))
    job = (
        "exec jaxddp launch --nodes 3 --nr {} --coordinator h0:77 --gpus 4 -- train digits --train.duration 2\\ epochs"
    )
    assert [command.partition(" && ")[2].rstrip() for command in commands] == [job.format(nr) for nr in range(3)]
    assert script("ssh.sh", "digits", HOSTS="h0 h1", NODES="1:2") == 5
    assert [f"launch --nodes 1:2 --nr {nr} --coordinator h0:" in words.read_text() for nr in range(3)] == [
        True,
        True,
        False,
    ]
    assert script("ssh.sh", "digits", HOSTS="") == 2


def test_the_openmpi_script(pretend):
    words = pretend("mpirun", "exit 3")
    assert script("openmpi.sh", "digits", PROCESSES="2", HOSTS="a:1,b:1") == 3
    text = words.read_text().split()
    assert text[-3:] == ["jaxddp", "train", "digits"] and "--bind-to" in text
    assert text[text.index("-np") + 1] == "2" and text[text.index("--host") + 1] == "a:1,b:1"


@pytest.mark.parametrize(
    ("code", "restarts", "most", "goes_back"),
    [
        (75, "9", "0", True),
        (1, "", "", True),
        (137, "2", "", True),
        (1, "3", "", False),
        (1, "0", "0", False),
        (2, "", "", False),
        (0, "", "", False),
    ],
)
def test_the_slurm_script_requeues_only_for_certain_exit_codes(code, restarts, most, goes_back, pretend):
    requeued, words = pretend("scontrol"), pretend("srun", f"exit {code}")
    done = subprocess.run(
        ["bash", str(ROOT / "launch/slurm.sbatch"), "digits"],
        env=os.environ | {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": restarts, "RESTARTS": most},
        timeout=HANGING,
    )
    assert done.returncode == code
    assert words.read_text().split()[-3:] == ["jaxddp", "train", "digits"]
    assert (requeued.read_text().split() if requeued.exists() else []) == ["requeue", "12"] * goes_back


def test_the_kubernetes_job():
    manifest = ROOT / "launch/kubernetes-job.yaml"
    text = manifest.read_text()
    if shutil.which("kubernetes-validate"):
        done = subprocess.run(["kubernetes-validate", "--strict", str(manifest)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    service, job = text.split("\n---\n")
    names = re.findall(r"^  name: (\S+)", text, re.MULTILINE)
    assert names == ["jaxddp", "jaxddp"] and "clusterIP: None" in service and "job-name: jaxddp" in service
    assert "completionMode: Indexed" in job and "subdomain: jaxddp" in job and "restartPolicy: Never" in job
    counts = re.findall(r'(?:parallelism|completions): (\d+)|JAX_NUM_PROCESSES, value: "(\d+)"', job)
    assert [one or other for one, other in counts] == ["2", "2", "2"]
    assert re.search(r'JAX_COORDINATOR_ADDRESS, value: "jaxddp-0\.jaxddp:\d+"', job)
    assert "\t" not in text
