"""The samples of all tar files of a split, found once and saved for later runs; see `record_index`."""

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxddp.core.errors import InputError
from jaxddp.core.files import cache_folder, in_turn
from jaxddp.core.phases import doing, moved
from jaxddp.core.wording import counted
from jaxddp.data.faults import Refuse
from jaxddp.data.storage.record_index import Columns, load_or_build_columns
from jaxddp.data.storage.shards import ShardFile, ShardFolder
from jaxddp.data.storage.tar_samples import Samples, find_samples

_FORMAT = 1
_THREADS = 16
_SECONDS = 3600.0
"""The longest wait for another process of this machine that indexes the same files; then this process indexes them."""
_COUNT = "count"


class _Faulty(Exception):
    """Raised with the samples and the faults of shards, whose index is not saved: faults are reported each time."""

    def __init__(self, samples: dict[str, Samples], faults: list[str]):
        super().__init__()
        self.samples, self.faults = samples, faults


def load_or_build_samples(folder: ShardFolder, paths: Sequence[str], refuse: Refuse) -> dict[str, Samples]:
    """Return the samples of each shard, by path; a shard without samples that can be used is left out.

    The first call reads the headers and the labels of all shards. It saves the result beside the shards or, where that
    folder cannot be written, in the cache folder. The index depends on the names, the sizes and the times of change of
    the shards.

    Args:
        refuse: called with a message for each fault.

    Raises: InputError if no sample can be used, or `refuse` raises it.
    """
    states: dict[str, tuple[int, str]] = {}
    for path in paths:
        try:
            states[path] = folder.state(path)
        except FileNotFoundError:
            refuse(f"{folder.name(path)}: no such shard; download it again, or correct the pattern")
    none_usable = f"{folder.name()}: no sample of {counted(len(paths), 'shard')} can be used; repair a shard"
    if not states:
        raise InputError(none_usable)
    digest = hashlib.sha256("\n".join([folder.name(), *paths]).encode(errors="surrogateescape")).hexdigest()[:16]
    file = f"shards-{digest}.jaxddp-index"
    places = [cache_folder() / file]
    if folder.root is not None:
        # The name depends on no absolute path, so the index of a moved folder is found.
        names = hashlib.sha256("\n".join(paths).encode(errors="surrogateescape")).hexdigest()[:16]
        places.insert(0, folder.root / f"shards-{names}.jaxddp-index")
    stamp = json.dumps([_FORMAT, *states.items()])
    with in_turn(cache_folder() / f"{file}.lock", _SECONDS, "indexing the shards"):
        try:
            columns = load_or_build_columns(places, stamp, lambda: _build(folder, states))
            samples = _split(columns, [*states])
        except _Faulty as faulty:
            samples = faulty.samples
            for fault in faulty.faults:
                refuse(fault)
    if not samples:
        raise InputError(none_usable)
    return samples


def _build(folder: ShardFolder, states: dict[str, tuple[int, str]]) -> Columns:
    """Read all shards. Raises: _Faulty."""

    def read(path: str) -> tuple[Samples, list[str]] | InputError:
        file = ShardFile(folder, path)
        try:
            with folder.open(path) as opened:
                return find_samples(opened, states[path][0], str(file))
        except InputError as error:
            return error
        except OSError as error:
            return InputError(f"{file}: cannot be read ({error.strerror}); make it a readable file")

    samples, faults = dict[str, Samples](), list[str]()
    with ThreadPoolExecutor(_THREADS) as pool:
        total, results = counted(len(states), "shard"), pool.map(read, states)
        for done, path in enumerate(states):
            with doing(f"indexing {total}, once: {done:,} done"):
                result = next(results)
            moved()
            if isinstance(result, InputError):
                faults.append(str(result))
                continue
            samples[path] = result[0]
            faults += result[1]
    if faults:
        raise _Faulty({path: part for path, part in samples.items() if len(part.key)}, faults)
    return _joined([*samples.values()])


def _joined(samples: Sequence[Samples]) -> Columns:
    columns = {name: np.concatenate([getattr(part, name) for part in samples]) for name in Samples._fields}
    return {**columns, _COUNT: np.array([len(part.key) for part in samples], np.int64)}


def _split(columns: Columns, paths: Sequence[str]) -> dict[str, Samples]:
    ends = np.cumsum(columns[_COUNT])[:-1]
    parts = zip(*(np.split(columns[name], ends) for name in Samples._fields), strict=True)
    return dict(zip(paths, map(Samples._make, parts), strict=True))
