"""Kinds of files, channels and bits: the same image gives the same pixels, and every loss is logged."""

import functools
import io
import logging
import struct
import threading
from typing import Any

import numpy as np
import pytest
from PIL import Image

import jaxddp.data.stream.decode as decode
from jaxddp.core.errors import InputError
from jaxddp.curate.image_findings import examine_file
from jaxddp.curate.pack import PackOptions, packed_image
from jaxddp.data.images.header import parse_header
from jaxddp.data.images.image_types import ImageHeader, PixelFormat
from jaxddp.data.images.verify import verify
from jaxddp.data.stream.decode import eval_image, train_image
from jaxddp.data.stream.tensorflow_cpu import tf

SIZE = 9
KINDS: dict[str, dict[str, Any]] = {
    "PNG": {},
    "BMP": {},
    "TIFF": {},
    "WEBP": {"lossless": True, "exact": True},
}
TIFFS = [{}, {"compression": "tiff_lzw"}, {"compression": "tiff_adobe_deflate"}, {"compression": "packbits"}]


def picture(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(list(shape)).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def encode(image: np.ndarray, kind: str, **settings: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, kind, **KINDS.get(kind, {}), **settings)
    return stream.getvalue()


@functools.cache
def in_graph(function: Any, *arguments: Any) -> Any:
    """Calls it in a graph, as a stream does: in eager mode TensorFlow drops trailing zeros of bytes, as NumPy does."""
    spec = tf.TensorSpec([], tf.string)
    return tf.function(lambda data: function(data, *arguments), input_signature=(spec,), autograph=False)


def whole(data: bytes, channels: int = 3, bits: int = 8, size: int = SIZE) -> np.ndarray:
    return in_graph(train_image, None, None, size, PixelFormat(channels, bits))(data).numpy()


def center(data: bytes, channels: int, bits: int = 8, size: int = SIZE, resize: int = SIZE) -> np.ndarray:
    return in_graph(eval_image, size, resize, PixelFormat(channels, bits))(data).numpy()


def luma(rgb: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(rgb).convert("L"))[..., None]


def wide_luma(rgb: np.ndarray) -> np.ndarray:
    """Returns the luma in 16 bits of 8-bit colors: more exact than the luma in 8 bits."""
    mean = (rgb * 257.0) @ (19595, 38470, 7471) / 65536
    return np.floor(mean + 0.5).astype(np.uint16)[..., None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_image_in_every_format(kind: str):
    rgb = picture(SIZE, SIZE, 3)
    data = encode(rgb, kind)
    opaque = np.concatenate([rgb, np.full((SIZE, SIZE, 1), 255, np.uint8)], axis=-1)
    for channels, expected in {1: luma(rgb), 3: rgb, 4: opaque}.items():
        np.testing.assert_array_equal(whole(data, channels), expected)
        wide = expected.astype(np.uint16) * 257 if channels > 1 else wide_luma(rgb)
        np.testing.assert_array_equal(whole(data, channels, 16), wide)
        np.testing.assert_array_equal(center(data, channels), expected)
    assert verify(data) == ImageHeader(kind.lower(), SIZE, SIZE)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_alpha_is_kept_where_the_format_has_it(kind: str):
    rgba = picture(SIZE, SIZE, 4)
    np.testing.assert_array_equal(whole(encode(rgba, kind), 4), rgba)
    np.testing.assert_array_equal(whole(encode(rgba, kind), 3), rgba[..., :3])


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF"])
def test_gray_images_keep_their_values(kind: str):
    gray = picture(SIZE, SIZE)
    np.testing.assert_array_equal(whole(encode(gray, kind), 1), gray[..., None])
    np.testing.assert_array_equal(whole(encode(gray, kind), 3), np.repeat(gray[..., None], 3, -1))


@pytest.mark.parametrize("mode", ["1", "P", "LA", "PA", "CMYK", "YCbCr"])
def test_pillow_s_other_modes_become_rgb(mode: str):
    source = Image.fromarray(picture(SIZE, SIZE, 3)).convert("RGB").convert("P" if mode == "PA" else mode)
    image = source.convert(mode)
    stream = io.BytesIO()
    image.save(stream, "TIFF")
    assert parse_header(stream.getvalue()).kind == "tiff"
    np.testing.assert_array_equal(whole(stream.getvalue()), np.asarray(image.convert("RGB")))


def test_jpeg_in_gray_and_with_alpha():
    rgb = np.asarray(Image.fromarray(picture(2, 2, 3)).resize((SIZE, SIZE)))
    data = encode(rgb, "JPEG")
    decoded = whole(data)
    np.testing.assert_array_equal(whole(data, 1), luma(decoded))
    np.testing.assert_array_equal(whole(data, 4)[..., :3], decoded)
    assert (whole(data, 4)[..., 3] == 255).all()
    np.testing.assert_array_equal(whole(data, 3, 16), decoded.astype(np.uint16) * 257)


def test_a_tiff_is_rotated_by_its_orientation():
    wide = picture(4, 9, 3)
    exif = Image.Exif()
    exif[274] = 6
    data = encode(wide, "TIFF", exif=exif)
    turned = np.rot90(wide, -1)
    assert verify(data) == ImageHeader("tiff", 9, 4)
    np.testing.assert_array_equal(whole(data, size=9), whole(encode(turned, "PNG"), size=9))
    np.testing.assert_array_equal(center(data, 3, 8, 4, 4), turned[2:6])
    assert not [note for note in examine_file(data, "a.tif").notes if "orientation" in note]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_all_sixteen_bits_are_kept_in_png_and_tiff(channels: int):
    gray = picture(SIZE, SIZE, dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = whole(encode(gray, kind), channels, 16)
        assert pixels.dtype == np.uint16
        np.testing.assert_array_equal(pixels[..., 0], gray)
        assert channels < 4 or (pixels[..., 3] == 65535).all()
        np.testing.assert_array_equal(whole(encode(gray, kind), channels)[..., 0], gray >> 8)
        np.testing.assert_array_equal(center(encode(gray, kind), channels, 16)[..., 0], gray)


def test_sixteen_bits_are_resized_in_sixteen_bits():
    gray = np.full((20, 20), 12345, np.uint16)
    assert (whole(encode(gray, "TIFF"), 1, 16) == 12345).all()
    assert (center(encode(gray, "TIFF"), 1, 16, 8, 10) == 12345).all()


def test_cutting_bits_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    # The warning is logged once a process, and another test may have caused it.
    monkeypatch.setattr(decode, "_warned", threading.Lock())
    with caplog.at_level(logging.WARNING, "jaxddp.data"):
        for kind in ("PNG", "TIFF", "PNG"):
            whole(encode(picture(SIZE, SIZE, dtype=np.uint16), kind))
        whole(encode(picture(SIZE, SIZE), "PNG"))
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "data.bits=8: some images have 16 bits, of which the upper 8 are used"
    ]
    caplog.clear()
    monkeypatch.setattr(decode, "_warned", threading.Lock())
    whole(encode(picture(SIZE, SIZE, dtype=np.uint16), "PNG"), 1, 16)
    center(encode(picture(SIZE, SIZE, dtype=np.uint16), "PNG"), 1, 16)
    assert not caplog.records


def rgb16_tiff(rgb: np.ndarray) -> bytes:
    """Returns a 16-bit color TIFF, which Pillow does not write: header, pixels, one directory (TIFF 6.0, section 2)."""
    height, width, _ = rgb.shape
    pixels = rgb.astype("<u2").tobytes()
    bits_at = 8 + len(pixels)
    entries = [
        *((256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, bits_at), (259, 3, 1, 1), (262, 3, 1, 2)),
        *((273, 4, 1, 8), (277, 3, 1, 3), (278, 4, 1, height), (279, 4, 1, len(pixels))),
    ]
    directory = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    head = struct.pack("<2sHI", b"II", 42, bits_at + 6)
    return head + pixels + struct.pack("<3H", 16, 16, 16) + directory + bytes(4)


def test_a_color_tiff_of_sixteen_bits_is_rejected_instead_of_reduced():
    rgb = picture(SIZE, SIZE, 3, dtype=np.uint16)
    data = rgb16_tiff(rgb)
    assert verify(data).bits == 16
    np.testing.assert_array_equal(whole(data), rgb >> 8)
    with pytest.raises(Exception, match="colors of 16 bits, of which the upper 8 are read from a TIFF; save it as PNG"):
        whole(data, 3, 16)
    with pytest.raises(InputError, match="^colors of 16 bits"):
        decode.check_decoding(data, PixelFormat(3, 16))
    np.testing.assert_array_equal(whole(encode_rgb16_png(rgb), 3, 16), rgb)


def encode_rgb16_png(rgb: np.ndarray) -> bytes:
    return tf.io.encode_png(rgb).numpy()


@pytest.mark.parametrize(("kind", "settings"), [("BMP", {}), ("WEBP", {}), *(("TIFF", each) for each in TIFFS)])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Truncated File Read")
def test_a_file_that_is_cut_short_is_refused(kind: str, settings: dict):
    # Rows of whole groups of four bytes, without BMP's padding, whose loss cannot be detected.
    data = encode(picture(8, 8, 3), kind, **settings)
    verify(data)
    for length in {*range(1, len(data), 7), len(data) - 1}:
        with pytest.raises(InputError, match="."):
            verify(data[:length])


def test_damage_inside_of_a_compressed_file_is_refused():
    data = bytearray(encode(picture(8, 8, 3), "TIFF", compression="tiff_adobe_deflate"))
    data[20:60] = bytes(40)
    with pytest.raises(InputError, match="^damaged: "):
        verify(bytes(data))


def test_errors_of_libtiff_are_faults_and_not_written_to_stderr(capfd):
    """Pillow decodes damaged fax codes without an error."""
    data = encode(picture(64, 64) > 128, "TIFF", compression="group4")
    verify(data)
    cut = bytearray(data)
    cut[120:160] = bytes(byte ^ 0xA5 for byte in cut[120:160])
    for damaged in (bytes(cut), bytes(cut)):
        with pytest.raises(InputError, match="^damaged: libtiff: Fax4Decode: "):
            verify(damaged)
    verify(data)
    assert capfd.readouterr() == ("", "")


def pages(kind: str) -> bytes:
    stream, image = io.BytesIO(), Image.fromarray(picture(4, 4, 3))
    image.save(stream, kind, save_all=True, append_images=[Image.fromarray(picture(4, 4, 3) // 2)])
    return stream.getvalue()


def float_tiff() -> bytes:
    return encode(np.zeros((4, 4), np.float32), "TIFF")


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (lambda: pages("TIFF"), "holds 2 images; keep one in a file"),
        (lambda: pages("WEBP"), "holds 2 images; keep one in a file"),
        (float_tiff, "pixels of mode F with 32 bits, which are not supported; convert it to 8 or 16 bits, gray or RGB"),
        (lambda: b"BM" + bytes(60), "damaged: "),
        (lambda: b"II*\0" + bytes(60), "damaged: "),
        (lambda: b"RIFF\x10\0\0\0WEBPVP8 ", "damaged: "),
        (lambda: b"GIF89a", "not a JPEG, PNG, WebP, TIFF or BMP but a GIF; convert it or leave it out"),
        (
            lambda: rgb16_tiff(np.zeros((1, 1, 3), np.uint16)).replace(*HUGE),
            "more pixels than the limit of 100,000,000",
        ),
    ],
)
def test_an_unreadable_image_raises_a_one_line_error(data, fault: str):
    with pytest.raises(InputError) as caught:
        verify(data())
    assert str(caught.value).startswith(fault) and "\n" not in str(caught.value)


HUGE = (
    struct.pack("<HHIIHHII", 256, 4, 1, 1, 257, 4, 1, 1),
    struct.pack("<HHIIHHII", 256, 4, 1, 40000, 257, 4, 1, 40000),
)


def test_check_describes_the_new_kinds_and_pack_takes_them():
    for kind in ("WEBP", "TIFF", "BMP"):
        data = encode(picture(SIZE, SIZE, 3), kind)
        findings = examine_file(data, f"a.{kind.lower()}")
        assert (findings.kind, findings.height, findings.mode, findings.notes, findings.fault) == (
            kind.lower(),
            SIZE,
            "RGB",
            (),
            None,
        )
        assert f"{kind} named .png: decoded by its content, not its name" in examine_file(data, "a.png").notes
        assert parse_header(packed_image(data, PackOptions())).kind == "jpeg"
    gray = encode(picture(SIZE, SIZE, dtype=np.uint16), "TIFF")
    assert "16 bits: the upper 8 are kept" in examine_file(gray, "a.tif").notes


@pytest.mark.parametrize("mode", ["1", "P", "L"])
def test_an_opaque_png_has_full_alpha(mode: str):
    stream, gray = io.BytesIO(), Image.fromarray(picture(SIZE, SIZE)).convert("L")
    few = gray.quantize(4) if mode == "P" else gray.convert(mode)
    few.save(stream, "PNG")
    assert stream.getvalue()[24] == {"1": 1, "P": 2, "L": 8}[mode]
    assert np.all(whole(stream.getvalue(), 4)[..., 3] == 255)
