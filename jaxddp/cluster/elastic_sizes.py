"""Finds the numbers of machines among which an elastic job can divide its global batch evenly."""

import os

from jaxddp.cluster.options import Launch
from jaxddp.cluster.process_output import say
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.ranges import Range, whole
from jaxddp.core.wording import counted
from jaxddp.data.batch_plan import Division

_SIMULATED = Range(1, 100_000)


def valid_machine_counts(config: Config | None, options: Launch, processes: int, gpus: int) -> list[int]:
    """Return the numbers of machines, in ascending order, among which the batches of a config can be divided evenly.

    Print a line about the excluded numbers. Without a config, return all numbers.

    Args:
        processes: the number of processes on each machine.
        gpus: the number of GPUs of each process; 0 if it computes on the CPU.

    Raises:
        InputError: the batches cannot be divided among any number of machines.
    """
    least, most = options.machines
    sizes = list(range(least, most + 1))
    if config is None or not options.machines.elastic:
        return sizes
    devices = devices_per_process(config, gpus)
    problems = {size: sharing_problem(config, size * processes, devices) for size in sizes}
    allowed = [size for size in sizes if problems[size] is None]
    if not allowed:
        raise InputError(f"--nodes {options.nodes}: {problems[least]}, and no other number of machines is possible")
    if excluded := [size for size in sizes if problems[size] is not None]:
        listed = ", ".join(map(str, excluded))
        problem = f"the job cannot run on {listed} machines: {problems[excluded[0]]}"
        say(f"jaxddp launch: {problem}; surplus machines wait as spares")
    return allowed


def devices_per_process(config: Config, gpus: int) -> int:
    """Return the number of JAX devices of a process."""
    if config.parallel.cpu_devices is not None:
        return config.parallel.cpu_devices
    return gpus or whole(os.environ.get("JAX_NUM_CPU_DEVICES", ""), _SIMULATED) or 1


def sharing_problem(config: Config, processes: int, devices: int) -> str | None:
    """Return why a config's batches cannot be divided among so many processes and devices; None if they can."""
    total = processes * devices
    used = config.parallel.devices or total
    if used > total or used % processes:
        each = counted(devices, "device")
        return f"parallel.devices={used} cannot be divided among {processes} processes with {each} each"
    shares = used
    if config.parallel.reproducible:
        # This import imports JAX, so it is local.
        from jaxddp.engine.reproducible import SHARDS

        if SHARDS % used:
            return f"parallel.reproducible takes 1, 2, 4 or {SHARDS} devices, not {used}"
        shares = SHARDS
    division = Division.of(config, shares)
    if config.parallel.division is not None:
        try:
            config.parallel.division.sizes(division.batch_size, used, processes, division.unit_of_slice)
        except InputError as error:
            return str(error)
    elif not division.is_even:
        each = f", accumulate={division.accumulate}" if division.accumulate > 1 else ""
        return f"train.batch_size={division.batch_size} cannot be divided among {used} devices{each}"
    if config.eval.batch_size % used:
        return f"eval.batch_size={config.eval.batch_size} cannot be divided among {used} devices"
    return None
