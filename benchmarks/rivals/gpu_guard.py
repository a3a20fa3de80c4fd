"""Runs a command for `gpu_children.py`, and kills it with its descendants when the parent ends.

    python gpu_guard.py COMMAND…

The parent holds the other end of standard input, which the system closes when the parent ends, also by SIGKILL. The
parent starts this process as the leader of a process group, in which the command runs.
"""

import os
import signal
import subprocess
import sys
import threading

SIGNALLED = 128
"""An exit code above it means that a signal ended the command."""


def main() -> None:
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    code = child.wait()
    os._exit(code if code >= 0 else SIGNALLED - code)


def end_with_parent() -> None:
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
