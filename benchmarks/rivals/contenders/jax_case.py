"""Helpers of the contenders in JAX: images over the devices, and weights with torchvision's names."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from benchmarks.rivals.contenders.case import BOTTLENECK, Case, Task
from benchmarks.rivals.contenders.outcome import add_result
from jaxddp.api import resnet
from jaxddp.config import Config
from jaxddp.config.registry import MODELS
from jaxddp.job.environment import find_job
from jaxddp.job.membership import join
from jaxddp.mesh import Topology, simulate_cpu_devices
from jaxddp.models.resnet import ARCHITECTURES


def join_or_simulate(task: Task) -> Topology:
    """Join the job, or simulate the task's devices in one process."""
    if task.devices is not None:
        simulate_cpu_devices(task.devices)
    return Topology.create(peers=join(find_job()))


def local_images(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return this process's images and labels: a batch for each of its devices, in order."""
    first = int(os.environ.get("JAX_PROCESS_ID", "0"))
    return concatenated(task.case.images(share) for share in range(first, first + (task.devices or 1)))


def all_images(task: Task) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of the global batch."""
    shares = task.devices or int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    return concatenated(map(task.case.images, range(shares)))


def concatenated(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels).astype(np.int32)


def run(task: Task, topology: Topology, step: Callable[[], Any], loss: Callable[[Any], float]) -> None:
    """Measure a step, and write the figures."""
    figures = task.measure(step, loss, jax.block_until_ready)
    if topology.peers.is_first:
        add_result(task.out, figures | {"version": jax.__version__, "device": topology.device_kind})


def network(case: Case, **settings: Any) -> Any:
    """Return a case's network. `settings` are those of a ResNet."""
    if case.network not in ARCHITECTURES:
        config = Config().replace(model={"name": case.network}, train={"precision": case.precision})
        return MODELS.get(case.network)(config, case.classes)
    return resnet(case.network, case.classes, width=case.width, stem=case.stem, dtype=case.precision, **settings)


def write_weights(case: Case, path: Path, last_scale: float = 1.0) -> None:
    """Initialize a case's network, and write its weights.

    Args:
        last_scale: Scale of each block's last batch norm. With zero the blocks would not affect the first loss.
    """
    image = jnp.zeros((1, case.size, case.size, 3))
    module = network(case, zero_init_last_scale=False)
    params = jax.jit(module.init)(jax.random.key(0), image)["params"]
    name_of, flat = module.published_names()[0], traverse_util.flatten_dict({"params": params}, sep="/")
    arrays: dict[str, Any] = {name_of(path): np.asarray(leaf, np.float32) for path, leaf in flat.items()}
    last = ".bn3.weight" if case.network in BOTTLENECK else ".bn2.weight"
    arrays = {name: array * np.float32(last_scale) if name.endswith(last) else array for name, array in arrays.items()}
    # The rename is atomic, so a killed process leaves no partial file under this name.
    unfinished = path.with_suffix(".part.npz")
    np.savez(unfinished, **arrays)
    os.replace(unfinished, path)


def read_weights(task: Task, params: Any) -> Any:
    """Read a task's weights into a pytree like `params`."""
    weights, name_of = np.load(task.weights), network(task.case).published_names()[0]
    paths = traverse_util.flatten_dict({"params": params}, sep="/")
    return traverse_util.unflatten_dict({path: weights[name_of(path)] for path in paths}, sep="/")["params"]
