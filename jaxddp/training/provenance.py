"""What a run is made of, as a logger records it: its config, its size, versions, and the commit of the code."""

import os
import subprocess
from pathlib import Path
from typing import Any

from jaxddp.core.versions import installed_version
from jaxddp.overrides import flatten
from jaxddp.training.events import RunStart
from jaxddp.training.listeners.lines import count_parameters

_PACKAGES = ("jaxddp", "jax", "jaxlib", "flax", "optax")
_GIT_SECONDS = 5
"""A repository on a network's file system may take long to answer, and a run should not wait for it."""


def provenance(run: RunStart, folder: Path | None = None) -> dict[str, Any]:
    """By dotted names the config, and beside it `run.…`, `versions.…` and `code.…`.

    The code is that of the repository around `folder`, which is the current one where absent.
    """
    made_of = {
        "run": {
            "devices": run.devices,
            "device_kind": run.device_kind,
            "processes": run.processes,
            "parameters": None if run.params is None else count_parameters(run.params),
            "examples": run.num_examples,
            "steps": run.total_steps,
        },
        "versions": {package: installed_version(package) for package in _PACKAGES},
        "code": code_version(folder or Path.cwd()),
    }
    return flatten({**run.config, **made_of})


def code_version(folder: Path) -> dict[str, Any]:
    """The `commit` of the repository around a folder, and whether its files are `dirty`, that is, differ from it.

    Empty where there is no git, no repository or no answer within seconds.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": _git(folder, "status", "--porcelain", "--untracked-files=no") != ""}
    except (OSError, subprocess.SubprocessError):
        return {}


def _git(folder: Path, *words: str) -> str:
    # Looking must not take the lock of a repository in which somebody works.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_GIT_SECONDS, check=True)
    return done.stdout.strip()
