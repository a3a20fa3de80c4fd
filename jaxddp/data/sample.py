"""Sample data sets, created from an installed package without a download."""

import csv
import io
from pathlib import Path

import numpy as np

import jaxddp.core.files as files
from jaxddp.core.errors import InputError, choices, requires

_SIZE = 32
_VALIDATION_EVERY = 6
_DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# WordNet's ids of the ten digits, because ImageNet's mapping file has WordNet ids.
_SYNSETS = tuple(f"n{13742358 + digit:08d}" for digit in range(10))


def write_sample(name: str, out: str | Path) -> Path:
    """Write a small data set into a folder, and return the folder, for `open_data`.

    The sample "digits" has scikit-learn's 1,797 handwritten digits of 8x8 pixels, enlarged to 32x32, as JPEG files in
    the layout of Kaggle's ILSVRC download. Every sixth image is a validation image. The folder is created under a
    temporary name and renamed when it is complete. A folder that already has all the files is not changed.

    Raises:
        InputError: there is no such sample, scikit-learn is not installed, or the folder has other files or cannot be
            written.
    """
    if name != "digits":
        raise InputError(f"name={name!r}: no such sample; {choices(str(name), ['digits'])}")
    place, sample = Path(files.check_path(out, "out")), _digits()
    if place.exists() and not (place.is_dir() and not any(place.iterdir())):
        if all((place / file).is_file() for file in sample):
            return place
        raise InputError(f"{place}: does not hold the sample {name!r}; give a new folder")
    with files.whole_folder(place) as temporary:
        for file, content in sample.items():
            (temporary / file).parent.mkdir(parents=True, exist_ok=True)
            (temporary / file).write_bytes(content)
    return place


def _digits() -> dict[str, bytes]:
    """Return the content of each file by its path."""
    with requires("the sample 'digits'", "scikit-learn", "demo"):
        from sklearn.datasets import load_digits
    from PIL import Image

    sample, rows = dict[str, bytes](), {"train": list[tuple[str, str]](), "val": list[tuple[str, str]]()}
    pixels, labels = load_digits(return_X_y=True)
    images = np.round(pixels * 255 / 16).astype(np.uint8).reshape(-1, 8, 8)
    for number, (image, digit) in enumerate(zip(images, labels.tolist(), strict=True)):
        split, synset = "val" if number % _VALIDATION_EVERY == 0 else "train", _SYNSETS[digit]
        name = f"{synset}_{number}" if split == "train" else f"digits_val_{number:05d}"
        folder = f"{split}/{synset}" if split == "train" else split
        file = io.BytesIO()
        Image.fromarray(image).resize((_SIZE, _SIZE), Image.Resampling.BICUBIC).save(file, "JPEG", quality=95)
        sample[f"ILSVRC/Data/CLS-LOC/{folder}/{name}.JPEG"] = file.getvalue()
        rows[split].append((name, f"{synset} 0 0 {_SIZE - 1} {_SIZE - 1}"))
    for split, lines in rows.items():
        table = io.StringIO(newline="")
        csv.writer(table).writerows([("ImageId", "PredictionString"), *lines])
        sample[f"LOC_{split}_solution.csv"] = table.getvalue().encode()
    mapping = "".join(f"{synset} {word}\n" for synset, word in zip(_SYNSETS, _DIGIT_NAMES, strict=True))
    return {**sample, "LOC_synset_mapping.txt": mapping.encode()}
