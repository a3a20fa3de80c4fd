"""The optimizers: each is a dataclass of its settings, which makes a transformation of gradients.

`learning_rate` is a function of the step. Weight decay is `optimizer.weight_decay`, for kernels only.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from jaxddp.config.registry import OPTIMIZERS, Requires
from jaxddp.core.errors import InputError, Key
from jaxddp.core.libraries import Lazy
from jaxddp.core.ranges import Decay, Share, SomeShare
from jaxddp.kernels import BY_NAME, Kernels, add_decay, matrices, scale_kernels

if TYPE_CHECKING:
    import optax
    from optax import GradientTransformation, Schedule

    from jaxddp.config import Config
else:
    optax = Lazy("optax")

Nesterov = Annotated[bool, Requires("optimizer.momentum")]
_ADAMW_RMS = 0.2
"""The approximate root mean square of an AdamW update. Orthogonalized updates are scaled to this value."""


@OPTIMIZERS.add("momentum")
@dataclass(frozen=True)
class SgdWithMomentum:
    """SGD with momentum. Weight decay is added to the gradient, as for the original ResNets."""

    momentum: Decay = 0.9
    """Momentum of SGD and similar optimizers; beta 1 of Adam and similar optimizers."""
    nesterov: Nesterov = True
    """Whether to use Nesterov momentum."""

    def make(self, config: "Config", learning_rate: "Schedule", kernels: Kernels = BY_NAME) -> "GradientTransformation":
        sgd = optax.sgd(learning_rate, self.momentum or None, nesterov=self.nesterov)
        return optax.chain(add_decay(config, kernels), sgd)


@OPTIMIZERS.add("sgd")
@dataclass(frozen=True)
class Sgd(SgdWithMomentum):
    """SGD with the defaults of `optax.sgd` and PyTorch's `SGD`."""

    momentum: Decay = 0.0
    nesterov: Nesterov = False


@OPTIMIZERS.add("rmsprop")
@dataclass(frozen=True)
class RmsProp:
    """RMSProp (Tieleman & Hinton 2012, "Neural networks for machine learning", lecture 6.5), as in PyTorch.

    Unlike in `optax.rmsprop`, epsilon is added to the root, momentum accumulates updates before the multiplication by
    the learning rate, and the defaults differ. `beta2` is the decay of the mean square. Weight decay is added to the
    gradient.
    """

    momentum: Decay = 0.0
    nesterov: Nesterov = False
    beta2: Decay = 0.99
    """Decay of the mean of squared gradients."""
    epsilon: Share = 1e-8
    """Small constant that prevents division by zero."""

    def make(self, config: "Config", learning_rate: "Schedule", kernels: Kernels = BY_NAME) -> "GradientTransformation":
        return optax.chain(
            add_decay(config, kernels),
            optax.scale_by_rms(self.beta2, self.epsilon, eps_in_sqrt=False),
            optax.trace(self.momentum, self.nesterov) if self.momentum else optax.identity(),
            optax.scale_by_learning_rate(learning_rate),
        )


@OPTIMIZERS.add("lars")
@dataclass(frozen=True)
class Lars(SgdWithMomentum):
    """LARS (You et al. 2017, arXiv:1708.03888), for large batches: SGD with momentum and a rate for each kernel.

    A kernel's gradient g, with weight decay, is multiplied by `trust_coefficient` * |kernel| / (|g| + `epsilon`). Optax
    takes the norm of the sum of gradient and decay. The paper adds their two norms, and does not use Nesterov momentum.
    Parameters without weight decay (batch norm and biases) are not scaled, as in MLPerf's reference for ResNet-50.
    """

    trust_coefficient: SomeShare = 0.001
    """LARS: at a learning rate of 1, each layer changes by this fraction of its norm."""
    epsilon: Share = 0.0

    def make(self, config: "Config", learning_rate: "Schedule", kernels: Kernels = BY_NAME) -> "GradientTransformation":
        return optax.chain(
            add_decay(config, kernels),
            scale_kernels(kernels, self.trust_coefficient, self.epsilon),
            optax.scale_by_learning_rate(learning_rate),
            optax.trace(self.momentum, self.nesterov),
        )


@OPTIMIZERS.add("adamw")
@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101): Adam with decoupled weight decay. `momentum` is beta 1."""

    momentum: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Share = 1e-8

    def direction(self, kernels: Kernels) -> "GradientTransformation":
        """Return the transformation of gradients before weight decay and the learning rate."""
        return optax.scale_by_adam(self.momentum, self.beta2, self.epsilon)

    def make(self, config: "Config", learning_rate: "Schedule", kernels: Kernels = BY_NAME) -> "GradientTransformation":
        decay = add_decay(config, kernels)
        return optax.chain(self.direction(kernels), decay, optax.scale_by_learning_rate(learning_rate))


@OPTIMIZERS.add("lamb")
@dataclass(frozen=True)
class Lamb(AdamW):
    """LAMB (You et al. 2019, arXiv:1904.00962, algorithm 2): Adam with layer-wise scaled updates, for large batches.

    The update of a kernel is Adam's update with weight decay, scaled to the norm of the kernel. As in timm and
    TensorFlow Addons, and unlike in `optax.lamb`, parameters without weight decay (batch norm and biases) get Adam's
    update unscaled. timm and NVIDIA's code first clip the gradients at a global norm of 1, as with
    `optimizer.clip_norm=1`. `momentum` is beta 1.
    """

    epsilon: Share = 1e-6

    def make(self, config: "Config", learning_rate: "Schedule", kernels: Kernels = BY_NAME) -> "GradientTransformation":
        scaled = add_decay(config, kernels), scale_kernels(kernels)
        return optax.chain(self.direction(kernels), *scaled, optax.scale_by_learning_rate(learning_rate))


@OPTIMIZERS.add("muon")
@dataclass(frozen=True)
class Muon(AdamW):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): orthogonalized momentum for kernels, else Adam.

    Five Newton-Schulz iterations approximate the orthogonal matrix nearest to a kernel's momentum. The kernel of a
    convolution is a matrix of (height * width * input channels, output channels), and the kernels of attention are
    matrices of (inputs, heads * size) and (heads * size, outputs). Each layer of a stack (`nn.scan`, `nn.vmap`) has its
    own matrices. Kernels are scaled as in Liu et al. 2025 (arXiv:2502.16982, section 2.2), so AdamW's learning rate and
    weight decay suit them. Adam, or with `nesterov` NAdam, as in Optax, trains the other parameters at the same rate:
    batch norm, biases, and the tables of `nn.Embed`. `momentum` is only Muon's and often 0.95; `beta2` is only Adam's.
    """

    nesterov: Nesterov = True

    def direction(self, kernels: Kernels) -> "GradientTransformation":
        # With a learning rate of -1 Muon returns the unscaled direction, to which decay and learning rate are applied.
        return optax.contrib.muon(
            -1.0,
            beta=self.momentum,
            eps=self.epsilon,
            nesterov=self.nesterov,
            adam_b2=self.beta2,
            muon_weight_dimension_numbers=functools.partial(kernels.map, matrices),
            consistent_rms=_ADAMW_RMS,
        )


@OPTIMIZERS.add("schedule_free")
@dataclass(frozen=True)
class ScheduleFree(AdamW):
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), like `optax.contrib.schedule_free_adamw`.

    The optimizer updates the iterates z, and x is their average, weighted by the square of the largest rate so far.
    Gradients are computed at y, a point between z and x; `momentum`, the paper's beta 1, is the weight of x in y.
    Evaluation uses x; see `jaxddp.engine.parts.averages`.
    """

    def direction(self, kernels: Kernels) -> "GradientTransformation":
        return optax.scale_by_rms(decay=self.beta2, eps=self.epsilon, eps_in_sqrt=False, bias_correction=True)

    def make(self, config: "Config", learning_rate: "Schedule", kernels: Kernels = BY_NAME) -> "GradientTransformation":
        """Create the optimizer. Raises: InputError if the schedule is not constant, or the momentum is 0."""
        if config.optimizer.schedule != "constant":
            problem = ": schedule_free averages its steps instead of lowering the learning rate"
            advice = "set it to constant, which also allows a warm-up"
            raise InputError(Key("optimizer.schedule", config.optimizer.schedule), problem, advice=advice)
        if not self.momentum:
            problem, advice = ": schedule_free divides by the momentum", "give a number above 0, such as 0.9"
            raise InputError(Key("optimizer.momentum", 0.0), problem, advice=advice)
        step = super().make(config, learning_rate, kernels)
        return optax.contrib.schedule_free(step, lambda n: learning_rate(n - 1), b1=self.momentum)  # The first n is 1.
