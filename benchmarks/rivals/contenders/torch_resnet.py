"""The ResNets of `jaxddp.models.resnet` in PyTorch, with torchvision's names (arXiv:1512.03385, bottleneck v1.5)."""

import numpy as np
import torch
from torch import nn

from benchmarks.rivals.contenders.case import BOTTLENECK, STAGES, Case


class Block(nn.Module):
    """Two 3x3 convolutions, or a bottleneck of 1x1, 3x3 and 1x1 with four times the features, each with batch norm."""

    def __init__(self, inputs: int, features: int, stride: int, bottleneck: bool):
        super().__init__()
        outputs = features * (4 if bottleneck else 1)
        shapes = [(inputs, features, 3, stride), (features, features, 3, 1)]
        if bottleneck:
            shapes = [(inputs, features, 1, 1), (features, features, 3, stride), (features, outputs, 1, 1)]
        self.count = len(shapes)
        for number, shape in enumerate(shapes, start=1):
            setattr(self, f"conv{number}", convolution(*shape))
            setattr(self, f"bn{number}", nn.BatchNorm2d(shape[1]))
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for number in range(1, self.count + 1):
            y = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(y))
            y = y if number == self.count else torch.relu(y)
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, case: Case):
        super().__init__()
        bottleneck, small = case.network in BOTTLENECK, case.stem == "small"
        self.conv1 = convolution(3, case.width, *((3, 1) if small else (7, 2)))
        self.bn1 = nn.BatchNorm2d(case.width)
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        inputs = case.width
        for stage, blocks in enumerate(STAGES[case.network]):
            features, layers = case.width * 2**stage, []
            for block in range(blocks):
                layers.append(Block(inputs, features, 2 if stage and not block else 1, bottleneck))
                inputs = features * (4 if bottleneck else 1)
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, case.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def load(network: nn.Module, weights: dict[str, np.ndarray]) -> None:
    """Copy weights in JAX's layout into a network. The names of both must match exactly."""
    state = {name: torch.from_numpy(to_torch(name, array)) for name, array in weights.items()}
    missing, unexpected = network.load_state_dict(state, strict=False)
    # Running statistics start equal in both; torch also stores counts of batches and indices of relative positions.
    equal = ("running_mean", "running_var", "num_batches_tracked", "relative_position_index")
    assert not unexpected and all(name.endswith(equal) for name in missing), (unexpected, missing)


def to_torch(name: str, array: np.ndarray) -> np.ndarray:
    """Transpose the kernels of convolutions, HWIO, to OIHW, and those of dense layers, [in, out], to [out, in]."""
    if not name.endswith(".weight"):
        return array
    return np.ascontiguousarray(array.transpose((3, 2, 0, 1) if array.ndim == 4 else range(array.ndim)[::-1]))
