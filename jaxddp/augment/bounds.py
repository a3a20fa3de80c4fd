"""What augmentation can be asked for, said before anything is compiled."""

import math

from jaxddp.augment.rand_augment import LARGEST
from jaxddp.config import AugmentConfig
from jaxddp.errors import InputError


def check_augment(augment: AugmentConfig, image_shape: tuple[int, int, int]) -> None:
    """Raises:
    InputError: a value out of bounds, or images that cannot take it; names the key.

    Args:
        image_shape: (H, W, C) of the training images.
    """
    *sides, channels = image_shape
    bounds = {
        "pad": (min(sides), "pixels, at most the image's side"),
        "cutout": (min(sides), "pixels, at most the image's side"),
        "rand_augment": (math.inf, "layers"),
        "rand_magnitude": (LARGEST, "as in the paper"),
        "erase": (1, "a probability"),
        "mixup": (math.inf, "the alpha of a Beta distribution"),
        "cutmix": (math.inf, "the alpha of a Beta distribution"),
    }
    for name, (most, meaning) in bounds.items():
        value = getattr(augment, name)
        # NaN and infinity are refused too.
        if not 0 <= value <= most or value == math.inf:
            numbers = "0 (none) or a positive number" if most == math.inf else f"0 to {most}"
            raise InputError(f"data.augment.{name}={value!r}: expected {numbers}, {meaning}")
    if augment.rand_augment and channels not in (1, 3):
        raise InputError(
            f"data.augment.rand_augment={augment.rand_augment}: its colours are defined for 1 or 3 channels, and the "
            f"images have {channels}; give 0"
        )


def check_pairs(augment: AugmentConfig, batch_size: int, num_devices: int) -> None:
    """Raises:
    InputError: images are to be mixed, and a device's slice of the batch cannot be divided into pairs.
    """
    key = "mixup" if augment.mixup else "cutmix"
    alpha = getattr(augment, key)
    share = batch_size // num_devices
    if alpha and share % 2:
        near = " or ".join(str(size * num_devices) for size in (share - 1, share + 1) if size)
        raise InputError(
            f"data.augment.{key}={alpha} mixes pairs of images on one device, and train.batch_size={batch_size} gives "
            f"each of {num_devices} devices {share}, an odd number; a batch of {near} would do"
        )
