"""Every test sees eight simulated devices; a program that one test compiled is there for the next and its children.

Nothing that is kept between runs comes from, or goes to, the user's own cache folder.
"""

import atexit
import os
import shutil
import signal
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if not {"JAX_COMPILATION_CACHE_DIR", "JAXDDP_CACHE"} <= os.environ.keys():
    own = tempfile.mkdtemp(prefix="jaxddp-tests-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    os.environ.setdefault("JAXDDP_CACHE", own)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{own}/programs-of-tests")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# A shell has what it starts in the background ignore Ctrl-C, nohup a hang-up, and children would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def quick_compile():
    """A program that runs once is not worth XLA's optimizing it."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
