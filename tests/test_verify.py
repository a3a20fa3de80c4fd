"""A file that lost image data is rejected, wherever it was cut. A complete file passes, whatever else it contains."""

import io
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.images import EOI, PNGS, at_start, before_scan, encode, passes, picture, segment, ycck

from jaxddp.core.errors import InputError
from jaxddp.data.images import PNG_END, verify


def plane_by_plane() -> bytes:
    """Return a baseline JPEG of three components with a scan for each: three copies of the scan of a gray JPEG."""
    gray = encode(picture(37, 45, "L"))
    frame, scan = gray.index(b"\xff\xc0"), gray.index(b"\xff\xda")
    components = b"".join(bytes([component, 0x11, 0]) for component in (1, 2, 3))
    head = b"\xff\xc0" + struct.pack(">H", 17) + gray[frame + 4 : frame + 9] + b"\x03" + components
    size = struct.unpack(">H", gray[frame + 2 : frame + 4])[0]
    coded = gray[scan + 10 : -2]
    scans = b"".join(b"\xff\xda\x00\x08\x01" + bytes([component, 0, 0, 63, 0]) + coded for component in (1, 2, 3))
    return gray[:frame] + head + gray[frame + 2 + size : scan] + scans + EOI


JPEGS = {
    "4:2:0": lambda: encode(picture(37, 45), subsampling=2),
    "4:4:4": lambda: encode(picture(37, 45), subsampling=0),
    "own tables": lambda: encode(picture(37, 45), optimize=True),
    "gray": lambda: encode(picture(37, 45, "L")),
    "cmyk": lambda: encode(picture(37, 45, "CMYK")),
    "ycck": ycck,
    "restart": lambda: encode(picture(37, 45), restart_marker_blocks=2),
    "progressive": lambda: encode(picture(37, 45), progressive=True),
    "progressive gray": lambda: encode(picture(37, 45, "L"), progressive=True),
    "progressive restart": lambda: encode(picture(37, 45), progressive=True, restart_marker_blocks=2),
    "plane by plane": plane_by_plane,
    "one color": lambda: encode(Image.new("RGB", (64, 48), (10, 200, 30))),
    "one pixel": lambda: encode(picture(1, 1)),
}
FORGED = (b"", EOI, b"\xff\xff\xd9", b"\xff\xd0\xff\xd9", EOI + b"behind it")


@pytest.mark.parametrize("kind", JPEGS)
def test_a_jpeg_cut_anywhere_is_refused_with_or_without_a_forged_end(kind: str):
    data = JPEGS[kind]()
    height, width = np.asarray(Image.open(io.BytesIO(data))).shape[:2]
    assert verify(data) == verify(data + b"\x00")
    assert (verify(data).kind, verify(data).height, verify(data).width) == ("jpeg", height, width)
    for end in (b"", EOI):
        assert [cut for cut in range(len(data) - 2) if passes(data[:cut] + end)] == []


SIDE, NOISE = st.integers(1, 40), st.sampled_from([0.0, 3.0, 40.0])
OPTIONS = {
    "quality": st.integers(5, 100),
    **{"progressive": st.booleans(), "optimize": st.booleans()},
    "restart_marker_blocks": st.sampled_from([0, 1, 5]),
}


@given(
    image=st.builds(picture, SIDE, SIDE, st.sampled_from(["RGB", "L", "CMYK"]), st.integers(0, 99), NOISE),
    options=st.fixed_dictionaries(OPTIONS),
    subsampling=st.sampled_from([0, 1, 2]),
    place=st.floats(0, 1, exclude_max=True),
    end=st.sampled_from(FORGED),
)
def test_any_jpeg_cut_anywhere_is_refused(image, options, subsampling, place, end):
    data = encode(image, **options, **({"subsampling": subsampling} if image.mode == "RGB" else {}))
    assert passes(data)
    assert not passes(data[: int(place * (len(data) - 2))] + end)


@pytest.mark.parametrize("progressive", [False, True])
def test_a_cut_is_found_in_files_that_the_strict_decoder_does_not_support(progressive: bool):
    """The strict decoder does not support subsampled CMYK files. There, the loss of a few bits may change no pixel."""
    data = encode(picture(37, 45, "CMYK"), subsampling=2, progressive=progressive)
    assert (verify(data).height, verify(data).width) == (37, 45)
    cuts = range(data.index(b"\xff\xda"), len(data) - 2, 3)
    assert sum(passes(data[:cut] + EOI) for cut in cuts) <= len(cuts) // 100


ODDITIES = {
    "a thumbnail": lambda data: at_start(data, segment(0xE1, b"Exif\x00\x00" + encode(picture(8, 8)))),
    "a cut thumbnail": lambda data: at_start(data, segment(0xE1, encode(picture(8, 8))[:-40] + EOI)),
    "a comment": lambda data: before_scan(data, segment(0xFE, b"by hand")),
    "extraneous bytes before a marker": lambda data: before_scan(data, b"\x00\x01\x02"),
    "fill bytes before a marker": lambda data: before_scan(data, b"\xff\xff\xff"),
    "an unknown JFIF revision": lambda data: data.replace(b"JFIF\x00\x01\x01", b"JFIF\x00\x09\x09"),
    "an unknown color transform": lambda data: at_start(data, segment(0xEE, b"Adobe\x00d\x00\x00\x00\x00\x09")),
    "a broken color profile": lambda data: at_start(data, segment(0xE2, b"ICC_PROFILE\x00\x07\x03nonsense")),
}
AT_THE_END = {
    "bytes after the end": lambda data: data + b"a camera's own \xff\xd8\xff\xd9",
    "extraneous bytes before the end": lambda data: data[:-2] + bytes(7) + EOI,
    "a stuffed byte before the end": lambda data: data[:-2] + b"\x01\xff\x00\xff\x00\x02" + EOI,
}


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "restart"])
@pytest.mark.parametrize("oddity", ODDITIES | AT_THE_END)
def test_a_whole_jpeg_passes_whatever_else_it_carries(oddity: str, kind: str):
    data = JPEGS[kind]()
    odd = (ODDITIES | AT_THE_END)[oddity](data)
    assert odd != data and verify(odd) == verify(data)


@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "restart"])
@pytest.mark.parametrize("oddity", ODDITIES)
def test_unusual_features_of_a_file_hide_no_truncation(oddity: str, kind: str):
    odd = ODDITIES[oddity](JPEGS[kind]())
    first = odd.rindex(b"\xff\xda")
    for end in (b"", EOI, bytes(3) + EOI if kind == "4:2:0" else EOI):
        # With three zeros at the end, the cut removes more bytes than three zeros can encode.
        last = len(odd) - (60 if end.startswith(b"\x00") else 2)
        assert [cut for cut in range(first, last, 7) if passes(odd[:cut] + end)] == []


def test_a_restart_interval_that_is_missing_is_found():
    data = JPEGS["restart"]()
    scan = data.index(b"\xff\xda")
    first, second = data.index(b"\xff\xd0", scan), data.index(b"\xff\xd1", scan)
    assert not passes(data[:first] + data[second:])
    for end in (bytes(1) + EOI, b"\xff\x00" + EOI):
        assert not passes(data[:second] + end)


@pytest.mark.parametrize("kind", PNGS)
def test_a_png_cut_anywhere_is_refused_with_or_without_a_forged_end(kind: str):
    data = PNGS[kind]()
    assert (verify(data).kind, verify(data).height, verify(data).width) == ("png", 13, 17)
    assert passes(data + b"behind it")
    for end in (b"", PNG_END):
        assert [cut for cut in range(len(data) - len(PNG_END)) if passes(data[:cut] + end)] == []


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_of_a_png_is_always_found(place: float, bit: int):
    data = bytearray(encode(picture(13, 17), "PNG"))
    data[int(place * len(data))] ^= 1 << bit
    assert not passes(bytes(data))


@given(
    kind=st.sampled_from([*JPEGS]),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_damage_to_a_jpeg_raises_only_a_one_line_error(kind: str, flips):
    data = bytearray(JPEGS[kind]())
    for place, mask in flips:
        data[int(place * len(data))] ^= mask
    try:
        result = verify(bytes(data))
    except InputError as error:
        assert "\n" not in str(error)
    else:
        assert result.kind == "jpeg"
