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
from jaxddp.core.files import cache_folder

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
    """Return the requirement of `jax[tpu]` for libtpu, such as "libtpu==0.0.42.*"."""
    requirements = importlib.metadata.requires("jax") or []
    return next(line.partition(";")[0].strip() for line in requirements if line.startswith("libtpu"))


def plugin_folder() -> Path:
    """Return the folder for the files of the wheel."""
    return Path(os.environ.get(FOLDER_VARIABLE) or cache_folder() / "tpu-plugin") / jax.__version__


def is_present() -> bool:
    return plugin_folder().is_dir()


def fetch() -> None:
    """Download the wheel if it is missing. Raises SystemExit if that fails."""
    fetch_wheels(plugin_folder(), [requirement()])


@functools.cache
def described_devices(topology: str) -> list[Any]:
    """Return the chips of a slice to compile for: "v5e:2x4" is a slice of 2 x 4 chips of TPU v5e.

    On TPU v2 and v3, each chip has two devices.
    """
    fetch()
    (library,) = plugin_folder().glob("libtpu/libtpu.so")
    # On TPU v4, JAX uses the two cores of a chip as one device; libtpu describes two by default.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT | {"TPU_LIBRARY_PATH": str(library)})
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    finally:
        # Later code of this process, and its children, would take these variables for those of a job.
        for name in (*ENVIRONMENT, "TPU_LIBRARY_PATH"):
            os.environ.pop(name)
        os.environ.update(before)


if __name__ == "__main__":
    fetch()
