"""No damaged image is trained on: training, data on the devices, evaluation and packing reject it by its name."""

import contextlib
import io
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.damage import HEADERS, STRETCHES, resized
from support.ilsvrc import write_tree
from support.images import PNGS, chunks, encode, picture, png

from jaxddp.cli import main
from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.curate import PackOptions, pack
from jaxddp.data.formats.ilsvrc import train_solutions
from jaxddp.data.order import EvalOrder, SampleOrder
from jaxddp.data.source import Labels, Substitutes
from jaxddp.data.table import ExampleTable

INTACT = encode(picture(170, 210), quality=90)
DAMAGED = {
    kind: (HEADERS | STRETCHES)[kind](INTACT, random.Random(3))
    for kind in (
        *("one row of blocks less", "arithmetic codes", "swapped Huffman tables"),
        *("1 KiB deleted", "512 bytes inserted", "256 bytes zeroed"),
    )
}
DAMAGED |= {
    "height 0": resized(INTACT, 0, 210),
    "no palette": png([part for part in chunks(PNGS["palette"]()) if part[0] != b"PLTE"]),
}
BAD_ROW = 2
DATA = DataConfig(image_size=16, resize=16)


@pytest.fixture
def table(tmp_path: Path) -> ExampleTable:
    return train_solutions(write_tree(tmp_path / "tree", classes=2, images=4, val=2, size=20))


@pytest.fixture(scope="module")
def messages_by_reader(tmp_path_factory: pytest.TempPathFactory) -> tuple[ExampleTable, dict[str, dict[int, str]]]:
    """Return a table that begins with every kind of damaged image, and each reader's messages by row."""
    folder = tmp_path_factory.mktemp("all")
    table = train_solutions(write_tree(folder / "tree", classes=2, images=8, val=2, size=20))
    for row, content in enumerate(DAMAGED.values()):
        Path(table.name(row)).write_bytes(content)
    size = len(table)
    all_rows, whole = EvalOrder(size, size), replace(DATA, crop="whole")
    messages: dict[str, dict[int, str]] = {}
    for reader, batches in {
        "training": lambda faults: table.train_batches(SampleOrder(size, size, 0), DATA, range(1), substitutes=faults),
        "data on the devices": lambda faults: table.train_batches(all_rows, whole, range(1), substitutes=faults),
        "evaluation": lambda faults: table.eval_batches(all_rows, DATA, omissions=faults),
    }.items():
        omissions = Substitutes(Labels(np.zeros(size, np.int32), (), ()))
        list(batches(omissions))
        messages[reader] = omissions.faults
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(["data", "check", str(folder / "tree"), "--manifest", str(folder / "m.jsonl")])
    lines = [line for line in out.getvalue().splitlines() if line.startswith("/")]
    rows = {table.name(row): row for row in range(size)}
    messages["data check"] = {rows[line.partition(": ")[0]]: line for line in lines}
    return table, messages


@pytest.mark.slow
def test_every_reader_rejects_each_damaged_image_by_name(messages_by_reader, tmp_path: Path):
    table, messages = messages_by_reader
    assert all(sorted(faults) == [*range(len(DAMAGED))] for faults in messages.values())
    for row in range(len(DAMAGED)):
        for line in (faults[row] for faults in messages.values()):
            assert line.startswith(f"{table.name(row)}: ") and "\n" not in line and "object at" not in line
        with pytest.raises(InputError, match=f"^{table.name(row)}: "):
            pack({"train": table.rows(np.array([row]))}, tmp_path / "packed", PackOptions())
        assert not (tmp_path / "packed").exists()


def test_images_with_few_leftover_bytes_are_trained_on_and_noted_by_data_check(
    table: ExampleTable, tmp_path: Path, capfd
):
    file = Path(table.name(BAD_ROW))
    file.write_bytes(file.read_bytes()[:-2] + bytes(3) + b"\xff\xd9")
    next(table.train_batches(SampleOrder(8, 8, seed=0), DATA, range(1)))
    assert main(["data", "check", str(tmp_path / "tree"), "--manifest", str(tmp_path / "m.jsonl")]) == 0
    assert "train: note: bytes left over: 1" in capfd.readouterr().out.splitlines()
    assert "bytes left over: 3 behind the last pixel" in (tmp_path / "m.jsonl").read_text()
