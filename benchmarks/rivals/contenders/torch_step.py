"""Measures PyTorch's step in its fastest form. `benchmarks/step.py --against torch` and `benchmarks/gpu.py` start it.

Memory is channels-last. On a CPU it uses DistributedDataParallel and one thread for each process; on a GPU autocast, a
fused optimizer, and the task's variant: a mode of `torch.compile`, or none.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.rivals.contenders.case import MEAN, MOMENTUM, STAGES, STD, Case, Task
from benchmarks.rivals.contenders.outcome import add_result, attempt
from benchmarks.rivals.contenders.torch_others import ConvNeXt, ViT
from benchmarks.rivals.contenders.torch_resnet import ResNet, load

EAGER = "eager"
"""The variant without compilation; the others are modes of `torch.compile`."""


def main(task: Task) -> None:
    process, processes = int(os.environ.get("JAX_PROCESS_ID", "0")), int(os.environ.get("JAX_NUM_PROCESSES", "1"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = task.case.precision != "float32"
        torch.backends.cudnn.benchmark = True
    if processes > 1:
        store = Path(task.out).with_suffix(".store")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=process, world_size=processes)
    step = make_step(task, process, processes, device)
    figures = task.measure(step, lambda loss: mean(loss, processes), lambda loss: loss.item())
    if device.type == "cuda":
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
    if process == 0:
        add_result(task.out, figures | {"version": torch.__version__, "device": device.type})
    if processes > 1:
        dist.destroy_process_group()


def make_step(task: Task, process: int, processes: int, device: torch.device) -> Any:
    case = task.case
    others = {"vit_s16": lambda: ViT(case.size, case.classes), "convnext_tiny": lambda: ConvNeXt(case.classes)}
    network = ResNet(case) if case.network in STAGES else others.get(case.network, lambda: torchvision_network(case))()
    load(network, dict(np.load(task.weights)))
    network: Any = network.to(device, memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(network.parameters(), case.learning_rate, MOMENTUM, fused=device.type == "cuda" or None)
    if processes > 1:
        network = nn.parallel.DistributedDataParallel(
            network, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
        )
    pixels, labels = (torch.from_numpy(array).to(device) for array in case.images(process))
    scale, shift = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (STD, MEAN))
    bfloat16 = torch.autocast(device.type, torch.bfloat16, enabled=case.precision == "bfloat16")

    def loss_of(pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        images = (pixels.permute(0, 3, 1, 2).float() / 255 - shift) / scale
        with bfloat16:
            logits = network(images.contiguous(memory_format=torch.channels_last))
        return nn.functional.cross_entropy(logits.float(), labels)

    mode = task.variant or ("max-autotune" if device.type == "cuda" else EAGER)
    if mode != EAGER:
        loss_of = torch.compile(loss_of, mode=mode)

    def step() -> torch.Tensor:
        # Invalidates the outputs of the previous step's CUDA graphs.
        torch.compiler.cudagraph_mark_step_begin()
        loss = loss_of(pixels, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def torchvision_network(case: Case) -> nn.Module:
    """Return a network of torchvision without dropout and stochastic depth, whose random numbers differ from JAX's."""
    import torchvision

    network = torchvision.models.get_model(case.network, num_classes=case.classes)
    for module in network.modules():
        if isinstance(module, (nn.Dropout, torchvision.ops.StochasticDepth)):
            module.p = 0.0
    return network


def mean(loss: torch.Tensor, processes: int) -> float:
    if processes > 1:
        dist.all_reduce(loss)
    return loss.item() / processes


if __name__ == "__main__":
    attempt(main, Task.parse())
