"""The projected failures of a large job, and the cost of its checkpoints and restarts.

A job ends when any of its devices fails, and starts again from its last checkpoint. Failures are independent. With the
seconds C of a checkpoint and the mean time M between failures, the interval sqrt(2 C M) loses least (Young 1974,
doi:10.1145/361147.361115; Daly 2006, doi:10.1016/j.future.2004.11.016). Of each second, a job with the interval T loses
C / T to checkpoints and (T / 2 + R) / M to failures, where R is the time of a restart.

Rates of failures:
- "Llama 3": 419 unexpected interruptions in 54 days on 16,384 H100s (of 466; "The Llama 3 herd of models",
  arXiv:2407.21783, section 3.3.4).
- "RSC-1": 6.50 failures in 1,000 days of a node of 8 A100s (Kokolis et al. 2024, arXiv:2410.21680).

Measured values, from benchmarks/RESULTS.md, on a machine with two cores:
- The training loop waits 0.192 s for a save of 205 MB, which is written in 1.17 s.
- A warm start of a job of two processes takes 17 s.
- 4,000 processes meet in 3.95 s. An assumption: the time grows with the number of processes, one for each host.

Assumptions: a checkpoint is read as fast as it is written; a lost process is found out after the default
`parallel.heartbeat_timeout`, 10 s; a host is repaired in 24 hours.
"""

import math
from dataclasses import dataclass

from benchmarks.large.ways import HOST
from jaxddp.config import Config

HOURS_OF_A_DEVICE = {"Llama 3": 54 * 24 * 16_384 / 419, "RSC-1": HOST * 24 * 1000 / 6.5}
SAVED_BYTES, WAIT_OF_A_SAVE, SECONDS_OF_A_SAVE = 205e6, 0.192, 1.17
WARM_START = 17.0
SECONDS_OF_A_MEETING = 3.95 / 4000
HOURS_OF_A_REPAIR = 24.0


@dataclass(frozen=True)
class Failures:
    """The failures of a job.

    Attributes:
        between: seconds between two failures, in the mean.
        interval: seconds between two checkpoints.
        checkpoints: the fraction of the time that checkpoints take.
        repeated: the fraction of the time in which lost steps are repeated.
        restarts: the fraction of the time that restarts take.
    """

    devices: int
    between: float
    interval: float
    checkpoints: float
    repeated: float
    restarts: float

    @property
    def lost(self) -> float:
        return self.checkpoints + self.repeated + self.restarts


def failures(devices: int, state_bytes: float, source: str) -> Failures:
    """Return the failures of a job.

    Args:
        state_bytes: the bytes of a checkpoint.
        source: a key of `HOURS_OF_A_DEVICE`.
    """
    between = 3600 * HOURS_OF_A_DEVICE[source] / devices
    checkpoint = WAIT_OF_A_SAVE * state_bytes / SAVED_BYTES
    interval = math.sqrt(2 * checkpoint * between)
    # The seconds that are added to a second of training.
    costs = checkpoint / interval, interval / 2 / between, restart_seconds(devices, state_bytes) / between
    total = 1 + sum(costs)
    return Failures(devices, between, interval, *(cost / total for cost in costs))


def restart_seconds(devices: int, state_bytes: float) -> float:
    """Return the seconds from a failure until the first step after it."""
    processes = math.ceil(devices / HOST)
    found_out = Config().parallel.heartbeat_timeout
    read = SECONDS_OF_A_SAVE * state_bytes / SAVED_BYTES
    return found_out + WARM_START + SECONDS_OF_A_MEETING * processes + read


def spare_share(source: str) -> float:
    """Return the fraction of the hosts that are being repaired, so a job of constant size needs as many spares."""
    hours = HOURS_OF_A_DEVICE[source] / HOST
    return HOURS_OF_A_REPAIR / (HOURS_OF_A_REPAIR + hours)
