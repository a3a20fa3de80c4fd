"""The watch of a process that is in no job of ours: it ends, where it stands still, by itself."""

import math
import threading
import time

import jaxddp.core.phases as phases
from jaxddp.job.watch import LONGER, end_now, show_stacks

_BEAT_SECONDS = 1.0
_lock = threading.Lock()
_watch: "_Watch | None" = None


def watch_alone(stall: float) -> None:
    """End this process when it makes no progress for `stall` seconds; of several calls the last counts."""
    global _watch
    with _lock:
        if _watch is None:
            _watch = _Watch(stall)
            _watch.start()
        _watch.stall = stall


def watch_no_more() -> None:
    """The job's own watch judges from here on."""
    with _lock:
        if _watch is not None:
            _watch.stall = math.inf


class _Watch(threading.Thread):
    def __init__(self, stall: float):
        super().__init__(name="jaxddp-watch", daemon=True)
        self.stall = stall

    def run(self) -> None:
        while True:
            begin, between = time.monotonic(), min(_BEAT_SECONDS, self.stall / 4)
            time.sleep(between)
            phases.excuse(time.monotonic() - begin - between)
            own = phases.standing()
            if phases.stuck({0: own}, self.stall) is not None:
                show_stacks()
                end_now(f"this process {own}; the stacks of its threads are above; {LONGER}", 1)
