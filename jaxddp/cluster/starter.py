"""Turns into a worker: `python starter.py LAUNCHER_PID CORES PROGRAM WORDS...`, with CORES as `0,1` or empty.

What must be set inside a process before its program begins, without Python code between fork and exec: the launcher may
have threads (JAX's, TensorFlow's), and such code can then deadlock. Run by its path and on its own, it starts in 20 ms.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, cores: str, command: list[str]) -> None:
    """Ask the kernel to end this process with its launcher (Linux), move to its cores, and become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # A launcher that was killed before that line has left this process to another parent.
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # Python ignores these two, and an ignored signal stays ignored in the program.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be run ({error.strerror})")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
