r"""Evaluate a finished run on other data, with the metrics of its template.

python -m shared evaluate runs/chat --test_file test.jsonl -- \
    accelerate launch templates/lora_finetune.py
python -m shared evaluate runs/chat --beside runs/other --test_file test.jsonl \
    --eval_answers 200 -- accelerate launch templates/lora_finetune.py
python -m shared evaluate runs/photos --test_dir test/ -- \
    accelerate launch templates/image_classification.py

Compares an adapter with its base and with merged/, and a run with another one. Gives the template
the settings of RUN/config.yaml, the weights in RUN/final, your data to validate on, and no step to
train. What it writes is in RUN/evaluations/<name of your data>/.
"""

import argparse
import math
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from shared.data.files import matching
from shared.models.options import AdapterConfig
from shared.process.errors import CleanExit, ConfigError
from shared.process.files import discard, read_json_lines
from shared.run.checkpoint_files import run_folder

# What says how a new model or adapter is made, what it trains on, how long, and where it is put.
DROPPED = {
    *("train_file", "train_dir", "dataset_name", "dataset_config_name", "train_split_name"),
    *("mix_weights", "streaming", "shuffle_window"),
    *("global_batch_size", "per_device_train_batch_size"),
    "config_name",
    "config_overrides",
    "num_train_epochs",
    "max_tokens",
    "output_dir",
    "resume_from_checkpoint",
    "mirror_to",
    "validation_file",
    "validation_dir",
    "validation_split_name",
    "allow_changed",
    "fail_on",
    "order",
}
PIXEL = b"P6 1 1 255\n\0\0\0"  # an image
KEPT = {"load_in_4bit", "lora_experts"}  # of AdapterConfig
ONLY = {
    "max_steps": 0,
    "torch_compile": False,
    "report_to": "none",
    "show_answers": 0,
    "eval_samples": 10**9,
    "merge_adapter": False,
}


def settings(run: Path, weights: Path, data: dict[str, str], folder: Path) -> dict[str, Any]:
    """Flags for the template to evaluate `weights`: final/ of an adapter or a model, merged/, or
    base (no folder).

    Args:
        data: flags, first the one that names the data.
        folder: what classifiers need in place of the training data is written into it.
    """
    given = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    of_adapters = (
        set(AdapterConfig.__dataclass_fields__) - KEPT if "adapter_name_or_path" in given else set()
    )
    kept = {k: v for k, v in given.items() if k not in DROPPED | of_adapters}
    kept |= {key: value for key, value in ONLY.items() if key in given} | data
    if "problem_type" in given:
        kept |= _classes(weights, given, folder)
    else:
        [kept["train_file"], *_] = data.values()
    if given.get("tag_names") == []:
        from transformers import AutoConfig

        kept["tag_names"] = [*AutoConfig.from_pretrained(weights).id2label.values()]
    if weights.name == "base":  # a new adapter changes nothing yet
        return kept
    name = (
        "adapter_name_or_path"
        if (weights / "adapter_config.json").exists()
        else "model_name_or_path"
    )
    return kept | {name: str(weights)}


def _classes(final: Path, given: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Flags of a classifier for data to train on that have its classes: some samples of each.

    Args:
        given: settings of the run.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(final)
    kind = config.problem_type or given["problem_type"] or "single_label"
    kind = kind.removesuffix("_classification")
    sample: dict[str, Any] = {given.get("image_column") or "image": PIXEL}
    if "text_column" in given:
        sample = {given["text_column"] or "text": "-", given["text_pair_column"] or "text": "-"}
    label = given["label_column"] or "label"
    classes = [*config.id2label.values()]
    samples = [
        sample | {label: {"regression": 0.5, "multi_label": [name]}.get(kind, name)}
        for name in classes * (1 + 64 // len(classes))  # a batch, on any number of ranks
    ]
    (folder / "classes").mkdir()
    pq.write_table(pa.Table.from_pylist(samples), folder / "classes" / "train.parquet")
    return {"dataset_name": [str(folder / "classes")], "problem_type": kind}


def evaluate(
    run: Path, weights: Path, data: dict[str, str], whole: Path, command: list[str]
) -> dict[str, float]:
    """What the template measures of these weights. What it writes is in `whole`, in place of an
    earlier evaluation.
    """
    folder = whole.with_name(f".tmp-{whole.name}")
    # of one that failed: a run that is finished would not start again
    discard(folder)
    folder.mkdir(parents=True)
    flags = settings(run, weights, data, folder) | {"output_dir": str(folder)}
    (folder / "settings.yaml").write_text(yaml.safe_dump(flags), encoding="utf-8")
    print(f"evaluating {weights.name} ...", file=sys.stderr)
    done = subprocess.run(
        [*command, "--config", str(folder / "settings.yaml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        discard(folder)
        cause = re.search(r"^error: (.*)", done.stderr, re.M)
        if cause is None:  # probably a traceback
            print(done.stderr[-4000:], file=sys.stderr)
        raise CleanExit(cause[1] if cause else "the template ended with an error")
    # copies of the weights, since a run ends with them; a curve of one point; both splits are one
    for name in ("final", "adapter", "classes", "curves.png", "data.json"):
        discard(folder / name)
    discard(whole)
    folder.rename(whole)
    values: dict[str, float] = {}
    for row in read_json_lines(whole / "metrics.jsonl"):
        of_row = {k.removeprefix("eval_"): v for k, v in row.items() if k.startswith("eval_")}
        values = of_row or values
    return values


def titles(runs: list[Path]) -> dict[str, Path]:
    """The runs beside base, final and merged, by their folders' names, or by as much of their paths
    as tells them apart.
    """
    whole = [run.resolve() for run in runs]
    names = [run.name for run in whole]
    if len({*names, "base", "final", "merged"}) < len(names) + 3:
        shared = os.path.commonpath([run.parent.parent for run in whole])
        names = [os.path.relpath(run, shared) for run in whole]
    return dict(zip(names, runs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    place = partial(run_folder, with_checkpoints=False)
    parser.add_argument("run", type=place, help="folder of a finished run, or its mirror")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--test_file", help="as --validation_file")
    source.add_argument("--test_dir", help="as --validation_dir, for images in class folders")
    parser.add_argument(
        "command",
        nargs="+",
        help="after --: how the template is launched; flags of the template override the run's",
    )
    parser.add_argument("--eval_answers", help="answer so many prompts, too, and score the answers")
    parser.add_argument(
        "--beside",
        type=place,
        action="append",
        default=[],
        help="folder of another run of this template, to compare with; may be repeated",
    )
    options = parser.parse_args()
    runs = [options.run, *options.beside]
    for run in runs:
        if not (run / "config.yaml").exists() or not (run / "final").is_dir():
            raise ConfigError(
                f"{run}: no finished run, which has config.yaml and final/: "
                "its own command finishes it"
            )
    test = Path(options.test_file or options.test_dir).resolve()
    about = re.sub(r"[*?[\]]+", "all", test.stem)  # of a glob
    matching(test, flag="test_file" if options.test_file else "test_dir")  # refused before loading
    data = {"validation_file" if options.test_file else "validation_dir": str(test)}
    if options.eval_answers:
        data["eval_answers"] = options.eval_answers
    places = [name for name in ("final", "merged") if (options.run / name).is_dir()]
    places = ["base"] * (options.run / "final/adapter_config.json").exists() + places
    measured = {name: (options.run, name) for name in places}
    measured |= {title: (run, "final") for title, run in titles(options.beside).items()}
    found = {}
    for title, (run, name) in measured.items():
        folder = run.resolve()
        whole = folder / "evaluations" / about / name
        found[title] = evaluate(folder, folder / name, data, whole, options.command)
    names = list(dict.fromkeys(name for values in found.values() for name in values))
    wide = max(map(len, names)) + 2
    column = max(16, *(len(title) + 2 for title in found))
    print(" " * wide + "".join(f"{title:>{column}}" for title in found))
    for name in names:
        row = (f"{values.get(name, math.nan):>{column}.4f}" for values in found.values())
        print(f"{name:>{wide}}" + "".join(row))
    print(f"more in {options.run}/evaluations/{about}", file=sys.stderr)
