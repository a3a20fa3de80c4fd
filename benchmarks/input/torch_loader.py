"""Times one turn of a torch data loader. Prints images, seconds and the mean area of crops as JSON.

    python torch_loader.py KIND FILES BATCHES

FILES is a text file of image paths. KIND names one of torch's recipes: `pil` (Pillow, ToTensor, normalize), `v2`
(Pillow decodes, torchvision v2 on uint8), `io` (torchvision.io decodes, v2 on uint8).
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.input.crops import AREA, ASPECT, BATCH, SIZE, WORKERS, draw_window

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


class Photographs(torch.utils.data.Dataset):
    """A data set whose items are (image, area of its crop)."""

    def __init__(self, files: list[str], kind: str):
        self.files, self.kind = files, kind
        if kind != "pil":
            from torchvision.transforms import v2

            self.crop = v2.RandomResizedCrop(SIZE, scale=AREA, ratio=ASPECT, antialias=True)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, float]:
        if self.kind == "pil":
            return self._by_pillow(self.files[row])
        from torchvision.transforms.v2 import functional

        if self.kind == "io":
            from torchvision.io import ImageReadMode, decode_image, read_file

            image = decode_image(read_file(self.files[row]), mode=ImageReadMode.RGB)
        else:
            with Image.open(self.files[row]) as file:
                image = functional.pil_to_tensor(file.convert("RGB"))
        top, left, height, width = self.crop.get_params(image, AREA, ASPECT)
        return functional.resized_crop(image, top, left, height, width, [SIZE, SIZE], antialias=True), height * width

    def _by_pillow(self, path: str) -> tuple[torch.Tensor, float]:
        with Image.open(path) as file:
            image = file.convert("RGB")
        top, left, height, width = draw_window(image.height, image.width)
        box = (left, top, left + width, top + height)
        resized = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box)
        tensor = torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous().float().div(255)
        return (tensor - MEAN) / STD, height * width


def turn(files: list[str], kind: str, batches: int) -> dict[str, float]:
    """Time all batches except the first, which waits for the workers to start."""
    dataset = Photographs(files, kind)
    sampler = torch.utils.data.RandomSampler(dataset, replacement=True, num_samples=(batches + 1) * BATCH)
    loader = iter(torch.utils.data.DataLoader(dataset, BATCH, sampler=sampler, num_workers=WORKERS))
    next(loader)
    begin = time.perf_counter()
    areas = [area for _, area in loader]
    seconds = time.perf_counter() - begin
    return {"images": batches * BATCH, "seconds": seconds, "area": float(torch.cat(areas).double().mean())}


if __name__ == "__main__":
    kind, names, count = sys.argv[1:]
    print(json.dumps(turn(Path(names).read_text().splitlines(), kind, int(count))))
