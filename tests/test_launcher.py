"""The launcher, with real processes: what they are told, what becomes of what they write, and that all of them end.

The children are small Python programs without JAX. No test asserts a time; `HANGING` only bounds a wait without an end.
"""

import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxddp.cluster import starter, worker_group
from jaxddp.cluster.launcher import launch
from jaxddp.cluster.machine import local_cores, local_gpus, shares
from jaxddp.cluster.options import Launch, split
from jaxddp.cluster.output import Lines, Output
from jaxddp.errors import InputError

ROOT = Path(__file__).parent.parent
HANGING = 60

# The launcher alone, without what `import jaxddp` brings along; that it needs none of it is one of the tests.
LAUNCHER = f"""
import sys, types
package = types.ModuleType("jaxddp")
package.__path__ = [{str(ROOT / "jaxddp")!r}]
sys.modules["jaxddp"] = package
from pathlib import Path
from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch
"""
PRELUDE = """
import os, signal, socket, subprocess, sys, time
rank = int(os.environ["JAX_PROCESS_ID"])
def say(*words):
    print(*words, flush=True)
"""


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Neither this machine's GPUs nor a job that the tests run in."""
    for name in ("CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS", "GLIBC_TUNABLES", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.fixture
def brief(monkeypatch):
    """The others get hardly a moment after a failure."""
    monkeypatch.setattr(worker_group, "_MOMENT_SECONDS", 0.05)


def program(text: str) -> list[str]:
    return ["python", "-c", PRELUDE + textwrap.dedent(text)]


class Ran:
    """A launch in this process, and what came of it."""

    def __init__(self, capfd, logs: Path, text: str, **options):
        options = {"processes": 2, "logs": logs} | options
        self.code = launch(Launch(**options), program(text))
        self.out, self.err = capfd.readouterr()
        self.lines = self.out.splitlines()
        self.errors = self.err.splitlines()

    def of(self, rank: int) -> list[str]:
        """What a process wrote."""
        return [line.removeprefix(f"[{rank}] ") for line in self.lines if line.startswith(f"[{rank}] ")]

    def told(self) -> list[dict[str, str]]:
        """The environments that processes wrote with `TELL`."""
        ranks = sorted({int(re.match(r"\[(\d+)\]", line)[1]) for line in self.lines})
        return [dict(line.split("=", 1) for line in self.of(rank)) for rank in ranks]


TELL = """
for name, value in os.environ.items():
    if name.startswith(("JAX", "CUDA", "GLIBC", "PYTHONUNBUFFERED")):
        say(f"{name}={value}")
"""


@pytest.fixture
def run(capfd, tmp_path):
    return lambda text, **options: Ran(capfd, tmp_path / "logs", text, **options)


def test_output_is_prefixed_and_kept(run, tmp_path):
    ran = run("""
        say("one"); print("two", file=sys.stderr)
        assert sys.stdin.read() == ""
        sys.stdout.write("no end")
        """)
    assert ran.code == 0
    assert [ran.of(rank) for rank in (0, 1)] == [["one", "two", "no end"]] * 2
    assert len(ran.lines) == 6
    for rank in (0, 1):
        assert (tmp_path / f"logs/process-{rank}.log").read_text() == "one\ntwo\nno end"
    assert len(ran.errors) == 1 and str(tmp_path / "logs") in ran.errors[0]


def test_a_second_launch_goes_on_in_the_log(run, tmp_path):
    run("say('first')", processes=1)
    run("say('second')", processes=1)
    first, between, second = (tmp_path / "logs/process-0.log").read_text().splitlines()
    assert (first, second) == ("first", "second") and between.startswith("--- started again")


@pytest.mark.parametrize("words", (["--workdir", "w"], ["--workdir=w", "--seed", "1"], ["--seed", "1"]), ids=str)
def test_logs_are_kept_in_the_work_directory(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(Launch(processes=1), [*program(""), *words]) == 0
    assert (tmp_path / ("w/logs" if "w" in "".join(words) else "runs/launch") / "process-0.log").is_file()


def test_what_processes_are_told(run, monkeypatch):
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "3")
    monkeypatch.setenv("JAXDDP_COORDINATOR_FD", "99")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    first, second = run(TELL).told()
    assert (first.pop("JAX_PROCESS_ID"), second.pop("JAX_PROCESS_ID")) == ("0", "1")
    assert int(first.pop("JAXDDP_COORDINATOR_FD")) != 99
    assert first == second
    assert first["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert first["JAX_NUM_PROCESSES"] == "2"
    assert first["GLIBC_TUNABLES"] == "glibc.malloc.check=1"
    assert first["PYTHONUNBUFFERED"] == "1"
    assert "JAX_LOCAL_DEVICE_IDS" not in first and "CUDA_VISIBLE_DEVICES" not in first
    monkeypatch.delenv("GLIBC_TUNABLES")
    again = run(TELL).told()[0]
    assert again["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert re.fullmatch("[0-9a-f]{64}", first["JAXDDP_JOB_KEY"]) and first["JAXDDP_JOB_KEY"] != again["JAXDDP_JOB_KEY"]
    assert re.fullmatch("[0-9a-f]{16}", first["JAXDDP_RUN_ID"]) and first["JAXDDP_RUN_ID"] != again["JAXDDP_RUN_ID"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_several_machines(run, monkeypatch):
    place = {"nodes": "2", "processes": 3, "coordinator": f"127.0.0.1:{free_port()}"}
    told = run(TELL, nr=0, **place).told() + run(TELL, nr=1, **place).told()
    assert [each["JAX_PROCESS_ID"] for each in told] == ["0", "1", "2", "3", "4", "5"]
    assert {each["JAX_NUM_PROCESSES"] for each in told} == {"6"}
    assert {each["JAX_COORDINATOR_ADDRESS"] for each in told} == {place["coordinator"]}
    assert len({each["JAXDDP_RUN_ID"] for each in told}) == 1
    assert ["JAXDDP_COORDINATOR_FD" in each for each in told] == [True] + [False] * 5
    # Each machine has a launcher of its own, and none would know another's key.
    assert not any("JAXDDP_JOB_KEY" in each for each in told)
    monkeypatch.setenv("JAXDDP_JOB_KEY", "ours")
    named = run(TELL, nr=1, run_id="mine", **place).told()
    assert {each["JAXDDP_JOB_KEY"] for each in named} == {"ours"}
    assert {each["JAXDDP_RUN_ID"] for each in named} == {"mine"}


def test_process_0_inherits_the_port_and_the_others_reach_it(run):
    ran = run(
        """
        if rank == 0:
            door = socket.socket(fileno=int(os.environ["JAXDDP_COORDINATOR_FD"]))
            for _ in range(2):
                visitor, _ = door.accept()
                say("heard", visitor.recv(100).decode())
        else:
            host, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
            socket.create_connection((host, int(port))).sendall(f"process {rank}".encode())
        """,
        processes=3,
    )
    assert ran.code == 0
    assert sorted(ran.of(0)) == ["heard process 1", "heard process 2"]


def test_after_the_end_of_process_0_nobody_waits_at_its_door(run):
    ran = run("""
        host, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
        while rank == 1:
            try:
                socket.create_connection((host, int(port))).close()
                time.sleep(0.01)
            except ConnectionResetError:
                say("just closed")
            except ConnectionRefusedError:
                sys.exit(say("refused"))
        """)
    assert (ran.code, ran.of(1)[-1]) == (0, "refused")


@pytest.mark.parametrize("code", (1, 2, 77))
def test_the_first_failure_is_named_with_its_last_lines(code, run, brief, tmp_path):
    ran = run(f"""
        if rank == 1:
            for number in range(15):
                say("line", number)
            sys.exit({code})
        time.sleep(600)
        """)
    assert ran.code == code
    start = ran.errors.index(f"process 1: exit code {code}")
    assert ran.errors[start + 1] == "process 0: killed by SIGTERM"
    head, *last = ran.errors[start + 2 :]
    assert head.startswith(f"process 1: exit code {code}") and str(tmp_path / "logs/process-1.log") in head
    assert last == [f"[1] line {number}" for number in range(5, 15)]


def test_a_killed_process_is_named_with_its_signal(run, brief):
    ran = run("""
        if rank == 0:
            say("so far")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """)
    assert ran.code == 128 + signal.SIGKILL
    assert "process 0: killed by SIGKILL" in ran.errors
    assert ran.errors[-1] == "[0] so far"


def test_a_process_that_ignores_sigterm_is_killed(run, brief, tmp_path):
    ran = run(
        f"""
        ready = {str(tmp_path / "ready")!r}
        if rank == 1:
            while not os.path.exists(ready):
                time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: say("not me"))
        open(ready, "w").close()
        while True:
            time.sleep(0.01)
        """,
        grace=0.5,
    )
    assert ran.code == 3
    assert "process 0: killed by SIGKILL" in ran.errors
    assert ran.of(0) == ["not me"]


def test_workers_are_direct_children_in_sessions_of_their_own(run):
    ran = run("say(os.getppid(), os.getsid(0) == os.getpgrp() == os.getpid())")
    assert [ran.of(rank) for rank in (0, 1)] == [[f"{os.getpid()} True"]] * 2


def test_signals_that_python_ignores_are_not_ignored_in_programs(tmp_path):
    command = ["bash", "-c", "yes | head -1 >/dev/null; exit ${PIPESTATUS[0]}"]
    assert launch(Launch(processes=1, logs=tmp_path), command) == 128 + signal.SIGPIPE


def test_the_others_may_end_by_themselves(run):
    ran = run("""
        if rank == 1:
            sys.exit(4)
        time.sleep(0.3)
        sys.exit("process 1 is gone")
        """)
    assert ran.code == 4
    assert "process 0: exit code 1" in ran.errors and "process 1 is gone" in ran.of(0)
    assert not any("SIGTERM" in line for line in ran.errors)


def test_a_process_that_is_done_does_not_end_the_others(run, brief):
    ran = run("""
        if rank == 1:
            time.sleep(0.5)
            say("still here")
        """)
    assert (ran.code, ran.of(1)) == (0, ["still here"])


def test_a_process_that_saved_lets_the_others_save(run, brief):
    ran = run("""
        if rank == 1:
            time.sleep(0.5)
            say("saved")
        sys.exit(75)
        """)
    assert (ran.code, ran.of(1)) == (75, ["saved"])


def test_a_process_that_saved_waits_for_the_others_within_bounds(run):
    ran = run("sys.exit(75) if rank == 0 else time.sleep(600)", save_grace=0.2)
    assert ran.code == 128 + signal.SIGTERM and "process 1: killed by SIGTERM" in ran.errors


def test_a_failure_counts_for_more_than_a_preemption(run, brief):
    assert run("sys.exit(75) if rank == 0 else (time.sleep(0.2), sys.exit(5))").code == 5


def test_megabytes_without_an_end_of_line(run, tmp_path):
    size = 2_000_000
    ran = run(f"sys.stdout.write(str(rank) * {size})")
    assert ran.code == 0
    for rank in (0, 1):
        assert "".join(ran.of(rank)) == str(rank) * size
        assert (tmp_path / f"logs/process-{rank}.log").read_bytes() == str(rank).encode() * size


def test_bytes_that_are_no_text(run, tmp_path):
    ran = run("sys.stdout.buffer.write(bytes(range(256)) * 8)", processes=1)
    assert ran.code == 0 and ran.out.startswith("[0] ")
    assert (tmp_path / "logs/process-0.log").read_bytes() == bytes(range(256)) * 8


SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(600)']"


def test_a_grandchild_that_keeps_the_pipe_holds_nobody_up(run):
    """One that left the process group lives on, as it asked to; the test ends it."""
    ran = run(f"say(subprocess.Popen({SLEEPER}, start_new_session=True).pid)", processes=1)
    assert ran.code == 0
    os.kill(int(ran.of(0)[0]), signal.SIGKILL)


def test_a_grandchild_that_goes_on_writing_holds_nobody_up(tmp_path, capfd):
    endless = Path("/dev/zero")
    if not endless.exists():
        pytest.skip("no /dev/zero on this system")
    output = Output(0, endless.open("rb", buffering=0), tmp_path / "log")
    output.drain(0.01)
    output.close()
    assert capfd.readouterr().out.startswith("[0] ")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_the_number_of_an_ended_process_is_not_given_away_while_the_job_goes_on(run, tmp_path):
    """What it has left in its group is ended by that number."""
    ran = run(f"""
        path = {str(tmp_path / "pid")!r}
        if rank == 0:
            open(path + "~", "w").write(str(os.getpid()))
            os.rename(path + "~", path)
            sys.exit()
        while not os.path.exists(path):
            time.sleep(0.01)
        stat = f"/proc/{{open(path).read()}}/stat"
        while (state := open(stat).read().rpartition(")")[2].split()[0]) != "Z":
            time.sleep(0.01)
        time.sleep(0.2)
        say(open(stat).read().rpartition(")")[2].split()[0])
        """)
    assert (ran.code, ran.of(1)) == (0, ["Z"])


def test_a_grandchild_of_the_group_ends_with_the_job(run, tmp_path):
    lock = tmp_path / "lock"
    ran = run(
        f"""
        import fcntl
        file = open({str(lock)!r}, "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.Popen({SLEEPER}, pass_fds=[file.fileno()])
        sys.exit(3)
        """,
        processes=1,
    )
    assert ran.code == 3
    wait_for(lock)


def wait_for(lock: Path) -> None:
    """Until nobody holds the lock; pytest's timeout bounds it."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


class Launcher:
    """A launcher in a process of its own, whose two children have said `ready`."""

    def __init__(self, folder: Path, text: str, options: str = "processes=2"):
        self.paths = folder / "out", folder / "err"
        with self.paths[0].open("wb") as out, self.paths[1].open("wb") as err:
            self.process = subprocess.Popen(standalone(folder, text, options), stdout=out, stderr=err)
        self.wait_until(lambda: self.out.count("ready") == 2)

    @property
    def out(self) -> str:
        return self.paths[0].read_text()

    @property
    def err(self) -> str:
        return self.paths[1].read_text()

    def wait_until(self, happened: Callable[[], bool]) -> None:
        give_up = time.monotonic() + HANGING
        while not happened():
            assert self.process.poll() is None and time.monotonic() < give_up, self.err
            time.sleep(0.01)

    def send(self, number: signal.Signals) -> "Launcher":
        self.process.send_signal(number)
        return self

    def end(self) -> int:
        return self.process.wait(timeout=HANGING)


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
CARELESS = "say('ready'); time.sleep(600)"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); say('ready'); time.sleep(600)"


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM, signal.SIGHUP), ids=lambda number: number.name)
def test_a_signal_lets_processes_save_and_end(number, tmp_path):
    launcher = Launcher(tmp_path, SAVE.format(code=75)).send(number)
    assert launcher.end() == 75
    assert sorted(launcher.out.splitlines()[2:]) == ["[0] saved", "[1] saved"]
    assert f"{number.name}: every process was asked to save and stop" in launcher.err


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM), ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("text", "code"),
    [(SAVE.format(code=0), 0), (SAVE.format(code="75 + rank"), None), (CARELESS, None)],
    ids=("done", "one failing", "careless"),
)
def test_a_signal_ends_processes_that_do_not_save(number, text, code, tmp_path):
    assert Launcher(tmp_path, text).send(number).end() == (128 + number if code is None else code)


def test_a_mistake_that_shows_as_all_save_is_the_end(tmp_path):
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
libc = ctypes.CDLL(None)
libc.prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: whoever wants to
seize = "import ctypes, sys, time; print(ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0), flush=True)"
traced = [sys.executable, "-c", f"{{seize}}; time.sleep(60)", str(os.getpid())]
tracer = subprocess.Popen(traced, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True, text=True)
say(tracer.pid, tracer.stdout.readline().strip())
open(ready, "w").close()
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ptrace is Linux's")
def test_a_process_that_cannot_be_killed_is_not_waited_for_without_an_end(run, brief, monkeypatch, tmp_path):
    """Where a debugger holds it, its end does not come to the launcher, as that of one that hangs in the kernel."""
    monkeypatch.setattr(worker_group, "_DEATH_SECONDS", 0.5)
    ran = run(TRACED.format(ready=str(tmp_path / "ready")), grace=0.2)
    tracer, result = ran.of(0)[0].split()
    os.kill(int(tracer), signal.SIGKILL)
    if result != "0":
        pytest.skip("no process may trace another one here")
    assert ran.code == 9
    assert "process 0: SIGKILL does not end it, which waits in the kernel (a disk, a GPU?)" in ran.errors


def test_a_second_ctrl_c_kills(tmp_path):
    launcher = Launcher(tmp_path, DEAF).send(signal.SIGINT)
    launcher.wait_until(lambda: "SIGINT: " in launcher.err)
    assert launcher.send(signal.SIGINT).end() == 130
    assert sorted(launcher.err.splitlines()[-2:]) == ["process 0: killed by SIGKILL", "process 1: killed by SIGKILL"]


def test_processes_that_do_not_end_when_asked_are_killed_in_the_end(tmp_path):
    assert Launcher(tmp_path, DEAF, "processes=2, save_grace=0.3").send(signal.SIGTERM).end() == 143


def test_of_two_that_ended_together_the_killed_one_is_the_cause(tmp_path):
    launcher = Launcher(
        tmp_path,
        f"""
        import fcntl
        folder = {str(tmp_path)!r}
        file = open(os.path.join(folder, str(rank)), "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        say("ready")
        while not os.path.exists(os.path.join(folder, "go")):
            time.sleep(0.01)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(1)
        """,
    )
    # Asleep, the launcher finds both ends at once.
    launcher.send(signal.SIGSTOP)
    (tmp_path / "go").touch()
    for rank in (0, 1):
        wait_for(tmp_path / str(rank))
    time.sleep(0.1)  # a lock is let go of a little before its holder is seen to have ended
    assert launcher.send(signal.SIGCONT).end() == 128 + signal.SIGKILL
    assert "process 1: killed by SIGKILL; its last lines" in launcher.err


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not end a process with its parent")
def test_no_process_outlives_a_killed_launcher(tmp_path):
    launcher = Launcher(
        tmp_path,
        f"""
        import fcntl
        file = open(os.path.join({str(tmp_path)!r}, str(rank)), "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        {DEAF}
        """,
    )
    assert launcher.send(signal.SIGKILL).end() == -signal.SIGKILL
    for rank in (0, 1):
        wait_for(tmp_path / str(rank))


def test_a_worker_whose_launcher_is_gone_already_runs_nothing():
    started = [sys.executable, "-I", "-S", starter.__file__, "1", "", sys.executable, "-c", "print('ran')"]
    done = subprocess.run(started, capture_output=True, text=True, timeout=HANGING)
    assert (done.returncode, done.stdout) == (1, "") and "the launcher is gone" in done.stderr


def test_a_reader_that_leaves_does_not_end_the_run(tmp_path):
    command = standalone(tmp_path, "for number in range(2000): say('line', number)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout and process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=HANGING) == 0
    for rank in (0, 1):
        assert (tmp_path / f"logs/process-{rank}.log").read_text().endswith("line 1999\n")


def test_the_launcher_needs_no_library(tmp_path):
    code = f"""{LAUNCHER}
code = launch(Launch(processes=1, logs=Path("logs")), ["true"])
homes = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
print([home for home in homes if "site-packages" in home and "jaxddp" not in home])
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=HANGING
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


AFFINITY = "say(*sorted(os.sched_getaffinity(0)))"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity on this system")
class TestCores:
    def cores(self, ran: Ran, processes: int) -> list[list[int]]:
        return [[int(core) for core in ran.of(rank)[0].split()] for rank in range(processes)]

    def test_each_process_gets_its_share(self, run):
        mine = local_cores()
        processes = min(2, len(mine))
        given = self.cores(run(AFFINITY, processes=processes), processes)
        assert [core for part in given for core in part] == mine and all(given)

    def test_a_number_of_cores_may_be_asked_for(self, run):
        assert self.cores(run(AFFINITY, processes=1, cores=1), 1) == [local_cores()[:1]]
        assert self.cores(run(AFFINITY, processes=1, cores=0), 1) == [local_cores()]

    def test_more_processes_than_cores_share_them_all_and_are_told_of(self, run):
        mine = local_cores()
        ran = run(AFFINITY, processes=len(mine) + 1)
        assert self.cores(ran, len(mine) + 1) == [mine] * (len(mine) + 1)
        assert f"oversubscribed: {len(mine) + 1} processes on {len(mine)} core" in ran.err

    def test_processes_with_gpus_are_not_bound(self, run, monkeypatch):
        monkeypatch.delenv("JAX_PLATFORMS")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
        assert self.cores(run(AFFINITY), 2) == [local_cores()] * 2


@given(st.lists(st.integers(), max_size=40), st.integers(1, 12))
def test_shares_are_even_and_leave_nothing(items, count):
    parts = shares(items, count)
    assert [item for part in parts for item in part] == items
    assert len(parts) == count and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["4", "7", "GPU-ab", "1"]),
        ({"gpus": 3}, ["4", "7", "GPU-ab"]),
        ({"processes": 2}, ["4,7", "GPU-ab,1"]),
        ({"processes": 1, "gpus": 2}, ["4,7"]),
        ({"processes": 2, "gpus": 0}, ["", ""]),
    ],
    ids=str,
)
def test_gpus_are_shared_out(options, expected, run, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,GPU-ab,1")
    told = run(TELL, **({"processes": None} | options)).told()
    assert [each["CUDA_VISIBLE_DEVICES"] for each in told] == expected
    assert [each.get("JAX_PLATFORMS") for each in told] == [None if any(expected) else "cpu"] * len(expected)


@pytest.mark.parametrize(
    ("environ", "files", "expected"),
    [
        ({}, [], []),
        ({}, ["dev/nvidia0", "dev/nvidia3", "dev/nvidiactl", "dev/nvidia-uvm"], ["0", "1"]),
        ({}, ["proc/driver/nvidia/gpus/0000:01:00.0", "proc/driver/nvidia/gpus/0000:02:00.0"], ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["dev/nvidia0"], []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["dev/nvidia0"], []),
        ({"CUDA_VISIBLE_DEVICES": "2, 0,-1,3"}, [], ["2", "0"]),
        ({"JAX_PLATFORMS": "cpu"}, ["dev/nvidia0"], []),
        ({"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "5"}, [], ["5"]),
    ],
)
def test_gpus_are_counted_without_a_backend(environ, files, expected, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert local_gpus(environ, tmp_path) == expected


# fmt: off
BAD_OPTIONS = {
    "no process": ({"processes": 0}, "--processes=0: expected 1 to 10,000"),
    "no machine": ({"nodes": "0"}, "--nodes=0: expected 1 to 100,000"),
    "GPUs below zero": ({"gpus": -1}, "--gpus=-1: expected 0 to 10,000"),
    "a grace that is no number": ({"grace": float("nan")}, "--grace=nan: expected 0 to 1,000,000"),
    "a grace below zero": ({"save_grace": -1.0}, "--save_grace=-1.0: expected 0 to 1,000,000"),
    "no GPU and no number": ({"processes": None}, "say how many to start: --processes P"),
    "GPUs that are not there": ({"processes": None, "gpus": 2}, "--gpus 2: a process here would see 0; --processes P"),
    "more cores than there are": ({"processes": 1, "cores": 99999}, "--cores 99999: 1 process would need 99999"),
    "nodes without coordinator": ({"nodes": "2", "nr": 0}, "--nodes 2: give --coordinator HOST:PORT"),
    "nodes without nr": ({"nodes": "2", "coordinator": "h:1"}, "--nodes 2: give --nr, this machine's number, 0 to 1"),
    "nr too large": ({"nodes": "2", "coordinator": "h:1", "nr": 2}, "--nr 2: expected 0 to 1, for --nodes 2"),
    "nr below zero": ({"nodes": "2", "coordinator": "h:1", "nr": -1}, "--nr=-1: expected 0 to 99,999"),
    "nr of one machine": ({"nr": 1}, "--nr 1: expected 0 to 0, for --nodes 1"),
    "no port": ({"nodes": "2", "nr": 0, "coordinator": "host0"}, "--coordinator host0: expected HOST:PORT"),
    "no host": ({"nodes": "2", "nr": 0, "coordinator": ":1234"}, "--coordinator :1234: expected HOST:PORT"),
    "port that is no number": ({"coordinator": "h:x"}, "--coordinator h:x: expected HOST:PORT"),
    "machines that are no number": ({"nodes": "two"}, "--nodes='two': expected a number of machines, as 2, or MIN:MAX"),
    "three numbers of machines": ({"nodes": "1:2:3"}, "--nodes='1:2:3': expected a number of machines, as 2, or"),
    "from many to few machines": ({"nodes": "4:2"}, "--nodes 4:2: MIN is above MAX"),
    "from no machine": ({"nodes": "0:2"}, "--nodes=0: expected 1 to 100,000"),
    "a range without coordinator": ({"nodes": "1:2", "nr": 0}, "--nodes 1:2: give --coordinator HOST:PORT"),
    "a range without nr": ({"nodes": "1:2", "coordinator": "h:1"}, "--nodes 1:2: give --nr, this machine's number, 0"),
    "fewer restarts than none": ({"restarts": -1}, "--restarts=-1: expected 0 to 1,000,000"),
    "no wait": ({"wait": 0.0}, "--wait=0.0: expected above 0, at most 1,000,000"),
    "port out of range": ({"coordinator": "h:65536"}, "port from 1 to 65535"),
    "no such host": ({"coordinator": "no..where:1234"}, "no..where:1234: there is no host 'no..where'"),
    "another machine": ({"coordinator": "192.0.2.1:1234"}, "192.0.2.1:1234: not an address of this machine; process 0"),
}
# fmt: on


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case, tmp_path):
    options, expected = BAD_OPTIONS[case]
    with pytest.raises(InputError) as error:
        launch(Launch(**({"processes": 2, "logs": tmp_path / "logs"} | options)), ["true"])
    assert expected in str(error.value)
    assert not (tmp_path / "logs").exists()


def test_gpus_that_cannot_be_shared_evenly(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(InputError, match="--processes 2: 3 GPUs cannot be shared evenly; --gpus K takes some"):
        launch(Launch(processes=2, logs=tmp_path), ["true"])


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = Launch(processes=1, logs=tmp_path, nodes="2", nr=0, coordinator=f"127.0.0.1:{port}")
        with pytest.raises(InputError, match=f"port {port} is taken; choose another, the same on every machine"):
            launch(options, ["true"])


def test_a_name_that_is_the_loopback_is_told_of(run, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host0")
    plain = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **named: plain("127.0.0.1", *rest, **named))
    ran = run("", nodes="2", nr=0, processes=1, coordinator=f"host0:{free_port()}")
    assert "host0 is 127.0.0.1 here, where no other machine reaches it" in ran.err


def children() -> set[str]:
    """The pids of this process's children, zombies too."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_an_interrupted_start_leaves_the_signals_as_they_were(tmp_path):
    others = children()
    before = [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)]
    (tmp_path / "process-1.log").mkdir()
    with pytest.raises(InputError, match=r"process-1\.log: cannot be written .* choose another folder with --logs"):
        launch(Launch(processes=2, logs=tmp_path), program("time.sleep(600)"))
    assert [signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)] == before
    assert children() == others


def test_split():
    assert split(["--processes", "2", "--", "train", "x", "--", "y"]) == (
        ["--processes", "2"],
        ["train", "x", "--", "y"],
    )
    assert split(["--help"]) == (["--help"], [])
    for words in ([], ["--processes", "2"], ["--processes", "2", "--"], ["train", "digits"]):
        with pytest.raises(InputError, match=r"launch: no command; it follows a --, as in: jaxddp launch"):
            split(words)


def test_the_command(run, tmp_path, monkeypatch, capfd):
    with pytest.raises(InputError, match="'trian' is neither a command of jaxddp nor a program, did you mean 'train'?"):
        launch(Launch(processes=1, logs=tmp_path), ["trian", "digits"])
    package = tmp_path / "jaxddp"
    package.mkdir()
    # Without it this would be a namespace, and an installed jaxddp come first.
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("import sys; print(sys.executable, *sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    assert launch(Launch(processes=1, logs=tmp_path), ["train", "digits", "--seed", "1"]) == 0
    assert capfd.readouterr().out.split() == ["[0]", sys.executable, "train", "digits", "--seed", "1"]
    assert launch(Launch(processes=1, logs=tmp_path), ["echo", "a  b"]) == 0
    assert capfd.readouterr().out == "[0] a  b\n"


def lines_of(*chunks: bytes) -> list[str]:
    lines = Lines()
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.finish()


@given(st.lists(st.text("ab\né", max_size=8), max_size=8))
def test_lines_do_not_depend_on_how_they_arrive(chunks):
    whole = "".join(chunks)
    expected = whole.split("\n")
    assert lines_of(*(chunk.encode() for chunk in chunks)) == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.binary(max_size=8), max_size=8))
def test_any_bytes_become_lines(chunks):
    lines = lines_of(*chunks)
    assert not any("\n" in line or "\r" in line for line in lines)


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([b"a\r\nb\r\n"], ["a", "b"]),
        ([b"a\r", b"\nb"], ["a", "b"]),
        ([b"\r10%", b"\r20%", b"\r30%\n", b"done"], ["10%", "30%", "done"]),
        ([b"10%\r20%\r30%\r"], ["20%", "30%"]),
        ([b"\r10%\r20%\r30%\nx"], ["30%", "x"]),
        ([b"10%\r   \rmessage\n"], ["message"]),
        ([b"\n\n"], ["", ""]),
        ([], []),
    ],
)
def test_carriage_returns(chunks, expected):
    assert lines_of(*chunks) == expected


def test_a_line_without_an_end_is_not_kept_whole_in_memory():
    assert Lines().feed(b"x" * 100_000) == ["x" * 100_000]


def test_a_log_that_fails_does_not_end_the_run(capfd, monkeypatch, tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    reading, writing = os.pipe()
    os.write(writing, b"line\n")
    os.close(writing)
    full = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    monkeypatch.setattr("jaxddp.files.open_regular", lambda *_, **__: full)
    output = Output(0, os.fdopen(reading, "rb", buffering=0), tmp_path / "log")
    output.drain(HANGING)
    output.close()
    out, err = capfd.readouterr()
    assert out == "[0] line\n" and list(output.last_lines) == ["[0] line"]
    assert f"{tmp_path / 'log'}: cannot be written (No space left on device); the run continues without it" in err


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
def test_when_the_slurm_script_goes_back_to_the_queue(code, restarts, most, goes_back, pretend):
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
