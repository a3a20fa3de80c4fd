"""What validation measured of the checkpoints of a work directory: one small file beside them."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import jaxddp.files as files
from jaxddp.errors import InputError
from jaxddp.job.membership import is_first

VALIDATION_FILE = "validation.json"
_BEST_BY = "top1"


class Validations:
    """The metrics of each step that was validated; every process knows them, the first one writes.

    Raises:
        InputError: the file cannot be read, or holds something else.
    """

    def __init__(self, directory: Path):
        self._path = directory / VALIDATION_FILE
        self._known = _read(self._path)

    def __contains__(self, step: int) -> bool:
        return step in self._known

    def put(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keep a step's metrics; one that is not finite as null. Raises: InputError."""
        self._known[step] = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._write()

    def forget(self, step: int) -> None:
        """The step is to be another's than the one that was measured. Raises: InputError."""
        if self._known.pop(step, None) is not None:
            self._write()

    def best(self, steps: Iterable[int]) -> int | None:
        """The one of these steps with the highest top-1; of equal ones the latest; None without any."""
        measured = [(value, step) for step in steps if (value := self._known.get(step, {}).get(_BEST_BY)) is not None]
        return max(measured, default=(0, None))[1]

    def _write(self) -> None:
        if is_first():
            files.replace(self._path, json.dumps(self._known, indent=2).encode())


def _read(path: Path) -> dict[int, dict[str, float | None]]:
    try:
        return {int(step): dict(metrics) for step, metrics in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: is damaged ({error}); remove it, and keep a copy of the best checkpoint: it will not be known"
        ) from None
