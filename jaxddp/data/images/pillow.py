"""A sound image file as a Pillow image, for work that is done once: describing and packing."""

import io

from PIL import Image

from jaxddp.data.images.markers import APP14, essence, segments


def open_sound(data: bytes) -> Image.Image:
    """Opens what `verify` has found sound.

    Pillow refuses a JPEG over broken metadata on which no pixel depends, such as a color profile of no bytes. Decoders
    that train ignore it, so it is left out here; Adobe's marker, which says the color space, is left out only if it is
    broken itself.
    """
    try:
        return Image.open(io.BytesIO(data))
    except OSError:
        found = [*segments(data)]
    try:
        return Image.open(io.BytesIO(essence(data, found, keep=APP14)))
    except OSError:
        return Image.open(io.BytesIO(essence(data, found)))
