"""Downloads wheels into a folder outside the environment."""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FETCH_SECONDS = 600


def fetch_wheels(folder: Path, requirements: Sequence[str]) -> None:
    """Install wheels, without their dependencies, into a folder if it does not exist.

    Raises:
        SystemExit: the wheels cannot be installed.
    """
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        whole = Path(scratch) / "whole"
        # An environment that uv created has no pip.
        pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else ["uv", "pip"]
        command = [*pip, "install", "--quiet", "--no-deps", "--target", str(whole), *requirements]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError) as error:
            reason = [*str(getattr(error, "stderr", None) or error).strip().splitlines(), ""][0]
            sys.exit(f"{' and '.join(requirements)} cannot be installed ({reason}); try again with a network")
        with suppress(OSError):  # another process was faster
            whole.rename(folder)
