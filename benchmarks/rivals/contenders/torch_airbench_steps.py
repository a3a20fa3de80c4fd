"""Takes the first steps of a script of airbench with given parameters and images, and writes the loss of each step.

    python torch_airbench_steps.py SCRIPT --given FILE.npz --out FILE.npz

`benchmarks/whole_runs/airbench_steps.py` starts it and writes FILE.npz: `images` uint8[K, B, 32, 32, 3], `labels`
int64[K, B], and the parameters by their names in the script. The script runs on the CPU in float32, with GELU and the
epsilon of batch norm as in jaxddp, and without augmentation; nothing else of it changes.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.torch_airbench import for_cpu

STEPS_PER_EPOCH = 48
AS_IN_JAXDDP = {
    "nn.GELU()": 'nn.GELU("tanh")',
    "eps=1e-12": "eps=1e-5",
    "loss.backward()": "report(loss); loss.backward()",
}


class Finished(Exception):
    """All given batches have been used."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", type=Path)
    parser.add_argument("--given", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with np.load(options.given) as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    images, labels = (given.pop(name) for name in ("images", "labels"))
    losses: list[float] = []

    def report(loss: Any) -> None:
        losses.append(loss.item() / labels.shape[1])
        if len(losses) == len(labels):
            raise Finished

    text = for_cpu(options.script.read_text(), [])
    for old, new in AS_IN_JAXDDP.items():
        if old not in text:
            raise ValueError(f"the script has no {old!r}")
        text = text.replace(old, new)
    script: dict[str, Any] = {"__name__": "script", "report": report}
    exec(compile(text, options.script.name, "exec"), script)
    make_net = script["make_net"]

    class Loader:
        def __init__(self, *_: Any, **__: Any):
            self.normalize = script["T"].Normalize(script["CIFAR_MEAN"], script["CIFAR_STD"])
            self.images, self.labels = as_input(images[0]), labels[0]

        def __len__(self) -> int:
            return STEPS_PER_EPOCH

        def __iter__(self) -> Iterator[Any]:
            return ((self.normalize(as_input(batch)), label) for batch, label in zip(images, labels, strict=True))

    def make_given_net() -> Any:
        net = make_net()
        unexpected = net.load_state_dict(given, strict=False).unexpected_keys
        if unexpected:
            raise ValueError(f"the network of the script has no {unexpected}")
        return net

    script |= {"CifarLoader": Loader, "make_net": make_given_net, "init_whitening_conv": lambda *_: None}
    try:
        script["main"](0)
    except Finished:
        np.savez(options.out, losses=np.array(losses))


def as_input(images: Any) -> Any:
    return (images.float() / 255).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


if __name__ == "__main__":
    main()
