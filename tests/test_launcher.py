"""The launcher with real processes: their environment, their output and their end.

The processes run small Python programs without JAX. No test asserts a duration. `HANGING` only limits the time of a
test that hangs.
"""

import os
import re
import signal
from pathlib import Path

import pytest
from support.launches import PRINT_ENVIRONMENT, free_port, program, wait_for

from jaxddp.cli import main
from jaxddp.cluster.launcher import launch
from jaxddp.cluster.options import Launch

pytestmark = pytest.mark.usefixtures("clean_environment")


def test_output_is_prefixed_and_logged_to_files(run, tmp_path):
    program = """
        say("one"); print("two", file=sys.stderr)
        assert sys.stdin.read() == ""
        sys.stdout.write("no end")
        """
    ran = run(program)
    assert ran.code == 0 and [ran.of(rank) for rank in (0, 1)] == [["one", "two", "no end"]] * 2
    assert len(ran.lines) == 6 and len(ran.errors) == 1 and str(tmp_path / "logs") in ran.errors[0]
    for rank in (0, 1):
        assert (tmp_path / f"logs/process-{rank}.log").read_text() == "one\ntwo\nno end"
    run("say('second')", processes=1)
    *first, between, second = (tmp_path / "logs/process-0.log").read_text().splitlines()
    assert len(first) == 2 and "--- started again" in between and second == "second"


@pytest.mark.parametrize("words", (["--workdir", "w"], ["--workdir=w"], ["--seed", "1"]), ids=str)
def test_logs_are_kept_in_the_work_directory(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch(Launch(processes=1), [*program(""), *words]) == 0
    assert (tmp_path / ("w/logs" if "w" in "".join(words) else "runs/launch") / "process-0.log").is_file()
    of_run = Path("w/logs" if "w" in "".join(words) else "runs/digits/logs")
    monkeypatch.setattr("jaxddp.commands.launch.launch", lambda options, *_: 7 * (options.logs == of_run))
    assert main(["launch", "--", "train", "digits", *words]) == 7


def test_processes_get_the_environment_variables_of_their_job(run, monkeypatch):
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "3")
    monkeypatch.setenv("JAXDDP_COORDINATOR_FD", "99")
    monkeypatch.setenv("JAXDDP_JOB_KEY", "")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=1")
    first, second = run(PRINT_ENVIRONMENT).environments()
    assert (first.pop("JAX_PROCESS_ID"), second.pop("JAX_PROCESS_ID")) == ("0", "1")
    assert int(first.pop("JAXDDP_COORDINATOR_FD")) != 99
    # Each process has its own pipe; see tests/test_restarts.py.
    assert all(int(environment.pop("JAXDDP_STATUS_FD")) for environment in (first, second))
    assert first == second
    assert first["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:") and first["JAX_NUM_PROCESSES"] == "2"
    assert first["GLIBC_TUNABLES"] == "glibc.malloc.check=1" and first["PYTHONUNBUFFERED"] == "1"
    assert "JAX_LOCAL_DEVICE_IDS" not in first and "CUDA_VISIBLE_DEVICES" not in first
    monkeypatch.delenv("GLIBC_TUNABLES")
    again = run(PRINT_ENVIRONMENT).environments()[0]
    assert again["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    for name, digits in (("JAXDDP_JOB_KEY", 64), ("JAXDDP_RUN_ID", 16)):
        assert re.fullmatch(f"[0-9a-f]{{{digits}}}", first[name]) and first[name] != again[name]


def test_several_machines_run_one_job(run, monkeypatch):
    options = {"nodes": "2", "processes": 3, "coordinator": f"127.0.0.1:{free_port()}"}
    environments = [each for nr in (0, 1) for each in run(PRINT_ENVIRONMENT, nr=nr, **options).environments()]
    assert [environment["JAX_PROCESS_ID"] for environment in environments] == ["0", "1", "2", "3", "4", "5"]
    shared = ("JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS", "JAXDDP_RUN_ID")
    ((count, address, _),) = {tuple(environment[name] for name in shared) for environment in environments}
    assert (count, address) == ("6", options["coordinator"])
    assert ["JAXDDP_COORDINATOR_FD" in environment for environment in environments] == [True] + [False] * 5
    # Each machine has its own launcher, which cannot get the key of another launcher.
    assert not any("JAXDDP_JOB_KEY" in environment for environment in environments)
    monkeypatch.setenv("JAXDDP_JOB_KEY", "ours")
    with_given_ids = run(PRINT_ENVIRONMENT, nr=1, run_id="mine", **options).environments()
    assert {(each["JAXDDP_JOB_KEY"], each["JAXDDP_RUN_ID"]) for each in with_given_ids} == {("ours", "mine")}


def test_process_0_inherits_the_port_and_the_others_reach_it(run):
    ran = run(
        """
        if rank == 0:
            listener = socket.socket(fileno=int(os.environ["JAXDDP_COORDINATOR_FD"]))
            for _ in range(2):
                connection, _ = listener.accept()
                say("received", connection.recv(100).decode())
        else:
            host, port = os.environ["JAX_COORDINATOR_ADDRESS"].split(":")
            socket.create_connection((host, int(port))).sendall(f"process {rank}".encode())
        """,
        processes=3,
    )
    assert (ran.code, sorted(ran.of(0))) == (0, ["received process 1", "received process 2"])


def test_after_the_end_of_process_0_its_port_is_closed(run):
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


def test_the_launcher_names_the_first_failure_with_its_last_lines(run, short_wait, tmp_path):
    ran = run("""
        if rank == 1:
            print(*(f"line {number}" for number in range(15)), sep=chr(10), flush=True)
            sys.exit(77)
        time.sleep(600)
        """)
    assert ran.code == 77
    start = ran.errors.index("process 1: exit code 77")
    assert ran.errors[start + 1] == "process 0: killed by SIGTERM"
    summary, *last = ran.errors[start + 2 :]
    assert summary.startswith("process 1: exit code 77") and str(tmp_path / "logs/process-1.log") in summary
    assert last == [f"[1] line {number}" for number in range(5, 15)]


def test_the_launcher_names_a_killed_process_and_its_signal(run, short_wait):
    ran = run("""
        if rank == 0:
            say("so far")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        """)
    assert ran.code == 128 + signal.SIGKILL and "process 0: killed by SIGKILL" in ran.errors
    assert ran.errors[-1] == "[0] so far"


def test_a_process_that_ignores_sigterm_is_killed(run, short_wait, tmp_path):
    ran = run(
        f"""
        ready = {str(tmp_path / "ready")!r}
        if rank == 1:
            while not os.path.exists(ready):
                time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: say("ignored"))
        open(ready, "w").close()
        while True:
            time.sleep(0.01)
        """,
        grace=0.5,
    )
    assert (ran.code, ran.of(0)) == (3, ["ignored"]) and "process 0: killed by SIGKILL" in ran.errors


def test_workers_are_direct_children_in_sessions_of_their_own(run):
    ran = run("say(os.getppid(), os.getsid(0) == os.getpgrp() == os.getpid())")
    assert [ran.of(rank) for rank in (0, 1)] == [[f"{os.getpid()} True"]] * 2


def test_signals_that_python_ignores_are_not_ignored_in_programs(tmp_path):
    command = ["bash", "-c", "yes | head -1 >/dev/null; exit ${PIPESTATUS[0]}"]
    assert launch(Launch(processes=1, logs=tmp_path), command) == 128 + signal.SIGPIPE


def test_a_process_that_saved_lets_the_others_save(run, short_wait):
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


def test_a_failure_takes_precedence_over_a_preemption(run, short_wait):
    assert run("sys.exit(75) if rank == 0 else (time.sleep(0.2), sys.exit(5))").code == 5


def test_any_bytes_without_a_line_end_are_passed_on(run, tmp_path):
    ran = run("sys.stdout.buffer.write(bytes(range(256)) * 8 + str(rank).encode() * 2_000_000)")
    assert ran.code == 0 and ran.out.startswith("[")
    for rank in (0, 1):
        assert ran.out.count(str(rank)) >= 2_000_000
        written = bytes(range(256)) * 8 + str(rank).encode() * 2_000_000
        assert (tmp_path / f"logs/process-{rank}.log").read_bytes() == written


SLEEPER = "[sys.executable, '-c', 'import time; time.sleep(600)']"


def test_a_grandchild_that_keeps_the_pipe_open_is_not_waited_for(run):
    """A grandchild that left the process group survives, as intended. The test ends it."""
    ran = run(f"say(subprocess.Popen({SLEEPER}, start_new_session=True).pid)", processes=1)
    assert ran.code == 0
    os.kill(int(ran.of(0)[0]), signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's /proc")
def test_the_pid_of_an_ended_process_is_not_reused_while_the_job_runs(run, tmp_path):
    """The launcher needs the pid to end the process group of the ended process."""
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


@pytest.mark.parametrize("lacking", ("nothing", "waitid"))
def test_a_grandchild_of_the_group_ends_with_the_job(lacking, run, monkeypatch, tmp_path):
    monkeypatch.delattr(os, lacking, raising=False)
    holds = f"""
        import fcntl
        file = open({str(tmp_path / "lock")!r}, "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        subprocess.Popen({SLEEPER}, pass_fds=[file.fileno()])
        os.kill(os.getpid(), signal.SIGKILL)
        """
    assert run(holds, processes=1).code == 128 + signal.SIGKILL
    wait_for(tmp_path / "lock")
