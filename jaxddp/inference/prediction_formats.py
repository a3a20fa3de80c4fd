"""Formats of prediction files: CSV, JSON lines and Parquet with a row for each image, and Kaggle's submission file."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from jaxddp.core.errors import InputError
from jaxddp.core.wording import choices, not_installed
from jaxddp.data.images.header import parse_header
from jaxddp.data.source import Table
from jaxddp.inference.predictions import OutputRow

Item = TypeVar("Item")
PredictionFormat = Literal["csv", "jsonl", "parquet", "kaggle"]
_AT_ONCE = 4096
_THREADS = 16


def format_of(out: Path) -> PredictionFormat:
    """Return the format of a file from the suffix of its name. Raises: InputError if no format has this suffix."""
    names = get_args(PredictionFormat)[:3]
    form = next((name for name in names if out.suffix.lower() == f".{name}"), None)
    if form is None:
        raise InputError(f"{out}: its extension names no format; {choices(out.suffix[1:], names)}, or give --format")
    return form


def check(form: PredictionFormat) -> None:
    """Raise `InputError` if a package that the format needs is not installed."""
    if form == "parquet":
        _parquet_library()


def content(form: PredictionFormat, columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    """Yield the bytes of the file in parts. `rows` has a row for each image of the source, in order."""
    write: dict[PredictionFormat, Callable[[list[str], Iterable[OutputRow], Table], Iterator[bytes]]] = {
        "csv": _csv,
        "jsonl": _json_lines,
        "parquet": _parquet,
        "kaggle": _kaggle,
    }
    return write[form](columns, rows, source)


def _csv(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    yield _csv_lines([columns])
    for some in _blocks(rows):
        yield _csv_lines([row[column] for column in columns] for row in some)


def _csv_lines(rows: Iterable[Iterable[object]]) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _json_lines(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    return ((json.dumps(row, ensure_ascii=False) + "\n").encode() for row in rows)


def _parquet(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    pyarrow, parquet = _parquet_library()
    kinds = {"probability": pyarrow.float32()}
    schema = pyarrow.schema([(name, kinds.get(name.split("_")[0], pyarrow.string())) for name in columns])
    file = io.BytesIO()
    with parquet.ParquetWriter(file, schema) as writer:
        for some in _blocks(rows):
            writer.write_table(pyarrow.Table.from_pylist(list(some), schema=schema))
    yield file.getvalue()


def _parquet_library() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise InputError(f"format=parquet: {not_installed('pyarrow', 'parquet')}") from None
    return pyarrow, parquet


def _kaggle(columns: list[str], rows: Iterable[OutputRow], source: Table) -> Iterator[bytes]:
    """Yield the submission file of the ImageNet localization challenge. Every box is the whole image.

    An unusable image has an empty prediction.
    """
    classes = [column for column in columns if column.startswith("class")]

    def line(index: int, row: OutputRow) -> tuple[object, str]:
        if row["error"] is not None:
            return row["id"], ""
        header = parse_header(source.read(index))
        box = f"0 0 {header.width - 1} {header.height - 1}"
        return row["id"], " ".join(f"{row[column]} {box}" for column in classes)

    yield _csv_lines([("ImageId", "PredictionString")])
    with ThreadPoolExecutor(_THREADS) as pool:
        for some in _blocks(enumerate(rows)):
            yield _csv_lines(pool.map(line, *zip(*some, strict=True)))


def _blocks(items: Iterable[Item]) -> Iterator[list[Item]]:
    iterator = iter(items)
    while block := list(islice(iterator, _AT_ONCE)):
        yield block
