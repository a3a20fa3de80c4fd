"""The devices of trials that run side by side: each gets its own GPUs, or its share of the cores."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxddp.cluster.machine import divide, local_cores, local_gpus
from jaxddp.cluster.worker import shared_environment
from jaxddp.core.errors import InputError
from jaxddp.core.tpu import local_chips
from jaxddp.core.wording import counted

_OF_A_JOB = frozenset({"JAX_PROCESS_ID", "JAX_COORDINATOR_ADDRESS"})


@dataclass(frozen=True)
class Slot:
    """The devices of one trial at a time.

    Attributes:
        gpus: the GPUs, in the notation of CUDA_VISIBLE_DEVICES; empty for the devices of this process.
        cores: the cores; empty for all cores.
    """

    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    def environment(self) -> dict[str, str]:
        """Return the environment variables of a trial: those of this process, without the variables of a job."""
        environ = {name: value for name, value in shared_environment().items() if name not in _OF_A_JOB}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)} if self.gpus else {}
        # A trial is a job of its own, also if a scheduler started several sweeps as the processes of one job.
        return environ | gpus | {"JAX_NUM_PROCESSES": "1"}

    def __str__(self) -> str:
        if self.gpus:
            return counted(len(self.gpus), "GPU")
        return counted(len(self.cores), "core") if self.cores else "all devices"


def slots(jobs: int, environ: Mapping[str, str] = os.environ) -> list[Slot]:
    """Return a slot for each of the trials that run side by side.

    Without GPUs and with more trials than cores, every trial uses all cores.

    Raises:
        InputError: the GPUs or TPU chips of this machine cannot be divided among the trials.
    """
    if jobs == 1:
        return [Slot()]
    if chips := local_chips():
        raise InputError(f"--jobs {jobs}: a process uses all {len(chips)} TPU chips of this machine; give --jobs 1")
    gpus, cores = local_gpus(environ), local_cores()
    if len(gpus) % jobs:
        possible = " or ".join(str(number) for number in range(1, len(gpus) + 1) if len(gpus) % number == 0)
        total = counted(len(gpus), "GPU")
        raise InputError(f"--jobs {jobs}: {total} cannot be divided evenly among the trials; {possible} would do")
    if gpus:
        return [Slot(gpus=tuple(part)) for part in divide(gpus, jobs)]
    if jobs > len(cores) or not hasattr(os, "sched_setaffinity"):
        return [Slot()] * jobs
    return [Slot(cores=tuple(part)) for part in divide(cores, jobs)]


def describe(all_slots: Sequence[Slot]) -> str:
    """Return how trials run: "one after another", or "2 side by side, each with 4 cores"."""
    if len(all_slots) == 1:
        return "one after another"
    each = dict.fromkeys(map(str, all_slots))
    return f"{len(all_slots)} side by side, each with {' or '.join(each)}"
