"""Write scikit-learn's handwritten digits as JPEG files in the layout of Kaggle's ILSVRC download.

    python launch/digits.py data/digits

1,797 handwritten digits of 8x8 pixels, enlarged to 32x32; every sixth is kept for validation. They are read as
ImageNet's files are. Needs scikit-learn, whose package holds the images (the extra `demo`).
"""

import argparse
import csv
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SIZE = 32
HELD_OUT = 6
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# WordNet's numbers for the ten digits, so that the mapping file has the form of ImageNet's.
SYNSETS = tuple(f"n{13742358 + digit:08d}" for digit in range(10))


def write_digits(root: Path) -> None:
    """Write images, both solution files and the synset mapping under `root`."""
    images, labels = load_digits(return_X_y=True)
    rows: dict[str, list[tuple[str, str]]] = {"train": [], "val": []}
    for number, (pixels, label) in enumerate(zip(images.reshape(-1, 8, 8), labels, strict=True)):
        split = "val" if number % HELD_OUT == 0 else "train"
        synset = SYNSETS[label]
        name = f"{synset}_{number}" if split == "train" else f"digits_val_{number:05d}"
        folder = root / "ILSVRC/Data/CLS-LOC" / split / (synset if split == "train" else "")
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.round(pixels * 255 / 16).astype(np.uint8))
        image.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(folder / f"{name}.JPEG", quality=95)
        rows[split].append((name, f"{synset} 0 0 {SIZE - 1} {SIZE - 1}"))
    for split, lines in rows.items():
        with (root / f"LOC_{split}_solution.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("ImageId", "PredictionString"), *lines])
    mapping = "".join(f"{synset} {word}\n" for synset, word in zip(SYNSETS, WORDS, strict=True))
    (root / "LOC_synset_mapping.txt").write_text(mapping)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="folder to write")
    root = parser.parse_args().root
    write_digits(root)
    print(f"wrote scikit-learn's digits to {root}")


if __name__ == "__main__":
    main()
