"""A small data set in the layout of Kaggle's ILSVRC archive, with JPEG files that a network can learn."""

from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import numpy as np
from PIL import Image

IMAGES = Path("ILSVRC/Data/CLS-LOC")


def write_tree(
    root: str | PathLike[str],
    *,
    classes: int = 3,
    images: int = 4,
    val: int = 5,
    test: int = 0,
    size: int | tuple[int, int] = 32,
    seed: int = 0,
) -> Path:
    """Write the data set and return its root. The same arguments write the same files.

    The rows of the classes alternate, every third row has two boxes, and the images of a class are a color with noise.

    Args:
        classes: Number of classes, at most 1000; `synset(i)` is the i-th.
        images: Number of training images of each class.
        val: Total number of validation images, of alternating classes.
        test: Total number of test images, listed in LOC_sample_submission.csv, which is not written for 0.
        size: Height and width in pixels, or one number for both.
    """
    root = Path(root)
    height, width = (size, size) if isinstance(size, int) else size
    pictures = _pictures(classes, height, width, seed)
    train_rows = [(f"{synset(i)}_{n}", i) for n in range(images) for i in range(classes)]
    val_rows = [(f"ILSVRC2012_val_{n + 1:08d}", n % classes) for n in range(val)]
    test_rows = [(f"ILSVRC2012_test_{n + 1:08d}", n % classes) for n in range(test)]
    for folder, rows in (("train", train_rows), ("val", val_rows), ("test", test_rows)):
        for image_id, label in rows:
            place = root / IMAGES / folder / (synset(label) if folder == "train" else "")
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(next(pictures[label])).save(place / f"{image_id}.JPEG", quality=90)
    box = f"0 0 {width} {height}"
    write_csv(root / "LOC_train_solution.csv", [_row(row, n, box) for n, row in enumerate(train_rows)])
    write_csv(root / "LOC_val_solution.csv", [_row(row, n, box) for n, row in enumerate(val_rows)])
    if test:
        write_csv(root / "LOC_sample_submission.csv", [(image_id, f"1 {box}") for image_id, _ in test_rows])
    mapping = (f"{synset(i)} class {i}, also called {i}\n" for i in range(classes))
    (root / "LOC_synset_mapping.txt").write_text("".join(mapping))
    return root


def synset(label: int) -> str:
    """Return the id of a class of `write_tree`: sorted like the labels, and as long as WordNet's ids."""
    return f"n{1_000_000 + 137 * label:08d}"


def write_csv(file: Path, rows: list[tuple[str, str]]) -> None:
    """Write a solution file like Kaggle's: LF, no quotes."""
    file.write_text("ImageId,PredictionString\n" + "".join(f"{image_id},{boxes}\n" for image_id, boxes in rows))


def _row(row: tuple[str, int], number: int, box: str) -> tuple[str, str]:
    image_id, label = row
    # A box list in Kaggle's file ends in a space.
    return image_id, f"{synset(label)} {box} " * (2 if number % 3 == 2 else 1)


def _pictures(classes: int, height: int, width: int, seed: int) -> list[Iterator[np.ndarray]]:
    colors = np.random.default_rng(seed).permuted(np.linspace(30, 225, max(classes, 2))[:, None].repeat(3, 1), axis=0)

    def pictures(label: int) -> Iterator[np.ndarray]:
        rng = np.random.default_rng((seed, label))
        while True:
            noise = rng.normal(0, 20, (height, width, 3))
            yield np.clip(colors[label] + noise, 0, 255).astype(np.uint8)

    return [pictures(label) for label in range(classes)]
