"""Becomes a worker: `python starter.py LAUNCHER_PID CORES PROGRAM ARGUMENTS...`, with CORES as `0,1` or empty.

It sets what must be set inside a process before its program starts. Python code between fork and exec could deadlock,
because the launcher may have threads (JAX's, TensorFlow's). Run by its path and without imports, it starts in 20 ms.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, cores: str, command: list[str]) -> None:
    """Ask the kernel to kill this process when its launcher ends (Linux), pin it to its cores, and run the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the launcher was killed before that line, this process has another parent.
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # Python ignores these two signals, and they would stay ignored in the program.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be run ({error.strerror})")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
