"""Faults in the middle of training: every process ends in time and names the cause."""

import os
import re
import resource
import shutil
import signal

import pytest
from support.processes import ENDLESS, TRAIN, Launched, checkpoint_steps, close, lines, losses, result

SOON = 40
"""Maximum seconds until all processes end on a busy machine: the promised 15, and the launcher's grace period."""

STOPPED_AS_A_VALIDATION_BEGINS = """
import os, signal, sys, time
import numpy as np, optax
import jaxddp
from jaxddp.training.evaluation import Evaluator

evaluate, begun = Evaluator.measure, []
def slowly(*arguments):
    begun.append(arguments)
    if len(begun) == 3:
        if os.environ["JAX_PROCESS_ID"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)  # Until all processes have the message, and the save is on disk.
    return evaluate(*arguments)
Evaluator.measure = slowly

rng = np.random.default_rng(0)
tables = [
    jaxddp.ArrayTable(rng.integers(0, 256, (size, 6, 6, 3), np.uint8), rng.integers(0, 5, size), tuple("abcde"))
    for size in (50, 23)
]
net = (
    lambda key, example: {"weight": np.zeros((example[0].size, 5), np.float32)},
    lambda params, images: images.reshape(len(images), -1) @ params["weight"],
)
setup = jaxddp.prepare_training(net, tables[0], None, optax.sgd(0.01), 4, epochs=8)
jaxddp.train(jaxddp.softmax_cross_entropy, setup, val=tables[1], workdir=sys.argv[1])
"""


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def training(arrays, workdir, start, tmp_path):
    """Return a function that starts two processes, which train endlessly, and returns after some steps."""

    def run(*more: str, program: tuple[str, ...] = (), steps: int = 4, options: tuple[str, ...] = ()) -> Launched:
        words = [*program, *TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *ENDLESS, *more]
        launched = start(Launched, tmp_path / "launch", 2, words, "--grace", "2", *options)
        launched.wait_until(lambda: len(lines(workdir)) >= steps)
        return launched

    return run


@pytest.mark.ci
def test_a_killed_process_ends_the_job(training):
    launched = training()
    os.kill(launched.worker(1), signal.SIGKILL)
    assert launched.end(SOON) == 128 + signal.SIGKILL
    assert "process 1: killed by SIGKILL\n" in launched.err
    assert "process 0: exit code 1\n" in launched.err
    assert launched.last_of(0).startswith("jaxddp: process 1 was lost (on ")


# The cause is easier to find in process 0, whose message comes first.
@pytest.mark.ci
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_save_that_fails_in_one_process_ends_the_job_with_its_cause(start, arrays, workdir, tmp_path, rank):
    words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *ENDLESS, "--log.to", ""]
    launched = start(Launched, tmp_path / "launch", 2, [*words, "--checkpoint.every", "40 steps"], "--grace", "2")
    launched.wait_until((workdir / "checkpoints" / "40").is_dir)
    resource.prlimit(launched.worker(rank), resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    assert launched.end(SOON) == 2
    # In process 0 the last manifest may exceed the limit.
    failed = re.compile(rf"{workdir / 'checkpoints'}\S*: cannot be written \(File too large\)")
    assert failed.search(launched.last_of(rank))
    message = launched.last_of(1 - rank)
    assert message.startswith(f"jaxddp: process {rank} ended: ") and failed.search(message)


# tests/test_presence.py tests other changes of the work directory in one process.
@pytest.mark.ci
def test_a_work_directory_that_is_removed_ends_the_job_and_is_not_created_again(training, workdir):
    launched = training("--checkpoint.every", "5 steps")
    # In one step, because `rm -r` removes the folder of checkpoints first, which a process may notice before the rest.
    removed = workdir.rename(workdir.with_name("removed"))
    shutil.rmtree(removed, ignore_errors=True)
    assert launched.end(SOON) == 2
    line = f"{workdir}: was removed, moved or replaced while the run wrote there; bring {workdir} back, and the same"
    for rank in (0, 1):
        assert line in launched.last_of(rank)
        assert "Traceback" not in (launched.logs / f"process-{rank}.log").read_text()
    assert not workdir.exists()


@pytest.mark.ci
def test_sigterm_and_ctrl_c_save_and_the_same_command_resumes(training, workdir, reference):
    done = 0
    # The second signal usually comes during a validation.
    for number, more in ((signal.SIGTERM, ()), (signal.SIGINT, ("--eval.every", "1 step"))):
        before = len(lines(workdir))
        launched = training(*more, steps=before + 4)
        launched.process.send_signal(number)
        # A program that Ctrl-C stops ends by the signal, because only then a loop of the shell ends, too.
        assert launched.end() == (75 if number == signal.SIGTERM else -number), launched.out + launched.err
        assert f"{number.name}: every process was asked to save and stop" in launched.err
        assert all(f"process {rank}: exit code 75\n" in launched.err for rank in (0, 1))
        assert not done or f"resuming at step {done} | " in launched.out
        step = result(workdir)["step"]
        assert result(workdir)["status"] == "preempted" and step > done
        assert checkpoint_steps(workdir)[-1] == step
        saved = f"jaxddp: asked to stop: saved step {step} of 100000; the same command resumes it"
        assert [launched.last_of(rank) for rank in (0, 1)] == [saved, saved]
        done = step
    assert list(losses(workdir)) == list(range(1, done + 1))
    expected = losses(reference)
    assert close({step: losses(workdir)[step] for step in expected}, expected)


@pytest.mark.ci
def test_sigterm_to_a_process_ends_a_command_that_saves_nothing(start, arrays, tmp_path):
    words = ["find-lr", *TRAIN[1:], "--data.path", str(arrays), "--steps", "100000"]
    launched = start(Launched, tmp_path / "launch", 2, words)
    launched.wait_until(lambda: "[Gloo] Rank" in launched.out)
    os.kill(launched.worker(1), signal.SIGTERM)
    assert launched.end(SOON) == 75
    assert launched.last_of(1) == "jaxddp: asked to stop; nothing was written"
    assert launched.last_of(0) == "jaxddp: process 1 ended: asked to stop; nothing was written; the job ends here"


@pytest.mark.ci
def test_all_processes_learn_of_sigterm_as_a_validation_begins(workdir, start, tmp_path):
    (tmp_path / "script.py").write_text(STOPPED_AS_A_VALIDATION_BEGINS)
    words = ["python", str(tmp_path / "script.py"), str(workdir)]
    launched = start(Launched, tmp_path / "launch", 2, words)
    assert launched.end() == 75, launched.out + launched.err
    # The third epoch of 50 examples with batch size 8 ends at step 19.
    saved = "jaxddp: asked to stop: saved step 19 of 50; the same command resumes it"
    assert [launched.last_of(rank) for rank in (0, 1)] == [saved, saved]
    assert checkpoint_steps(workdir)[-1] == 19 and len(lines(workdir, "val")) == 2
