"""Finds the launcher among the ancestors of this process. A wrapper, such as `uv run`, may be between them."""

import os
from pathlib import Path

_MOST_ANCESTORS = 1000


def launcher_of(variable: str, proc: Path = Path("/proc")) -> int:
    """Return the id of the nearest ancestor that was started without an environment variable, which it sets itself.

    If the ancestors cannot be read, return the id of the parent process.

    Args:
        proc: the folder with the processes of the kernel.
    """
    parent = process = os.getppid()
    for _ in range(_MOST_ANCESTORS):
        try:
            if not _has(variable, proc / str(process) / "environ"):
                return process
            process = _parent(proc / str(process) / "stat")
        except OSError:
            # A wrapper belongs to the user of this process, who may read it, so this is the launcher.
            return process
        except (ValueError, IndexError):
            break
    return parent


def _has(variable: str, environ: Path) -> bool:
    return any(setting.startswith(f"{variable}=".encode()) for setting in environ.read_bytes().split(b"\0"))


def _parent(stat: Path) -> int:
    # The name of the program, in parentheses, may contain any character.
    return int(stat.read_bytes().rpartition(b")")[2].split()[1])
