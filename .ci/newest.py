"""Create `.venv-newest` with the newest versions of all libraries, on the newest Python of this machine.

The environment is kept for a day, and then created again. The last line of the output lists its versions, or the reason
why it cannot be created.
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
ENVIRONMENT = ROOT / ".venv-newest"
PYTHON, STAMP = ENVIRONMENT / "bin" / "python", ENVIRONMENT / "made"
UV = ROOT / ".venv" / "bin" / "uv"
MINOR_VERSIONS = (14, 13, 12, 11)
MAX_AGE_SECONDS, INSTALL_SECONDS = 24 * 3600, 600
EXCLUDED = {
    "jax2onnx",  # Requires an older Orbax than the other packages.
    *("basedpyright", "ipykernel", "kubernetes-validate", "mlflow-skinny", "moto", "nbclient", "ray", "ruff"),
    *("submitit", "wandb"),
}
LIBRARIES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "tensorstore",
    "numpy",
    "tensorflow-cpu",
    "tensorflow",
)


def newest_python() -> Path:
    """Return the newest Python of PATH and pyenv that can create environments, or else the current Python."""
    versions = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser() / "versions"
    for minor in MINOR_VERSIONS:
        on_path = shutil.which(f"python3.{minor}")
        of_pyenv = sorted(versions.glob(f"3.{minor}.*/bin/python"), key=lambda path: int(path.parts[-3].split(".")[2]))
        for python in [*([Path(on_path)] if on_path else []), *reversed(of_pyenv)]:
            command = [
                str(python),
                "-c",
                f"import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, {minor}))",
            ]
            # The command may be a pyenv shim of an inactive version, which fails.
            if subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0:
                return python
    return Path(sys.executable)


def requirements(project: dict) -> list[str]:
    """Return the arguments of `pip install`: the package and the requirements of its tests."""
    extras = project["optional-dependencies"]
    names = {requirement: re.match(r"[\w-]+", requirement)[0] for requirement in [*extras["demo"], *extras["dev"]]}
    return ["--editable", str(ROOT), *(requirement for requirement, name in names.items() if name not in EXCLUDED)]


def create(python: Path, packages: list[str]) -> None:
    """Create the environment with the uv of `make setup`, or without uv with pip, which takes minutes."""
    run(str(python), "-m", "venv", "--clear", str(ENVIRONMENT))
    if UV.exists():
        run(str(UV), "pip", "install", "--quiet", "--compile-bytecode", "--python", str(PYTHON), *packages)
    else:
        run(str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)


def run(*command: str) -> str:
    """Run a command and return its output. Raises: OSError with the last error line of its stderr."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise OSError(f"the command took more than {INSTALL_SECONDS} s") from None
    if result.returncode:
        lines = [f"exit code {result.returncode}", *result.stderr.strip().splitlines()]
        # pip prints notes after its errors.
        raise OSError(([line for line in lines if line.lower().startswith("error: ")] or lines)[-1])
    return result.stdout


def installed_versions() -> str:
    """Return the versions of Python and of the libraries in one line."""
    program = (
        "import platform, sys; from importlib.metadata import distributions; "
        "versions = {each.name.lower().replace('_', '-'): each.version for each in distributions()}; "
        "lines = [f'{name} {versions[name]}' for name in sys.argv[1:] if name in versions]; "
        "print(', '.join([f'Python {platform.python_version()}', *lines]))"
    )
    return run(str(PYTHON), "-c", program, *LIBRARIES).strip()


def is_current(digest: str) -> bool:
    """Return whether an environment with the same requirements exists and is less than a day old."""
    return STAMP.is_file() and STAMP.read_text() == digest and time.time() - STAMP.stat().st_mtime < MAX_AGE_SECONDS


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    python, packages = newest_python(), requirements(project)
    lines = [str(python.resolve()), *packages, *project["dependencies"]]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    try:
        if not is_current(digest):
            print(f"newest versions: setting up {ENVIRONMENT.name}", flush=True)
            STAMP.unlink(missing_ok=True)
            create(python, packages)
            STAMP.write_text(digest)
    except OSError as error:
        sys.exit(f"newest versions: not installed ({error}); check the network and try again")
    print(f"newest versions: {installed_versions()}")


if __name__ == "__main__":
    main()
