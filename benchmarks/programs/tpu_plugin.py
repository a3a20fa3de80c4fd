"""Provides XLA's TPU compiler on a machine without a TPU; it compiles for the chips of a described slice.

    python benchmarks/programs/tpu_plugin.py

The command downloads libtpu, 215 MB, once, into the cache folder or the folder that JAXDDP_TPU_PLUGIN names. It is the
version that `jax[tpu]` requires. It stays outside the environment, so JAX itself still computes on the CPU.
"""

import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.programs.wheels import fetch_wheels
from jaxddp.core.cache_folder import cache_folder

FOLDER_VARIABLE = "JAXDDP_TPU_PLUGIN"

# Without the first variable, libtpu waits for the metadata server of a TPU VM. Without the second one, a second process
# cannot load libtpu. The others describe one host; a compilation does not use them.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


def requirement() -> str:
    """Returns the requirement of `jax[tpu]` for libtpu, such as "libtpu==0.0.42.*"."""
    requirements = importlib.metadata.requires("jax") or []
    return next(line.partition(";")[0].strip() for line in requirements if line.startswith("libtpu"))


def plugin_folder() -> Path:
    """Returns the folder for the files of the wheel."""
    return Path(os.environ.get(FOLDER_VARIABLE) or cache_folder() / "tpu-plugin") / jax.__version__


def is_present() -> bool:
    return plugin_folder().is_dir()


def fetch() -> None:
    """Downloads the wheel if it is missing. Raises SystemExit if that fails."""
    fetch_wheels(plugin_folder(), [requirement()])


@functools.cache
def described_devices(topology: str) -> list[Any]:
    """Returns the chips of a slice to compile for: "v5e:2x4" is a slice of 2 x 4 chips of TPU v5e."""
    fetch()
    (library,) = plugin_folder().glob("libtpu/libtpu.so")
    os.environ.update(ENVIRONMENT | {"TPU_LIBRARY_PATH": str(library)})
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


if __name__ == "__main__":
    fetch()
