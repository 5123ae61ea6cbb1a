"""What is printed: lines on the main rank, without secrets and without what moves the cursor."""

import logging
import re
import sys
import textwrap
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from shared.process import ranks
from shared.process.errors import shown
from shared.process.redaction import masked, redact


def quieten_imports() -> None:
    """Keep from the console what imports of libraries print and a user cannot act on. Call before
    them.
    """
    # how torchao registers its types; a package that is not needed
    for name in ("torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
        logging.getLogger(name).setLevel(logging.ERROR)


def label(name: str) -> str:
    """A name from outside as logs, progress bars and reports show it. It depends on the name
    alone.
    """
    return shown(masked(name))


def indented(text: str) -> list[str]:
    """The lines of a text from outside, none of which looks like a line of the log."""
    return [f"  {line}" for line in redact(text).expandtabs().split("\n")]


def collapsed(text: str) -> str:
    """A text in which a special token that is repeated, as those of an image are, stands once with
    its count.
    """
    return re.sub(
        r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\1{3,}",
        lambda found: f"{found[1]} x {len(found[0]) // len(found[1])}",
        text,
    )


def excerpt(lines: Sequence[str], most: int = 12) -> list[str]:
    """The beginning and the end of many lines, and of long ones: what fits a console."""
    half = most // 2
    if len(lines) > most + 1:
        left_out = f"  ... {len(lines) - most} more lines ..."
        lines = [*lines[:half], left_out, *lines[-half:]]
    return [
        line if len(line) <= COLUMNS else f"{line[: COLUMNS - 45]} ... {line[-40:]}"
        for line in lines
    ]


def print_main(*lines: str) -> None:
    """Print on the main rank, above a progress bar if there is one. Each argument is one line,
    whatever it quotes.
    """
    if ranks.is_main_rank():
        from tqdm import tqdm

        tqdm.write("\n".join(shown(redact(line)) for line in lines), file=sys.stderr)
        sys.stderr.flush()


COLUMNS = 100
# notes, while a run is set up
_kept: list[tuple[str, ...]] | None = None


def keep_notes() -> None:
    """From here on `note` keeps its lines until `release_notes`: they follow the summary."""
    global _kept
    _kept = []


def note(*lines: str) -> None:
    """Print a fact about a run on the main rank: after its summary, if that is still to come.

    Args:
        lines: the fact, and what it is about, of which an `excerpt` is printed.
    """
    if _kept is None:
        print_main(*lines[:1], *excerpt(lines[1:]))
    else:
        _kept.append(lines)


def release_notes() -> None:
    """Print the notes that were kept, and each further one at once."""
    global _kept
    notes = _kept
    _kept = None
    for lines in notes or ():
        note(*lines)


def summary(
    title: str, rows: dict[str, Any], *, details: Collection[str] = (), file: Path | None = None
) -> None:
    """Print the settings in force on the main rank, aligned, each in two lines at most; then
    the notes.

    Args:
        rows: those that are None are left out.
        details: names of rows that only `file` gets.
        file: gets everything, uncut. One rank writes it.
    """
    width = max(map(len, rows.keys() - details))
    lines = {name: f"  {name:<{width}}  {row}" for name, row in rows.items() if row is not None}
    if file is not None and ranks.is_main_rank():
        everything = [title, *lines.values(), *(line for lines in _kept or () for line in lines)]
        file.write_text("".join(f"{shown(redact(line))}\n" for line in everything), "utf-8")
    indent = " " * (width + 4)
    wrapper = textwrap.TextWrapper(
        COLUMNS, subsequent_indent=indent, max_lines=2, placeholder=" ..."
    )
    wrapper.break_long_words = wrapper.break_on_hyphens = False  # paths, secrets
    print_main(title)
    for name, line in lines.items():
        if name not in details:
            print_main(*wrapper.wrap(shown(line)))
    release_notes()
