"""File formats, channels and bits: the same image has the same pixels in all of them, and lost bits are logged."""

import io
import logging
import struct
import threading

import cv2
import numpy as np
import pytest
from PIL import Image
from support.errors import error_line
from support.images import chunk, encode

import jaxddp.data.stream.decode as decode
from jaxddp.core.errors import InputError
from jaxddp.curate import PackOptions, examine_file, packed_image
from jaxddp.data.batch import PixelFormat
from jaxddp.data.images import ImageHeader, parse_header, verify
from jaxddp.data.stream.decode import Pixels

SIZE = 9
FORMATS = ("PNG", "BMP", "PPM", "TIFF", "WEBP")
TIFFS = [{}, {"compression": "tiff_lzw"}]


def picture(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(list(shape)).integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


def decode_train(data: bytes, channels: int = 3, bits: int = 8, size: int = SIZE) -> np.ndarray:
    return Pixels(size, PixelFormat(channels, bits))(data)


def decode_eval(data: bytes, channels: int, bits: int = 8, size: int = SIZE, resize: int = SIZE) -> np.ndarray:
    return Pixels(size, PixelFormat(channels, bits), resize=resize)(data)


def luma(rgb: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(rgb).convert("L"))[..., None]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FORMATS)
def test_every_file_format_decodes_to_every_pixel_format(kind: str):
    rgb = picture(SIZE, SIZE, 3)
    data = encode(rgb, kind)
    opaque = np.concatenate([rgb, np.full((SIZE, SIZE, 1), 255, np.uint8)], axis=-1)
    for channels, expected in {1: luma(rgb), 3: rgb, 4: opaque}.items():
        np.testing.assert_array_equal(decode_train(data, channels), expected)
        mean = (rgb * 257.0) @ (19595, 38470, 7471) / 65536
        expected_16_bits = expected.astype(np.uint16) * 257 if channels > 1 else np.floor(mean + 0.5)[..., None]
        np.testing.assert_array_equal(decode_train(data, channels, 16), expected_16_bits)
        np.testing.assert_array_equal(decode_eval(data, channels), expected)
    assert verify(data) == ImageHeader(kind.lower(), SIZE, SIZE)  # type: ignore[arg-type]


def test_a_gif_gives_its_first_frame_and_avif_is_read():
    frames, stream = [Image.fromarray(picture(SIZE, SIZE + one)[:, :SIZE]) for one in range(2)], io.BytesIO()
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:])
    gif, avif = stream.getvalue(), encode(np.full((SIZE, SIZE, 3), 99, np.uint8), "AVIF")
    assert [verify(data).kind for data in (gif, avif)] == ["gif", "avif"]
    np.testing.assert_array_equal(decode_eval(gif, 1)[..., 0], np.asarray(frames[0]))
    assert np.abs(decode_train(avif) - 99.0).max() < 4
    with pytest.raises(InputError, match="damaged"):
        verify(gif[:60])


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_alpha_is_kept_if_the_pixel_format_has_it(kind: str):
    rgba = picture(SIZE, SIZE, 4)
    np.testing.assert_array_equal(decode_train(encode(rgba, kind), 4), rgba)
    np.testing.assert_array_equal(decode_train(encode(rgba, kind), 3), rgba[..., :3])


@pytest.mark.parametrize("largest", [255, 1023, 65535])
def test_gray_and_colors_of_pgm_and_ppm_keep_their_values(largest: int):
    gray = np.linspace(0, largest, SIZE * SIZE).round().reshape(SIZE, SIZE, 1)
    dtype, full, bits = (np.uint8, 255, 8) if largest == 255 else (np.uint16, 65535, 16)
    content = gray.astype(np.dtype(dtype).newbyteorder(">")).tobytes()
    data = b"P5\n# a comment\n%d %d\n%d\n" % (SIZE, SIZE, largest) + content
    assert verify(data) == ImageHeader("ppm", SIZE, SIZE) and parse_header(data).bits == bits
    np.testing.assert_allclose(decode_train(data, 1, bits), gray / largest * full, atol=0.5 if largest == 1023 else 0)
    for cut in (1, SIZE):
        with pytest.raises(InputError, match="damaged: "):
            verify(data[:-cut])
    wide = b"P6\n%d %d\n%d\n" % (SIZE, SIZE, largest) + 3 * content
    if largest > 255:
        with pytest.raises(InputError, match="a PPM with colors of 16 bits, of which only the upper 8 can be read"):
            decode_train(wide, 3, 16)
    assert decode_train(wide).shape == (SIZE, SIZE, 3)


@pytest.mark.parametrize("mode", ["1", "PA", "CMYK", "YCbCr"])
def test_pillow_s_other_modes_become_rgb(mode: str):
    source = Image.fromarray(picture(SIZE, SIZE, 3)).convert("RGB").convert("P" if mode == "PA" else mode)
    image = source.convert(mode)
    stream = io.BytesIO()
    image.save(stream, "TIFF")
    assert parse_header(stream.getvalue()).kind == "tiff"
    np.testing.assert_array_equal(decode_train(stream.getvalue()), np.asarray(image.convert("RGB")))


def test_a_jpeg_decodes_to_gray_and_to_rgb_with_full_alpha():
    rgb = np.asarray(Image.fromarray(picture(2, 2, 3)).resize((SIZE, SIZE)))
    data = encode(rgb, "JPEG")
    decoded = decode_train(data)
    np.testing.assert_array_equal(decode_train(data, 1), luma(decoded))
    np.testing.assert_array_equal(decode_train(data, 4)[..., :3], decoded)
    assert (decode_train(data, 4)[..., 3] == 255).all()
    np.testing.assert_array_equal(decode_train(data, 3, 16), decoded.astype(np.uint16) * 257)


def test_a_tiff_is_rotated_by_its_orientation():
    image = picture(4, 9, 3)
    exif = Image.Exif()
    exif[274] = 6
    data = encode(image, "TIFF", exif=exif)
    rotated = np.rot90(image, -1)
    assert verify(data) == ImageHeader("tiff", 9, 4)
    np.testing.assert_array_equal(decode_train(data, size=9), decode_train(encode(rotated, "PNG"), size=9))
    np.testing.assert_array_equal(decode_eval(data, 3, 8, 4, 4), rotated[2:6])
    assert not [note for note in examine_file(data, "a.tif").notes if "orientation" in note]


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_all_sixteen_bits_are_kept_in_png_and_tiff(channels: int):
    gray = picture(SIZE, SIZE, dtype=np.uint16)
    for kind in ("PNG", "TIFF"):
        pixels = decode_train(encode(gray, kind), channels, 16)
        assert pixels.dtype == np.uint16
        np.testing.assert_array_equal(pixels[..., 0], gray)
        assert channels < 4 or (pixels[..., 3] == 65535).all()
        np.testing.assert_array_equal(decode_train(encode(gray, kind), channels)[..., 0], gray >> 8)
        np.testing.assert_array_equal(decode_eval(encode(gray, kind), channels, 16)[..., 0], gray)


def test_a_loss_of_bits_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    # The warning is logged once per process, and another test may already have caused it.
    monkeypatch.setattr(decode, "_warned", threading.Lock())
    with caplog.at_level(logging.WARNING, "jaxddp.data"):
        for kind in ("PNG", "TIFF", "PNG"):
            decode_train(encode(picture(SIZE, SIZE, dtype=np.uint16), kind))
        decode_train(encode(picture(SIZE, SIZE), "PNG"))
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "data.bits=8: some images have 16 bits, of which the upper 8 are used"
    ]


def rgb16_tiff(rgb: np.ndarray) -> bytes:
    """Return a 16-bit color TIFF, which Pillow cannot write: header, pixels, one directory (TIFF 6.0, section 2)."""
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


def test_a_color_tiff_of_sixteen_bits_is_rejected_instead_of_reduced(capfd):
    rgb = picture(SIZE, SIZE, 3, dtype=np.uint16)
    data = rgb16_tiff(rgb)
    assert verify(data).bits == 16
    np.testing.assert_array_equal(decode_train(data), rgb >> 8)
    with pytest.raises(InputError, match="^a TIFF with colors of 16 bits, of which only the upper 8 can be read; save"):
        decode_train(data, 3, 16)
    png, with_alpha = (cv2.imencode(".png", one)[1].tobytes() for one in (rgb[..., ::-1], rgb[..., [2, 1, 0, 0]]))
    np.testing.assert_array_equal(decode_train(png[:33] + chunk(b"iCCP", b"x") + png[33:], 3, 16), rgb)
    assert capfd.readouterr().err == ""
    np.testing.assert_array_equal(decode_train(with_alpha, 1, 16), decode_train(png, 1, 16))
    assert all("16 bits: the upper 8 are kept" in examine_file(one, "a").notes for one in (data, png, with_alpha))


@pytest.mark.parametrize(("kind", "settings"), [("BMP", {}), ("WEBP", {}), *(("TIFF", settings) for settings in TIFFS)])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data", "ignore:Truncated File Read")
def test_a_file_that_is_cut_short_is_refused(kind: str, settings: dict):
    # Rows have a multiple of four bytes, so BMP adds no padding. A loss of padding could not be detected.
    data = encode(picture(8, 8, 3), kind, **settings)
    verify(data)
    for length in {*range(1, len(data), 7), len(data) - 1}:
        with pytest.raises(InputError, match="."):
            verify(data[:length])


def test_errors_of_libtiff_raise_an_error_and_are_not_written_to_stderr(capfd):
    """Pillow decodes damaged fax codes without an error."""
    data = encode(picture(64, 64) > 128, "TIFF", compression="group4")
    verify(data)
    with_bad_codes = bytearray(data)
    with_bad_codes[120:160] = bytes(byte ^ 0xA5 for byte in with_bad_codes[120:160])
    for _ in range(2):
        with pytest.raises(InputError, match="^damaged: libtiff: Fax4Decode: "):
            verify(bytes(with_bad_codes))
    verify(data)
    assert capfd.readouterr() == ("", "")


def pages(kind: str) -> bytes:
    stream, image = io.BytesIO(), Image.fromarray(picture(4, 4, 3))
    image.save(stream, kind, save_all=True, append_images=[Image.fromarray(picture(4, 4, 3) // 2)])
    return stream.getvalue()


HUGE = [struct.pack("<HHIIHHII", 256, 4, 1, side, 257, 4, 1, side) for side in (1, 40_000)]
UNREADABLE = {
    "pages": (lambda: pages("TIFF"), "holds 2 images; keep one image per file"),
    "frames": (lambda: pages("WEBP"), "holds 2 images; keep one image per file"),
    "floats": (lambda: encode(np.zeros((4, 4), np.float32), "TIFF"), "pixels of mode F with 32 bits, which are not"),
    "bmp": (lambda: b"BM" + bytes(60), "damaged: "),
    "webp": (lambda: b"RIFF\x10\0\0\0WEBPVP8 ", "damaged: "),
    "huge": (
        lambda: rgb16_tiff(np.zeros((1, 1, 3), np.uint16)).replace(*HUGE),
        "more pixels than the limit of 100,000,",
    ),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_an_unreadable_image_raises_a_one_line_error(kind: str):
    data, fault = UNREADABLE[kind]
    assert error_line(verify, data()).startswith(fault)


def test_check_describes_webp_tiff_and_bmp_and_pack_accepts_them():
    for kind in ("WEBP", "TIFF", "BMP"):
        data = encode(picture(SIZE, SIZE, 3), kind)
        findings = examine_file(data, f"a.{kind.lower()}")
        assert (findings.kind, findings.height, findings.mode) == (kind.lower(), SIZE, "RGB")
        assert (findings.notes, findings.fault) == ((), None)
        assert f"{kind} named .png: decoded by its content, not its name" in examine_file(data, "a.png").notes
        assert parse_header(packed_image(data, PackOptions())).kind == "jpeg"
    assert "16 bits: the upper 8 are kept" in examine_file(encode(picture(9, 9, dtype=np.uint16), "TIFF"), "a").notes
