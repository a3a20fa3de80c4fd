"""The start of a run: the compiled programs that it keeps for the next one, and its imports."""

import functools
import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest
from jax._src import compilation_cache as jax_cache
from jax._src import compiler
from support.data import random_table, write_arrays
from support.ilsvrc import write_tree
from support.peers import Second

import jaxddp.core.libraries as libraries
from jaxddp.cli import main
from jaxddp.core.files import CACHE_VARIABLE
from jaxddp.engine.compilation import PROGRAMS, _warn_once, keep_compiled_programs

DEFAULTS = {
    "jax_compilation_cache_dir": None,
    "jax_enable_compilation_cache": True,
    "jax_compilation_cache_max_size": -1,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


def jax_settings() -> dict[str, Any]:
    return {name: getattr(jax.config, name) for name in DEFAULTS}


@pytest.fixture
def programs_folder(monkeypatch, tmp_path):
    """Reset JAX's settings to their defaults, set a cache folder of the test, and yield its folder of programs."""
    before = jax_settings()
    for name, value in DEFAULTS.items():
        monkeypatch.delenv(name.upper(), raising=False)
        jax.config.update(name, value)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kept"))
    _warn_once.cache_clear()
    yield tmp_path / "kept" / PROGRAMS
    for name, value in before.items():
        jax.config.update(name, value)
    # JAX opens its folder at the first compilation: later tests keep their programs in their own folder.
    jax_cache.reset_cache()


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({CACHE_VARIABLE: "a", "XDG_CACHE_HOME": "b"}, "a/programs"),
        ({"XDG_CACHE_HOME": "b"}, "b/jaxddp/programs"),
        ({}, "home/.cache/jaxddp/programs"),
    ],
)
def test_programs_are_kept_in_their_own_folder(programs_folder, variables, place, tmp_path, monkeypatch):
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "home", **variables}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    assert main(["export", str(tmp_path), "--out", "net.onnx"]) == 2  # There is no run.
    folder = tmp_path / place
    assert jax_settings() == DEFAULTS | {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    assert folder.stat().st_mode & 0o777 == 0o700 and list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_compilation_cache_dir", "/somewhere/else"),
        ("jax_enable_compilation_cache", False),
        ("jax_persistent_cache_min_compile_time_secs", 5.0),
        ("jax_compilation_cache_max_size", 4096),
    ],
)
def test_the_users_settings_of_jax_are_kept(programs_folder, name, value):
    jax.config.update(name, value)
    keep_compiled_programs()
    assert jax_settings()[name] == value
    assert programs_folder.exists() == (name not in ("jax_compilation_cache_dir", "jax_enable_compilation_cache"))


def occupy_its_path(place: Path, monkeypatch) -> None:
    place.parent.parent.mkdir(exist_ok=True)
    place.parent.write_text("a file")


def let_others_write(place: Path, monkeypatch) -> None:
    place.mkdir(parents=True)
    place.chmod(0o770)


def remove_the_home_folder(place: Path, monkeypatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)
    # Without a home directory, the path is unchanged.
    monkeypatch.setattr(os.path, "expanduser", str)


@pytest.mark.parametrize("spoil", [occupy_its_path, let_others_write, remove_the_home_folder])
def test_without_a_writable_cache_a_run_continues_and_logs_one_line(programs_folder, spoil, monkeypatch, caplog):
    spoil(programs_folder, monkeypatch)
    with caplog.at_level(logging.INFO):
        keep_compiled_programs()
        keep_compiled_programs()
    assert jax.config.jax_compilation_cache_dir is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("compiled programs are not kept (") and CACHE_VARIABLE in line and "\n" not in line
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2


def test_a_program_is_written_whole_or_not_at_all(programs_folder, monkeypatch, caplog):
    """JAX alone would leave a part of a program if the process is killed while it writes."""
    keep_compiled_programs()
    jax_cache.reset_cache()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            jax.jit(lambda x: x * 5 + 43)(1.0)
        patch.setattr(Path, "replace", Mock(side_effect=OSError(28, "disk full")))
        jax.jit(lambda x: x * 5 + 44)(jax.jit(lambda x: x * 5 + 45)(1.0))
    assert list(programs_folder.iterdir()) == []
    assert caplog.messages == [f"compiled programs are not kept (disk full); set {CACHE_VARIABLE} to a folder for them"]
    jax.jit(lambda x: x * 5 + 43)(1.0)
    assert programs_folder.is_dir() and all(path.name.endswith("-cache") for path in programs_folder.iterdir())
    assert [path for path in programs_folder.iterdir() if path.name.startswith("jit__lambda")]


@pytest.fixture
def second_process(programs_folder, monkeypatch):
    """Prepare a process that is not the first of a job: it keeps its programs through JAX's private functions."""
    # JAX has no setting for this (`jaxddp.engine.compilation`). monkeypatch restores the replaced function.
    monkeypatch.setattr(compiler, "_cache_write", compiler._cache_write)
    libraries.warn_missing.cache_clear()
    # JAX opens its folder at the first compilation, which may have happened long ago.
    jax_cache.reset_cache()
    return monkeypatch


@pytest.mark.parametrize(
    ("module", "name", "replacement"),
    [(compiler, "_cache_write", None), (jax_cache, "put_executable_and_time", lambda *, why, **_: None)],
)
def test_without_jaxs_functions_one_log_line_names_the_consequence(second_process, caplog, module, name, replacement):
    second_process.setattr(module, name, replacement)
    keep_compiled_programs(Second())
    keep_compiled_programs(Second())
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"jax {jax.__version__} has no usable jax._src.") and f".{name}: " in line
    assert line.endswith("on CPUs, this process compiles its programs again at each start")
    assert getattr(module, name) is replacement


def test_the_least_recently_used_programs_are_removed_unless_jax_limits_the_folder(programs_folder, monkeypatch):
    monkeypatch.setattr("jaxddp.engine.compilation.MOST_BYTES", 10)
    programs_folder.mkdir(parents=True, mode=0o700)
    # The times of reading and writing: a file system may be mounted without access times.
    for number, times in enumerate([(9, 0), (0, 1), (2, 2), (0, 3)]):
        (programs_folder / f"{number}-cache").write_bytes(b"x" * 4)
        os.utime(programs_folder / f"{number}-cache", times)
    jax.config.update("jax_compilation_cache_max_size", 1000)
    keep_compiled_programs()
    assert len(list(programs_folder.iterdir())) == 4
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_max_size", -1)
    keep_compiled_programs()
    assert sorted(path.name for path in programs_folder.iterdir()) == ["0-cache", "3-cache"]


# Whole starts, each in a new Python process whose home folder belongs to the test

CHILD = """
import collections, hashlib, json, os, sys
import flax.linen as nn
import jax.monitoring
import numpy as np

events = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))

if "JAXDDP_TEST_REFUSES" in os.environ:
    sys.modules[os.environ["JAXDDP_TEST_REFUSES"]] = None

import jaxddp.setup.run_training as training
import jaxddp.models.resnet as resnet
from jaxddp.cli import main
from jaxddp.training.listeners.jsonl import JsonLines

def imported():
    names = {name for name, module in sys.modules.items() if module is not None}
    return sorted({name.partition(".")[0] for name in names} | {"flax.nnx"} & names)

class Network(nn.Module):
    # A ResNet would take half a minute to compile.
    classes: int

    @nn.compact
    def __call__(self, images, train):
        hidden = nn.BatchNorm(use_running_average=not train)(nn.Conv(8, (3, 3))(images))
        return nn.Dense(self.classes)(nn.relu(hidden).mean((1, 2)))

resnet.build = lambda settings, classes, *_: Network(classes)
seen, train, step = {}, training.train, JsonLines.step

def train_and_hash(*arguments, **named):
    state = train(*arguments, **named)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.model_state))]
    seen["state"] = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()
    return state

def step_and_list_imports(self, record):
    seen.setdefault("imported at the first step", imported())
    step(self, record)

training.train, JsonLines.step = train_and_hash, step_and_list_imports
code = main(sys.argv[1:])
seen["imported"] = imported()
print(json.dumps({"code": code, "hits": events["cache_hits"], "misses": events["cache_misses"], **seen}))
"""


def start(home: Path, workdir: Path, *words: str, **variables: str) -> dict[str, Any]:
    """Train a small network; return the child's observations and the metrics."""
    environment = {name: value for name, value in os.environ.items() if name.upper() not in map(str.upper, DEFAULTS)}
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        environment.pop(name, None)
    environment |= {"HOME": str(home), **variables}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), "train", "digits", "--workdir", str(workdir), *words]
    command += ["--model.name", "resnet10", "--model.width", "4", "--log.every", "1 step"]
    command += ["--train.batch-size", "4", "--eval.batch-size", "4", "--train.duration", "3 steps"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled programs" not in done.stderr
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    figures = [{name: line[name] for name in ("step", "split", "loss", "top1")} for line in lines]
    return json.loads(done.stdout.splitlines()[-1]) | {"figures": figures, "stderr": done.stderr}


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory):
    """Start one run on arrays twice, first without any kept programs; return the results and the folder."""
    folder = tmp_path_factory.mktemp("arrays")
    write_arrays(folder / "set.npz", random_table(8), random_table(8, seed=1))
    words = ["--data.path", str(folder / "set.npz"), "--data.image-size", "6", "--data.resize", "6"]
    words += ["--parallel.cpu-devices", "2"]
    begin = functools.partial(start, folder / "home")
    (folder / "home").mkdir()
    cold = begin(folder / "cold", *words, "--log.to", "jsonl,curves,parameters")
    warm = begin(folder / "warm", *words, "--log.to", "jsonl,tensorboard", JAXDDP_TEST_REFUSES="tensorflow")
    return cold, warm, folder / "home/.cache/jaxddp" / PROGRAMS


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_equals_the_first_bit_for_bit(two_starts):
    cold, warm, place = two_starts
    assert cold["hits"] == 0 and cold["misses"] > 3 and warm["misses"] == 0 and warm["hits"] == cold["misses"]
    assert len([path for path in place.iterdir() if path.name.endswith("-cache")]) == cold["misses"]
    assert warm["figures"] == cold["figures"] and len(cold["figures"]) == 5
    assert warm["state"] == cold["state"]


UNUSED = {"tensorflow", "tensorboard", "keras", "tensorflow_datasets", "IPython", "flax.nnx", "obstore", "scipy"}


@pytest.mark.slow
def test_training_on_arrays_imports_nothing_that_it_does_not_use(two_starts):
    cold, warm, _ = two_starts
    assert UNUSED & set(cold["imported"]) == set()
    assert "matplotlib" not in cold["imported at the first step"] and "matplotlib" in cold["imported"]
    # The second run writes for TensorBoard, which needs no TensorFlow, after its first step.
    assert UNUSED & set(warm["imported at the first step"]) == set()
    assert "tensorflow" not in warm["imported"] and "the logger tensorboard failed" not in warm["stderr"]


@pytest.mark.ci
@pytest.mark.slow
def test_training_on_files_does_not_import_tensorflow(tmp_path):
    root = write_tree(tmp_path / "tree", classes=2, images=4, val=4, size=10)
    small = ["--data.path", str(root), "--data.image-size", "8", "--data.resize", "8"]
    # This test checks only imports, so it may use the compiled programs of the test suite.
    jax_variables = {name: value for name, value in os.environ.items() if name.lower() in DEFAULTS}
    words = [*small, "--log.to", "jsonl,tensorboard", "--parallel.cpu-devices", "1", "--eval.every", "0 steps"]
    observed = start(tmp_path, tmp_path / "run", *words, JAXDDP_TEST_REFUSES="tensorflow", **jax_variables)
    assert observed["code"] == 0 and UNUSED & set(observed["imported"]) == {"tensorboard"}
