"""Values that processes compare over their devices, where JAX was initialized without us."""

import json
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxddp.errors import InputError, Unreachable, error_of


def decided_on_devices(text: str, decide: Callable[[list[str]], str]) -> str:
    """What process 0 makes of the texts of all processes; all must call this alike.

    Raises:
        InputError, Unreachable: that of process 0, on every process.
    """
    texts, answer, error, code = _gathered(text), "", None, 0
    if jax.process_index() == 0:
        try:
            answer = decide(texts)
        except (InputError, Unreachable) as caught:
            error, code = str(caught), caught.exit_code
    answer, error, code = json.loads(_gathered(json.dumps([answer, error, code]))[0])
    if error is not None:
        raise error_of(code, error)
    return answer


def _gathered(text: str) -> list[str]:
    own = np.frombuffer(text.encode(), np.uint8)
    lengths = np.asarray(multihost_utils.process_allgather(np.array([len(own)])))[:, 0]
    padded = np.zeros(max(int(lengths.max()), 1), np.uint8)
    padded[: len(own)] = own
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]
