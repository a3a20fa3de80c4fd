"""What the contenders in JAX share: images over the devices, and weights in torchvision's names."""

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from case import Case, Task
from flax import traverse_util

from jaxddp.api import resnet
from jaxddp.job.environment import find_job
from jaxddp.job.membership import is_first, join
from jaxddp.mesh import Topology, simulate_cpu_devices
from jaxddp.models.resnet import ResNet

LAST = {"kernel": "weight", "scale": "weight", "bias": "bias"}


def lay_out(task: Task) -> Topology:
    """Join the job, or simulate the devices that are asked for in one process."""
    if task.devices is not None:
        simulate_cpu_devices(task.devices)
    join(find_job())
    return Topology.create()


def local_images(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """This process's images and labels: a batch for each of its devices, in their order."""
    first = int(os.environ.get("JAX_PROCESS_ID", "0"))
    return concatenated(task.case.images(share) for share in range(first, first + (task.devices or 1)))


def all_images(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """The global batch."""
    shares = task.devices or int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    return concatenated(map(task.case.images, range(shares)))


def concatenated(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels).astype(np.int32)


def run(task: Task, topology: Topology, step: Callable[[], Any], loss: Callable[[Any], float]) -> None:
    """Measure a step and write the figures."""
    figures = task.measure(step, loss, jax.block_until_ready)
    if is_first():
        task.out.write_text(json.dumps(figures | {"version": jax.__version__, "device": topology.device_kind}))


def network(case: Case, **settings: Any) -> ResNet:
    return resnet(case.network, case.classes, width=case.width, stem=case.stem, dtype=case.precision, **settings)


def write_weights(case: Case, path: Path) -> None:
    """Initialize a case's network; no last scale is zero, or the blocks would have no part in the first loss."""
    image = jnp.zeros((1, case.size, case.size, 3))
    params = jax.jit(network(case, zero_init_last_scale=False).init)(jax.random.key(0), image)["params"]
    flat = traverse_util.flatten_dict(params, sep=".")
    arrays: dict[str, Any] = {torch_name(name): np.asarray(leaf, np.float32) for name, leaf in flat.items()}
    np.savez(path, **arrays)


def read_weights(path: Path, params: Any) -> Any:
    """The weights as a pytree like `params`."""
    weights = np.load(path)
    flat = traverse_util.flatten_dict(params, sep=".")
    return traverse_util.unflatten_dict({name: weights[torch_name(name)] for name in flat}, sep=".")


def torch_name(name: str) -> str:
    """ "layer1_0.downsample_bn.scale" becomes "layer1.0.downsample.1.weight"."""
    *modules, last = name.split(".")
    joined = ".".join([*modules, LAST[last]])
    joined = joined.replace("downsample_conv", "downsample.0").replace("downsample_bn", "downsample.1")
    return re.sub(r"layer(\d)_(\d+)", r"layer\1.\2", joined)
