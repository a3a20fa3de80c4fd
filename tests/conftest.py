"""Configures pytest: eight simulated devices, and a cache of compiled programs for tests and their child processes.

The cache is kept between runs and checkouts, in a folder beside the user's cache. All other caches are temporary. Tests
neither read nor write the caches of the user's runs.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The width of the user's terminal, which pytest-xdist would pass to its workers.
os.environ.pop("COLUMNS", None)
# Programs of tests are small and run a few times, so XLA compiles them without expensive optimizations. It uses one
# thread, because other tests use the other cores. Children inherit the flags. XLA aborts for an unknown flag; jaxlib
# 0.11 removed the last flag.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)
if not {"JAXDDP_GPU_PLUGIN", "JAXDDP_TPU_PLUGIN"} <= os.environ.keys():
    # The user and the tests share one download of XLA's compilers for GPUs and TPUs.
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxddp"
    for accelerator in ("gpu", "tpu"):
        os.environ.setdefault(f"JAXDDP_{accelerator.upper()}_PLUGIN", str(caches / f"{accelerator}-plugin"))
if "JAXDDP_CACHE" not in os.environ:
    temporary_cache = tempfile.mkdtemp(prefix="jaxddp-tests-")
    atexit.register(shutil.rmtree, temporary_cache, ignore_errors=True)
    os.environ["JAXDDP_CACHE"] = temporary_cache
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxddp-tests"
    programs.mkdir(parents=True, exist_ok=True)
    # A larger cache contains programs of many old versions of the code.
    if sum(file.stat().st_size for file in programs.iterdir()) > 1 << 30:
        shutil.rmtree(programs)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest
from hypothesis import settings
from support.launches import HANGING, LaunchResult, Machine, plain_environment
from support.longest import LONGEST
from support.networks import linear_model

import jaxddp.core.phases as activity
import jaxddp.recipe.sources as recipes

# Tests compare whole outputs. On a busy machine they would contain an activity that takes more than a second.
activity.PATIENCE_SECONDS = 3600.0
jax.config.update("jax_num_cpu_devices", 8)
# No test has a deadline.
settings.register_profile("usual", deadline=None, max_examples=30)
settings.register_profile("exhaustive", deadline=None, max_examples=200)
settings.load_profile("usual")
# Tracing creates many small objects. Garbage collection would take a seventh of a test's time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)
# Shells make background programs ignore SIGINT, and nohup makes them ignore SIGHUP. Children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Any:
    """Run all tests, through the hooks of the other plugins, below one large frame."""
    plugins = config.pluginmanager
    return plugins.subset_hook_caller("pytest_cmdline_main", [plugins.get_plugin(__file__)])(config=config)


# CPython keeps the frames of calls in chunks of 16 kB. A loop whose calls cross the end of a chunk maps and unmaps
# memory each time, which takes a tenth of the time of all tests. A chunk has at least twice its first frame's size.
pytest_cmdline_main.__code__ = pytest_cmdline_main.__code__.replace(co_stacksize=1 << 16)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest files first, so that no long file runs at the end, and mark the tests of some folders."""
    ranks = {name: place for place, name in enumerate(LONGEST)}
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder / "benchmarks"):
            item.add_marker("ci")
        if item.path.is_relative_to(folder / "integration"):
            item.add_marker("processes")
    items.sort(key=lambda item: ranks.get(item.path.relative_to(folder).as_posix(), len(ranks)))


@pytest.fixture(autouse=True)
def recipe_folders() -> Iterator[None]:
    """Forget the folders of a test's recipes, which every later import would search, and their modules."""
    folders, path = {*recipes._folders}, [*sys.path]
    yield
    for folder in recipes._folders - folders:
        for name in recipes.modules_in(folder):
            del sys.modules[name]
    recipes._folders.intersection_update(folders)
    sys.path[:] = path


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test a cache folder of its own."""
    monkeypatch.setenv("JAXDDP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def float64() -> Iterator[None]:
    """Compute in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def linear_resnet(monkeypatch):
    """Replace ResNets by a linear network. ResNets compile slowly, and CPUs do not dispatch their steps together."""
    monkeypatch.setattr("jaxddp.models.resnet.build", lambda settings, classes, *_: linear_model(classes))


@pytest.fixture
def clean_environment(monkeypatch):
    """Remove variables of GPUs and of a surrounding job from the environment."""
    plain_environment(monkeypatch)


@pytest.fixture
def short_wait(monkeypatch):
    """Shorten the time that other processes get after a failure. The constant is private: users need not change it."""
    monkeypatch.setattr("jaxddp.cluster.worker._SELF_END_SECONDS", 0.05)


@pytest.fixture
def run(capfd, tmp_path):
    """Launch a small program in processes of this machine."""
    return lambda text, **options: LaunchResult(capfd, tmp_path / "logs", text, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Callable[..., Machine]]:
    """Return a function that starts launchers, which end after the test."""
    started: list[Machine] = []

    def start(text: str, options: str) -> Machine:
        started.append(Machine(tmp_path / str(len(started)), text, options))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait(HANGING)
