"""The experiment of a recipe file: its process joins the job, its data are opened, its objects are made."""

import optax

from jaxddp.core.phases import doing, phase
from jaxddp.recipe.given import by_hooks
from jaxddp.recipe.layout import Layout, TrainingData
from jaxddp.recipe.make import make_recipe
from jaxddp.recipe_file import RecipeFile
from jaxddp.setup.experiment import Experiment, lay_out
from jaxddp.setup.joined import joined
from jaxddp.setup.judged import judgement_of
from jaxddp.setup.resources import open_resources


@phase("start")
def open_experiment(file: RecipeFile, rate: optax.Schedule | None = None) -> Experiment:
    """What a recipe file trains and on what; what is wrong with it is said before there is a work directory.

    Args:
        rate: what the optimizer follows in place of the config's schedule.

    Raises: InputError.
    """
    topology, config = joined(file)
    resources = open_resources(config, topology)
    with doing("making network, loss and optimizer"):
        layout = Layout.of(config, topology, TrainingData.of(resources.train, config.data))
        recipe = make_recipe(config, layout, topology, by_hooks(file.hooks), rate)
        experiment = lay_out(recipe, resources, layout, file)
        judgement_of(experiment)
    return experiment
