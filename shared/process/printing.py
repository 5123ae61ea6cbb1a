"""What is printed: lines on the main rank, without secrets and without what moves the cursor."""

import sys
from typing import Any

from shared.process import ranks
from shared.process.errors import shown
from shared.process.redaction import masked, redact


def label(name: str) -> str:
    """A name from outside as logs, progress bars and reports show it. It depends on the name alone."""
    return shown(masked(name))


def indented(text: str) -> list[str]:
    """The lines of a text from outside, none of which looks like a line of the log."""
    return [f"  {line}" for line in redact(text).expandtabs().split("\n")]


def print_main(*lines: str) -> None:
    """Print on the main rank, above a progress bar if there is one. Each argument is one line, whatever it quotes."""
    if ranks.is_main_rank():
        from tqdm import tqdm

        tqdm.write("\n".join(shown(redact(line)) for line in lines), file=sys.stderr)
        sys.stderr.flush()


def summary(title: str, rows: dict[str, Any]) -> None:
    """Print the settings in force, one aligned line each, on the main rank. Rows that are None are left out."""
    rows = {k: v for k, v in rows.items() if v is not None}
    width = max(map(len, rows))
    print_main(title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()))
