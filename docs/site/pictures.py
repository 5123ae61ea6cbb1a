"""Pictures of README and docs: what runs leave, drawn from real runs with default settings.

    python benchmarks/quality.py chats --make news  # model and data of lora_finetune.py's
    # runs what is missing there, 30 minutes on two cores
    python docs/site/pictures.py --runs runs/pictures

Each run has the template's defaults; it only logs and evaluates more often, which changes nothing
that is learned. A picture is written twice, for light pages and for dark ones:
docs/pictures/<template>-light.png and -dark.png.
"""

import argparse
import ast
import json
import os
import re
import subprocess
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "pictures"
HELD_OUT = Path("evaluations/test")


@dataclass(frozen=True)
class Theme:
    name: str
    page: str
    text: str
    faint: str
    first: str
    second: str
    right: str  # an answer after training


# Page and text are GitHub's own. The pairs of colours differ in lightness, too, for readers who see
# few colours.
LIGHT = Theme("light", "#ffffff", "#1f2328", "#8c959f", "#0969da", "#d4740b", "#116329")
DARK = Theme("dark", "#0d1117", "#e6edf3", "#6e7681", "#58a6ff", "#f0a35e", "#7ee787")


def run(template: str, folder: Path, news: Path) -> None:
    """Run a template as its demo, or on `news`, with its output in output.txt, unless that was
    done.
    """
    if (folder / "exit.json").exists():
        return
    often = {"image_classification": ("4", "23")}.get(template, ("2", "10"))
    command = ["accelerate", "launch", "--config_file", "accelerate_configs/cpu.yaml"]
    command += [f"templates/{template}.py"]
    command += [
        "--output_dir",
        str(folder),
        "--report_to",
        "none",
        "--logging_steps",
        often[0],
        "--eval_steps",
        often[1],
    ]
    if template == "lora_finetune":  # as in docs/tutorial.md
        command[2:2] = ["--mixed_precision", "bf16"]
        command += ["--num_train_epochs", "2", "--merge_adapter"]
        for flag, name in (
            ("model_name_or_path", "smollm2"),
            ("train_file", "train.jsonl"),
            ("validation_file", "validation.jsonl"),
        ):
            command += [f"--{flag}", str(news / name)]
    print(" ".join(command), flush=True)
    pipes: Any = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "env": os.environ | {"ACCELERATE_USE_CPU": "true"},
    }
    done = subprocess.run(command, cwd=ROOT, text=True, check=False, **pipes)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "output.txt").write_text(done.stdout)
    if done.returncode:
        raise SystemExit(done.stdout)
    if template == "lora_finetune":
        test = ["python", "-m", "shared", "evaluate", str(folder), "--eval_answers", "10"]
        test += ["--test_file", str(news / "test.jsonl"), "--", *command[:7]]
        subprocess.run(test, cwd=ROOT, check=True, env=pipes["env"])


def points(folder: Path, key: str) -> tuple[list[int], list[float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def curve(panel: Any, folder: Path, labels: dict[str, str], theme: Theme, title: str) -> None:
    """Lines of metrics.jsonl, each named at its right end."""
    for (key, label), colour in zip(labels.items(), (theme.first, theme.second), strict=False):
        steps, values = points(folder, key)
        panel.plot(
            steps,
            values,
            color=colour,
            linewidth=2,
            marker="o",
            markersize=0 if len(steps) > 12 else 4,
            label=label,
        )
    panel.set_title(title, loc="left")
    panel.set_xlabel("optimizer step")
    panel.grid(axis="y", alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        panel.legend(frameon=False)


def loss(panel: Any, folder: Path, theme: Theme) -> None:
    curve(panel, folder, {"loss": "training", "eval_loss": "validation"}, theme, "loss")


def written(panel: Any, parts: list[tuple[str, str, str]], limit: int = 66) -> None:
    """Texts under each other: (heading, text, colour)."""
    panel.axis("off")
    y = 1.06
    for heading, text, colour in parts:
        panel.text(0, y, heading, transform=panel.transAxes, va="top", fontsize=8, alpha=0.7)
        lines = [
            line if len(line) <= limit else line[: limit - 1] + "…" for line in text.splitlines()
        ]
        y -= 0.075
        for line in lines:
            panel.text(
                0.01,
                y,
                line,
                transform=panel.transAxes,
                va="top",
                family="DejaVu Sans Mono",
                fontsize=7.5,
                color=colour,
            )
            y -= 0.075
        y -= 0.05


def conversation(figure: Figure, folder: Path, theme: Theme) -> None:
    """The loss, and the first two news items that nobody trained on, with the answers of base and
    adapter.
    """
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    loss(left, folder, theme)
    answered = [
        [json.loads(line) for line in (folder / path).read_text("utf-8").splitlines()]
        for path in (HELD_OUT / "base/answers.jsonl", HELD_OUT / "final/answers.jsonl")
    ]
    parts = []
    for base, tuned in list(zip(*answered, strict=True))[:2]:
        asked = re.split(r"<\|im_start\|>user|<\|im_end\|>", base["prompt"])[2].strip()
        item = asked.split("\n\n", 1)[1]
        first = " ".join(base["answer"].split())
        parts += [
            ("", "\n".join(textwrap.wrap(item, 82)), theme.text),
            ("before training", textwrap.shorten(first, 82, placeholder=" ..."), theme.second),
            ("after training", tuned["answer"], theme.right),
        ]
    written(right, parts, limit=84)


def matrix(panel: Any, folder: Path, theme: Theme, counts: np.ndarray, names: list[str]) -> None:
    colours = LinearSegmentedColormap.from_list("", [theme.page, theme.first])
    share = counts / counts.sum(1, keepdims=True)
    panel.imshow(share, cmap=colours, vmin=0, vmax=1)
    for true, predicted in np.argwhere(counts):
        colour = theme.page if share[true, predicted] > 0.5 else theme.text
        panel.text(
            predicted,
            true,
            counts[true, predicted],
            ha="center",
            va="center",
            fontsize=7,
            color=colour,
        )
    short = max(map(len, names)) < 3
    panel.set_xticks(range(len(names)) if short else [], names if short else None)
    panel.set_yticks(range(len(names)), names)
    panel.tick_params(length=0, labelsize=7.5)
    panel.set_xlabel("predicted" if short else "predicted, in the same order")
    panel.set_ylabel("true")
    panel.spines[:].set_visible(False)


def confusion(folder: Path) -> tuple[np.ndarray, list[str]]:
    """Counts [true, predicted] and the names of the classes, from evaluation.json."""
    report = json.loads((folder / "evaluation.json").read_text())
    names = list(report["classes"])
    counts = np.diag([report["classes"][name]["support"] for name in names])
    for mistake in report["mistakes"]:
        true = names.index(mistake["label"])
        predicted = names.index(mistake["predicted"])
        counts[true, true] -= 1
        counts[true, predicted] += 1
    return counts, names


def images(figure: Figure, folder: Path, theme: Theme) -> None:
    left, middle, right = figure.subfigures(1, 3, width_ratios=(1, 1.1, 1))
    panel = left.subplots()
    curve(panel, folder, {"eval_accuracy": ""}, theme, "validation accuracy")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    matrix(middle.subplots(), folder, theme, *confusion(folder))
    mistakes = json.loads((folder / "evaluation.json").read_text())["mistakes"][:6]
    right.suptitle("the most confident mistakes", fontsize=9, x=0.02, ha="left")
    for panel, mistake in zip(right.subplots(2, 3).flat, mistakes + [None] * 6, strict=False):
        panel.axis("off")
        if mistake:
            panel.imshow(Image.open(mistake["image"]).convert("L"), cmap="gray")
            panel.set_title(f"{mistake['label']}, not {mistake['predicted']}", fontsize=7.5, pad=3)


def sampled(folder: Path) -> list[str]:
    """The sample texts of a pretraining, in order, from what the run printed."""
    lines = (folder / "output.txt").read_text().splitlines()
    return [ast.literal_eval(line.strip()) for line in lines if line.startswith(("  '", '  "'))]


def rewarded(figure: Figure, folder: Path, theme: Theme) -> None:
    left, middle, right = figure.subplots(1, 3)
    labels = {"reward": "sampled", "eval_reward": "validation"}
    curve(left, folder, labels, theme, "mean reward of an answer")
    curve(middle, folder, {"eval_correct": ""}, theme, "right answers, validation")
    middle.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    curve(right, folder, {"entropy": ""}, theme, "entropy of a token")


def pretraining(figure: Figure, folder: Path, theme: Theme) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
    loss(left, folder, theme)
    first, *_, last = sampled(folder)
    before, after = ("\n".join(text.splitlines()[:9]) for text in (first, last))
    short = "\n".join(line for line in before.splitlines()[:3])
    written(
        right,
        [
            ("text before training", short, theme.second),
            ("text after training", after, theme.right),
        ],
    )


DRAWN: dict[str, Callable[[Figure, Path, Theme], None]] = {
    "lora_finetune": conversation,
    "grpo": rewarded,
    "pretrain": pretraining,
    "image_classification": images,
}


def styled(theme: Theme) -> Any:
    """A context in which figures have the theme's colours."""
    return rc_context(
        {
            **dict.fromkeys(
                ("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.page
            ),
            **dict.fromkeys(
                ("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"),
                theme.text,
            ),
            "axes.edgecolor": theme.faint,
            "grid.color": theme.faint,
            "font.size": 8.5,
            "axes.titlesize": 9,
        }
    )


def draw(template: str, folder: Path, theme: Theme) -> None:
    with styled(theme):
        figure = Figure(figsize=(8.8, 2.7), layout="constrained")
        DRAWN[template](figure, folder, theme)
        figure.savefig(OUT / f"{template}-{theme.name}.png", dpi=180, pil_kwargs={"optimize": True})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "pictures", help="where the runs are, or go"
    )
    parser.add_argument("--templates", nargs="+", default=list(DRAWN), choices=list(DRAWN))
    parser.add_argument(
        "--news", type=Path, default=ROOT / "news", help="the folder of quality.py chats --make"
    )
    given = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    for template in given.templates:
        folder = given.runs.resolve() / template
        run(template, folder, given.news.resolve())
        for theme in (LIGHT, DARK):
            draw(template, folder, theme)


if __name__ == "__main__":
    main()
