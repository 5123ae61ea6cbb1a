"""CSV and TSV."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.data.files import name_inside, open_text
from shared.process.errors import ConfigError
from shared.process.printing import note


def read_table(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, record) of a CSV or TSV file. Quoted cells may hold line ends, as in RFC 4180.

    Raises:
        ConfigError: a line that does not fit the header, or a column that is there twice.
    """
    kind = name_inside(path).suffix[1:].upper()
    csv.field_size_limit(2**31 - 1)
    quoting: Any = csv.QUOTE_MINIMAL
    if kind == "TSV" and not _is_quoted(path):
        quoting = csv.QUOTE_NONE
        note(f"{path}: quotes are part of the text, since each line is a record")
    with open_text(path, newline="") as lines:
        # Not strict, an open quote would take all that follows.
        dialect = "excel-tab" if kind == "TSV" else "excel"
        reader = csv.reader(lines, dialect, strict=True, quoting=quoting)
        begins = 1
        try:
            columns: list[str] = next(reader, [])
            if len(set(columns)) < len(columns):  # csv would keep the last one without a word
                raise ConfigError(f"{path}:1: a column is there twice ({', '.join(columns)})")
            if len(columns) == 1 and (wrong := re.search("[;\t,]", columns[0])):
                raise ConfigError(
                    f"{path}:1: {wrong[0]!r} is between the columns: CSV has commas, TSV tabs"
                )
            begins = reader.line_num + 1
            for cells in filter(None, reader):
                if len(cells) != len(columns):
                    raise ConfigError(
                        f"{path}:{reader.line_num}: not as many fields as the header has"
                    )
                first = reader.line_num - sum(value.count("\n") for value in cells)
                yield f"{path}:{first}", dict(zip(columns, cells, strict=True))
                begins = reader.line_num + 1
        except csv.Error as error:
            raise ConfigError(f"{path}:{begins}: not valid {kind} ({error})") from None


def _is_quoted(path: Path) -> bool:
    """Whether quotes around cells fit a TSV file: GLUE's files and most exports know no quotes.

    A cell with tabs and line ends would be lines that an open quote has taken in.
    """
    with open_text(path, newline="") as lines:
        try:
            rows = csv.reader(lines, "excel-tab", strict=True)
            return not any("\t" in cell and "\n" in cell for cells in rows for cell in cells)
        except csv.Error:
            return False
