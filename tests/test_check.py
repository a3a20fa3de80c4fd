"""`jaxddp data check` names bad files, notes unusual files, and has no findings in a clean data set."""

import dataclasses
import hashlib
import io
import itertools
import json
import os
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from support.forms import pictures, put, write_packed, write_parquet
from support.ilsvrc import IMAGES, synset, write_tree
from support.images import EOI, before_scan, chunks, encode, picture, png, segment

from jaxddp.cli import main
from jaxddp.core.errors import InputError
from jaxddp.curate import CheckedSplit, PackOptions, check, examine_file, manifest_path, packed_image
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.formats.ilsvrc import train_solutions, val_solutions
from jaxddp.data.stream.decode import Pixels

WHOLE = encode(picture(40, 48, seed=77), subsampling=2)
FIRST_SCANS = encode(picture(40, 48), progressive=True).rpartition(b"\xff\xda")[0]

FAULTS: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "missing image"),
    "empty": (b"", "empty file"),
    "cut": (WHOLE[:-100], "cut short: no end-of-image marker"),
    "cut and closed": (WHOLE[:-100] + EOI, "damaged: "),
    "cut between scans": (FIRST_SCANS + EOI, "cut short: the scans of its finer detail are missing"),
    "jxl": (b"\xff\x0a" + WHOLE, "not a JPEG, PNG, WebP, TIFF, BMP, PPM, GIF, AVIF or HEIC but"),
    "bomb": (encode(Image.new("L", (12_000, 12_000)), quality=1), "12000x12000 pixels, more than the limit"),
    "png cut": (encode(picture(40, 48), "PNG")[:-40], "cut short: no IEND chunk"),
    "tiff cut": (encode(picture(40, 48), "TIFF")[:50], "damaged: no header of a TIFF file"),
}


EXIF = Image.Exif()
EXIF[0x0112] = 6
TURNED = encode(picture(40, 48, seed=1), exif=EXIF)
NOTES = {
    "png": (encode(picture(40, 48), "PNG"), "PNG named .JPEG: decoded by its content, not its name"),
    "cmyk": (encode(picture(40, 48, "CMYK")), "CMYK: Adobe's inverted kind; converted to RGB"),
    "gray": (encode(picture(40, 48, "L")), "gray: repeated as RGB"),
    "alpha": (encode(picture(40, 48, "RGBA"), "PNG"), "transparency: dropped"),
    "orientation": (TURNED, "EXIF orientation: 6, which is ignored; the image is used as stored"),
    "extraneous": (before_scan(WHOLE, bytes(3)), "extraneous bytes: 3 before a marker"),
    "trailing": (WHOLE + b"camera", "bytes after the end: 6"),
    "thumbnail": (WHOLE[:2] + segment(0xE1, WHOLE) + WHOLE[2:], ""),
}

FIRST_CHUNK, *OTHER_CHUNKS = chunks(PNG := encode(picture(40, 48, "L"), "PNG"))
REJECTED = {
    "profile": (WHOLE, WHOLE[:2] + segment(0xE2, b"ICC_PROFILE\0") + WHOLE[2:]),
    "Adobe": (WHOLE, WHOLE[:2] + segment(0xEE, b"Adobe") + WHOLE[2:]),
    "JFIF": (WHOLE, WHOLE[:2] + segment(0xE0, b"JFIF") + WHOLE[2:]),
    "a large profile": (PNG, png([FIRST_CHUNK, (b"iCCP", b"p\0\0" + zlib.compress(bytes(1 << 21))), *OTHER_CHUNKS])),
    "a short gamma": (PNG, png([FIRST_CHUNK, (b"gAMA", b"\0"), *OTHER_CHUNKS])),
    "a short transparent color": (PNG, png([FIRST_CHUNK, (b"tRNS", b"\0"), *OTHER_CHUNKS])),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_metadata_that_pillow_rejects_are_not_a_fault(kind: str):
    good, broken = REJECTED[kind]
    with pytest.raises((OSError, ValueError, SyntaxError)):
        Image.open(io.BytesIO(broken)).load()
    changed = {"sha256": hashlib.sha256(broken).digest(), "size": len(broken)}
    name, notes = ("n.png", ("gray: repeated as RGB",)) if good is PNG else ("n.jpg", ())
    findings = examine_file(broken, name)
    assert (findings.fault, findings.notes) == (None, notes)
    np.testing.assert_array_equal(Pixels(8)(broken), Pixels(8)(good))
    assert findings == dataclasses.replace(examine_file(good, name), **changed)
    assert packed_image(broken, PackOptions(short_side=24)) == packed_image(good, PackOptions(short_side=24))


def train_files(root: Path) -> list[Path]:
    return [root / path.decode() for path in train_solutions(root).path.tolist()]


@pytest.fixture(scope="module")
def faulty_tree(tmp_path_factory) -> tuple[Path, dict[str, Path]]:
    """Return a data set in which a file of each kind replaces a training image, and the path of each such file."""
    root = write_tree(tmp_path_factory.mktemp("spoiled") / "set", classes=3, images=8, val=4)
    files = dict(zip(FAULTS | NOTES, train_files(root), strict=False))
    for kind, file in files.items():
        data = (FAULTS | NOTES)[kind][0]
        file.unlink() if data is None else file.write_bytes(data)
    return root, files


def run(arguments: list, capfd) -> tuple[int, list[str], str]:
    code = main(["data", "check", *map(str, arguments)])
    out, error = capfd.readouterr()
    assert "Traceback" not in error
    return code, out.splitlines(), error


@pytest.mark.filterwarnings("error::UserWarning")
def test_the_command_names_each_bad_file_on_its_own_line_and_exits_with_code_1(faulty_tree, tmp_path, capfd):
    root, files = faulty_tree
    manifest = tmp_path / "m.jsonl"
    code, lines, _ = run([root, "--manifest", manifest, "--threads", 3], capfd)
    assert code == 1 and lines[-1] == f"manifest: {manifest}"
    for line, (kind, file) in zip(lines, files.items(), strict=False):
        if kind in FAULTS:
            assert line.startswith(f"{file}: {FAULTS[kind][1]}")
    summary = "\n".join(lines[len(FAULTS) :])
    assert str(root) not in summary
    assert f"train: 24 examples (15 jpeg, 2 png), {len(FAULTS)} cannot be used" in summary
    assert "train: note: CMYK: 1" in summary
    assert "train: repair or replace the images that cannot be used, or leave them out of the data set" in summary
    assert "val: 4 examples (4 jpeg), 0 cannot be used" in summary
    header, *images = map(json.loads, manifest.read_text().splitlines())
    tables = {"train": train_solutions(root), "val": val_solutions(root)}
    assert header["manifest"] == 1
    assert all(header["splits"][name]["fingerprint"] == table.fingerprint for name, table in tables.items())
    assert [image["split"] for image in images] == ["train"] * 24 + ["val"] * 4
    by_path = {str(root / image["path"]): image for image in images}
    for kind, file in files.items():
        image = by_path[str(file)]
        if kind in FAULTS:
            assert image["fault"].startswith(FAULTS[kind][1])
        else:
            assert (image["fault"], image["height"], image["width"]) == (None, 40, 48)
            expected = NOTES[kind][1]
            assert expected in image["notes"] if expected else image["notes"] == []
            assert image["bytes"] == file.stat().st_size and len(image["sha256"]) == 64
    assert by_path[str(files["missing"])]["sha256"] is None
    assert by_path[str(files["cmyk"])]["mode"] == "CMYK"
    assert [name.name for name in tmp_path.iterdir()] == ["m.jsonl"]


def check_all(root: Path, tmp_path: Path, capfd, *options: str) -> tuple[list[str], dict]:
    """Return the output lines of a check that finds faults, and the first line of its manifest."""
    code, lines, error = run([root, "--manifest", tmp_path / "m.jsonl", *options], capfd)
    assert (code, error) == (1, "")
    header = json.loads((tmp_path / "m.jsonl").read_text().splitlines()[0])
    count = f"faults in the listing of images: {len(header['refused'])}"
    assert f"{count}; correct them, since a run ends at the first" in lines
    return lines, header


def test_one_run_reports_every_fault_of_a_folder(tmp_path, capfd):
    root = tmp_path / "set"
    for split, label, name in itertools.product(("train", "val"), ("ant", "bee"), ("a", "b")):
        put(root / split / label / f"{name}.jpg", WHOLE)
    train = root / "train"
    in_list = {
        "ant/c.heic": "Pillow reads HEIC with pillow-heif; pip install it",
        "ant/out.png": "a symbolic link that leads nowhere, to 'nowhere'",
        "ant/loop": "a symbolic link leads into a folder above itself",
        "stray.png": "an image outside the class folders (1 in all); move it",
        "none": "no image in this class's folder",
    }
    (train / "ant/c.heic").write_bytes(WHOLE)
    (train / "ant/out.png").symlink_to("nowhere")
    (train / "ant/loop").symlink_to(".")
    (train / "stray.png").write_bytes(WHOLE)
    (train / "none").mkdir()
    (train / "ant" / os.fsdecode(b"\xff.png")).write_bytes(WHOLE)
    put(root / "val/cat/a.jpg", WHOLE)
    os.mkfifo(train / "bee/fifo.jpg")
    lines, header = check_all(root, tmp_path, capfd)
    for name, fault in in_list.items():
        assert [line for line in lines if line.startswith(f"{train / name}: {fault}")], name
    assert f"{train}/bee/fifo.jpg: cannot be read (a FIFO, not a regular file)" in "\n".join(lines)
    assert f"{train}/ant: the name b'\\xff.png' is not UTF-8; rename it" in lines
    assert [line for line in lines if line.startswith(f"{root}/val/cat: a class that {train} does not have")]
    assert len(header["refused"]) == len(in_list) + 2 == len({*header["refused"]})
    assert header["splits"]["train"] | {"examples": 5, "faults": 1} == header["splits"]["train"]
    assert "train: 5 examples (4 jpeg), 1 cannot be used" in lines
    assert "train: repair or replace the images that cannot be used, or leave them out of the data set" in lines
    assert not [line for line in lines if "row" in line]


def test_one_run_reports_every_fault_of_a_list(tmp_path, capfd):
    root = tmp_path / "set"
    for name in "abc":
        put(root / f"{name}.jpg", WHOLE)
    (root / "out.jpg").symlink_to("/etc/hostname")
    rows = ["a.jpg,ant", "b.jpg", "b.jpg,", "../b.jpg,ant", "a.jpg,bee", "out.jpg,ant", "no.jpg,ant", "c.jpg,an\u200bt"]
    (root / "train.csv").write_bytes("\n".join(["path,label", *rows, "b.jpg,"]).encode() + b"\xff\nb.jpg,bee\n")
    (root / "val.csv").write_text("path,label\na.jpg,ant\nb.jpg,cat\n")
    lines, header = check_all(root, tmp_path, capfd)
    for number, fault in {
        3: "1 of 2 fields",
        4: "label '' has an empty name",
        5: "path '../b.jpg' names no file below a folder",
        6: "'a.jpg' has other labels than in ",
        7: "a symbolic link leads out of the data set",
        9: "'an\\u200bt' (U+0061 U+006E U+200B U+0074) looks like 'ant' (U+0061 U+006E U+0074)",
        10: "not UTF-8",
    }.items():
        assert [line for line in lines if line.startswith(f"{root}/train.csv:{number}: {fault}")], number
    assert [line for line in lines if line.startswith(f"{root}/val.csv:3: no row of train.csv has the label 'cat'")]
    assert f"{root}/no.jpg: missing image; download it or leave it out" in lines
    assert len(header["refused"]) == 8 and "train: 4 examples (3 jpeg), 1 cannot be used" in lines


@pytest.mark.slow
def test_one_run_reports_every_fault_of_parquet_and_of_records(tmp_path, capfd):
    parquet = write_parquet(tmp_path / "parquet", pictures())
    (file,) = (parquet / "data").glob("train-*")
    table = pq.read_table(file)
    labels = pa.array([7, None, *table.column("label").to_pylist()[2:]])
    pq.write_table(table.set_column(1, "label", labels), file)
    lines, header = check_all(parquet, tmp_path, capfd)
    assert {line.partition(":")[0] for line in header["refused"]} == {f"{file}, row 0", f"{file}, row 1"}
    assert "train: 8 examples (8 png), 0 cannot be used" in lines
    records = write_packed(tmp_path / "packed")
    index = json.loads((records / "packed.json").read_text())
    index["splits"]["train"]["files"]["train-00001.tfrecord"] = 9
    (records / "packed.json").write_text(json.dumps(index))
    lines, header = check_all(records, tmp_path, capfd)
    advice = "copy it again, or pack the data set again"
    assert header["refused"] == [f"{records}/train-00001.tfrecord: no such file; {advice}"]
    assert "train: 9 examples (9 jpeg), 0 cannot be used" in lines


def test_a_data_set_without_a_readable_split_raises_a_one_line_error_with_exit_code_2(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = write_packed(tmp_path / "packed")
    for split, wanted in (("train", 1), ("val", 2)):
        (records / f"{split}.npz").unlink()
        assert main(["data", "check", str(records)]) == wanted
        out, err = capfd.readouterr()
        assert f"{records}/{split}.npz: no such file; pack the data set again" in out
    assert err == f"jaxddp: {records}: no split can be read; correct the faults that are listed above\n"


def test_the_report_is_the_same_on_any_number_of_threads(faulty_tree):
    root, _ = faulty_tree
    tables = {"train": train_solutions(root), "val": val_solutions(root)}
    single_threaded, multi_threaded = check(tables, threads=1), check(tables, threads=7)
    assert single_threaded.summary() == multi_threaded.summary() and single_threaded.num_faults == len(FAULTS)
    for split, expected in zip(single_threaded.splits, multi_threaded.splits, strict=True):
        assert split.findings == expected.findings


def notes_of(split: CheckedSplit) -> dict[int, tuple[str, ...]]:
    return {row: findings.notes for row, findings in enumerate(split.findings) if findings.notes}


def test_duplicates_are_noted_with_the_image_that_they_repeat(tmp_path, capfd):
    root = write_tree(tmp_path / "set", classes=3, images=4, val=5)
    train, val = train_solutions(root), val_solutions(root)
    files = train_files(root)
    content = files[0].read_bytes()
    files[3].write_bytes(content)
    files[4].write_bytes(content)
    Path(val.name(0)).write_bytes(content)
    Path(val.name(1)).write_bytes(files[1].read_bytes() + b"not the same")
    photographs = np.random.default_rng(0).integers(0, 255, (2, 6, 6, 3), np.uint8)
    photograph, other = (Image.fromarray(pixels).resize((90, 60)) for pixels in photographs)
    photograph.save(files[5], quality=95)
    photograph.resize((48, 32)).save(val.name(2), quality=40)
    other.save(val.name(3))
    notes = [notes_of(split) for split in check({"train": train, "val": val}).splits]
    same_content = f"the same content as {files[0]}"
    assert notes[0] == {
        3: (f"duplicate: {same_content}",),
        4: (f"contradiction: {same_content}, which is of class {synset(0)}, and this of {synset(1)}",),
    }
    near = f"near leak: it looks like {files[5]}, of split train"
    assert notes[1] == {0: (f"leak: {same_content}, of split train",), 1: ("bytes after the end: 12",), 2: (near,)}
    code, lines, _ = run([root, "--manifest", tmp_path / "m"], capfd)
    assert code == 0
    assert "train: warning: contradiction: 1" in lines and "val: warning: leak: 1" in lines
    assert f"{val.name(2)}: {near}" in lines and "val: warning: near leak: 1" in lines
    assert "train: note: duplicate: 1" in lines
    # Files that cannot be used are no duplicates.
    for file in files[:4]:
        file.write_bytes(WHOLE[:-50] + EOI)
    (damaged,) = check({"train": train}).splits
    assert sorted(damaged.faults) == [0, 1, 2, 3] and notes_of(damaged) == {}


def test_balance_names_classes_without_images(tmp_path):
    root = write_tree(tmp_path / "set", classes=4, images=2, val=3)
    rows = (root / "LOC_train_solution.csv").read_text().splitlines(keepends=True)
    (root / "LOC_train_solution.csv").write_text("".join(row for row in rows if not row.startswith(synset(0))))
    summary = check({"train": train_solutions(root), "val": val_solutions(root)}).summary()
    assert summary["train"]["images_a_class"] == {"least": 0, "median": 2.0, "most": 2}
    assert summary["train"]["empty_classes"] == [synset(0)]
    assert summary["val"]["classes_of_train_lacking"] == [synset(3)]


def test_arrays_are_checked_for_constant_images_and_contradictions():
    images = np.random.default_rng(0).integers(0, 256, (6, 5, 7, 3), np.uint8)
    images[2] = (9, 8, 7)
    images[5] = images[0]
    labels = np.array([0, 1, 0, 1, 1, 1])
    (split,) = check({"train": ArrayTable(images, labels, ("ant", "bee", "cat"))}).splits
    assert split.faults == {}
    assert notes_of(split) == {
        2: ("constant: every pixel is the same",),
        5: ("contradiction: the same content as train row 0, which is of class ant, and this of bee",),
    }
    assert {(findings.height, findings.mode) for findings in split.findings} == {(5, "3")}
    (split,) = check({"train": ArrayTable(images, labels + 1, ("grade",), label_form="numbers")}).splits
    assert notes_of(split)[5][0].endswith("row 0, which is of class 1.0, and this of 2.0")


class CountingStore:
    """A store with one small image. `most_ahead` is the most images read but not yet reported."""

    def __init__(self):
        self.num_read = self.num_reported = self.most_ahead = 0
        self.lock = threading.Lock()

    def name(self, path: bytes, offset: int = 0) -> str:
        return path.decode()

    def read(self, path: bytes, offset: int = 0) -> bytes:
        with self.lock:
            self.num_read += 1
            self.most_ahead = max(self.most_ahead, self.num_read - self.num_reported)
        return TINY

    @property
    def root(self) -> None: ...

    def faults(self, paths: np.ndarray, identity: np.ndarray | None = None) -> list:
        return []


TINY = encode(picture(1, 1))


def test_no_more_is_read_ahead_than_the_threads_need(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    store = CountingStore()

    def slow(done: int, faults: int, line: str | None) -> None:
        assert faults == 0 and line is None
        store.num_reported = done
        time.sleep(0.001)

    table = train_solutions(write_tree(tmp_path / "set", classes=1, images=1, val=1))
    names, labels = np.array([b"%d.jpg" % row for row in range(600)]), np.zeros(600, np.int32)
    table = dataclasses.replace(table, store=store, id=names, path=names, labels=labels)
    report = check({"train": table}, progress=slow)
    assert store.num_read == store.num_reported == 600 == len(report.splits[0].source)
    assert 2 <= store.most_ahead <= 300


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["check", "{root}", "--train", "other.csv"], "other.csv"),
        (["check", "{root}", "--threads", "0"], "--threads 0: expected 1 to 1,024"),
        (["check", "{root}", "--manifest", "{root}/gone/m.jsonl"], "gone/m.jsonl: cannot be written"),
        (["chekc", "{root}"], "data: unknown command 'chekc'; did you mean 'check'?"),
    ],
)
def test_bad_input_raises_a_one_line_error_with_exit_code_2(arguments, expected, tmp_path, capfd, monkeypatch):
    root = write_tree(tmp_path / "set", classes=2, images=2, val=2)
    monkeypatch.chdir(tmp_path)
    assert main(["data", *(argument.format(root=root) for argument in arguments)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("jaxddp: ") and expected in line


def test_the_default_manifest_is_never_inside_the_data_set(tmp_path, monkeypatch):
    root = write_tree(tmp_path / "set", classes=2, images=2, val=2)
    monkeypatch.chdir(root / IMAGES)
    with pytest.raises(InputError, match="is inside the data set; give the manifest"):
        manifest_path(root, None)
    assert manifest_path(root, Path("m.jsonl")) == root / IMAGES / "m.jsonl"
