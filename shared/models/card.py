"""The model card."""

from __future__ import annotations

from typing import Any

import yaml

from shared.process.printing import redact


def model_card(
    title: str, data: str, results: dict[str, float], settings: dict[str, Any], *, load: str, **front: str
) -> str:
    """A model card: what it was trained on and how, with its results.

    Secrets in it are masked: cards are made to be published.

    Args:
        settings: in YAML's types.
        load: the line of Python that loads it.
        front: metadata for the Hub.
    """
    front = {"library_name": "transformers", **front}
    lines = [
        "---",
        *(f"{k}: {v}" for k, v in front.items()),
        "---",
        "",
        f"# {title}",
        "",
        f"Data: {data}",
        "",
        "```python",
        load,
        "```",
        "",
        "## Results",
        "",
    ]
    lines += ["| metric | value |", "|---|---|", *(f"| {k} | {v:.4f} |" for k, v in results.items())]
    given = yaml.safe_dump(redact({k: v for k, v in settings.items() if v is not None}), sort_keys=False, allow_unicode=True)
    lines += ["", "## Settings", "", f"```yaml\n{given}```", ""]
    return redact("\n".join(lines))
