"""Checks the options of the launcher on a TPU machine, where one process uses all chips."""

import os
from collections.abc import Sequence
from pathlib import Path

from jaxddp.cluster.options import Launch
from jaxddp.core.errors import InputError
from jaxddp.core.wording import counted
from jaxddp.job import tpu
from jaxddp.job.env_variables import Environ

_ON_CPU = "or compute only on the CPU with --gpus 0 --processes P"


def check_options(options: Launch, chips: Sequence[Path], environ: Environ = os.environ) -> None:
    """Check that the launcher may start one process here, with all chips of this machine.

    Args:
        options: the launcher's options.
        chips: the device files of this machine's chips.
        environ: the environment, which may name the hosts of the slice.

    Raises:
        InputError: the options divide the chips, or differ from the hosts of the TPU slice.
        Unreachable: the metadata server of a TPU VM does not answer in time.
    """
    machine = f"this machine has {counted(len(chips), 'TPU chip')}, which one process uses"
    if options.gpus:
        raise InputError(f"--gpus {options.gpus}: {machine}; leave out --gpus, {_ON_CPU}")
    if options.processes not in (None, 1):
        raise InputError(f"--processes {options.processes}: {machine}; leave out --processes, {_ON_CPU}")
    place = tpu.with_metadata(environ)
    hosts, process = tpu.process_count(place), tpu.process(place)
    if hosts is None:
        return
    machines = options.machines
    if (str(machines.least), str(machines.most)) != (hosts.value, hosts.value):
        others = f"give --nodes {hosts.value}, --nr and --coordinator" if hosts.value != "1" else "leave out --nodes"
        raise InputError(
            f"--nodes {options.nodes}: the TPU slices of this job have {counted(int(hosts.value), 'host')} "
            f"({hosts.variable}); start `jaxddp train` on every host without the launcher, or {others}"
        )
    if process is not None and options.nr is not None and process.value != str(options.nr):
        raise InputError(f"--nr {options.nr}: libtpu numbers this host {process.value}; give --nr {process.value}")
