"""With how many machines an elastic job can go on: its global batch stays the same, and all devices share it evenly."""

import os

from jaxddp.cluster.options import Launch
from jaxddp.cluster.process_output import say
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.ranges import Range, whole
from jaxddp.data.batch_plan.division import Division

_SIMULATED = Range(1, 100_000)


def sizes_that_share(config: Config | None, options: Launch, processes: int, gpus: int) -> list[int]:
    """Numbers of machines from least to most that can share the batches of a config; all, where none is known.

    Those that cannot are said in one line.

    Args:
        processes: of each machine.
        gpus: of each process; 0 where it computes on the CPU.

    Raises:
        InputError: none can.
    """
    least, most = options.machines
    sizes = list(range(least, most + 1))
    if config is None or not options.machines.elastic:
        return sizes
    each = devices_of_process(config, gpus)
    found = {size: unshared(config, size * processes, each) for size in sizes}
    does = [size for size in sizes if found[size] is None]
    if not does:
        raise InputError(f"--nodes {options.nodes}: {found[least]}; no number of machines can share it")
    if never := [size for size in sizes if found[size] is not None]:
        listed = ", ".join(map(str, never))
        say(f"jaxddp launch: never on {listed} machines: {found[never[0]]}; what is over waits as a spare")
    return does


def devices_of_process(config: Config, gpus: int) -> int:
    """How many devices JAX will show a process."""
    if config.parallel.cpu_devices is not None:
        return config.parallel.cpu_devices
    return gpus or whole(os.environ.get("JAX_NUM_CPU_DEVICES", ""), _SIMULATED) or 1


def unshared(config: Config, processes: int, devices: int) -> str | None:
    """Why so many processes with so many devices each cannot share a config's batches; None where they can."""
    total = processes * devices
    used = config.parallel.devices or total
    if used > total or used % processes:
        return f"parallel.devices={used} of {processes} processes with {devices} each"
    shares = used
    if config.parallel.reproducible:
        # It imports JAX, which other jobs need not wait for.
        from jaxddp.engine.reproducible import SHARDS

        if SHARDS % used:
            return f"parallel.reproducible takes 1, 2, 4 or {SHARDS} devices, not {used}"
        shares = SHARDS
    division = Division.of(config, shares)
    if not division.is_even:
        each = f", accumulate={division.accumulate}" if division.accumulate > 1 else ""
        return f"train.batch_size={division.batch_size} cannot be divided among {used} devices{each}"
    if config.eval.batch_size % used:
        return f"eval.batch_size={config.eval.batch_size} cannot be divided among {used} devices"
    return None
