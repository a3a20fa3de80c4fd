"""The way of a config: the only place where the keys of the config decide how the devices divide a step."""

from jaxddp.config import Config
from jaxddp.engine.ways.groups import Groups
from jaxddp.engine.ways.reproducible import Reproducible
from jaxddp.engine.ways.sharded import Sharded
from jaxddp.engine.ways.unequal import Unequal
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import Topology


def choose_way(config: Config, topology: Topology) -> Way:
    """Return the way of a config. Raises: InputError if keys conflict, or do not fit the devices or the batch."""
    way = Way.of(config, topology)
    if config.parallel.reproducible:
        way = Reproducible.of(config, topology)
    if config.parallel.shares is not None:
        unequal = Unequal.of(config, topology)
        # Equal slices need one program and no padding.
        way = unequal if len({*unequal.counts}) > 1 else way
    if config.train.sync_every is not None:
        way = Groups.of(config, topology)
    if config.parallel.shard_optimizer and topology.num_devices > 1:
        way = Sharded.of(config, topology)
    way.check_batch_size(config.train.batch_size)
    return way
