"""Whether an image file is sound to its last pixel, which its markers alone cannot promise."""

import io

import simplejpeg
from PIL import Image

from jaxddp.data.images.header import AGAIN, ImageHeader, parse_header
from jaxddp.errors import InputError

# Bytes between two segments that belong to neither: some of ImageNet's files have them, and every pixel is there.
_HARMLESS = "extraneous bytes"


def verify(data: bytes) -> ImageHeader:
    """The header of a file all of whose image data is there and decodes.

    A JPEG's entropy-coded data is read to its end, at an eighth of the size, gray: about half the work of decoding it.
    So a file that was cut short and closed with an end marker again is found out, which a decoder fills up with gray.

    Raises:
        InputError: what `parse_header` refuses, and data that is damaged or ends before the image does.
    """
    header = parse_header(data)
    try:
        if header.kind == "jpeg":
            simplejpeg.decode_jpeg(data, "gray", fastdct=True, min_height=1, min_width=1, min_factor=8)
        else:
            with Image.open(io.BytesIO(data)) as image:
                image.load()
    # Pillow raises SyntaxError for a chunk whose checksum is wrong.
    except (ValueError, OSError, SyntaxError) as error:
        if _HARMLESS not in str(error):
            raise InputError(f"damaged: {error}; {AGAIN}") from None
    return header
