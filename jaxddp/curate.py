"""`jaxddp data check` and `jaxddp data pack`.

The check reads a data set once, and finds images that cannot be used or are unusual. A pack is a copy of a data set in
a few large files.
"""

import hashlib
import io
import json
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from PIL import Image

import jaxddp.core.files as files
import jaxddp.core.phases as phases
from jaxddp.config.data_section import Pixels
from jaxddp.core.cores import num_cores
from jaxddp.core.errors import InputError, Key, about, counted, first_line, plural, show, some, span
from jaxddp.core.ranges import Range
from jaxddp.core.threads import map_in_threads
from jaxddp.data.faults import find_repeats
from jaxddp.data.formats.packed_records import FEATURE, MANIFEST
from jaxddp.data.images import open_sound, parse_header, sound_image, stray_bytes
from jaxddp.data.manifest import VERSION, manifest_name
from jaxddp.data.source import Table, image_dtype, labels_of
from jaxddp.data.storage.shards import write_example

LARGE = 20_000_000
"""Images with more pixels are decoded one at a time, whatever the number of threads, to bound the memory."""

_ORIENTATION = 0x0112
_SUFFIXES = {f".{kind}": kind for kind in ("jpeg", "png", "webp", "tiff", "bmp", "ppm", "gif", "avif", "heif")}
_SUFFIXES |= {".jpg": "jpeg", ".tif": "tiff", ".pgm": "ppm", ".heic": "heif"}
_large_images = threading.Lock()
WARNINGS = ("contradiction", "leak", "near leak")
"""The kinds of notes on images that distort the measured accuracy. Such images do not stop a run: ImageNet has some."""
_MIN_THREADS = 8
_SIDE, _LIKE, _MIN_CONTRAST = 8, 0.99, 4.0
"""Two images are nearly equal if the gray values of their reductions correlate by 0.99, and have this standard
deviation. 150 photographs that are halved, doubled, or compressed at quality 20 reach 0.996; of CIFAR-10's 10,000 test
images, 44 are so near to a training image, and all show the same picture."""
_AT_ONCE = 64
"""The number of images of a split that are compared with another split at a time."""
_SHOWN = 20


@dataclass(slots=True)
class ImageFindings:
    """The findings about one image."""

    sha256: bytes | None = None
    """The SHA-256 of the file, or of an array's pixels; None if the image could not be read."""
    size: int = 0
    """The size of the file in bytes."""
    kind: str | None = None
    """The kind of `ImageHeader`, or array. Kind, height and width are None if the header cannot be used."""
    height: int | None = None
    width: int | None = None
    mode: str | None = None
    """Pillow's name of the color space: L, RGB, CMYK, P, RGBA, ...; for an array, the number of channels."""
    notes: tuple[str, ...] = ()
    """Unusual properties that do not prevent training, each as `kind: detail`."""
    fault: str | None = None
    """The reason why training cannot use the image; None if it can."""
    has_stray_bytes: bool = False
    """Whether the file has stray bytes, which are removed each time before it is decoded."""
    reduced: bytes = b""
    """The gray values of the image, reduced to 8x8 pixels, as a perceptual hash; empty if they are unknown."""


def examine(source: Table, row: int) -> ImageFindings:
    """Read, hash and verify a row's image. Raises: Unreachable if its store does not answer."""
    name = source.name(row)
    try:
        data = source.read(row)
    except InputError as error:
        return ImageFindings(fault=str(error).removeprefix(f"{name}: "))
    if source.pixel_shape is None:
        return examine_file(data, name)
    image = np.frombuffer(data, image_dtype(source, source.default_data())).reshape(source.pixel_shape)
    height, width, channels = image.shape
    notes = ("constant: every pixel is the same",) if (image == image[0, 0]).all() else ()
    findings = ImageFindings(hashlib.sha256(data).digest(), len(data), "array", height, width, str(channels), notes)
    if image.dtype.kind == "u":
        gray = (image.mean(2) / np.iinfo(image.dtype).max * 255).astype(np.uint8)
        findings.reduced = _reduced(Image.fromarray(gray))
    return findings


def examine_file(data: bytes, name: str) -> ImageFindings:
    """Examine an encoded image, and compare the extension of its name with its content."""
    findings = ImageFindings(hashlib.sha256(data).digest(), len(data))
    try:
        header = parse_header(data)
        findings.kind, findings.height, findings.width = header.kind, header.height, header.width
        with _large_images if header.height * header.width > LARGE else nullcontext():
            header, decoded = sound_image(data)
            findings.mode, notes, findings.reduced = _describe(data, header.bits)
    except InputError as error:
        findings.fault = str(error)
        return findings
    suffix = name[name.rfind(".") :]
    if _SUFFIXES.get(suffix.lower(), header.kind) != header.kind:
        notes.insert(0, f"{header.kind.upper()} named {suffix}: decoded by its content, not its name")
    if header.left_over:
        notes.append(f"bytes left over: {header.left_over} behind the last pixel")
    if header.kind == "jpeg":
        notes += stray_bytes(data)
    findings.notes, findings.has_stray_bytes = tuple(notes), decoded is not data
    return findings


def _describe(data: bytes, bits: int) -> tuple[str, list[str], bytes]:
    """Return the color space, notes on unusual properties, and the reduction of a sound image.

    Raises: see `open_sound`.
    """
    with open_sound(data) as image:
        mode, info, is_turned = image.mode, image.info, image.format == "TIFF"
        try:
            orientation = image.getexif().get(_ORIENTATION, 1)
        except Exception:  # Broken metadata can cause any error, and no pixel depends on the metadata.
            orientation = 1
        reduced = _reduced(image)
    kind = "YCCK" if info.get("adobe_transform") == 2 else "CMYK"
    inverted = "Adobe's inverted kind" if "adobe" in info else "read as not inverted, as Adobe's marker is absent"
    is_ignored = orientation not in (0, 1) and not is_turned
    notes = {
        f"{kind}: {inverted}; converted to RGB": mode == "CMYK",
        "gray: repeated as RGB": mode in ("L", "1", "LA") or mode.startswith("I"),
        "16 bits: the upper 8 are kept": bits == 16,
        "transparency: dropped": mode in ("LA", "RGBA", "PA") or "transparency" in info,
        f"EXIF orientation: {orientation}, which is ignored; the image is used as stored": is_ignored,
    }
    return mode, [note for note, is_true in notes.items() if is_true], reduced


def _reduced(image: Image.Image) -> bytes:
    """Return `ImageFindings.reduced`."""
    # Pillow cannot decode some images that training can.
    with suppress(OSError, ValueError, SyntaxError):
        image.draft("L", (4 * _SIDE, 4 * _SIDE))
        return _eight_bits(image).convert("L").resize((_SIDE, _SIDE), Image.Resampling.BOX).tobytes()
    return b""


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return the upper 8 of 16 bits, as training uses them. Pillow would clip the values at 255."""
    return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode.startswith("I") else image


@dataclass
class CheckedSplit:
    """One split and the findings of its rows."""

    name: str
    source: Table
    findings: list[ImageFindings] = field(default_factory=list)

    @property
    def faults(self) -> dict[int, str]:
        """The fault of each row that cannot be used."""
        return {row: findings.fault for row, findings in enumerate(self.findings) if findings.fault is not None}

    def name_of(self, row: int) -> str:
        """Return a readable name of a row's image."""
        name = self.source.name(row)
        # Images of arrays are named by their row alone, so the name of the split is added.
        return f"{self.name} {name}" if self.source.record(row).path is None else name

    def class_of(self, row: int) -> str | None:
        """Return `Labels.text` of a row, such as the id of its class; None if the class is unknown."""
        return labels_of(self.source).text(row) or None


class CheckReport:
    """The splits of a check, with a note on each image that has the same content as an earlier image.

    A `duplicate` is in the same split and class as the earlier image, a `contradiction` is in another class, and a
    `leak` is in another split. A `near leak` is nearly equal to an image of the first split: it was resized or
    compressed again.

    Attributes:
        refused: a message for each row or file of the data set that was rejected and is in no split.
    """

    def __init__(self, splits: Sequence[CheckedSplit], refused: Sequence[str] = ()):
        self.splits, self.refused = tuple(splits), tuple(refused)
        places = [(split, row) for split in splits for row, each in enumerate(split.findings) if each.fault is None]
        digests = np.array([split.findings[row].sha256 for split, row in places], "V32")
        for repeat, first in find_repeats(digests):
            (split, row), (first_split, first_row) = places[repeat], places[first]
            this_class, first_class = split.class_of(row), first_split.class_of(first_row)
            where, notes = f"the same content as {first_split.name_of(first_row)}", []
            if this_class is not None and first_class is not None and this_class != first_class:
                notes = [f"contradiction: {where}, which is of class {first_class}, and this of {this_class}"]
            if split is not first_split:
                notes.append(f"leak: {where}, of split {first_split.name}")
            elif this_class == first_class:
                notes.append(f"duplicate: {where}")
            split.findings[row].notes += tuple(notes)
        for split in splits[1:]:
            exact = {row for row, each in enumerate(split.findings) if "leak" in map(_kind, each.notes)}
            for row, first_row in _nearly_equal(split, splits[0], exact).items():
                note = f"near leak: it looks like {splits[0].name_of(first_row)}, of split {splits[0].name}"
                split.findings[row].notes += (note,)

    @property
    def num_faults(self) -> int:
        return len(self.refused) + sum(len(split.faults) for split in self.splits)

    def summary(self) -> dict[str, Any]:
        """Return the summary of each split, made of JSON types."""
        return {split.name: _summary(split, self.splits[0]) for split in self.splits}

    def lines(self) -> list[str]:
        """Return the summary as readable lines, several for each split."""
        count = f"faults in the listing of images: {len(self.refused):,}"
        lines = [f"{count}; correct them, since a run ends at the first"] if self.refused else []
        lines += [f"{name}: {line}" for name, summary in self.summary().items() for line in _lines(summary)]
        rows = ((split.name_of(row), each) for split in self.splits for row, each in enumerate(split.findings))
        notes = ((name, note) for name, each in rows for note in each.notes)
        leaks = [f"{name}: {note}" for name, note in notes if _kind(note) in ("leak", "near leak")]
        more = [f"... and {len(leaks) - _SHOWN:,} more, in the manifest"] if len(leaks) > _SHOWN else []
        return lines + leaks[:_SHOWN] + more


def _kind(note: str) -> str:
    return note.partition(":")[0]


def _nearly_equal(split: CheckedSplit, other: CheckedSplit, without: Collection[int]) -> dict[int, int]:
    """Return the rows of a split that look like an image of another split, each with the row most like it."""
    (rows, values), (of_other, others) = _normalized(split, without), _normalized(other, ())
    found: dict[int, int] = {}
    for start in range(0, len(rows), _AT_ONCE):
        likeness = values[start : start + _AT_ONCE] @ others.T
        for place in np.flatnonzero(likeness.max(1, initial=0) > _LIKE):
            found[int(rows[start + place])] = int(of_other[likeness[place].argmax()])
    return found


def _normalized(split: CheckedSplit, without: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return rows, int[n], and their gray values with mean 0 and norm 1, float32[n, 64]. Flat images are left out."""
    rows = [row for row, each in enumerate(split.findings) if each.reduced and row not in without]
    pixels = np.frombuffer(b"".join(split.findings[row].reduced for row in rows), np.uint8)
    values = pixels.reshape(-1, _SIDE**2).astype(np.float32)
    values -= values.mean(1, keepdims=True)
    has_contrast = values.std(1) >= _MIN_CONTRAST
    values = values[has_contrast]
    return np.array(rows, np.int64)[has_contrast], values / np.linalg.norm(values, axis=1, keepdims=True)


def _summary(split: CheckedSplit, first: CheckedSplit) -> dict[str, Any]:
    """Return the summary of a split. It has the classes of the first split without images in this one, if any."""
    kinds = Counter(each.kind for each in split.findings if each.kind is not None)
    noted = Counter(kind for each in split.findings for kind in {*map(_kind, each.notes)})
    ids, counts = split.source.class_ids, labels_of(split.source).counts
    summary: dict[str, Any] = {
        "examples": len(split.source),
        "fingerprint": split.source.fingerprint,
        "bytes": sum(each.size for each in split.findings),
        "faults": len(split.faults),
        "kinds": dict(sorted(kinds.items())),
        "notes": dict(noted.most_common()),
        "classes": len(counts),
    }
    if len(counts):
        least, most = int(counts.min()), int(counts.max())
        summary["images_a_class"] = {"least": least, "median": float(np.median(counts)), "most": most}
        summary["empty_classes"] = [ids[label] for label in np.flatnonzero(counts == 0)]
    if len(counts) and split is not first:
        present = {ids[label] for label in np.flatnonzero(counts)}
        of_first = [first.source.class_ids[label] for label in np.flatnonzero(labels_of(first.source).counts)]
        summary[f"classes_of_{first.name}_lacking"] = [each for each in of_first if each not in present]
    return summary


def _lines(summary: dict[str, Any]) -> Iterator[str]:
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in summary["kinds"].items()) or "none readable"
    yield f"{counted(summary['examples'], 'example')} ({kinds}), {summary['faults']:,} cannot be used"
    if summary["faults"]:
        yield "repair or replace the images that cannot be used, or leave them out of the data set"
    if balance := summary.get("images_a_class"):
        least, most = balance["least"], balance["most"]
        median = f", median {balance['median']:,g}" if least < most else ""
        images_a_class = f"{span(least, most)} {plural(most, 'image')} a class{median}"
        yield f"{counted(summary['classes'], 'class')}, {images_a_class}"
    for key, classes in summary.items():
        if isinstance(classes, list) and classes:
            yield f"{key.replace('_', ' ')}: {len(classes):,} ({some(classes)})"
    for kind, n in summary["notes"].items():
        yield f"{'warning' if kind in WARNINGS else 'note'}: {kind}: {n:,}"


def check(
    sources: Mapping[str, Table],
    *,
    refused: Sequence[str] = (),
    threads: int | None = None,
    progress: Callable[..., None] = lambda *_: None,
) -> CheckReport:
    """Read every image of every split once, and find images with the same content.

    Faults are reported in the order of the rows, and the report does not depend on the number of threads. The memory
    holds at most one encoded image for each thread, and about 500 bytes for each row.

    Args:
        sources: the tables of the splits by name, such as train and val. Of two equal images, the later is the
            duplicate.
        refused: messages about rows and files that were rejected when the splits were opened; the report lists them.
        threads: the number of threads; by default twice the number of cores, because threads wait for the disk, but at
            least 8.
        progress: see `jaxddp.core.phases.counting_images`.
    """
    threads = threads or max(_MIN_THREADS, 2 * num_cores())
    splits = [CheckedSplit(name, source) for name, source in sources.items()]
    num_examined = num_faulty = 0
    with warnings.catch_warnings():
        # Pillow's warnings of damaged images are not needed, because the report has their faults.
        warnings.filterwarnings("ignore", module="PIL")
        for split in splits:
            verified, sound = split.source.verified, np.zeros(len(split.source), bool)
            if verified is not None:
                # Record the identity of each file before any image is read. If a file changes during the check, its
                # identity is out of date, and the next run verifies the file again.
                verified.check_local_files()
                sound = verified.sound
            findings_of_rows = map_in_threads(partial(examine, split.source), range(len(split.source)), threads)
            try:
                for row, findings in enumerate(findings_of_rows):
                    split.findings.append(findings)
                    sound[row] = findings.fault is None and not findings.has_stray_bytes
                    num_examined, num_faulty = num_examined + 1, num_faulty + (findings.fault is not None)
                    progress(num_examined, num_faulty, findings.fault and f"{split.name_of(row)}: {findings.fault}")
            finally:
                findings_of_rows.close()
                if verified is not None:
                    verified.write_cache()
    with phases.doing("comparing the splits"):
        return CheckReport(splits, refused)


def manifest_path(root: Path, override: Path | None) -> Path:
    """Return the path of a data set's manifest: `override`, or a file named after the root in the working directory.

    Raises: InputError if the file cannot be written, or the default path is inside the data set.
    """
    path = (override or Path(manifest_name(root))).absolute()
    if override is None and path.resolve().is_relative_to(root.resolve()):
        raise InputError(f"{path}: is inside the data set; give the manifest's place with --manifest")
    if path.is_dir():
        raise InputError(f"{path}: is a directory; give --manifest a file")
    # Test writing here. Otherwise an error would appear only after the check, which may take an hour.
    with files.readable_errors(path):
        probe = path.with_name(f".{path.name}.tmp")
        probe.touch()
        probe.unlink()
    return path


def write_manifest(report: CheckReport, path: Path) -> None:
    """Write the manifest atomically. Raises: InputError if it cannot be written.

    The first line holds `manifest`, the version of the format; `splits`, the summary of each split; and `refused`, a
    message for each row or file that was rejected. Each other line describes an image, in the order of the rows; a
    missing value is null.
    """
    images = (_image(split, row) for split in report.splits for row in range(len(split.source)))
    lines = chain([{"manifest": VERSION, "splits": report.summary(), "refused": report.refused}], images)
    files.replace(path, (json.dumps(line).encode() + b"\n" for line in lines))


def _image(split: CheckedSplit, row: int) -> dict[str, Any]:
    findings = split.findings[row]
    return {
        "split": split.name,
        **split.source.record(row)._asdict(),
        "class": split.class_of(row),
        "bytes": findings.size,
        "sha256": findings.sha256 and findings.sha256.hex(),
        **{name: getattr(findings, name) for name in ("kind", "height", "width", "mode", "notes", "fault")},
    }


SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class PackOptions:
    """The options of packing images."""

    short_side: Pixels = 256
    """The pixels to which the shorter side of an image is reduced; a smaller image keeps its size."""
    quality: Annotated[int, Range(1, 100)] = 90
    """The quality of the JPEG images, 1 to 100. A small RGB JPEG is copied unchanged."""
    pixels: bool = False
    """Write PPM files, which hold the pixels, in place of JPEG: they take more space, and less time to read."""

    @property
    def kind(self) -> str:
        """The kind of the files, as Pillow names it."""
        return "PPM" if self.pixels else "JPEG"


def pack(
    sources: Mapping[str, Table],
    out: Path,
    packing: PackOptions,
    progress: Callable[[int, int], None] = lambda done, faults: None,
) -> dict[str, Any]:
    """Write a packed copy of the splits into a directory, and return its manifest.

    The directory appears only when it is complete. `progress` is that of `jaxddp.core.phases.counting_images`.

    Raises:
        InputError: the directory exists or cannot be written, the images are in memory or have weights, the splits have
            different classes, or an image cannot be used (the message names it).
    """
    if any(source.pixel_shape is not None for source in sources.values()):
        raise InputError("the images of this data set are already arrays in few files; train on it directly")
    for source in sources.values():
        if getattr(source, "weights", None) is not None:
            advice = "train on the original data, or leave ", Key("data.weight_column"), " out"
            raise InputError("the images have weights, which a packed copy does not hold", advice=advice)
        labels = labels_of(source)
        if labels.has_rows and len(several := np.flatnonzero(labels.single < 0)):
            names = ", ".join(labels.names[label] for label in labels.of(int(several[0])))
            fault = f"{labels.form} ({names}), but packing accepts one label per row"
            of_all = f"{len(several)} of {len(source)} rows have several"
            advice = "keep one label per row, or set ", Key("data.classes"), " to classes of which no row has two"
            raise InputError(f"{source.name(int(several[0]))}: {fault} ({of_all})", advice=advice)
    _check_classes(sources)
    if os.path.lexists(out):
        raise InputError(f"{out}: exists already; remove it, or choose another --out")
    done = count(1)
    with files.whole_folder(out) as unfinished:
        first = next(iter(sources.values()))
        manifest = {
            "classes": {"ids": first.class_ids, "names": first.class_names},
            "short_side": packing.short_side,
            "quality": None if packing.pixels else packing.quality,
            "splits": {
                split: _pack_split(source, split, unfinished, packing, lambda: progress(next(done), 0))
                for split, source in sources.items()
            },
        }
        files.replace_json(unfinished / MANIFEST, manifest)
    return manifest


def _check_classes(sources: Mapping[str, Table]) -> None:
    """Check that all splits have the classes of the first one, in the same order. Raises: InputError."""
    (first, whole), *others = sources.items()
    for split, source in others:
        for place, (one, other) in enumerate(zip_longest(source.class_ids, whole.class_ids)):
            if one != other:
                fault = f"class {place} is {show(one)}, and {show(other)} in {first}"
                raise InputError(f"{split}: {fault}; give all splits the same classes in the same order")


def packed_image(data: bytes, packing: PackOptions) -> bytes:
    """Return an image as JPEG or PPM, its shorter side reduced to `packing.short_side` by an antialiasing filter.

    Raises: InputError if the image cannot be used.
    """
    header, _ = sound_image(data)
    with open_sound(data) as image:
        scale = min(packing.short_side / min(image.size), 1)
        if scale == 1 and header.kind == "jpeg" and image.mode == "RGB" and not packing.pixels:
            return data
        try:
            return _resized(image, scale, packing)
        # Pillow also raises these errors if it cannot decode the image, or cannot encode it as JPEG.
        except (OSError, ValueError, SyntaxError) as error:
            reason = first_line(error)
    raise InputError(f"cannot be converted to {packing.kind} ({reason}); convert or shrink it, or leave it out")


def _resized(image: Image.Image, scale: float, packing: PackOptions) -> bytes:
    """Return a scaled image as JPEG or PPM. Raises: an error of Pillow."""
    image = _eight_bits(image)
    width, height = (round(side * scale) for side in image.size)
    # Decoding at a half or a quarter of the size is faster. The filter needs no more than twice the final size.
    image.draft(None, (2 * width, 2 * height))
    packed, small = io.BytesIO(), image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS)
    small.save(packed, packing.kind, quality=packing.quality)
    return packed.getvalue()


def _pack_split(
    source: Table, split: str, folder: Path, packing: PackOptions, progress: Callable[[], None]
) -> dict[str, Any]:
    """Write the records and the index of a split; return its entry in the manifest."""

    def packed_row(row: int) -> bytes:
        data = source.read(row)
        with about(source.name(row)):
            return packed_image(data, packing)

    ids = [os.fsencode(str(source.record(row).id)) for row in range(len(source))]
    labels = labels_of(source).single
    shard, offset, shards = np.zeros(len(source), np.int32), np.zeros(len(source), np.int64), list[str]()
    writer = None
    with ExitStack() as open_writers:
        for row, image in enumerate(map_in_threads(packed_row, range(len(source)), num_cores())):
            if writer is None or writer.tell() >= SHARD_BYTES:
                open_writers.close()
                shards.append(f"{split}-{len(shards):05d}.tfrecord")
                writer = open_writers.enter_context(files.open_regular(folder / shards[-1], "wb"))
            shard[row], offset[row] = len(shards) - 1, writer.tell()
            write_example(writer, {FEATURE: image, "id": ids[row], "label": int(labels[row])})
            progress()
    np.savez(folder / f"{split}.npz", id=np.array(ids), label=labels, shard=shard, offset=offset)
    bytes_of_files = {name: (folder / name).stat().st_size for name in shards}
    return {"examples": len(source), "fingerprint": source.fingerprint, "files": bytes_of_files}
