"""A process joins its job with a recipe, and settles what the recipe leaves to the devices and to the directory."""

import logging

from jaxddp.config import Config
from jaxddp.mesh import Topology
from jaxddp.recipe_file import RecipeFile
from jaxddp.setup.resources import join_with
from jaxddp.workdir.places import with_places

_log = logging.getLogger("jaxddp.experiment")


def joined(file: RecipeFile) -> tuple[Topology, Config]:
    """Join the job, and find the devices; with the file's config, its precision and its places settled.

    A line says where settings come from that the recipe file does not say. Raises: InputError.
    """
    topology = join_with(file.config, file.digest())
    if file.said and topology.peers.is_first:
        _log.info(file.said)
    config = with_places(file.config, topology.peers)
    if config.train.precision is None:
        config = config.replace(train={"precision": "float32" if topology.platform == "cpu" else "bfloat16"})
    return topology, config
