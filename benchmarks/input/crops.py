"""The crops that all contenders of `stream.py` draw, without TensorFlow, which some of them must not import."""

import math
import random

SIZE, BATCH, WORKERS = 224, 64, 2
AREA, ASPECT = (0.08, 1.0), (3 / 4, 4 / 3)


def draw_window(height: int, width: int) -> tuple[int, int, int, int]:
    """Draw a crop of random area and aspect: top, left, height, width. After ten misfits return the image's center."""
    for _ in range(10):
        area = height * width * random.uniform(*AREA)
        aspect = math.exp(random.uniform(*map(math.log, ASPECT)))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side, side
