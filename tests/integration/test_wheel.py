"""A wheel is built and installed in an empty environment, where it trains the digits."""

import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
from support.processes import REPOSITORY, environment
from support.runs import metrics

pytestmark = pytest.mark.ci

VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=TIMEOUT_S)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Callable[..., str]:
    """Return a function that runs a program of an environment with the wheel, and returns its output.

    The environment imports its dependencies from this Python's site-packages. An editable install of jaxddp there has
    no effect, because Python reads no .pth files of such folders.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "env", symlinks=True)
    python = folder / "env/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=TIMEOUT_S)
    (site_packages,) = folder.glob("env/lib/python*/site-packages")
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies))
    (folder / "empty").mkdir()
    environ = environment()
    environ.pop("PYTHONPATH")

    def run(program: str, *words: str) -> str:
        command = [str(folder / "env/bin" / program), *words]
        options = {"cwd": folder / "empty", "env": environ, "timeout": TIMEOUT_S}
        done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


def test_the_wheel_contains_only_the_package_and_the_configs(wheel):
    assert wheel.name == f"jaxddp-{VERSION}-py3-none-any.whl"
    with ZipFile(wheel) as content:
        names = {*content.namelist()}
    assert {"jaxddp/py.typed", "jaxddp/configs/digits.py", "jaxddp/configs/datasets.toml"} <= names
    assert {"jaxddp/reports/page.html", "jaxddp/reports/page.css", "jaxddp/reports/page.js"} <= names
    assert {name.partition("/")[0] for name in names} == {"jaxddp", f"jaxddp-{VERSION}.dist-info"}


def test_the_installed_wheel_trains_the_digits(installed, tmp_path):
    printed = installed("python", "-c", "import jaxddp; print(jaxddp.__file__, jaxddp.__version__)").split()
    assert "/env/lib/" in printed[0] and printed[1] == VERSION
    assert installed("jaxddp", "--version").startswith(f"jaxddp {VERSION} (")
    data, run = str(tmp_path / "digits"), tmp_path / "run"
    installed("jaxddp", "data", "sample", "digits", "--out", data)
    installed("jaxddp", "train", "digits", "--data", data, "--workdir", str(run), "--epochs", "1")
    (validation,) = (row for row in metrics(run) if row["split"] == "val")
    assert validation["top1"] > 0.3
