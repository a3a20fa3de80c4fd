"""Provides XLA's CUDA compiler on a machine without a GPU; it compiles for a described H200.

    python benchmarks/programs/gpu_plugin.py

The command downloads the two wheels that this needs, 215 MB, once, into the cache folder or the folder that
JAXDDP_GPU_PLUGIN names: the CUDA plugin of the installed JAX, and NVIDIA's `ptxas`. They stay outside the environment,
so that JAX itself still computes on the CPU. Neither a driver nor cuDNN is needed, because the autotuner, which would
time kernels, is off.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.programs.wheels import fetch_wheels
from jaxddp.core.files import cache_folder

FOLDER_VARIABLE = "JAXDDP_GPU_PLUGIN"
ASSEMBLER = "nvidia-cuda-nvcc-cu12==12.9.86"

# From NVIDIA's data sheet of the H200 (SXM), and for compute capability 9.0 (CUDA C++ Programming Guide, appendix
# "Compute Capabilities").
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150110011392
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.14.0"
  name: "NVIDIA H200"
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 14 patch: 0 } device_description_str: "NVIDIA H200"
"""


def plugin_folder() -> Path:
    """Return the folder for the files of the wheels."""
    return Path(os.environ.get(FOLDER_VARIABLE) or cache_folder() / "gpu-plugin") / jax.__version__


def is_present() -> bool:
    return plugin_folder().is_dir()


def fetch() -> None:
    """Download the wheels if they are missing. Raises SystemExit if that fails."""
    fetch_wheels(plugin_folder(), [f"jax-cuda12-pjrt=={jax.__version__}", ASSEMBLER])


@functools.cache
def _plugin() -> Any:
    """Load the plugin once for this process."""
    fetch()
    (library,) = plugin_folder().glob("jax_plugins/*/xla_cuda_plugin.so")
    os.environ["PATH"] = os.pathsep.join([str(_toolkit() / "bin"), os.environ["PATH"]])
    plugin = xla_client.load_pjrt_plugin_dynamically("cuda", str(library))
    xla_client.initialize_pjrt_plugin("cuda")
    return plugin


def _toolkit() -> Path:
    return plugin_folder() / "nvidia/cuda_nvcc"


def described_devices(topology: str) -> list[Any]:
    """Return devices to compile for: "1x2x8" is one partition of 2 hosts with 8 H200s each."""
    description = xla_client.make_c_api_device_topology(_plugin(), "", topology=topology, target_config=H200)
    return description._make_compile_only_devices()


def compiler_options() -> dict[str, str]:
    """Return the options that a compilation for described devices needs."""
    return {"xla_gpu_autotune_level": "0", "xla_gpu_cuda_data_dir": str(_toolkit())}


if __name__ == "__main__":
    fetch()
