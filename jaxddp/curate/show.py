"""`jaxddp data show`: draws the training images of any step of a run, after augmentation."""

from pathlib import Path

import jaxddp.core.files as files
from jaxddp.core.wording import counted
from jaxddp.setup.input_figure import input_figure
from jaxddp.setup.recipe import Recipe
from jaxddp.training.pictures import png


def show(recipe: Recipe, step: int, count: int, out: Path) -> str:
    """Draw the first images of a step's batch into a PNG file, after all augmentation but without normalization.

    A batch is a function of the recipe and the step, so a run of the recipe trains on these images.

    Args:
        step: the number of the step, from 1, as in metrics.jsonl.
        count: the number of images, 1 or more.

    Returns: a description of the picture.

    Raises: InputError if the config or the data are wrong, or the picture cannot be written.
    """
    picture = input_figure(recipe.feed, recipe.preprocess, step, count)
    files.create(out.parent)
    files.replace(out, png(picture))
    batch_size, growth = recipe.feed.order.batch_size, recipe.feed.growth
    side = "" if growth is None else f", {growth.side(step - 1)}x{growth.side(step - 1)} pixels"
    return f"{min(count, batch_size)} of {counted(batch_size, 'image')} of step {step}{side}"
