"""Joins the job of a process, and resolves the values of a config that depend on devices and directories."""

import logging

from jaxddp.config import Config, ParallelConfig
from jaxddp.core.peers import Peers
from jaxddp.engine.compilation import keep_compiled_programs
from jaxddp.job.environment import Job, find_job
from jaxddp.job.membership import join
from jaxddp.mesh import Topology, fix_cpu_threads, simulate_cpu_devices
from jaxddp.overrides import flatten
from jaxddp.platforms import platform_named
from jaxddp.recipe_file import RecipeFile
from jaxddp.workdir.paths import with_absolute_paths

_log = logging.getLogger("jaxddp.experiment")


def join_job(job: Job | None, parallel: ParallelConfig) -> Peers:
    """Join the job with the time limits of a config. Programs that are compiled later are cached on disk."""
    if parallel.cpu_devices is not None:
        simulate_cpu_devices(parallel.cpu_devices)
    if parallel.reproducible:
        fix_cpu_threads()
    waits = {"silence": parallel.heartbeat_timeout, "stall": parallel.stall_timeout}
    peers = join(job, start=parallel.start_timeout, **waits, shutdown=parallel.shutdown_timeout)
    keep_compiled_programs(peers)
    return peers


def join_and_resolve(file: RecipeFile) -> tuple[Topology, Config]:
    """Join the job, check that all processes have the same recipe, and find the devices.

    Returns:
        The devices, and the config with its precision and absolute paths.

    Raises: InputError if the processes have different recipes, or the devices do not exist.
    """
    config = file.config
    peers = join_job(find_job(), config.parallel)
    values = {key: str(value) for key, value in flatten(config.to_dict()).items()}
    peers.agree(values | {"the recipe file's digest": str(file.digest()), "replaced hooks": str(file.replaced)})
    topology = Topology.create(config.parallel.devices, peers)
    if file.taken.notice and peers.is_first:
        _log.info(file.taken.notice)
    config = with_absolute_paths(config, peers)
    if config.train.precision is None:
        config = config.replace(train={"precision": platform_named(topology.platform).precision})
    return topology, config
