"""Prepares a worker process and runs its program: `python starter.py LAUNCHER_PID CORES PROGRAM ARGUMENTS...`.

CORES is a list such as `0,1`, or empty for all cores. The settings below must be made in the new process. Python code
between fork and exec could deadlock, because the launcher may have threads of JAX or TensorFlow. This file does not
import the package, so it starts in 20 ms.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, cores: str, command: list[str]) -> None:
    """Let the kernel kill this process when its launcher ends (Linux), pin it to its cores, and run the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the launcher was killed before prctl, this process has another parent by now.
    if os.getppid() != launcher:
        sys.exit("the launcher is gone")
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
    # Python ignores these two signals, and the program would inherit this setting.
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]}: cannot be run ({error.strerror})")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
