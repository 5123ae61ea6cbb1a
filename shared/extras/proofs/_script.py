"""Runs a user's script in the process of a probe, which was started in its place."""

import runpy
import sys
from pathlib import Path
from typing import Any


def note_tokenizers() -> list[Any]:
    """A list that gets each tokenizer that is loaded from now on. Before other modules import
    `load_tokenizer`.
    """
    from shared.models import tokenizers

    loaded: list[Any] = []
    load = tokenizers.load_tokenizer

    def noted(*arguments: Any, **named: Any) -> Any:
        loaded.append(load(*arguments, **named))
        return loaded[-1]

    tokenizers.load_tokenizer = noted
    return loaded


def run() -> None:
    """Run the script that the probe's first argument names, with the others, as `__main__`."""
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
