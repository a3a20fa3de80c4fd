"""The options of `jaxddp launch`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from jaxddp.config.values import HELP, check_values
from jaxddp.core.errors import InputError, about, show
from jaxddp.core.ranges import Range, Seconds, whole
from jaxddp.job.messages import split_address

_EXAMPLE = "jaxddp launch --processes 2 -- train digits"
_MACHINES = Range(1, 100_000)


class Machines(NamedTuple):
    """The numbers of machines that a job may have."""

    least: int
    most: int

    @property
    def elastic(self) -> bool:
        """Whether the job continues when the number of machines changes."""
        return self.least < self.most


@dataclass(frozen=True)
class Launch:
    """Start the command after `--` in several processes.

    By default, there is one process for each GPU of this machine, or one for all TPU chips.

    Example: jaxddp launch --processes 2 -- train digits --data data/digits
    """

    processes: Annotated[int, Range(1, 10_000)] | None = None
    """Number of processes on this machine. The GPUs, if any, are divided evenly among the processes."""
    gpus: Annotated[int, Range(0, 10_000)] | None = None
    """Number of this machine's GPUs to use, with one process for each. With 0, all processes compute on the CPU."""
    nodes: str = "1"
    """Number of machines, or minimum and maximum, such as 1:4. Start the same command on each machine, with its own
    --nr."""
    nr: Annotated[int, Range(0, 99_999)] | None = None
    """This machine's number, from 0."""
    coordinator: str | None = None
    """HOST:PORT of machine 0, reachable from every machine. The default for one machine is a free loopback port."""
    restarts: Annotated[int, Range(0, 1_000_000)] = 0
    """Maximum restarts of a failed job, from its last checkpoint. Bad input (exit code 2) causes no restart."""
    wait: Seconds = 300.0
    """Seconds that machines wait for each other at each start, with --restarts or --nodes MIN:MAX."""
    settle: Annotated[float, Range(0, 1_000_000)] = 10.0
    """With --nodes MIN:MAX, fewer than MAX machines start if none joins or leaves for this many seconds."""
    join_after: Annotated[float, Range(0, 1_000_000)] = 300.0
    """With --nodes MIN:MAX, minimum seconds from a start to a restart with more machines. All processes save first."""
    run_id: str | None = None
    """A name that distinguishes this job from other jobs at the same address. Use the same name on every machine."""
    logs: Path | None = None
    """Folder for the output of each process. The default is `logs` in the work directory, or else runs/launch."""
    cores: Annotated[int, Range(0, 100_000)] | None = None
    """Cores for each process: by default an even share without GPUs, and all cores with GPUs. 0 means all cores."""
    grace: Annotated[float, Range(0, 1_000_000)] = 10.0
    """After a process fails, seconds between SIGTERM and SIGKILL for the other processes."""
    save_grace: Annotated[float, Range(0, 1_000_000)] = 120.0
    """After Ctrl-C or SIGTERM, seconds that every process has to save before it is killed."""

    @property
    def machines(self) -> Machines:
        """The numbers of machines in `nodes`. Raises InputError if `nodes` is invalid."""
        counts = [whole(word, _MACHINES) for word in self.nodes.split(":")]
        least, most = counts[0], counts[-1]
        if len(counts) > 2 or least is None or most is None:
            expected = f"a number of machines such as 2, or MIN:MAX such as 1:4, from {_MACHINES}"
            raise InputError(f"--nodes={show(self.nodes)}: expected {expected}")
        if least > most:
            raise InputError(f"--nodes {self.nodes}: MIN is above MAX")
        return Machines(least, most)

    @property
    def launchers_meet(self) -> bool:
        """Whether the launchers of several machines connect to each other."""
        return self.machines.most > 1 and (self.machines.elastic or self.restarts > 0)

    def check(self) -> None:
        """Raise InputError if an option is invalid. Options that depend on this machine's resources are not checked."""
        check_values(self, "--")
        most = self.machines.most
        if most > 1 and None in (self.coordinator, self.nr):
            both = f"--coordinator HOST:PORT, an address of machine 0, and --nr, this machine's number, 0 to {most - 1}"
            raise InputError(f"--nodes {self.nodes}: give {both}")
        if self.nr is not None and self.nr >= most:
            raise InputError(f"--nr {self.nr}: expected 0 to {most - 1}, for --nodes {self.nodes}")
        if self.coordinator is not None:
            with about(f"--coordinator {self.coordinator}"):
                split_address(self.coordinator)


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the launcher's arguments before the first `--`, and the command after it.

    Raises: InputError if there is no command, and the launcher's arguments do not include --help.
    """
    words = list(arguments)
    own, command = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    if not command and not {*HELP} & {*own}:
        raise InputError(f"launch: no command; write the command after --, as in: {_EXAMPLE}")
    return own, command
