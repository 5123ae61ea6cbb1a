"""The curves of docs/loss_looks_wrong.md, from small runs: five minutes on two cores.

    python docs/site/losses.py --runs runs/losses  # runs what is missing there, then draws

One run is right; each other one differs from it by what its title says.
"""

import argparse
import inspect
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from pictures import DARK, LIGHT, OUT, ROOT, Theme, points, styled
from PIL import Image
from sklearn.datasets import load_digits

SMALL = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=4"
TEXT = f"--config_overrides {SMALL},intermediate_size=128 --vocab_size 1024 --seq_length 128"
TEXT += " --max_steps 120 --eval_samples 16 --global_batch_size 8 --per_device_train_batch_size 8"
# title, template, its flags; the first is the one that is right
RUNS = {
    "as it should be": ("pretrain", TEXT),
    "rate too high": ("pretrain", TEXT + " --learning_rate 0.5"),
    "rate too low": ("pretrain", TEXT + " --learning_rate 1e-5"),
    "a batch of one sequence": ("pretrain", TEXT.replace("size 8", "size 1")),
    "16 KB of text, again and again": (
        "pretrain",
        TEXT + " --train_file {runs}/few.txt --validation_file {runs}/others.txt",
    ),
    "labels shuffled": (
        "image_classification",
        "--num_train_epochs 30 --image_size 32 --train_dir {runs}/shuffled",
    ),
}


def shuffled_digits(folder: Path) -> None:
    """500 handwritten digits of scikit-learn, to train and to validate on, with labels drawn at
    random.
    """
    images, labels = load_digits(return_X_y=True)
    labels = np.random.default_rng(0).permutation(labels)
    for number in range(1000):
        part = folder / ("train" if number < 500 else "val") / str(labels[number])
        part.mkdir(parents=True, exist_ok=True)
        pixels = (images[number].reshape(8, 8) * 15).astype(np.uint8)
        Image.fromarray(pixels).convert("RGB").save(part / f"{number}.png")


def few_texts(folder: Path) -> None:
    """16 KB of Python's library to train on, and 64 KB of another module to validate on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "few.txt").write_text(inspect.getsource(argparse)[:16_000])
    (folder / "others.txt").write_text(inspect.getsource(subprocess)[:64_000])


def run(runs: Path, title: str) -> Path:
    """Train unless that was done."""
    template, flags = RUNS[title]
    folder = runs / title.replace(" ", "_").replace(",", "")
    if not (folder / "exit.json").exists():
        command = "accelerate launch --config_file accelerate_configs/cpu.yaml"
        command += f" templates/{template}.py --output_dir {folder} --report_to none"
        command += " --eval_steps 0.1 --logging_steps 3 "
        words = (command + flags.format(runs=runs)).split()
        subprocess.run(words, cwd=ROOT, check=True, env=os.environ, stdout=sys.stderr)
    return folder


def draw(runs: Path, theme: Theme) -> None:
    with styled(theme):
        figure = Figure(figsize=(8.8, 4.6), layout="constrained")
        panels = figure.subplots(2, 3).flat
        for panel, title in zip(panels, RUNS, strict=True):
            folder = run(runs, title)
            for key, colour, label in (
                ("loss", theme.first, "training"),
                ("eval_loss", theme.second, "validation"),
            ):
                panel.plot(*points(folder, key), color=colour, linewidth=1.6, label=label)
            panel.set_title(title, loc="left")
            panel.grid(axis="y", alpha=0.25)
            panel.spines[["top", "right"]].set_visible(False)
        figure.axes[0].legend(frameon=False)
        figure.savefig(OUT / f"losses-{theme.name}.png", dpi=180, pil_kwargs={"optimize": True})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "losses")
    where = parser.parse_args().runs.resolve()
    if not (where / "shuffled").exists():
        shuffled_digits(where / "shuffled")
        few_texts(where)
    for theme in (LIGHT, DARK):
        draw(where, theme)
