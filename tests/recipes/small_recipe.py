"""A recipe that starts fast: the digits' config at 16 pixels, with a network that compiles in a second.

Its folder has no other modules, because modules beside a recipe count as sources of the recipe.
"""

import flax.linen as nn
import jax.numpy as jnp

from jaxddp.config import Config, load


class SmallNet(nn.Module):
    """A convolution, optional batch norm over the axis `sync`, pooling and a dense layer."""

    batch_norm: bool = False
    sync: str | None = None
    classes: int = 5
    dtype: object = jnp.float32
    width: int = 4

    @nn.compact
    def __call__(self, images, train: bool):
        # A bias before batch norm has no gradient, but tests that compare gradients need every gradient.
        x = nn.Conv(self.width, (3, 3), use_bias=not self.batch_norm, param_dtype=self.dtype)(images)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.sync, param_dtype=self.dtype)(
                x
            )
        x = nn.relu(x).mean((1, 2))
        return nn.Dense(self.classes, param_dtype=self.dtype)(x)


def get_config() -> Config:
    return load("digits").replace(
        data={"image_size": 16, "resize": 16, "augment": {"pad": 1}},
        model={"width": 4},
        train={"batch_size": 8},
        eval={"batch_size": 8},
        log={"every": "1 step", "to": ("jsonl", "curves", "parameters")},
    )


def get_model(config: Config, num_classes: int) -> SmallNet:
    return SmallNet(batch_norm=True, sync="data", classes=num_classes, width=config.model.width)
