"""A work directory belongs to one recipe: it is claimed by writing config.json, and a resumed run must match it."""

import json
from pathlib import Path
from typing import Any, Literal

from jaxddp.config import Config, flatten
from jaxddp.errors import InputError
from jaxddp.runtime import workdir
from jaxddp.runtime.checkpoint import Checkpoints

Resume = Literal["auto", "never", "must"]
CONFIG_FILE = "config.json"
_MEND = "restore it, or start in another --workdir"

# What a resumed run may change: how long, how often, and on what. All else is the recipe.
_FREE = ("train.duration", "eval.every", "checkpoint.every", "log.every", "parallel.")


def resume_step(checkpoints: Checkpoints, resume: Resume) -> int | None:
    """The step to go on from; None begins anew.

    Raises:
        InputError: "must" without a checkpoint, or "never" where one would be lost.
    """
    latest = checkpoints.latest()
    if resume == "must" and latest is None:
        raise InputError(f"{checkpoints.directory}: no checkpoint to resume from; check --workdir, or --resume auto")
    if resume == "never" and latest is not None:
        raise InputError(
            f"{checkpoints.directory}: holds checkpoints up to step {latest}, which --resume never would lose; "
            "choose another --workdir, remove it, or --resume auto"
        )
    return latest


def claim(directory: Path, config: Config, fingerprints: dict[str, str], *, resuming: bool) -> None:
    """Write config.json: the resolved config and the data's fingerprints. On resume, compare with what stands there.

    Raises:
        InputError: a key of the recipe differs; names it and both values. Or the file cannot be read or written.
    """
    path = directory / CONFIG_FILE
    content = {**config.to_dict(), "fingerprint": fingerprints}
    if resuming:
        _compare(path, _read(path), content)
    workdir.replace(path, (json.dumps(content, indent=2) + "\n").encode())


def _compare(path: Path, saved: dict[str, Any], content: dict[str, Any]) -> None:
    there, here = flatten(saved), flatten(content)
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key) and not key.startswith(_FREE):
            raise InputError(
                f"{path}: {key} was {there.get(key)!r} and is now {here.get(key)!r}; a resumed run keeps its recipe: "
                "set it back, or start in another --workdir"
            )


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(
            f"{path}: is missing beside the checkpoints; restore it, or start in another --workdir"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); restore it, or start in another --workdir") from None
