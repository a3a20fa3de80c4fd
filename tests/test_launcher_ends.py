"""A launcher that receives a signal or is killed: its processes can save, and none of them outlives it.

The processes run small Python programs without JAX. No test asserts a duration. `HANGING` only limits the time of a
test that hangs.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launches import HANGING, LAUNCHER, LauncherProcess, program, wait_for

from jaxddp.cluster import starter, worker

pytestmark = pytest.mark.usefixtures("clean_environment")


class Launcher(LauncherProcess):
    """A launcher whose two processes have printed `ready`."""

    def __init__(self, folder: Path, text: str, options: str = "processes=2"):
        super().__init__(folder, standalone(folder, text, options))
        self.wait_until(lambda: self.out.count("ready") == 2)


def standalone(folder: Path, text: str, options: str = "processes=2") -> list[str]:
    options = f"{options}, logs=Path({str(folder / 'logs')!r})"
    return [sys.executable, "-c", f"{LAUNCHER}\nsys.exit(launch(Launch({options}), {program(text)!r}))"]


SAVE = """
def save(*_):
    say("saved")
    sys.exit({code})
signal.signal(signal.SIGTERM, save)
say("ready")
time.sleep(600)
"""
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); time.sleep(600)"


@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGHUP, signal.SIGINT), ids=lambda number: number.name)
@pytest.mark.parametrize("code", (75, 0))
def test_a_signal_lets_processes_save_and_end(number, code, tmp_path):
    launcher = Launcher(tmp_path, SAVE.format(code=code)).send(number)
    assert launcher.end() == (130 if number == signal.SIGINT else code)
    assert sorted(launcher.out.splitlines()[2:]) == ["[0] saved", "[1] saved"]
    assert f"{number.name}: every process was asked to save and stop" in launcher.err


@pytest.mark.parametrize(
    ("text", "code"), [(SAVE.format(code="75 + rank"), 143), (IGNORES_SIGTERM, 143)], ids=("one failing", "killed")
)
def test_a_signal_ends_processes_that_do_not_save(text, code, tmp_path):
    assert Launcher(tmp_path, text, "processes=2, save_grace=0.3").send(signal.SIGTERM).end() == code


def test_an_error_while_all_save_ends_the_job_with_its_code(tmp_path):
    text = SAVE.format(code="(143, 2)[rank]").replace('"saved"', '"disk full"')
    launcher = Launcher(tmp_path, text).send(signal.SIGTERM)
    assert launcher.end() == 2
    assert "process 1: exit code 2; its last lines" in launcher.err and "[1] disk full" in launcher.err


TRACED = """
import ctypes
ready = {ready!r}
if rank == 1:
    while not os.path.exists(ready):
        time.sleep(0.01)
    sys.exit(9)
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER, to any process
seize = "import ctypes, sys, time; print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)"
traced = [sys.executable, "-c", f"{{seize}}; time.sleep(60)", str(os.getpid())]
tracer = subprocess.Popen(traced, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True)
say(tracer.pid, tracer.stdout.readline().strip())
open(ready, "w").close()
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace is Linux's")
def test_a_process_that_cannot_be_killed_is_not_waited_for_forever(run, short_wait, monkeypatch, tmp_path):
    """A debugger hides the end of a process from the launcher, as if the process hung in the kernel."""
    # The time limit for a kill is private, because users need not change it.
    monkeypatch.setattr(worker, "_DEATH_SECONDS", 0.5)
    ran = run(TRACED.format(ready=str(tmp_path / "ready")), grace=0.2)
    tracer, result = ran.of(0)[0].split()
    os.kill(int(tracer), signal.SIGKILL)
    if result != "0":
        pytest.skip("no process may trace another one here")
    assert ran.code == 9
    assert "process 0: SIGKILL does not end it; it waits in the kernel (for a disk or GPU?)" in ran.errors


def test_a_second_ctrl_c_kills(tmp_path):
    launcher = Launcher(tmp_path, IGNORES_SIGTERM).send(signal.SIGINT)
    launcher.wait_until(lambda: "SIGINT: " in launcher.err)
    assert launcher.send(signal.SIGINT).end() == 130
    assert sorted(launcher.err.splitlines()[-2:]) == ["process 0: killed by SIGKILL", "process 1: killed by SIGKILL"]


LOCKED = """
import fcntl
file = open(os.path.join({folder!r}, str(rank)), "w")
fcntl.flock(file, fcntl.LOCK_EX)
"""


def test_of_two_processes_that_end_together_the_killed_one_is_the_cause(tmp_path):
    text = f"""{LOCKED.format(folder=str(tmp_path))}
say("ready")
while not os.path.exists({str(tmp_path / "go")!r}):
    time.sleep(0.01)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(1)
"""
    # While the launcher is stopped, both processes end, so it finds both at once.
    launcher = Launcher(tmp_path, text).send(signal.SIGSTOP)
    (tmp_path / "go").touch()
    for rank in (0, 1):
        wait_for(tmp_path / str(rank))
    time.sleep(0.1)  # A lock is released a little before its holder is reported as ended.
    assert launcher.send(signal.SIGCONT).end() == 128 + signal.SIGKILL
    assert "process 1: killed by SIGKILL; its last lines" in launcher.err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end a process with its parent")
def test_no_process_outlives_a_killed_launcher(tmp_path):
    launcher = Launcher(tmp_path, LOCKED.format(folder=str(tmp_path)) + IGNORES_SIGTERM)
    assert launcher.send(signal.SIGKILL).end() == -signal.SIGKILL
    for rank in (0, 1):
        wait_for(tmp_path / str(rank))


def test_a_worker_whose_launcher_has_ended_runs_nothing():
    command = [sys.executable, "-I", "-S", starter.__file__, "1", "", sys.executable, "-c", "print('ran')"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANGING)
    assert (result.returncode, result.stdout) == (1, "") and "the launcher is gone" in result.stderr


def test_a_file_of_the_working_directory_takes_the_place_of_no_module(tmp_path):
    (tmp_path / "numbers.py").write_text("raise SystemExit(9)")
    words = ["launch", "--processes", "1", "--", "data", "check", "nowhere"]
    command = [sys.executable, "-P", "-c", f"import sys; from jaxddp.cli import main; sys.exit(main({words}))"]
    environment = os.environ | {"PYTHONPATH": str(Path(worker.__file__).parents[2])}
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode == 2


def test_a_closed_output_pipe_does_not_end_the_run(tmp_path):
    command = standalone(tmp_path, "for number in range(2000): say('line', number)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout and process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=HANGING) == 0
    for rank in (0, 1):
        assert (tmp_path / f"logs/process-{rank}.log").read_text().endswith("line 1999\n")


def test_the_launcher_needs_no_third_party_library_and_no_error_number_of_linux(tmp_path):
    code = f"""import errno; del errno.EREMOTEIO{LAUNCHER}
code = launch(Launch(processes=1, logs=Path("logs")), ["true"])
paths = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
print([path for path in paths if "site-packages" in path and "jaxddp" not in path])
sys.exit(code)
"""
    command = [sys.executable, "-S", "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANGING)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "command", "code", "problem"),
    [
        ("-Sn", "true", 0, None),
        # Processes that end at once would free their files for the next.
        ("-n", "sleep 60", 2, r"process [1-7]: cannot be started \(Too many open files\); start fewer processes.*"),
    ],
)
def test_the_launcher_raises_its_limit_of_open_files(limit, command, code, problem, tmp_path):
    limited = ["bash", "-c", f'ulimit {limit} 24 && exec "$@"', "bash"]
    options = ["--processes", "8", "--logs", str(tmp_path)]
    words = [*limited, sys.executable, "-m", "jaxddp", "launch", *options, "--", *command.split()]
    result = subprocess.run(words, capture_output=True, text=True, timeout=HANGING)
    assert result.returncode == code, result.stderr
    assert problem is None or re.fullmatch(f"jaxddp: {problem}", result.stderr.splitlines()[-1])
    assert "Traceback" not in result.stderr
