"""Write tests/support/torchvision.json: operations and policy tables of torchvision, on PIL images.

The tests run without PyTorch and compare with this file. `python tests/support/torchvision_golden.py` writes it, in an
environment with torchvision. Warps are by nearest neighbour and fill with gray 128.
"""

import base64
import json
import zlib
from pathlib import Path

import numpy as np

HEIGHT, WIDTH = 16, 18
FILE = Path(__file__).with_name("torchvision.json")
NAMES = {"ShearX": "shear_x", "ShearY": "shear_y", "TranslateX": "translate_x", "TranslateY": "translate_y"}


def image() -> np.ndarray:
    """Return the test image, uint8[HEIGHT, WIDTH, 3]: slopes with a little noise."""
    rng = np.random.default_rng(0)
    slopes = np.add.outer(np.arange(HEIGHT) * 8, np.arange(WIDTH) * 6)[..., None] * [1.0, 0.8, 0.4] + [0, 60, 100]
    return (slopes + rng.integers(-9, 10, slopes.shape)).clip(0, 255).astype(np.uint8)


def encoded(pixels: np.ndarray) -> str:
    """Return pixels, uint8, as text."""
    return base64.b85encode(zlib.compress(pixels.tobytes(), 9)).decode()


def decoded(text: str) -> np.ndarray:
    """Return the pixels of a text of `encoded`, uint8[HEIGHT, WIDTH, 3]."""
    return np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8).reshape(HEIGHT, WIDTH, 3)


def write() -> None:
    import torch
    import torchvision
    import torchvision.transforms.v2.functional as functional
    from PIL import Image
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import autoaugment as policies

    picture, operations = Image.fromarray(image()), {}
    size = (HEIGHT, WIDTH)
    spaces = {
        "trivial_augment": policies.TrivialAugmentWide()._augmentation_space(31),
        "auto_augment": policies.AutoAugment()._augmentation_space(10, size),
        "augmix": policies.AugMix(all_ops=False)._augmentation_space(10, size),
    }
    for name, (magnitudes, is_signed) in spaces["trivial_augment"].items() | {("Invert", (torch.tensor(0.0), False))}:
        # At 135 degrees, the largest magnitude, the source of many pixels is on a border between two pixels.
        bins = magnitudes.tolist()[:-1] if magnitudes.ndim else [0.0]
        for magnitude in sorted({bins[len(bins) // 3], bins[-1] * (-1 if is_signed else 1)}):
            done = policies._apply_op(picture, name, magnitude, InterpolationMode.NEAREST, [128.0] * 3)
            operations[f"{NAMES.get(name, name.lower())} {magnitude}"] = encoded(np.array(done))
    tensor = torch.from_numpy(image()).movedim(-1, 0)
    for hue in (-0.4, -0.1, 0.05, 0.5):
        operations[f"hue {hue}"] = encoded(functional.adjust_hue(tensor, hue).movedim(0, -1).numpy())
    for name, adjust in (
        ("jitter brightness", functional.adjust_brightness),
        ("jitter contrast", functional.adjust_contrast),
        ("jitter saturation", functional.adjust_saturation),
    ):
        for factor in (0.6, 1.3):
            operations[f"{name} {factor}"] = encoded(np.array(adjust(picture, factor)))
    operations["grayscale 3"] = encoded(np.array(functional.to_grayscale(picture, 3)))
    tables = {
        str(policy.value): [
            [[NAMES.get(name, name.lower()), probability, index or 0] for name, probability, index in pair]
            for pair in policies.AutoAugment(policy).policies
        ]
        for policy in policies.AutoAugmentPolicy
    }
    text = {
        "source": f"torchvision {torchvision.__version__.partition('+')[0]}",
        "operations": dict(sorted(operations.items())),
        "policies": tables,
        "spaces": {
            policy: {
                NAMES.get(name, name.lower()): [np.round(magnitudes.tolist(), 4).tolist(), is_signed]
                for name, (magnitudes, is_signed) in space.items()
            }
            for policy, space in spaces.items()
        },
    }
    lines = [f' "{key}": {json.dumps(value)}' for key, value in text.items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    write()
