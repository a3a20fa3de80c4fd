"""The sizes of the devices' slices: for `parallel.shares` "auto", measured at the start of a run, kept in shares.json.

Each device computes the gradient of the slice that it would get if the slices were equal. All devices compute at the
same time, as in a step, but without communication. All times are of the first batch of the run, which is read before.
All processes know the speeds of all devices, so they use the same sizes.
"""

import itertools
import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

import jaxddp.core.files as files
from jaxddp.core.errors import listed
from jaxddp.core.phases import moved, phase
from jaxddp.core.shares import AUTO, Shares
from jaxddp.data.batch import Batch
from jaxddp.engine.ways.unequal import Unequal, UnequalStep, device_arrays
from jaxddp.mesh import Device
from jaxddp.recipe.file import RUN_ID
from jaxddp.setup.run_setup import RunSetup

SIMILAR = 0.1
"""Speeds that differ by at most this fraction count as equal: equal slices need one program and no padding."""
_LEAST_SECONDS, _MOST_SECONDS = 2.0, 30.0
_LEAST_TIMES = 3
SHARES_FILE = "shares.json"
_log = logging.getLogger("jaxddp.experiment")


def measure_shares(setup: RunSetup) -> tuple[float, ...]:
    """Return the images a second of each device of all processes, in mesh order. All processes must call it together.

    The measurement takes at least two seconds after compilation, and at most half a minute or a single gradient.
    """
    topology, config = setup.topology, setup.config
    unit = setup.layout.division.unit_of_slice
    counts = Shares().lengths(config.train.batch_size, topology.num_devices, topology.peers.process_count, unit)
    with phase("compile", "measuring the speed of each device"):
        # Images that grow have their last size.
        batch = next(replace(setup.feed.divided(counts), growth=None).batches(0, 1))
        way, options = Unequal.with_counts(setup.way, counts), setup.resources.compiler_options
        step = way.program(setup.phases, compiler_options=options).prepare(setup.state, batch, setup.key)
        # The first gradient allocates memory. The processes begin together, so that processes that share a core or a
        # memory bus slow each other as they will in training.
        _seconds(step, setup, batch)
        topology.peers.exchange("ready to measure", "")
        times: list[list[float]] = []
        end, last = time.perf_counter() + _LEAST_SECONDS, time.perf_counter() + _MOST_SECONDS
        while (now := time.perf_counter()) < end or (len(times) < _LEAST_TIMES and now < last):
            times.append(_seconds(step, setup, batch))
            moved()
    local = set(topology.mesh.local_devices)
    own = [count for device, count in zip(topology.mesh.devices.flat, counts, strict=True) if device in local]
    speeds = [count / statistics.median(each) for count, each in zip(own, zip(*times, strict=True), strict=True)]
    return tuple(itertools.chain(*topology.peers.exchange("speeds of devices", speeds)))


def shares_of(speeds: Sequence[float], processes: int, batch_size: int, unit: int = 1) -> str:
    """Return the value of `parallel.shares` for speeds: multiples of the lowest speed, with three digits.

    There is a number for each process if the devices of each process have similar speeds, and otherwise for each
    device. Similar speeds count as equal. A device that is too slow for a slice gets the smallest slice, `unit`.
    """
    by_process = [speeds[at : at + len(speeds) // processes] for at in range(0, len(speeds), len(speeds) // processes)]
    if all(map(_are_similar, by_process)):
        speeds, unit = [statistics.fmean(each) for each in by_process], unit * len(by_process[0])
    if _are_similar(speeds):
        return ",".join("1" for _ in speeds)
    least = unit / batch_size * sum(speeds)
    raised = [max(speed, least) for speed in speeds]
    return ",".join(f"{speed / min(raised):.3g}" for speed in raised)


def _are_similar(speeds: Sequence[float]) -> bool:
    return max(speeds) <= (1 + SIMILAR) * min(speeds)


def _seconds(step: UnequalStep, setup: RunSetup, batch: Batch) -> list[float]:
    """Compute a gradient on all devices of this process at the same time; return the seconds of each device."""
    begin = time.perf_counter()
    leaves = jax.tree.leaves(step.compute(setup.state, batch, setup.key))

    def wait(device: Device) -> float:
        jax.block_until_ready([shard for leaf in leaves for shard in device_arrays(leaf) if device in shard.devices()])
        return time.perf_counter() - begin

    devices = setup.topology.mesh.local_devices
    with ThreadPoolExecutor(len(devices)) as pool:
        return list(pool.map(wait, devices))


def settle_shares(setup: RunSetup, workdir: Path | None = None, run_id: str = "", *, resumes: bool = False) -> RunSetup:
    """Return the setup with the sizes of the slices of a run. Measure the devices for "auto", and log a line.

    A file in the work directory keeps the measured shares. A run that `resumes` uses them, unless the devices have
    changed. All processes of a job must call this function together. Raises: InputError if the file cannot be written;
    see also `Layout.of`.
    """
    shares = setup.config.parallel.shares
    if shares is None:
        return setup
    origin = f"parallel.shares={shares}"
    if shares == AUTO and setup.topology.num_devices > 1:
        file = None if workdir is None else workdir / SHARES_FILE
        shares, origin = _saved_or_measured(setup, file, run_id, resumes=resumes)
        setup = setup.changed(config=setup.config.replace(parallel={"shares": shares}))
    if setup.topology.peers.is_first:
        sizes = _listed(str(rows.stop - rows.start) for _, rows in setup.slices)
        _log.info(f"shares: {origin}; slices of {sizes} images")
    return setup


def _saved_or_measured(setup: RunSetup, file: Path | None, run_id: str, *, resumes: bool) -> tuple[str, str]:
    """Return the value of `parallel.shares` for the devices of a run, and its origin in words."""
    peers, kinds = setup.topology.peers, [device.device_kind for device in setup.topology.mesh.devices.flat]
    content = {RUN_ID: run_id, "shares": "", "processes": peers.process_count, "devices": kinds}
    shares, origin = "", "as measured at the start of the run"
    if file is not None and resumes:
        # Process 0 reads the file, because other hosts may not see its last write yet.
        shares = peers.from_first("saved shares", lambda: _saved(file, content))
    if not shares:
        if resumes and peers.is_first:
            _log.info(f"shares: measured again, because {file} has none of this run on these devices")
        speeds, division = measure_shares(setup), setup.layout.division
        shares = shares_of(speeds, peers.process_count, division.batch_size, division.unit_of_slice)
        origin = f"measured {_listed(f'{speed:.3g}' for speed in speeds)} images/s"
        if file is not None and peers.is_first:
            files.replace_json(file, content | {"shares": shares})
    return shares, f"{_listed(f'{weight:g}' for weight in Shares.parse(shares).weights)}, {origin}"


def _saved(file: Path, expected: Mapping[str, Any]) -> str:
    """Return the value of `parallel.shares` in a file; "" if its other content, the run and devices, is another."""
    try:
        saved = files.parse_json(files.read(file), dict)
        Shares.parse(saved["shares"]).of_devices(len(saved["devices"]), saved["processes"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return ""
    return saved["shares"] if saved | {"shares": ""} == expected else ""


_listed = partial(listed, between=" / ", most=8)
