"""`parameters.txt`: the name, shape, dtype and size of every parameter, through clu."""

from pathlib import Path

import jax

import jaxddp.core.files as files
from jaxddp.registry import LOGGERS
from jaxddp.training.events import Listener, RunStart

PARAMETERS = "parameters.txt"


class ParameterOverview(Listener):
    """A logger that writes `parameters.txt` at the start of a run. Raises: InputError if the file cannot be written."""

    def __init__(self, directory: Path):
        self._path = directory / PARAMETERS

    def start(self, run: RunStart) -> None:
        if run.params is None:
            return
        # Imported here, because only this logger needs clu.
        from clu import parameter_overview

        leaves, _ = jax.tree_util.tree_flatten_with_path(run.params)
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
        table = parameter_overview.get_parameter_overview(named, include_stats=False)
        files.create(self._path.parent)
        files.replace(self._path, (table + "\n").encode())


LOGGERS.add("parameters")(lambda config, workdir: ParameterOverview(workdir))
