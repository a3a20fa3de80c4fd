"""Files and servers that stop answering: the training ends with a message that names the phase "input"."""

import os
import re
import shutil
import signal
import socket
import sys

import pytest
from support.processes import ENDLESS, TRAIN, Launched, Program, lines

# test_stalls.py tests other stalls, and tests/test_progress.py a pipe without a reader.
pytestmark = pytest.mark.ci

SOON = 60
"""Maximum seconds until all processes end on a busy machine: ten times the limit of this test."""
STALL_OPTIONS = ["--parallel.stall-timeout", "6"]  # TensorFlow takes seconds to start.
STALL_MESSAGE = r"jaxddp: this process made no progress for \d+ s after step \d+, in phase 'input'; "


def test_images_that_become_fifos_end_the_run(tree, start, tmp_path):
    copy = shutil.copytree(tree, tmp_path / "tree")
    words = [*TRAIN, "--data.path", str(copy), "--workdir", str(tmp_path / "run"), *ENDLESS, *STALL_OPTIONS]
    run = start(Launched, tmp_path / "launch", 1, words)
    run.wait_until(lambda: lines(tmp_path / "run"))
    for image in copy.glob("ILSVRC/**/train/**/*.JPEG"):
        image.unlink()
        os.mkfifo(image)
    assert run.end(SOON) == 1, run.out + run.err
    assert re.match(STALL_MESSAGE, run.last_of(0)), run.last_of(0)


def test_a_stopped_web_server_ends_the_run(tree, start, tmp_path):
    """The store accepts connections without answering. The run ends long before an image's timeout of a minute."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    server = start(
        Program, [sys.executable, "-m", "http.server", "-b", "127.0.0.1", "-d", str(tree), port], tmp_path / "web"
    )
    words = [
        *TRAIN,
        "--data.path",
        f"http://127.0.0.1:{port}/",
        "--workdir",
        str(tmp_path / "run"),
        *ENDLESS,
        *STALL_OPTIONS,
    ]
    run = start(Launched, tmp_path / "launch", 1, words)
    run.wait_until(lambda: lines(tmp_path / "run"))
    server.process.send_signal(signal.SIGSTOP)
    assert run.end(SOON) == 1, run.out + run.err
    assert re.match(STALL_MESSAGE, run.last_of(0)), run.last_of(0)
    server.process.send_signal(signal.SIGKILL)
