"""What is printed: lines on the main rank, without secrets and without what moves the cursor."""

import logging
import re
import sys
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
    # where DeepSpeed is installed; the summary says what a run is on
    alarm = "Setting accelerator to CPU"
    logging.getLogger("DeepSpeed").addFilter(lambda record: alarm not in record.getMessage())


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


def print_main(*lines: str) -> None:
    """Print on the main rank, above a progress bar if there is one. Each argument is one line,
    whatever it quotes.
    """
    if ranks.is_main_rank():
        from tqdm import tqdm

        tqdm.write("\n".join(shown(redact(line)) for line in lines), file=sys.stderr)
        sys.stderr.flush()


_kept: list[str] | None = None  # notes, while a run is set up


def keep_notes() -> None:
    """From here on `note` keeps its lines until `release_notes`: they follow the summary."""
    global _kept
    _kept = []


def note(*lines: str) -> None:
    """Print on the main rank what is to be known of a run: after its summary, if that is to
    come.
    """
    if _kept is None:
        print_main(*lines)
    else:
        _kept.extend(lines)


def release_notes() -> None:
    """Print the notes that were kept, and each further one at once."""
    global _kept
    lines = _kept
    _kept = None
    if lines:
        print_main(*lines)


def summary(title: str, rows: dict[str, Any]) -> None:
    """Print the settings in force, aligned, on the main rank; then the notes. Rows that are None
    are left out.
    """
    rows = {k: v for k, v in rows.items() if v is not None}
    width = max(map(len, rows))
    print_main(title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()))
    release_notes()
