"""curves.png."""

from pathlib import Path

from shared.process.files import read_json_lines


def draw_curves(metrics: Path, chosen: str) -> None:
    """Loss, scores of the validation, learning rate and throughput over steps, from a
    metrics.jsonl, beside it.

    Args:
        chosen: the metric by which the best weights are chosen.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not metrics.exists():
        return
    rows = [*read_json_lines(metrics)]
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
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.legend(loc="upper right")  # looking for the best place may warn
    temporary = metrics.with_name(".curves.png")
    with temporary.open("wb") as file:
        figure.savefig(file, dpi=120, format="png")
    temporary.replace(metrics.with_name("curves.png"))
