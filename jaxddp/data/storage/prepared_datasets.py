"""Opens data sets of the library `datasets`: of the Hugging Face Hub, of its cache, or saved in a folder.

A data set of the hub is downloaded once, by one process of each machine; the others wait, and then read its cache. The
library reads the variables HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_DATASETS_OFFLINE.
"""

import functools
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.core.files import in_turn
from jaxddp.core.phases import doing, moved
from jaxddp.core.wording import first_line, not_installed, show
from jaxddp.data.storage.local import check_regular

T = TypeVar("T")
_SECONDS = 6 * 3600.0
"""The longest preparation of a data set, and the longest wait for another process that prepares it."""
_PAUSE = 0.5


def import_datasets(where: str) -> Any:
    """Return the library `datasets`. Raises: InputError if it is not installed."""
    try:
        import datasets
    except ImportError:
        raise InputError(f"{where}: {not_installed('datasets', 'datasets')}") from None
    return datasets


def is_saved(folder: Path) -> bool:
    """Return whether a folder was written by `save_to_disk`."""
    return (folder / "dataset_dict.json").is_file() or all(
        (folder / name).is_file() for name in ("state.json", "dataset_info.json")
    )


def open_saved(folder: Path) -> Mapping[str, Any]:
    """Return the splits that `save_to_disk` wrote to a folder; a data set alone is "train". Raises: InputError."""
    datasets = import_datasets(str(folder))
    check_regular(folder, "save the data set again")
    try:
        opened = datasets.load_from_disk(str(folder))
    # The library documents no types of errors for damaged files.
    except Exception as error:
        where = _damaged_file(datasets, folder) or folder
        raise InputError(f"{where}: cannot be opened ({_reason(error)}); save the data set again") from None
    return opened if isinstance(opened, dict) else {"train": opened}


def _damaged_file(datasets: Any, folder: Path) -> Path | None:
    """Return the first file of a saved data set that cannot be read. The messages of Arrow do not name it."""
    for file in sorted(folder.rglob("*.arrow")):
        try:
            datasets.Dataset.from_file(str(file))
        except Exception:
            return file
    return None


@functools.lru_cache(maxsize=4)
def open_prepared(name: str, config: str | None, revision: str | None) -> Mapping[str, Any]:
    """Return the splits of a data set of the hub, or of a folder with data files; download and prepare it if needed.

    Both splits of a run come from one call, so they are of one revision.

    Args:
        name: `owner/name`, `name` or a folder.
        config: the name of a configuration (subset); None for the only or default one.
        revision: a branch, tag or commit; None for the default branch.

    Raises:
        InputError: there is no such data set, or its files cannot be used.
        Unreachable: the hub does not answer, or the data set is not prepared after six hours.
    """
    address = f"hf:{name}"
    datasets = import_datasets(address)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    digest = hashlib.sha256(repr((name, config, revision)).encode()).hexdigest()[:16]
    lock = Path(datasets.config.HF_DATASETS_CACHE) / f"jaxddp-{digest}.lock"

    if Path(name).is_dir():
        check_regular(Path(name), "put the file there")

    def prepare() -> Mapping[str, Any]:
        return datasets.load_dataset(name, config, revision=revision)

    with in_turn(lock, _SECONDS, f"preparing {address}") as is_held:
        if not is_held:
            raise Unreachable(f"{address}: another process still prepares it after {_SECONDS / 3600:.0f} hours; end it")
        try:
            with doing(f"preparing {address}"):
                return _in_thread(prepare, _SECONDS, address)
        except (InputError, Unreachable):
            raise
        except (ConnectionError, TimeoutError) as error:
            raise Unreachable(
                f"{address}: the hub cannot be reached, and the data set is not in the cache ({_reason(error)}); check "
                "the network, HF_ENDPOINT and HF_DATASETS_OFFLINE, and start again"
            ) from None
        except Exception as error:
            raise InputError(
                f"{address}: cannot be opened ({_reason(error)}); write hf:OWNER/NAME, with :CONFIG for one of several "
                "configurations, and log in for a data set that needs it"
            ) from None


def _in_thread(call: Callable[[], T], seconds: float, address: str) -> T:
    """Return the result of a call in a thread. Meanwhile this thread reports progress to the watchdog of the job."""
    results: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            errors.append(error)

    # The thread of a download that never ends must not keep the process alive.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < until:
        thread.join(_PAUSE)
        moved()
    if errors:
        raise errors[0]
    if not results:
        raise Unreachable(f"{address}: is not prepared after {seconds / 3600:.0f} hours; check the network")
    return results[0]


def _reason(error: Exception) -> str:
    return show(first_line(error) or type(error).__name__)
