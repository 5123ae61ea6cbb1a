"""The report as a page that needs nothing from elsewhere."""

import base64
import io
from collections.abc import Sequence
from html import escape
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from shared.data.order import EvenSubset

EXAMPLES = 10
BARS = 100
HEAD = """<!doctype html><meta charset=utf-8><title>Data</title><style>body{font:15px sans-serif;
max-width:60em;margin:2em auto;padding:0 1em;color-scheme:light dark} mark{background:#fc86}
pre{white-space:pre-wrap;border-left:3px solid #8888;padding-left:1em}</style><h1>Data</h1>"""


def draw(file: Path, lines: Sequence[str], total: Any, data: Any, tokenizer: Any) -> None:
    """Write the page.

    Args:
        lines: of the report.
        total: see `report.Part`.
        data: the samples to train on.
        tokenizer: of their ids.
    """
    said = escape("\n".join(lines))
    body = [HEAD, f"<pre>{said}</pre>", histogram(total.unit, total.lengths)]
    if hasattr(data, "targets"):
        body.append(histogram("tokens that are learned", data.targets))
    if "classes" in total.numbers:
        body.append(bars("classes", total.numbers["classes"]))
    for number in EvenSubset(data, EXAMPLES).indices.tolist():
        body.append(f"<pre>{example(data, number, tokenizer)}</pre>")
    file.write_text("".join(body), encoding="utf-8")


def histogram(title: str, values: np.ndarray) -> str:
    counts, edges = np.histogram(values, min(30, len(np.unique(values))))
    names = [f"{low:.0f} to {high:.0f}" for low, high in pairwise(edges)]
    return bars(title, dict(zip(names, counts.tolist(), strict=True)))


def bars(title: str, counts: dict[str, int]) -> str:
    """A picture with a bar for each of the first counts."""
    most = max(1, *counts.values())
    shown = [*counts.items()][:BARS]
    rows = [
        f"<text x=130 y={20 * n + 14} text-anchor=end>{escape(name[:18])}</text><rect x=135 "
        f"y={20 * n} height=17 width={500 * count // most + 1} /><text x={640} y={20 * n + 14}>"
        f"{count:,}</text>"
        for n, (name, count) in enumerate(shown)
    ]
    svg = f"<svg width=750 height={20 * len(rows)} font-size=12 fill=currentColor>"
    return f"<h2>{escape(title)}</h2>{svg}{''.join(rows)}</svg>"


def example(data: Any, number: int, tokenizer: Any) -> str:
    """A sample, as HTML: what is learned is marked."""
    sample = data[number]
    if hasattr(data, "labels") and not hasattr(data, "tokens"):
        labels, value = data.labels, np.asarray(sample["labels"])
        chosen = np.flatnonzero(value) if value.ndim else [int(value)]
        learned = f"{value}"
        if labels.problem_type != "regression":
            learned = ", ".join(labels.classes[n] for n in chosen)
        about = f"{escape(str(data.shown(number)))}\n<mark>{escape(learned)}</mark>"
        if "image" not in sample:
            return about
        file = io.BytesIO()
        sample["image"].resize((128, 128)).save(file, "PNG")
        encoded = base64.b64encode(file.getvalue()).decode()
        return f"<img src='data:image/png;base64,{encoded}'>\n{about}"
    if not hasattr(data, "tokens"):
        return escape(tokenizer.decode(sample["input_ids"][:300]))
    groups = groupby(zip(*data.tokens(number), strict=True), itemgetter(1))
    texts = [(learned, [int(token) for token, _ in group]) for learned, group in groups]
    marks = ("{}", "<mark>{}</mark>")
    return "".join(marks[bool(on)].format(escape(tokenizer.decode(ids))) for on, ids in texts)
