"""The training of a setup whose pieces came from Python, in a work directory or without one."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxddp.job.progress as progress
from jaxddp.data.labels import is_multi_label
from jaxddp.engine.state import TrainState
from jaxddp.experiment.argument_kinds import Measure, check_start
from jaxddp.experiment.chosen_metrics import check_wanted
from jaxddp.experiment.resume import claim, claim_of
from jaxddp.experiment.session import session
from jaxddp.experiment.setup import RunSetup
from jaxddp.recipe_file import CONFIG_FILE
from jaxddp.training.loggers import make_loggers
from jaxddp.training.loop import fit


@progress.phase("start")
def fit_setup(
    setup: RunSetup, directory: Path | None, listeners: Sequence[Any], evaluators: Sequence[Measure]
) -> TrainState:
    """Train a setup, which stays as it was, and return the last state.

    In a directory it resumes or begins, saves, and writes metrics.jsonl. Raises: as `check_start`, `session`, `claim`
    and `fit`.
    """
    compared = directory is not None or setup.topology.process_count > 1
    claimed = claim_of(setup, setup.identity() if compared else {})
    told = {"evaluators": evaluators, "objects": claimed.objects}
    if directory is None:
        check_start(setup)
        return fit(_consumed(setup).run(listeners=listeners, config=claimed.content(), **told))
    watching = [*listeners, *make_loggers(setup.recipe.config, directory)]
    check_wanted(watching, multi_label=is_multi_label(setup.table))
    with session(directory, goal=setup.recipe.config.checkpoint.goal) as own:
        check_start(setup, resumes=own.resume_step is not None)
        # Once there was no config.json.
        known = own.resume_step is not None and (own.directory / CONFIG_FILE).exists()
        content, _ = claim(own.directory, claimed, resuming=known, run_id=own.run_id)
        own.belongs_to(content)
        return fit(_consumed(setup).run(own, listeners=watching, config=content, **told))


def _consumed(setup: RunSetup) -> RunSetup:
    """The setup with a copy of its state: the step consumes what it is given."""
    return dataclasses.replace(setup, state=jax.tree.map(jnp.copy, setup.state))
