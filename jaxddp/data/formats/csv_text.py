"""What the readers of CSV files share: rows by the names of columns, and errors that name file and line."""

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxddp.data.storage.home import TextFile
from jaxddp.errors import InputError
from jaxddp.wording import show


def csv_rows(file: TextFile, columns: Sequence[str]) -> Iterator[list]:
    """Yields [line, *fields of the named columns] for every row that is not blank. Raises: InputError."""
    with errors_of_text(file), file.text(newline="") as text:
        reader = csv.reader(text, strict=True)
        try:
            header = [name.strip() for name in next(reader, ())]
            places = _places(file, header, columns)
            for row in reader:
                if len(row) == len(header):
                    yield [reader.line_num, *[row[place] for place in places]]
                elif row:
                    raise InputError(
                        f"{file}:{reader.line_num}: {len(row)} of {len(header)} fields in {show(','.join(row))}; "
                        f"write {','.join(header)}"
                    )
        except csv.Error as error:
            raise InputError(f"{file}:{reader.line_num}: {error}; correct the quotes of this row") from None


def _places(file: TextFile, header: Sequence[str], columns: Sequence[str]) -> list[int]:
    if not header:
        raise InputError(f"{file}: no header line; give the columns {','.join(columns)}")
    for name in columns:
        if name not in header:
            found = show(",".join(header))
            raise InputError(f"{file}:1: no column {name}, found {found}; give the columns {','.join(columns)}")
    return [header.index(name) for name in columns]


@contextmanager
def errors_of_text(file: TextFile) -> Iterator[None]:
    """Turns what can go wrong in reading a text file into an `InputError` of one line."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{file}: no such file{file.hint()}") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read ({error.strerror}); give a readable text file") from None
    except UnicodeDecodeError:
        raise InputError(f"{file}:{_undecodable_line(file)}: not UTF-8; save the file as UTF-8") from None


def _undecodable_line(file: TextFile) -> int:
    # The decoder counts bytes from the start of a block, so the line has to be searched for.
    with file.open() as content:
        for line, one in enumerate(content, 1):
            try:
                one.decode()
            except UnicodeDecodeError:
                return line
    return 1
