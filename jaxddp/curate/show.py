"""`jaxddp data show`: training images exactly as the model is given them, at any step of any run."""

from pathlib import Path

import jax
import numpy as np

import jaxddp.files as files
from jaxddp.augment.preprocess import Inputs, Preprocess
from jaxddp.data.batch import Batch
from jaxddp.experiment.experiment import Experiment
from jaxddp.training.pictures import input_grid, png
from jaxddp.training.shown import short


def show(experiment: Experiment, step: int, count: int, out: Path) -> str:
    """Draw the first images of a step's batch into a PNG file, after all augmentation but without normalization.

    A batch is a function of the recipe and the step, so these are the images that a run of the recipe sees. Returns
    what was drawn, in words.

    Args:
        step: from 1, as in metrics.jsonl.
        count: of the images, from 1.

    Raises `InputError` for an error in config or data, or a picture that cannot be written.
    """
    feed, preprocess = experiment.feed, experiment.preprocess
    batch = next(feed.batches(step - 1, step))
    key = jax.random.key(feed.order.seed)
    inputs = jax.jit(lambda batch: preprocess(batch, train=True, key=key))(batch)
    pixels = denormalized(preprocess, inputs)[:count]
    picture = input_grid(pixels, _titles(batch, inputs, feed.source.class_names, len(pixels)))
    files.create(out.parent)
    files.replace(out, png(picture))
    return f"{len(pixels)} of {feed.order.batch_size} images of step {step}"


def denormalized(preprocess: Preprocess, inputs: Inputs) -> np.ndarray:
    """What the network sees, as pixels again: uint8[B, H, W, C]."""
    images = np.asarray(inputs.images).astype(np.float32)
    channels = images.shape[-1]
    pixels = (images * np.array(preprocess.std[:channels]) + np.array(preprocess.mean[:channels])) * 255
    return np.clip(np.round(pixels), 0, 255).astype(np.uint8)


def _titles(batch: Batch, inputs: Inputs, names: tuple[str, ...], count: int) -> list[str]:
    """The label of each image, or both labels and their shares where two images are mixed; and its row."""
    titles = []
    for place in range(count):
        own = short(names[int(batch.label[place])])
        if inputs.mixing is not None:
            weight, other = float(inputs.mixing.weight[place]), short(names[int(inputs.mixing.label[place])])
            own = f"{weight:.0%} {own}\n{1 - weight:.0%} {other}"
        titles.append(f"{own}\nrow {int(batch.row[place])}")
    return titles
