"""CSV and TSV: which delimiter and quotes a file has, and its records."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from shared.data.files import DataFile, name_inside
from shared.process.errors import ConfigError
from shared.process.printing import note

WINDOW = 2**26  # characters of a file that decide on its form
NAMES = {",": "commas", "\t": "tabs"}


@dataclass(frozen=True)
class Form:
    """How lines are cut into cells. `quoted`: quotes around a cell may hold delimiters and line
    ends, as in RFC 4180.
    """

    delimiter: str
    quoted: bool = True
    # a quoted cell holds some, and what follows them does not look like records
    has_line_ends: bool = False

    def reader(self, lines: Iterable[str]) -> Any:
        csv.field_size_limit(2**31 - 1)
        # Not strict, an open quote would take all that follows.
        how: Any = csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
        return csv.reader(lines, strict=True, delimiter=self.delimiter, quoting=how)

    def has_taken_in(self, cells: list[str]) -> bool:
        """Whether the cells span lines that look like records: an unquoted file has a quote at the
        start of a cell.

        A comma may end a line of a text, so that two lines with commas say nothing.
        """
        delimiters = len(cells) - 1
        least = 2 if self.delimiter == "\t" else 3
        lines = re.split("\r\n|\r|\n", self.delimiter.join(cells))
        return (
            len(lines) >= least
            and delimiters > 0
            and all(line.count(self.delimiter) == delimiters for line in lines)
        )


def read_table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) of a CSV or TSV file, whose form `_choose` finds.

    Raises:
        ConfigError: a line that does not fit the form, or a column that is there twice.
    """
    form = _choose(path, path.stat().st_mtime_ns)
    with DataFile(path) as file, file.text(newline="") as lines:
        reader = form.reader(lines)
        try:
            columns: list[str] = next(reader, [])
            # as Excel writes where the comma is decimal
            if len(columns) == 1 and ";" in columns[0]:
                raise ConfigError(
                    f"{path}:1: the columns are separated by semicolons: save it as CSV with commas"
                )
            if len(set(columns)) < len(columns):  # csv would keep the last one without a word
                raise ConfigError(f"{path}:1: a column is there twice ({', '.join(columns)})")
            file.record = 0
            file.line = reader.line_num + 1
            for cells in filter(None, reader):
                if len(cells) != len(columns):
                    raise ConfigError(
                        f"{path}:{reader.line_num}: not as many fields as the header has"
                    )
                first = reader.line_num - sum(value.count("\n") for value in cells)  # it stands on
                if first < reader.line_num and not form.has_line_ends and form.has_taken_in(cells):
                    raise ConfigError(
                        f"{path}:{first}: a quote opens here and closes in line {reader.line_num}, "
                        "and each line between "
                        'looks like a record: write "" for a quote in quotes, or save it as JSON '
                        "lines"
                    )
                yield f"{path}:{first}", dict(zip(columns, cells, strict=True))
                file.record = 0
                file.line = reader.line_num + 1
        except csv.Error as error:
            raise ConfigError(
                f"{path}:{file.line}: not valid {name_inside(path).suffix[1:].upper()} ({error})"
            ) from None


@cache  # a file is looked at once a run
def _choose(path: Path, _version: int) -> Form:
    """The form that reads most of the beginning of a file.

    Its delimiter is that of its name, unless only the other one is in the header. Cells between
    tabs are quoted, or else lines as they stand: GLUE's TSV files and most exports know no quotes.
    """
    with DataFile(path) as file:
        header = file.text().readline(WINDOW)
    usual, other = (",", "\t") if name_inside(path).suffix.lower() == ".csv" else ("\t", ",")
    delimiter = other if usual not in header and other in header else usual
    reach, has_line_ends = _reach(path, Form(delimiter))
    form = Form(delimiter, True, has_line_ends)
    if delimiter == "\t" and reach < float("inf"):
        unquoted = Form(delimiter, quoted=False)
        form = unquoted if _reach(path, unquoted)[0] > reach else form
    if delimiter != usual or not form.quoted:
        quotes = "" if form.quoted else "; quotes are part of the text, since each line is a record"
        note(f"{path}: read with {NAMES[delimiter]} between columns{quotes}")
    return form


def _head(lines: io.TextIOWrapper) -> Iterator[str]:
    left = WINDOW
    for line in lines:
        yield line
        left -= len(line)
        if left < 0:
            return


def _reach(path: Path, form: Form) -> tuple[float, bool]:
    """(the first line that is no record, or infinity; whether cells have line ends) of the
    beginning of a file.
    """
    columns = 0
    begins = 1
    has_line_ends = False
    reach = taken_in = float("inf")
    with DataFile(path) as file, file.text(newline="") as lines:
        reader = form.reader(_head(lines))
        try:
            for cells in reader:
                columns = columns or len(cells)
                if cells and len(cells) != columns:
                    reach = begins
                    break
                if reader.line_num > begins and form.has_taken_in(cells):
                    taken_in = min(taken_in, begins)
                elif reader.line_num > begins:
                    has_line_ends = True
                begins = reader.line_num + 1
                file.record = 0
                file.line = begins
        except csv.Error as error:
            # the window ends in a cell, not the file
            is_cut = "unexpected end" in str(error) and lines.read(1)
            reach = reach if is_cut else begins
    return reach if has_line_ends else min(reach, taken_in), has_line_ends
