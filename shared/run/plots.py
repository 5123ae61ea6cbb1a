"""curves.png."""

import json
from pathlib import Path

from shared.process.files import open_regular


def draw_curves(
    metrics: Path, picture: Path, chosen: str = "loss", training: str = "training"
) -> None:
    """Loss, scores of the validation, learning rate and throughput over steps, from a
    metrics.jsonl.

    Args:
        chosen: the metric by which the best weights are chosen.
        training: the name of the training loss, in the legend.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not metrics.exists():
        return
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    keys = set().union(*rows)
    unit = next((key.split("_")[1] for key in keys if key.startswith("processed_")), "tokens")
    titles: dict[str, dict[str, str | None]] = {
        "loss": {"loss": training, "eval_loss": "validation"}
    }
    scores = {
        "eval_accuracy": "accuracy",
        "eval_map": "mean average precision",
        "eval_spearman": "rank correlation",
    }
    if chosen != "loss":  # which has its panel
        scores.setdefault(f"eval_{chosen}", chosen)
    for name, title in scores.items():
        if name in keys:
            titles[f"validation {title}"] = {name: None}
    if "rewards/chosen" in keys:
        titles["rewards"] = {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}
    titles["learning rate"] = {"learning_rate": None}
    titles[f"{unit} per second"] = {
        f"processed_{unit}_per_second": "processed",
        f"trained_{unit}_per_second": "trained",
    }
    figure = Figure(figsize=(4 * len(titles), 3.6), layout="constrained")
    panels = figure.subplots(1, len(titles))
    for panel, (title, labels) in zip(panels, titles.items(), strict=True):
        for key, label in labels.items():
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if points:
                panel.plot(
                    *zip(*points, strict=True),
                    label=label,
                    marker="o" if len(points) < 30 else None,
                    markersize=3,
                )
        panel.set(title=title, xlabel="optimizer step")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        if len(labels) > 1 and panel.lines:
            panel.legend(loc="upper right")  # looking for the best place may warn
    temporary = picture.with_name(".curves.png")
    with open_regular(temporary, "wb") as file:
        figure.savefig(file, dpi=120)  # a PNG
    temporary.replace(picture)
