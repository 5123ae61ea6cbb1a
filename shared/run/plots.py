"""curves.png."""

from pathlib import Path
from typing import Any

from shared.process.files import read_json_lines


def draw_curves(metrics: Path, chosen: str, before: Any = ()) -> None:
    """Loss, scores of the validation, learning rate and throughput over steps, from a
    metrics.jsonl, beside it.

    Args:
        chosen: the metric by which the best weights are chosen.
        before: rows of another run, which this one follows.
    """
    from matplotlib.figure import Figure

    if not metrics.exists():
        return
    rows = [*before, *read_json_lines(metrics)]
    keys = sorted({key for row in rows for key in row})
    panels = {"loss": ["loss", "eval_loss"]}
    if chosen not in ("loss", "none"):
        panels[chosen] = [chosen, f"eval_{chosen}"]
    panels |= {"accuracy": ["eval_accuracy"], "learning rate": ["learning_rate"]}
    panels["throughput"] = [key for key in keys if key.endswith("_per_second")]
    panels = {title: names for title, names in panels.items() if set(names).intersection(keys)}
    figure = Figure(figsize=(4 * max(1, len(panels)), 3.6), layout="constrained")
    for place, (title, names) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(1, len(panels), place)
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                panel.plot(*zip(*points, strict=True), label=name, marker=".")
        panel.set(title=title, xlabel="optimizer step")
        panel.locator_params(axis="x", integer=True)
        panel.grid(alpha=0.3)
        panel.legend(loc="upper right")  # looking for the best place may warn
    temporary = metrics.with_name(".curves.png")
    figure.savefig(temporary, dpi=120)
    temporary.replace(metrics.with_name("curves.png"))
