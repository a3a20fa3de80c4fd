"""The pixels of evaluation equal those of torchvision's Resize and CenterCrop.

The reference is Pillow's `resize` and a slice. `Resize(256)` and `CenterCrop(224)` of torchvision 0.29.2 gave exactly
the same pixels for 312 of 312 images (200 photographs, 112 resized copies of them). Their antialiased versions for
tensors gave pixels that differed by 0.14 levels in the mean, and by 0.22 in the worst image.
"""

import io
import random
from collections.abc import Callable

import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from support.images import encode

from jaxddp.data.stream.decode import Interpolation, Pixels


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return smooth colors with hard edges and some noise."""
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    y, x = np.mgrid[:height, :width]
    edges = np.sin(x / 5 + y / 9)[..., None] > rng.uniform(-1, 1, 3)
    pixels = np.where(edges, np.asarray(smooth), 255 - np.asarray(smooth).astype(int))
    return Image.fromarray(np.clip(pixels + rng.normal(0, 6, pixels.shape), 0, 255).astype(np.uint8))


def reference(
    data: bytes, image_size: int, resize: int, interpolation: str = "bilinear", *, squash: bool = False
) -> np.ndarray:
    """Return torchvision's `Resize(resize)` and `CenterCrop(image_size)` of an image from its loader."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    short, long = sorted(image.size)
    longer = resize if squash else int(resize * long / short)
    width, height = (resize, longer) if image.width <= image.height else (longer, resize)
    left, top = int(round((width - image_size) / 2.0)), int(round((height - image_size) / 2.0))  # noqa: RUF046
    pixels = np.asarray(image.resize((width, height), Image.Resampling[interpolation.upper()]))
    return pixels[top : top + image_size, left : left + image_size]


def check(data: bytes, image_size: int = 224, resize: int = 256, kind: Interpolation = "bilinear", **crop: bool):
    pixels = Pixels(image_size, interpolation=kind, resize=resize, **crop)(data)
    np.testing.assert_array_equal(pixels, reference(data, image_size, resize, kind, **crop))


@pytest.mark.parametrize("seed", range(6))
def test_bicubic_training_crops_equal_pillows(seed: int):
    """The sides of the crop shrink and grow in all combinations, so Pillow resizes rows first or columns first."""
    draw = random.Random(seed)
    width, height = draw.randint(20, 120), draw.randint(20, 120)
    image = photograph(width, height, seed)
    expected = np.asarray(image.resize((64, 64), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(Pixels(64, interpolation="bicubic")(encode(image, "PNG")), expected)


@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    image_size=st.integers(1, 40),
    spare=st.integers(0, 12),
    form=st.sampled_from(["JPEG", "PNG"]),
    kind=st.sampled_from(["bilinear", "bicubic"]),
    squash=st.booleans(),
)
@example(width=120, height=90, image_size=28, spare=4, form="PNG", kind="bicubic", squash=False)
def test_evaluation_gives_the_pixels_of_torchvision_and_timm(width, height, image_size, spare, form, kind, squash):
    """timm resizes by Pillow as well; "squash" is its crop mode of that name."""
    data = encode(photograph(width, height), form, **({"subsampling": width % 3} if form == "JPEG" else {}))
    check(data, image_size, image_size + spare, kind, squash=squash)


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1)], ids=str)
def test_the_middle_of_a_long_image_is_resized(size: tuple[int, int]):
    """A resized image of the whole would take 4 GB."""
    line = np.arange(20_000) // 100
    data = encode(Image.fromarray(line.astype(np.uint8).reshape(size[::-1])).convert("RGB"), "PNG")
    assert set(Pixels(224, resize=256)(data).ravel()) <= {99, 100}


def with_alpha(mode: str) -> Callable[[Image.Image], bytes]:
    def make(image: Image.Image) -> bytes:
        image = image.convert(mode)
        image.putalpha(Image.fromarray(np.arange(image.width * image.height, dtype=np.uint8).reshape(image.size[::-1])))
        return encode(image, "PNG")

    return make


def ycck(image: Image.Image) -> bytes:
    """Return a JPEG like those of Photoshop: inverted CMYK, with YCbCr in the first three channels."""
    return simplejpeg.encode_jpeg(np.ascontiguousarray(255 - np.asarray(image.convert("CMYK"))), 95, "CMYK", "444")


KINDS: dict[str, Callable[[Image.Image], bytes]] = {
    "gray jpeg": lambda image: encode(image.convert("L")),
    "gray png": lambda image: encode(image.convert("L"), "PNG"),
    "one bit": lambda image: encode(image.convert("1"), "PNG"),
    "palette": lambda image: encode(image.quantize(50), "PNG", transparency=3),
    "color with alpha": with_alpha("RGBA"),
    "gray with alpha": with_alpha("LA"),
    "progressive": lambda image: encode(image, progressive=True),
    "bytes after the end": lambda image: encode(image) + bytes(9),
    "cmyk": lambda image: encode(image.convert("CMYK"), quality=95),
    "subsampled cmyk": lambda image: encode(image.convert("CMYK"), quality=95, subsampling=2),
    "ycck": ycck,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_pixels_of_torchvision(kind: str):
    check(KINDS[kind](photograph(500, 375)))


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
@pytest.mark.parametrize(("width", "height"), [(32, 32), (32, 45), (46, 32), (47, 32)])
def test_without_resizing_the_pixels_are_those_of_the_image(width: int, height: int, file_format: str):
    data = encode(photograph(width, height), file_format)
    for image_size in (32, 29, 28, 1):
        check(data, image_size, 32)
