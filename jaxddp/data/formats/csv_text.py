"""Functions that the readers of CSV files share: rows of named columns, and errors that name file and line."""

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from jaxddp.core.errors import InputError
from jaxddp.core.phases import reached
from jaxddp.core.wording import show
from jaxddp.data.faults import Refuse, index_of_column, raise_fault
from jaxddp.data.storage.data_root import TextFile

_ROWS_BETWEEN_REPORTS = 10_000
_DELIMITERS = ",;\t"


def csv_rows(file: TextFile, columns: Sequence[Sequence[str]], refuse: Refuse = raise_fault) -> Iterator[list]:
    """Yield [line number, *fields of the columns] for every row that is neither blank nor rejected.

    Commas, semicolons or tabs separate the fields: the first of these with which the header has the columns.

    Args:
        columns: the names that each column may have, in any case; the first name that the header has is used.

    Raises: InputError if the file or a column is missing.
    """
    with file.text(newline="") as text:
        first = text.readline()
        delimiter = _delimiter(first, columns)
        reader = csv.reader(itertools.chain([first], text), delimiter=delimiter, strict=True)
        try:
            header = [name.strip() for name in next(reader, ())]
            check_utf8(header, file, 1)
            places = _places(file, header, columns, delimiter)
            for number, row in enumerate(reader):
                if number % _ROWS_BETWEEN_REPORTS == 0:
                    reached(number)
                try:
                    check_utf8(row, file, reader.line_num)
                    if len(row) == len(header):
                        yield [reader.line_num, *[row[place] for place in places]]
                    elif row:
                        raise InputError(
                            f"{file}:{reader.line_num}: {len(row)} of {len(header)} fields in "
                            f"{show(delimiter.join(row))}; write {delimiter.join(header)}"
                        )
                except InputError as error:
                    refuse(str(error))
        except csv.Error as error:
            refuse(f"{file}:{reader.line_num}: {error}; correct the quotes of this row")


def _delimiter(header: str, columns: Sequence[Sequence[str]]) -> str:
    """Return the first delimiter with which a header has the columns; if there is none, its most frequent one."""
    for delimiter in _DELIMITERS:
        with suppress(csv.Error):
            found = {_folded(name.strip()) for name in next(csv.reader([header], delimiter=delimiter, strict=True), ())}
            if not any(found.isdisjoint(map(_folded, names)) for names in columns):
                return delimiter
    return max(_DELIMITERS, key=header.count)


def _places(file: TextFile, header: Sequence[str], columns: Sequence[Sequence[str]], delimiter: str) -> list[int]:
    expected = ",".join(names[0] for names in columns)
    if not header:
        raise InputError(f"{file}: no header line; give the columns {expected}")
    folded, places = [*map(_folded, header)], []
    for names in columns:
        place = next((folded.index(name) for name in map(_folded, names) if name in folded), None)
        if place is None:
            also = f" (or {', '.join(names[1:])} for {names[0]})" if names[1:] else ""
            raise InputError(
                f"{file}:1: no column {names[0]}, found {show(delimiter.join(header))}; give the columns "
                f"{expected}{also}"
            )
        index_of_column(header, header[place], f"{file}:1")
        places.append(place)
    return places


def _folded(name: str) -> str:
    return name.casefold().replace("_", "")


def check_utf8(texts: Iterable[str], file: TextFile, line: int) -> None:
    """Check that a line is UTF-8. `TextFile.text` has decoded other bytes to lone surrogates. Raises: InputError."""
    for text in texts:
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{file}:{line}: not UTF-8; save the file as UTF-8") from None
