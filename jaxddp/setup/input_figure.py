"""A figure of training images exactly as the network receives them at a step, also for `jaxddp data show`."""

from pathlib import Path

import jax
import numpy as np

import jaxddp.core.files as files
from jaxddp.augment.preprocess import Inputs, Preprocess
from jaxddp.core.errors import counted
from jaxddp.setup.feed import Feed
from jaxddp.setup.recipe import Recipe
from jaxddp.training.events import short_class_name
from jaxddp.training.pictures import Picture, input_grid, png


def input_figure(feed: Feed, preprocess: Preprocess, step: int, count: int) -> Picture:
    """Draw the first images of a step's batch, without normalization, with labels and rows. The first step is 1."""
    batch = next(feed.batches(step - 1, step))
    inputs = jax.jit(lambda batch: preprocess(batch, train=True, key=jax.random.key(feed.order.seed)))(batch)
    places = np.flatnonzero(np.asarray(batch.mask))[:count]
    is_normalized = np.issubdtype(batch.image.dtype, np.floating)
    pixels = np.asarray(inputs.images) if is_normalized else denormalized(preprocess, inputs)
    names = feed.source.class_names

    def name_of(label: jax.Array) -> str:
        if np.issubdtype(label.dtype, np.floating):
            return ", ".join(f"{name} {value:.3g}" for name, value in zip(names, label.tolist(), strict=True))
        classes = [int(label)] if label.ndim == 0 else np.flatnonzero(label).tolist()
        return ", ".join(short_class_name(names[each]) for each in classes) or "no label"

    def title_of(index: int) -> str:
        """Return the label, or both labels and their weights if images are mixed, and the row."""
        title, mixing = name_of(batch.label[index]), inputs.mixing
        if mixing is not None:
            weight = float(mixing.weight[index])
            title = f"{weight:.0%} {title}\n{1 - weight:.0%} {name_of(mixing.label[index])}"
        return f"{title}\nrow {int(batch.row[index])}"

    return input_grid(pixels[places], [title_of(index) for index in places.tolist()])


def denormalized(preprocess: Preprocess, inputs: Inputs) -> np.ndarray:
    """Convert the network's input back to pixels, uint8[B, H, W, C]."""
    images = np.asarray(inputs.images).astype(np.float32)
    std, mean = (np.array(each[: images.shape[-1]]) for each in (preprocess.std, preprocess.mean))
    return np.clip(np.round((images * std + mean) * 255), 0, 255).astype(np.uint8)


def show(recipe: Recipe, step: int, count: int, out: Path) -> str:
    """Draw the result of `input_figure` into a PNG file, and return a description of it.

    Raises: InputError if an image cannot be read, or the picture cannot be written.
    """
    files.create(out.parent)
    files.replace(out, png(input_figure(recipe.feed, recipe.preprocess, step, count)))
    batch_size, growth = recipe.feed.order.batch_size, recipe.feed.growth
    side = "" if growth is None else f", {growth.side(step - 1)}x{growth.side(step - 1)} pixels"
    return f"{min(count, batch_size)} of {counted(batch_size, 'image')} of step {step}{side}"
