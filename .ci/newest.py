"""Creates `.venv-newest`: the newest versions without constraints, on the newest Python of this machine.

The environment is kept for a day, and then created again. The last line lists its versions, or says why it cannot be
created.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = ROOT / ".venv-newest"
PYTHON, STAMP = HOME / "bin" / "python", HOME / "made"
UV = ROOT / ".venv" / "bin" / "uv"
MINORS = (13, 12, 11)
KEPT_SECONDS, INSTALL_SECONDS = 24 * 3600, 600
NOT_NEEDED = {
    "jax2onnx",  # Requires an older Orbax than the other packages.
    *("basedpyright", "ipykernel", "kubernetes-validate", "mlflow-skinny", "moto", "nbclient", "ray", "ruff"),
    *("submitit", "wandb"),
}
LISTED = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "tensorflow-cpu", "tensorflow")


def newest_python() -> Path:
    """Returns the newest Python of PATH and pyenv that can create environments, or else the current one."""
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for minor in MINORS:
        named = shutil.which(f"python3.{minor}")
        beside = sorted(versions.glob(f"3.{minor}.*/bin/python"), key=lambda path: int(path.parts[-3].split(".")[2]))
        for python in [*([Path(named)] if named else []), *reversed(beside)]:
            command = [
                str(python),
                "-c",
                f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, {minor}))",
            ]
            # The command may be a shim of pyenv for an inactive version.
            if subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0:
                return python
    return Path(sys.executable)


def requirements(project: dict) -> list[str]:
    """Returns the package and the requirements of its tests."""
    extras = project["optional-dependencies"]
    named = {word: re.match(r"[\w-]+", word)[0] for word in [*extras["demo"], *extras["dev"]]}
    return ["--editable", str(ROOT), *(word for word, name in named.items() if name not in NOT_NEEDED)]


def make(python: Path, packages: list[str]) -> None:
    """Creates the environment with the uv of `make setup`, or with pip, which takes minutes."""
    run(str(python), "-m", "venv", "--clear", str(HOME))
    if UV.exists():
        run(str(UV), "pip", "install", "--quiet", "--compile-bytecode", "--python", str(PYTHON), *packages)
    else:
        run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)


def run(*command: str) -> str:
    """Runs a command and returns its output. Raises OSError with its last error on stderr."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"it took more than {INSTALL_SECONDS} s") from None
    if done.returncode:
        lines = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
        # pip writes notes after its errors.
        raise OSError(([line for line in lines if line.lower().startswith("error: ")] or lines)[-1])
    return done.stdout


def installed() -> str:
    """Returns the versions of Python and the libraries in one line."""
    program = (
        "import platform, sys; from importlib.metadata import distributions; "
        "found = {one.name.lower().replace('_', '-'): one.version for one in distributions()}; "
        "has = [f'{name} {found[name]}' for name in sys.argv[1:] if name in found]; "
        "print(', '.join([f'Python {platform.python_version()}', *has]))"
    )
    return run(str(PYTHON), "-c", program, *LISTED).strip()


def is_kept(digest: str) -> bool:
    """Returns whether there is an environment of the same requirements that is younger than a day."""
    return STAMP.is_file() and STAMP.read_text() == digest and time.time() - STAMP.stat().st_mtime < KEPT_SECONDS


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, packages = newest_python(), requirements(project)
    lines = [str(python.resolve()), *packages, *project["dependencies"]]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    try:
        if not is_kept(digest):
            print(f"newest versions: setting up {HOME.name}", flush=True)
            STAMP.unlink(missing_ok=True)
            make(python, packages)
            STAMP.write_text(digest)
    except OSError as error:
        sys.exit(f"newest versions: not installed ({error}); try again with a network")
    print(f"newest versions: {installed()}")


if __name__ == "__main__":
    main()
