"""ResNet-50 on ImageNet in 32 epochs: the mild recipe of Mosaic's ResNet (2022), at a scale of 0.36.

    jaxddp train imagenet_resnet50_mild --data.path /data/imagenet

The source is github.com/mosaicml/examples, blogs/resnet/recipes/resnet50_mild.yaml: binary cross-entropy, summed over
the classes, with a head that starts at equal probabilities, BlurPool, averaged weights, images that grow from 88 to 176
pixels and are evaluated at 224, and decoupled weight decay of all parameters. The scale shortens its 90 epochs to 32,
but not its warmup (`scale_warmup` of github.com/mosaicml/composer). Unlike this recipe, the source also blurs at the
max-pool, and resizes crops of 176 pixels.

The source published 75 to 78.1% top-1 for 16 to 60 epochs (mosaicml.com/blog/mosaic-resnet-deep-dive). This recipe has
not been run.
"""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxddp.config import Config, load
from jaxddp.losses import binary_cross_entropy

HALF_LIFE = 100
"""Half-life of the average, in steps."""


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        data={
            "image_size": 176,
            "grow_from": 88,
            "grow_start": "40%",
            "grow_by": 4,
            "eval_size": 224,
            "resize": 232,
        },
        model={"blur_pool": True, "zero_init_last_scale": False},
        train={
            "batch_size": 2048,
            "duration": "32 epochs",
            "label_smoothing": 0.08,
            "ema": 0.5 ** (1 / HALF_LIFE),
            "ema_every": 20,
            "ema_warmup": False,
        },
        optimizer={
            "learning_rate": 2.048,
            "momentum": 0.875,
            "nesterov": False,
            "warmup": "8 epochs",
            "weight_decay": 5e-4,
        },
    )


def get_loss(config: Config) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Return the sum over the classes, as in Mosaic's Composer, where `bce` is the mean."""
    mean = binary_cross_entropy(config.train.label_smoothing)
    return lambda logits, labels: logits.shape[-1] * mean(logits, labels)


def get_optimizer(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Return SGD with weight decay that follows the schedule but does not depend on the peak of the learning rate."""
    settings = config.optimizer
    return optax.chain(
        optax.trace(settings.momentum, settings.nesterov),
        optax.add_decayed_weights(settings.weight_decay / settings.learning_rate),
        optax.scale_by_learning_rate(learning_rate),
    )


def get_initialize(config: Config, images: Callable[[int], np.ndarray]) -> Any:
    def initialize(params: Any, model_state: Any) -> tuple[Any, Any]:
        """Draw the scales of batch norm from 0 to 1, and set the head's bias for equal probabilities of all classes."""
        key = jax.random.key(config.seed)

        def draw_scale(path: Any, leaf: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            if not name.endswith("/scale"):
                return leaf
            leaf_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
            return jax.random.uniform(leaf_key, leaf.shape, leaf.dtype)

        params = jax.tree_util.tree_map_with_path(draw_scale, params)
        bias = jnp.full_like(params["fc"]["bias"], -jnp.log(params["fc"]["bias"].size))
        return {**params, "fc": {**params["fc"], "bias": bias}}, model_state

    return initialize
