"""Tests with real parts: processes, schedulers, hosts. Where one is missing a test is skipped; in CI it fails."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ilsvrc import write_tree
from started import BRIEF, HANGING, TRAIN, Launched, Program


@pytest.fixture(scope="session")
def require() -> Callable[..., None]:
    """`require("srun", package="slurm-wlm")` skips the test that asks, unless this machine has what it needs."""

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
    """Starts programs, `start(kind, *arguments)`, which do not outlive the test."""
    programs: list[Program] = []

    def started(kind: type[Program], *arguments: object, **more: object) -> Program:
        programs.append(kind(*arguments, **more))
        return programs[-1]

    yield started
    for program in reversed(programs):
        program.close()


@pytest.fixture(scope="session")
def tree(tmp_path_factory) -> Path:
    """39 images to train on, 11 to validate with: no multiple of the batch."""
    return write_tree(tmp_path_factory.mktemp("tree"), classes=3, images=13, val=11, size=20)


@pytest.fixture(scope="session")
def reference(tree, tmp_path_factory) -> Path:
    """The work directory of the run that all others must equal: one process with four devices."""
    workdir = tmp_path_factory.mktemp("reference")
    words = [*TRAIN, "--data.path", str(tree), "--workdir", str(workdir), *BRIEF, "--parallel.cpu-devices", "4"]
    run = Launched(workdir, 1, words)
    try:
        assert run.end(HANGING) == 0, run.out + run.err
    finally:
        run.close()
    return workdir
