"""Fixtures for tests with real processes, schedulers and hosts. Without a program a test is skipped; in CI it fails."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.browser import Browser
from support.data import random_table, write_arrays
from support.ilsvrc import write_tree
from support.processes import BRIEF, LONGER, THREADS, TRAIN, Launched, Program


@pytest.fixture(scope="session")
def require() -> Callable[..., None]:
    """Skip a test if a program is missing, such as by `require("srun", package="slurm-wlm")`."""

    def check(*programs: str, package: str, root: bool = False) -> None:
        missing = [program for program in programs if shutil.which(program) is None]
        reasons = [f"no {' and no '.join(missing)} here: apt-get install {package}"] if missing else []
        if root and os.geteuid() != 0:
            reasons.append("only root can")
        if reasons:
            (pytest.fail if os.environ.get("CI") else pytest.skip)("; ".join(reasons))

    return check


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Yield `start(kind, *arguments)`, which starts a program, and end all programs afterwards."""
    programs: list[Program] = []

    def start_program(kind: type[Program], *arguments: object, **more: object) -> Program:
        programs.append(kind(*arguments, **more))
        return programs[-1]

    yield start_program
    for program in reversed(programs):
        program.close()


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """A data set of 39 and 11 files, no multiples of the batch size. Each process imports TensorFlow to read it."""
    return write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=13, val=11, size=20)


@pytest.fixture(scope="session")
def arrays(tmp_path_factory) -> Path:
    """A file of arrays with as many images as `tree`. With arrays a process starts in half the time."""
    file = tmp_path_factory.mktemp("arrays") / "images.npz"
    return write_arrays(file, random_table(39, image=16), random_table(11, seed=1, image=16))


def trained_alone(data: Path, workdir: Path) -> Path:
    """Train in one process with four devices, and return the work directory."""
    words = [*TRAIN, "--data.path", str(data), "--workdir", str(workdir), *BRIEF, "--parallel.cpu-devices", "4"]
    Launched(workdir, 1, words).ends_well()
    return workdir


@pytest.fixture(scope="session")
def reference(arrays, tmp_path_factory) -> Path:
    """The run on arrays that all other runs must equal."""
    return trained_alone(arrays, tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="session")
def undisturbed(arrays, tmp_path_factory) -> Path:
    """A longer run of two processes with a device each, which killed and resumed runs must equal bit for bit."""
    workdir = tmp_path_factory.mktemp("undisturbed")
    words = [*TRAIN, "--data.path", str(arrays), "--workdir", str(workdir), *LONGER]
    Launched(workdir, 2, words, *THREADS).ends_well()
    return workdir


@pytest.fixture(scope="module")
def browser(require, tmp_path_factory) -> Iterator[Browser]:
    """A headless Chromium for the tests of a module."""
    require("chromium", package="chromium")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()
