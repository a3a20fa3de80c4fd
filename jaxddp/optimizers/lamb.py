"""LAMB: Adam with layer-wise scaled updates, for large batches."""

from dataclasses import dataclass

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.core.ranges import Decay, Share
from jaxddp.optimizers.decay import add_decay, scale_kernels
from jaxddp.optimizers.kernels import BY_NAME, Kernels
from jaxddp.registry import OPTIMIZERS


@dataclass(frozen=True)
class LambSettings:
    """The keys of the config section `optimizer` that LAMB reads. `momentum` is beta 1."""

    momentum: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Share = 1e-6


@OPTIMIZERS.add("lamb", LambSettings)
def lamb(config: Config, learning_rate: optax.Schedule, kernels: Kernels = BY_NAME) -> optax.GradientTransformation:
    """Create LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2).

    The update of a kernel is Adam's update with weight decay, scaled to the norm of the kernel. As in timm and
    TensorFlow Addons, and unlike in `optax.lamb`, parameters without weight decay (batch norm and biases) get Adam's
    update unscaled. timm and NVIDIA's code first clip the gradients at a global norm of 1, as with
    `optimizer.clip_norm=1`.
    """
    settings = settings_of(config.optimizer, LambSettings)
    return optax.chain(
        optax.scale_by_adam(b1=settings.momentum, b2=settings.beta2, eps=settings.epsilon),
        add_decay(config, kernels),
        scale_kernels(kernels),
        optax.scale_by_learning_rate(learning_rate),
    )
