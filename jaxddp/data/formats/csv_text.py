"""Functions that the readers of CSV files share: rows of named columns, and errors that name file and line."""

import csv
from collections.abc import Iterable, Iterator, Sequence

from jaxddp.core.errors import InputError
from jaxddp.core.phases import reached
from jaxddp.core.wording import show
from jaxddp.data.faults import Refuse, index_of_column, raise_fault
from jaxddp.data.storage.data_root import TextFile

_ROWS_BETWEEN_REPORTS = 10_000


def csv_rows(file: TextFile, columns: Sequence[str], refuse: Refuse = raise_fault) -> Iterator[list]:
    """Yield [line number, *fields of the named columns] for every row that is neither blank nor rejected.

    Raises: InputError if the file or a column is missing.
    """
    with file.text(newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            header = [name.strip() for name in next(reader, ())]
            check_utf8(header, file, 1)
            places = _places(file, header, columns)
            for number, row in enumerate(reader):
                if number % _ROWS_BETWEEN_REPORTS == 0:
                    reached(number)
                try:
                    check_utf8(row, file, reader.line_num)
                    if len(row) == len(header):
                        yield [reader.line_num, *[row[place] for place in places]]
                    elif row:
                        raise InputError(
                            f"{file}:{reader.line_num}: {len(row)} of {len(header)} fields in {show(','.join(row))}; "
                            f"write {','.join(header)}"
                        )
                except InputError as error:
                    refuse(str(error))
        except csv.Error as error:
            refuse(f"{file}:{reader.line_num}: {error}; correct the quotes of this row")


def _places(file: TextFile, header: Sequence[str], columns: Sequence[str]) -> list[int]:
    if not header:
        raise InputError(f"{file}: no header line; give the columns {','.join(columns)}")
    places = {name: index_of_column(header, name, f"{file}:1") for name in columns}
    for name, place in places.items():
        if place is None:
            actual = show(",".join(header))
            raise InputError(f"{file}:1: no column {name}, found {actual}; give the columns {','.join(columns)}")
    return [place for place in places.values() if place is not None]


def check_utf8(texts: Iterable[str], file: TextFile, line: int) -> None:
    """Check that a line is UTF-8. `TextFile.text` has decoded other bytes to lone surrogates. Raises: InputError."""
    for text in texts:
        if text.isascii():
            continue
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f"{file}:{line}: not UTF-8; save the file as UTF-8") from None
