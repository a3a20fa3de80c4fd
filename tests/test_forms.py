"""The same images through every form of a data set give the same batches, by hash."""

import hashlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jaxddp.config import DataConfig
from jaxddp.data.held_out import held_out_rows
from jaxddp.data.opening import open_tables
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.source import Source

SIZE, SHARE = 8, 0.25
CLASSES = ("ant", "bee", "cat")
NAMES = sorted(f"{CLASSES[number % 3]}/{number:02d}" for number in range(24))
"""As ids of a folder, which `data.val_share` divides by, in the order of its rows."""
LABELS = np.array([CLASSES.index(name.split("/")[0]) for name in NAMES])
HELD = held_out_rows(np.array([name.encode() for name in NAMES]), LABELS, SHARE)
ROWS = {"train": np.flatnonzero(~HELD), "val": np.flatnonzero(HELD)}
LOSSLESS = {"png": {}, "bmp": {}, "tiff": {"compression": "tiff_lzw"}, "webp": {"lossless": True, "exact": True}}

Pictures = list[np.ndarray]


def pictures(channels: int, dtype: type = np.uint8) -> Pictures:
    """Gray, RGB or RGBA, of noise: no two the same."""
    rng = np.random.default_rng(channels)
    shape = (SIZE, SIZE) if channels == 1 else (SIZE, SIZE, channels)
    return [rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True) for _ in NAMES]


def encode(picture: np.ndarray, kind: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, kind.upper(), **LOSSLESS[kind])
    return stream.getvalue()


def put(file: Path, content: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


def folders(root: Path, images: Pictures, kind: str) -> Path:
    for split, rows in ROWS.items():
        for row in rows:
            put(root / split / f"{NAMES[row]}.{kind}", encode(images[row], kind))
    return root


def undivided(root: Path, images: Pictures) -> Path:
    for name, image in zip(NAMES, images, strict=True):
        put(root / f"{name}.png", encode(image, "png"))
    return root


def listing(root: Path, images: Pictures) -> Path:
    for split, rows in ROWS.items():
        lines = [f"{CLASSES[LABELS[row]]},img/{row}.bmp" for row in rows]
        put(root / f"{split}.csv", "\n".join(["label,path", *lines, ""]).encode())
        for row in rows:
            put(root / "img" / f"{row}.bmp", encode(images[row], "bmp"))
    return root


def parquet(root: Path, images: Pictures) -> Path:
    features = {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": CLASSES}}
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    for split, rows in {"train": ROWS["train"], "validation": ROWS["val"]}.items():
        cells = [{"bytes": encode(images[row], "png"), "path": None} for row in rows]
        table = pa.table({"image": pa.array(cells, cell), "label": pa.array(LABELS[rows])})
        told = {"huggingface": json.dumps({"info": {"features": features}})}
        stream = io.BytesIO()
        pq.write_table(table.replace_schema_metadata(told), stream, row_group_size=4)
        put(root / "data" / f"{split}-00000-of-00001.parquet", stream.getvalue())
    return root


def arrays(root: Path, images: Pictures) -> Path:
    held = {"class_names": np.array(CLASSES)}
    for split, rows in ROWS.items():
        held[f"{split}_images"] = np.stack([images[row].reshape(SIZE, SIZE, -1) for row in rows])
        held[f"{split}_labels"] = LABELS[rows]
    root.mkdir()
    np.savez(root / "arrays.npz", **held)
    return root / "arrays.npz"


FORMS: dict[str, Callable[[Path, Pictures], Path]] = {
    **{f"folders of {kind}": lambda root, images, kind=kind: folders(root, images, kind) for kind in LOSSLESS},
    "a folder and val_share": undivided,
    "CSV": listing,
    "Parquet": parquet,
    "NumPy": arrays,
}


def digest(train: Source, val: Source, data: DataConfig) -> str:
    """Of pixels, labels, rows and masks of an epoch and a half, and of a validation."""
    found = hashlib.sha256()
    order = SampleOrder(len(train), 6, seed=11)
    for batches in (train.train_batches(order, data, range(5)), val.eval_batches(EvalOrder(len(val), 4), data)):
        for batch in batches:
            for column in batch[:5]:
                found.update(repr((column.shape, column.dtype.str)).encode() + np.ascontiguousarray(column).tobytes())
    return found.hexdigest()


def digests(tmp_path: Path, images: Pictures, forms: Sequence[str], channels: int, bits: int = 8) -> dict[str, str]:
    found = {}
    for form in forms:
        path = FORMS[form](tmp_path / form, images)
        share = SHARE if form == "a folder and val_share" else None
        more = {} if form == "NumPy" else {"channels": channels, "bits": bits}
        data = DataConfig(path=str(path), image_size=SIZE, resize=SIZE, crop="whole", val_share=share, **more)
        train, val = open_tables(data)
        assert (len(train), len(val), train.class_names) == (18, 6, CLASSES)
        found[form] = digest(train, val, data)
        print(f"{channels} channels of {bits} bits, {form}: {found[form]}")
    return found


@pytest.mark.parametrize(
    ("channels", "forms"),
    [
        (1, ("folders of png", "folders of tiff", "CSV", "NumPy")),
        (3, tuple(FORMS)),
        (4, ("folders of webp", "folders of tiff", "Parquet", "NumPy")),
    ],
)
def test_every_form_gives_the_same_batches(tmp_path: Path, channels: int, forms: tuple[str, ...]):
    found = digests(tmp_path, pictures(channels), forms, channels)
    assert len(found) == len(forms) and len({*found.values()}) == 1


def test_sixteen_bits_of_gray_are_the_same_from_every_form_that_holds_them(tmp_path: Path):
    forms = ("folders of png", "folders of tiff", "Parquet", "NumPy")
    found = digests(tmp_path, pictures(1, np.uint16), forms, 1, 16)
    assert len({*found.values()}) == 1


def test_another_pixel_is_another_hash(tmp_path: Path):
    images = pictures(3)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before = digests(tmp_path / "a", images, ["NumPy"], 3)
    images[int(ROWS["train"][0])][0, 0, 0] ^= 1
    assert digests(tmp_path / "b", images, ["NumPy"], 3) != before
