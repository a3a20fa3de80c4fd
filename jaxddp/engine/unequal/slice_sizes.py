"""The sizes of the devices' slices of a batch, from `parallel.shares`, and the settings that need equal slices."""

from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch_plan import Division
from jaxddp.mesh import Topology


def slice_sizes(config: Config, topology: Topology) -> tuple[int, ...]:
    """Return the number of examples of each device's slice, in mesh order; empty if all slices are equal.

    Raises:
        InputError: `parallel.shares` does not fit the devices, the batch or another key.
    """
    shares, devices = config.parallel.division, topology.num_devices
    if shares is None:
        return ()
    _check_other_keys(config)
    unit = Division.of(config, devices).unit_of_slice
    sizes = shares.sizes(config.train.batch_size, devices, topology.process_count, unit)
    return () if len({*sizes}) == 1 else sizes


def _check_other_keys(config: Config) -> None:
    """Raise `InputError` if another key does not work with slices of different sizes."""
    key = Key("parallel.shares", config.parallel.shares)
    if config.model.batch_norm == "sync":
        raise InputError(
            *(key, ": "),
            Key.plain("model.batch_norm", "sync"),
            " communicates within the gradient, which each device computes by a program of its own",
            advice="set it to local or ghost:K",
        )
    if config.data.placement == "local":
        raise InputError(
            *(key, ": "),
            Key.plain("data.placement", "local"),
            " determines the slices by the examples of each process",
            advice="leave one of them out",
        )
    if config.train.sync_every is not None:
        other = Key.plain("train.sync_every", config.train.sync_every)
        raise InputError(*(key, ": "), other, " divides batches equally among groups", advice="leave one of them out")
    reasons = {
        "parallel.reproducible": "divides each batch into 8 equal shards",
        "parallel.shard_optimizer": "gathers the parameters in a program that all devices share",
        "parallel.buckets": "overlaps communication with a gradient that is complete before it is sent",
    }
    for name, reason in reasons.items():
        value = getattr(config.parallel, name.partition(".")[2])
        if value not in (None, False):
            raise InputError(*(key, ": "), Key.plain(name, value), f" {reason}", advice="leave one of them out")
