"""Images in unusual formats have the colors of another decoder, Pillow."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import simplejpeg
from PIL import Image
from support.images import encode
from support.streams import all_of, waves

from jaxddp.data.images.verify import verify
from jaxddp.data.stream.decode import eval_image

# In 8-bit levels: the decoders may round the result of a color conversion differently.
TOLERANCE = 1


def ycck() -> bytes:
    """Return a JPEG like those of Photoshop: inverted CMYK, with YCbCr in the first three channels."""
    inverted = 255 - np.asarray(Image.fromarray(waves(5)).convert("CMYK"))
    return simplejpeg.encode_jpeg(np.ascontiguousarray(inverted), 95, "CMYK", "444")


def with_alpha(mode: str) -> Image.Image:
    image = Image.fromarray(waves(5)).convert(mode)
    image.putalpha(Image.fromarray(waves(6)[..., 0]))
    return image


def as_mode(mode: str) -> Image.Image:
    return Image.fromarray(waves(5)).convert(mode)


UNUSUAL: dict[str, Callable[[], bytes]] = {
    "adobe cmyk": lambda: encode(as_mode("CMYK"), quality=95),
    "adobe cmyk, subsampled": lambda: encode(as_mode("CMYK"), quality=95, subsampling=2),
    "adobe cmyk, progressive": lambda: encode(as_mode("CMYK"), quality=95, progressive=True),
    "adobe ycck": ycck,
    "palette": lambda: encode(as_mode("P"), "PNG"),
    "palette with a transparent color": lambda: encode(as_mode("P"), "PNG", transparency=3),
    "one bit": lambda: encode(as_mode("1"), "PNG"),
    "gray with alpha": lambda: encode(with_alpha("LA"), "PNG"),
    "color with alpha": lambda: encode(with_alpha("RGBA"), "PNG"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", UNUSUAL)
def test_unusual_images_have_the_colors_that_pillow_gives_them(tmp_path: Path, kind: str):
    data = UNUSUAL[kind]()
    (tmp_path / "n.JPEG").write_bytes(data)
    assert (verify(data).height, verify(data).width) == waves(5).shape[:2]
    expected = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    pixels = all_of(str(tmp_path / "n.JPEG")).numpy().astype(int)
    assert np.abs(pixels - expected).max() <= TOLERANCE
    # If the colors were inverted, they would differ from the waves by much more.
    if kind.startswith("adobe"):
        assert np.abs(pixels - waves(5)).mean() < 12


def test_cmyk_decoded_at_reduced_size_keeps_its_colors():
    smooth = Image.fromarray(waves(5)).resize((640, 480), Image.Resampling.BICUBIC)
    data = encode(smooth.convert("CMYK"), quality=95)
    color = eval_image(encode(smooth, quality=95), 64, 64).numpy().astype(int)
    assert np.abs(eval_image(data, 64, 64).numpy().astype(int) - color).mean() < 4
