"""Starts the benchmarks that count the programs of a described accelerator."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

# JAX cannot cache such programs.
uncached = pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache")


def needs_plugin(plugin: ModuleType) -> pytest.MarkDecorator:
    """Return a mark that skips a test without the compiler of a plugin, a module of `benchmarks/programs/`."""
    command = f"python benchmarks/programs/{plugin.__name__.rpartition('.')[2]}.py"
    return pytest.mark.skipif(not plugin.is_present(), reason=f"{plugin.plugin_folder()} does not exist: {command}")


def run_script(script: ModuleType, *words: str) -> int | str | None:
    """Run a benchmark in this process, and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [Path(str(script.__file__)).name, *words])
        try:
            script.main()
        except SystemExit as ended:
            return ended.code
    return 0


def counts_of(script: ModuleType, *words: str) -> dict:
    """Return the figures that a benchmark writes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "program.json"
        assert run_script(script, *words, "--out", str(out)) == 0
        return json.loads(out.read_text())


def assert_a_wrong_config_is_one_line(script: ModuleType) -> None:
    command = [sys.executable, str(script.__file__), "imagenet_resnet5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "config 'imagenet_resnet5' does not exist; did you mean 'imagenet_resnet50'?" in done.stderr
