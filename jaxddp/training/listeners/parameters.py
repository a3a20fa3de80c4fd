"""The parameter overview: every parameter's name, shape, dtype and size, through clu."""

from pathlib import Path

import jax

import jaxddp.core.files as files
from jaxddp.registry import LOGGERS
from jaxddp.training.events import Listener, RunStart

PARAMETERS = "parameters.txt"


class ParameterOverview(Listener):
    """Writes `parameters.txt` at the start: a ResNet-152 has 465 rows, too many for the screen. Raises: InputError."""

    def __init__(self, directory: Path):
        self._path = directory / PARAMETERS

    def start(self, run: RunStart) -> None:
        if run.params is None:
            return
        # A run that writes no overview does not need it.
        from clu import parameter_overview

        leaves, _ = jax.tree_util.tree_flatten_with_path(run.params)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        table = parameter_overview.get_parameter_overview(named, include_stats=False)
        files.create(self._path.parent)
        files.replace(self._path, (table + "\n").encode())


LOGGERS.add("parameters")(lambda config, workdir: ParameterOverview(workdir))
