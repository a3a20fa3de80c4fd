"""Writes timm's logits of images that Pillow reads. It must run where torch, torchvision and timm are installed.

    python torch_logits.py NAME WEIGHTS FOLDER INTERPOLATION OUT.npz

NAME is timm's name of the network, and WEIGHTS a .pth file with its arrays, whose names may differ, in their order. OUT
has the logits, float32[N, K], and the pixels that the network got before their normalization, uint8[N, 224, 224, 3],
in the order of the files' names.
"""

import sys
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

MEAN, DEVIATION = 127, 128
"""The normalization of efficientnet_pytorch's EfficientNet-Lite0, for pixels between 0 and 255."""
RESIZE, SIDE, BATCH = 256, 224, 50


def main(name: str, weights: str, folder: str, interpolation: str, out: str) -> None:
    network = timm.create_model(name).eval()
    arrays = {key: array for key, array in network.state_dict().items() if not key.endswith("num_batches_tracked")}
    stored = [each for key, each in torch.load(weights).items() if not key.endswith("num_batches_tracked")]
    network.load_state_dict(dict(zip(arrays, stored, strict=True)), strict=False)
    window = Compose([Resize(RESIZE, InterpolationMode(interpolation)), CenterCrop(SIDE)])
    pixels = np.stack([np.asarray(window(Image.open(path).convert("RGB"))) for path in sorted(Path(folder).iterdir())])
    results = []
    with torch.no_grad():
        for start in range(0, len(pixels), BATCH):
            images = torch.from_numpy(pixels[start : start + BATCH]).permute(0, 3, 1, 2).float()
            results.append(network((images - MEAN) / DEVIATION).numpy())
    np.savez(out, logits=np.concatenate(results), pixels=pixels)


if __name__ == "__main__":
    main(*sys.argv[1:])
