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
HEAD = """<!doctype html><meta charset=utf-8><meta name=viewport content=width=device-width>
<title>Data</title><style>:root{color-scheme:light dark}
body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
p,pre{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.5 monospace}
p{margin:0;padding-left:21ch;text-indent:-21ch} pre{border-left:3px solid #8888;padding-left:1em}
mark{background:#fc86;color:inherit} img{display:block;height:8em;max-width:100%;
object-fit:contain;object-position:left;image-rendering:pixelated}
table{width:100%;border-spacing:.5em 0} th{font-weight:normal;overflow-wrap:anywhere}
th{min-width:7em} th,td:last-child{text-align:right;width:1%} hr{height:1em;margin:0;border:0;
background:#48c}</style><h1>Data</h1>"""


def draw(file: Path, lines: Sequence[str], total: Any, data: Any, tokenizer: Any) -> None:
    """Write the page.

    Args:
        lines: of the report.
        total: see `report.Part`.
        data: the samples to train on.
        tokenizer: of their ids.
    """
    body = [HEAD, *(f"<p>{escape(line)}" for line in lines), histogram(total.unit, total.lengths)]
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
    """A bar for each of the first counts."""
    most = max(1, *counts.values())
    rows = [
        f"<tr><th>{escape(name)}<td><hr style=width:{100 * count / most:.1f}%><td>{count:,}"
        for name, count in [*counts.items()][:BARS]
    ]
    return f"<h2>{escape(title)}</h2><table>{''.join(rows)}</table>"


def example(data: Any, number: int, tokenizer: Any) -> str:
    """A sample, as HTML: what is learned is marked."""
    sample = data[number]
    if hasattr(data, "labels") and not hasattr(data, "tokens"):
        labels, value = data.labels, np.asarray(sample["labels"])
        chosen = np.flatnonzero(value) if value.ndim else [int(value)]
        learned = f"{value}"
        if labels.problem_type != "regression":
            learned = ", ".join(labels.classes[n] for n in chosen)
        lines = "\n".join(map(str, data.shown(number).values()))
        about = f"{escape(lines)}\n<mark>{escape(learned)}</mark>"
        if "image" not in sample:
            return about
        file = io.BytesIO()
        sample["image"].thumbnail((256, 256))
        sample["image"].save(file, "PNG")
        encoded = base64.b64encode(file.getvalue()).decode()
        return f"<img src='data:image/png;base64,{encoded}'>\n{about}"
    if not hasattr(data, "tokens"):
        return escape(tokenizer.decode(sample["input_ids"][:300]))
    groups = groupby(zip(*data.tokens(number), strict=True), itemgetter(1))
    texts = [(learned, [int(token) for token, _ in group]) for learned, group in groups]
    marks = ("{}", "<mark>{}</mark>")
    return "".join(marks[bool(on)].format(escape(tokenizer.decode(ids))) for on, ids in texts)
