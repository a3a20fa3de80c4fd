"""Python runs this first in every process that a test starts: let each of them keep what it has compiled.

On a CPU a compiled program is looked up by, among others, the process that runs it, but JAX lets only process 0 write:
every other would compile everything again in every test, which takes most of a test's time.
"""

from jax._src import compiler, distributed

_write = compiler._cache_write


def _write_from_any_process(*args: object) -> None:
    number = distributed.global_state.process_id
    distributed.global_state.process_id = 0
    try:
        _write(*args)
    finally:
        distributed.global_state.process_id = number


compiler._cache_write = _write_from_any_process
