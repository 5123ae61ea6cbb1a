"""The model card."""

from typing import Any

import yaml

from shared.process.redaction import redact


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
    metadata = "\n".join(f"{k}: {v}" for k, v in {"library_name": "transformers", **front}.items())
    shown = {name: str(value) if isinstance(value, int) else f"{value:.4f}" for name, value in results.items()}
    rows = "\n".join(["| metric | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in shown.items())])
    given = yaml.safe_dump(redact({k: v for k, v in settings.items() if v is not None}), sort_keys=False, allow_unicode=True)
    return redact(
        f"---\n{metadata}\n---\n\n# {title}\n\nData: {data}\n\n```python\n{load}\n```\n\n"
        f"## Results\n\n{rows}\n\n## Settings\n\n```yaml\n{given}```\n"
    )
