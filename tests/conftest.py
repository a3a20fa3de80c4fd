"""Every test sees eight simulated devices; a program that one test compiled is there for the next and its children.

Compiled programs are kept between runs and checkouts, in a folder of the tests' own beside the user's. All else that is
kept lies in a folder of this run alone, and nothing comes from, or goes to, the programs of the user's runs.
"""

import atexit
import gc
import os
import shutil
import signal
import tempfile
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# The width of whoever runs the tests, which pytest-xdist hands to its workers too.
os.environ.pop("COLUMNS", None)
# A program of a test runs a few times on a few numbers, so it is compiled in haste, and by one thread: other tests have
# the other cores. Children inherit it. XLA ends a process for a flag that it does not know; one went with jaxlib 0.11.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    " --xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)
if "JAXDDP_GPU_PLUGIN" not in os.environ:
    # XLA's compiler for GPUs is fetched once, for the user and for the tests.
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    os.environ["JAXDDP_GPU_PLUGIN"] = str(caches / "jaxddp" / "gpu-plugin")
if "JAXDDP_CACHE" not in os.environ:
    own = tempfile.mkdtemp(prefix="jaxddp-tests-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ["JAXDDP_CACHE"] = own
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    programs = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "jaxddp-tests"
    programs.mkdir(parents=True, exist_ok=True)
    # Beyond this size they are those of many versions of the code.
    if sum(file.stat().st_size for file in programs.iterdir()) > 1 << 30:
        shutil.rmtree(programs)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(programs)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest
from hypothesis import settings
from support.longest import LONGEST

jax.config.update("jax_num_cpu_devices", 8)
# No test asserts a time.
settings.register_profile("usual", deadline=None, max_examples=30)
settings.register_profile("exhaustive", deadline=None, max_examples=200)
settings.load_profile("usual")
# Tracing makes so many small objects that looking for cycles among them was a seventh of a test's time.
gc.freeze()
gc.set_threshold(50_000, 20, 20)
# A shell has what it starts in the background ignore Ctrl-C, nohup a hang-up, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, so that no worker ends with one; a folder's marks are those of its tests."""
    places = {name: place for place, name in enumerate(LONGEST)}
    folder = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(folder / "benchmarks"):
            item.add_marker("ci")
        if item.path.is_relative_to(folder / "integration"):
            item.add_marker("processes")
    items.sort(key=lambda item: places.get(item.path.relative_to(folder).as_posix(), len(places)))
