"""curves.png."""

from pathlib import Path

from shared.process.files import read_json_lines


def draw_curves(metrics: Path, chosen: str) -> None:
    """Loss, the chosen metric and learning rate over steps, from a metrics.jsonl, beside it.

    Args:
        chosen: the metric by which the best weights are chosen.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not metrics.exists():
        return
    rows = [*read_json_lines(metrics)]
    panels = {"loss": ["loss", "eval_loss"], "learning rate": ["learning_rate"]}
    if chosen not in ("loss", "none"):
        panels[chosen] = [f"eval_{chosen}"]
    figure = Figure(figsize=(4 * len(panels), 3.6), layout="constrained")
    for place, (title, names) in enumerate(panels.items(), 1):
        panel = figure.add_subplot(1, len(panels), place)
        for name in names:
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            steps = [step for step, _ in points]
            panel.plot(steps, [value for _, value in points], label=name, marker=".")
        panel.set(title=title, xlabel="optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.legend(loc="upper right")  # looking for the best place may warn
    figure.savefig(metrics.with_name("curves.png"), dpi=120)
