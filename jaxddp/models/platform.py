"""What a network computes with on a platform: the one place where that is chosen."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxddp.models.adapt import LinenModel
from jaxddp.models.cpu_convolution import convolve


@runtime_checkable
class Convolutional(Protocol):
    """A network that lets the operation of its convolutions be chosen, as `jaxddp.models.resnet.ResNet` does."""

    def with_convolution(self, convolution: Callable[..., Any]) -> Any:
        """The same network with its convolutions computed by `convolution(images, kernel, stride, padding)`."""
        ...


def for_platform(model: Any, platform: str) -> Any:
    """The model as it is quickest on a platform ("cpu", "gpu"): on CPUs a `Convolutional` one gets others."""
    if platform != "cpu":
        return model
    if isinstance(model, LinenModel):
        return dataclasses.replace(model, module=for_platform(model.module, platform))
    return model.with_convolution(convolve) if isinstance(model, Convolutional) else model
