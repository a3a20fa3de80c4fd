"""Make `.venv-newest`: the newest versions without constraints, on the newest Python that this machine has.

It is kept for a day, and then made anew. The last line says with what tests will run, or why there is no such
environment.
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
NOT_FOR_THESE_TESTS = {
    "jax2onnx",  # asks for an older Orbax than all others
    *("basedpyright", "ipykernel", "kubernetes-validate", "mlflow-skinny", "moto", "nbclient", "ray", "ruff"),
    *("submitit", "wandb"),
}
TOLD = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "tensorflow-cpu", "tensorflow")


def newest_python() -> Path:
    """The newest that starts and can make environments, of PATH and of pyenv; at last the one that runs this."""
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for minor in MINORS:
        named = shutil.which(f"python3.{minor}")
        beside = sorted(versions.glob(f"3.{minor}.*/bin/python"), key=lambda path: int(path.parts[-3].split(".")[2]))
        for python in [*([Path(named)] if named else []), *reversed(beside)]:
            asked = [str(python), "-c", f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, {minor}))"]
            # The name may be pyenv's, of a version that is not switched on.
            if subprocess.run(asked, capture_output=True, timeout=30, check=False).returncode == 0:
                return python
    return Path(sys.executable)


def requirements(project: dict) -> list[str]:
    """The package, and what its tests need."""
    extras = project["optional-dependencies"]
    named = {word: re.match(r"[\w-]+", word)[0] for word in [*extras["demo"], *extras["dev"]]}
    return ["--editable", str(ROOT), *(word for word, name in named.items() if name not in NOT_FOR_THESE_TESTS)]


def make(python: Path, wanted: list[str]) -> None:
    """A new environment, by the uv of `make setup`, or by pip, which takes minutes."""
    run(str(python), "-m", "venv", "--clear", str(HOME))
    if UV.exists():
        run(str(UV), "pip", "install", "--quiet", "--compile-bytecode", "--python", str(PYTHON), *wanted)
    else:
        run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted)


def run(*command: str) -> str:
    """What it prints. Raises: OSError, with the last error that it wrote to stderr."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"it took more than {INSTALL_SECONDS} s") from None
    if done.returncode:
        lines = [f"exit code {done.returncode}", *done.stderr.strip().splitlines()]
        # After its errors pip writes notes.
        raise OSError(([line for line in lines if line.lower().startswith("error: ")] or lines)[-1])
    return done.stdout


def installed() -> str:
    """What the environment has, on one line."""
    program = (
        "import platform, sys; from importlib.metadata import distributions; "
        "found = {one.name.lower().replace('_', '-'): one.version for one in distributions()}; "
        "has = [f'{name} {found[name]}' for name in sys.argv[1:] if name in found]; "
        "print(', '.join([f'Python {platform.python_version()}', *has]))"
    )
    return run(str(PYTHON), "-c", program, *TOLD).strip()


def is_kept(made_of: str) -> bool:
    """Whether there is one, of the same things and of today."""
    return STAMP.is_file() and STAMP.read_text() == made_of and time.time() - STAMP.stat().st_mtime < KEPT_SECONDS


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, wanted = newest_python(), requirements(project)
    made_of = hashlib.sha256("\n".join([str(python.resolve()), *wanted, *project["dependencies"]]).encode()).hexdigest()
    try:
        if not is_kept(made_of):
            print(f"newest versions: setting up {HOME.name}", flush=True)
            STAMP.unlink(missing_ok=True)
            make(python, wanted)
            STAMP.write_text(made_of)
    except OSError as error:
        sys.exit(f"newest versions: they cannot be installed ({error}); try again with a network")
    print(f"newest versions: {installed()}")


if __name__ == "__main__":
    main()
