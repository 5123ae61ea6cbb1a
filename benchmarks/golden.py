"""Record what small runs compute, and compare what another version of the code computes, bit for bit.

    python benchmarks/golden.py record FOLDER                    # on the commit before a change
    python benchmarks/golden.py compare FOLDER                   # on each commit of the change
    python benchmarks/golden.py compare FOLDER --only pretrain-ddp --only dpo-one

Every template in every launch that it takes, on CPU processes: samples and inputs of each step, losses, norms, rates,
evaluations, answers, checkpoints, `final/`. `compare` also resumes the checkpoint that the recorded version wrote. It
prints one line a run: the same, or what differs first and by how much; exit code 1 if a run differs. A launch that a
template refuses is recorded with the line that says so.

Bits depend on processor and libraries: record and compare on one machine, in one environment. FOLDER keeps the inputs
that the runs were made with.
"""

import argparse
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

STEPS, SAVED = 4, 2
# processes, launch config
LAUNCHES: dict[str, tuple[int, str | None]] = {
    "one": (1, None),
    "ddp": (2, "ddp"),
    "fsdp2": (2, "fsdp2"),
    "tp": (2, "tensor_parallel"),
    "sp": (2, "sequence_parallel"),
    "zero2": (2, "deepspeed_zero2"),
    "hsdp": (4, "hsdp"),
}
WORDS = "the model reads a line of text and says what comes next since it saw many before".split()  # noqa: SIM905
VOLATILE = re.compile(r"second|time|share|memory|mfu|_gb|hours|tflops")  # in the names of metrics: how fast, not what
TEXT = ("answers.jsonl", "evaluation.json", "rollouts.jsonl", "predictions.jsonl")


@dataclass(frozen=True)
class Case:
    name: str
    template: str
    launch: str
    flags: tuple[str, ...]


def cases(inputs: Path) -> Iterator[Case]:
    """Each template in each launch, and what one template has beside it."""
    llama, chats, texts = f"{inputs}/llama", f"{inputs}/chats.jsonl", f"{inputs}/texts.jsonl"
    answers = ("--show_answers", "0", "--eval_answers", "3", "--max_new_tokens", "6")
    chat = ("--model_name_or_path", llama, "--train_file", chats, "--seq_length", "64", "--eval_samples", "9", *answers)
    text = ("--train_file", texts, "--seq_length", "32", "--eval_samples", "9")
    labelled = ("--train_file", f"{inputs}/labelled.jsonl", "--validation_split_percentage", "20", "--seq_length", "32")
    images = ("--train_dir", f"{inputs}/images", "--image_size", "32", "--mixup_alpha", "0.2", "--label_smoothing", "0.1")
    kinds = {
        "lora_finetune": (*chat, "--lora_dropout", "0.1", "--merge_adapter"),
        "full_finetune": chat,
        "dpo": (*chat[:2], "--train_file", f"{inputs}/pairs.jsonl", *chat[4:]),
        "distill": (*chat, "--teacher_name_or_path", f"{inputs}/teacher", "--on_policy", "0.5"),
        "grpo": (
            *("--model_name_or_path", llama, "--train_file", f"{inputs}/sums.jsonl", "--eval_samples", "5"),
            *("--group_size", "4", "--max_new_tokens", "6", "--eval_answers", "3"),
        ),
        "pretrain": (*text, "--model_name_or_path", llama),
        "text_classification": (*labelled, "--model_name_or_path", llama, "--class_weights", "balanced"),
        "token_classification": ("--train_file", f"{inputs}/tagged.jsonl", *labelled[2:], "--model_name_or_path", llama),
        "image_classification": (*images, "--config_name", f"{inputs}/resnet"),
    }
    not_with_zero2 = {  # which it refuses
        "full_finetune": ("--ema_decay", "0.9"),
        "grpo": ("--updates_per_rollout", "2"),
        "pretrain": ("--ema_decay", "0.9"),
        "image_classification": ("--ema_decay", "0.9"),
    }
    for template, flags in kinds.items():
        for launch in LAUNCHES:
            more = not_with_zero2.get(template, ()) if launch != "zero2" else ()
            yield Case(f"{template}-{launch}", template, launch, (*flags, *more))
    yield Case("pretrain_pipeline-ddp", "pretrain_pipeline", "ddp", (*text, "--model_name_or_path", llama))
    replicas = ("--sync_every", "2", "--model_name_or_path", llama)
    streamed = (*text[:4], "--streaming", "--eval_samples", "5", "--model_name_or_path", llama)
    mixed = ("--model_name_or_path", llama, "--train_file", chats, f"{inputs}/sums_chats.jsonl", "--mix_weights", "2", "1")
    masked = ("--objective", "mlm", "--config_overrides", "hidden_size=32,num_hidden_layers=2,num_attention_heads=2")
    seen = ("--demo_images", "--eval_samples", "9", *answers)
    for launch in ("one", "ddp"):
        yield Case(f"images_in_chats-{launch}", "full_finetune", launch, seen)
        yield Case(f"4bit-{launch}", "lora_finetune", launch, (*chat, "--load_in_4bit"))
        yield Case(f"streaming-{launch}", "pretrain", launch, streamed)
        mixture = (*mixed, "--seq_length", "64", "--eval_samples", "9", *answers)
        yield Case(f"mixture-{launch}", "lora_finetune", launch, mixture)
    for launch in ("one", "ddp", "fsdp2"):
        yield Case(f"masked-{launch}", "pretrain", launch, (*text, "--tokenizer_name", llama, *masked))
    for launch in ("ddp", "hsdp"):
        yield Case(f"replicas-{launch}", "pretrain", launch, (*text, *replicas))


def make_inputs(folder: Path) -> None:
    """Small data and models of random weights."""
    import numpy as np
    import torch
    from PIL import Image
    from transformers import LlamaConfig, LlamaForCausalLM, ResNetConfig

    from shared.text.corpus import train_tokenizer

    rng = random.Random(0)

    def words(most: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, most)))

    def turns(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    sums = [(f"{a} + {b} =", str(a + b)) for a in range(6) for b in range(4)]
    files: dict[str, list[dict[str, Any]]] = {
        "chats": [{"messages": turns(words(8), words(50))} for _ in range(41)],
        "texts": [{"text": words(80)} for _ in range(57)],
        "pairs": [{"prompt": words(6), "chosen": words(20), "rejected": words(20)} for _ in range(37)],
        "sums": [{"prompt": f"{question} ", "answer": answer} for question, answer in sums],
        "sums_chats": [{"messages": turns(question, answer)} for question, answer in sums],
        "labelled": [{"text": words(20), "label": f"kind {n % 3}"} for n in range(53)],
    }
    sentences = [words(60).split() for _ in range(47)]
    files["tagged"] = [{"tokens": each, "tags": [f"B-{w[0]}" if len(w) > 4 else "O" for w in each]} for each in sentences]
    folder.mkdir(parents=True)
    for name, records in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = train_tokenizer([words(50) for _ in range(50)], vocab_size=320)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for name in ("llama", "teacher"):  # of other random weights
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    small = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    small.save_pretrained(folder / "resnet")
    drawn = np.random.default_rng(0)
    for split, count in (("train", 41), ("val", 13)):
        for number in range(count):
            path = folder / "images" / split / f"kind{number % 3}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(drawn.integers(0, 256, (36, 40, 3), dtype=np.uint8)).save(path)


def tests_launcher() -> Any:
    """The module whose launches fork from a process that has imported everything: a run takes seconds."""
    return importlib.import_module("tests.conftest")


def launch(case: Case, output: Path, *more: str) -> dict[str, Any]:
    """Run a case and read what it computed."""
    conftest = tests_launcher()
    processes, config = LAUNCHES[case.launch]
    global_batch, each = (4, 2) if case.template == "grpo" else (8, 2)
    common = ["--max_steps", STEPS, "--save_steps", SAVED, "--eval_steps", SAVED, "--save_total_limit", 9, "--audit_data"]
    common += ["--global_batch_size", global_batch, "--per_device_train_batch_size", each]
    argv = conftest.command(case.template, output, *common, *case.flags, *more, processes=processes, config=config)
    place = next(i for i, part in enumerate(argv) if part.endswith(f"templates/{case.template}.py"))
    argv.insert(place, str(Path(__file__).with_name("golden_run.py")))
    code, printed = conftest.LAUNCHER.run(argv, {**os.environ, "GOLDEN_BATCHES": f"{output}-batches"})
    if code:
        said = re.findall(r"^.*(?:error: |Error: ).*$", printed, re.MULTILINE)
        return {"exit": re.sub(re.escape(str(output)), "RUN", said[0] if said else printed[-400:])}
    return read(output) | {"inputs": inputs_of(Path(f"{output}-batches"))}


def inputs_of(folder: Path) -> dict[str, Any]:
    """What each rank's micro-batches held: a digest of each tensor."""
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))
    }


def read(run_dir: Path) -> dict[str, Any]:
    """All that a run wrote which does not depend on time and place."""
    audit = {path.stem: path.read_text().splitlines() for path in sorted((run_dir / "audit").glob("*.jsonl"))}
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    manifest = json.loads((run_dir / f"checkpoint-{STEPS:06d}" / "MANIFEST.json").read_text())
    return {
        "exit": "0",
        "strategy": manifest["strategy"],
        "samples": audit,
        "metrics": [{key: value for key, value in row.items() if not VOLATILE.search(key)} for row in rows],
        "texts": {name: (run_dir / name).read_text() for name in TEXT if (run_dir / name).exists()},
        "weights": {
            f"{path.relative_to(run_dir)}: {name}": hashlib.sha256(value.numpy().tobytes()).hexdigest()
            for path in sorted(run_dir.rglob("*.safetensors"))
            for name, value in tensors(path).items()
        },
    }


def tensors(path: Path) -> dict[str, Any]:
    """Each tensor's bytes, whatever its type. Headers have names that every save draws anew."""
    import torch
    from safetensors.torch import load_file

    return {name: value.contiguous().reshape(-1).view(torch.uint8) for name, value in load_file(path).items()}


def first_difference(old: dict[str, Any], new: dict[str, Any], resumed: bool = False) -> str:
    """What two runs computed differently first, in the order of a step; empty if nothing."""
    for part in ("exit", "strategy"):
        if old.get(part) != new.get(part):
            return f"{part}: {old.get(part)} | {new.get(part)}"
    if old["exit"] != "0":
        return ""

    for rank, lines in old["samples"].items():
        if lines != new["samples"].get(rank):
            pairs = zip(lines, new["samples"].get(rank, []), strict=False)
            return f"samples of {rank}, line {next((n for n, (a, b) in enumerate(pairs, 1) if a != b), 'beyond the last')}"
    if not resumed:  # which has only the inputs since then
        for rank, batches in old["inputs"].items():
            for number, (a, b) in enumerate(zip(batches, new["inputs"].get(rank, []), strict=False)):
                if keys := sorted(key for key in a.keys() & b.keys() if a[key] != b[key]):
                    return f"inputs of {rank}, micro-batch {number}: {', '.join(keys)}"
    rows = [which["metrics"] for which in (old, new)]
    for a, b in zip(*rows, strict=False):
        for key in [*a, *(b.keys() - a.keys())]:
            if a.get(key) != b.get(key):
                numbers = [row.get(key) for row in (a, b)]
                by = ""
                if all(isinstance(number, int | float) for number in numbers):
                    by = f" (relative {abs(numbers[0] - numbers[1]) / (abs(numbers[0]) or 1):.1e})"
                return f"{key} at step {a.get('step')}: {a.get(key)} | {b.get(key)}{by}"
    if len(rows[0]) != len(rows[1]):
        return f"{len(rows[0])} | {len(rows[1])} rows of metrics"
    for part in ("texts", "weights"):
        for name in sorted({*old[part], *new[part]}):
            if old[part].get(name) != new[part].get(name):
                is_new, is_gone = name not in old[part], name not in new[part]
                return f"{name} {'is new' if is_new else 'is gone' if is_gone else 'differs'}"
    return ""


def difference_of_weights(old: Path, new: Path) -> str:
    """The largest relative difference of two folders' tensors."""
    from safetensors.torch import load_file

    worst = 0.0
    for path in old.glob("*.safetensors"):
        mine, theirs = load_file(path), load_file(new / path.name) if (new / path.name).exists() else {}
        for name, value in mine.items():
            if name not in theirs or theirs[name].shape != value.shape:
                return f"; {old.name}: {name} is not there in this shape"
            scale = value.float().abs().max().item() or 1.0
            worst = max(worst, (value.float() - theirs[name].float()).abs().max().item() / scale)
    return f"; {old.name} differs by {worst:.1e}"


def kept(folder: Path, case: Case) -> Path:
    return folder / "runs" / case.name


def record(folder: Path, case: Case, work: Path) -> str:
    result = launch(case, work / case.name)
    place = kept(folder, case)
    place.mkdir(parents=True, exist_ok=True)
    (place / "result.json").write_text(json.dumps(result))
    if result["exit"] != "0":
        return result["exit"]
    ignored = shutil.ignore_patterns(f"checkpoint-{STEPS:06d}", "merged", "*.png")
    shutil.copytree(work / case.name, place / "run", ignore=ignored, dirs_exist_ok=True)
    return result["strategy"]


def changed_inputs(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Names of inputs that only one of two runs has: how a model is told something may change, if it learns the same."""
    names = [{key for batches in which.get("inputs", {}).values() for b in batches for key in b} for which in (old, new)]
    return ", ".join(f"{'+-'[name in names[0]]}{name}" for name in sorted(names[0] ^ names[1]))


def compare(folder: Path, case: Case, work: Path) -> str:
    """What differs; empty if nothing."""
    place = kept(folder, case)
    if not (place / "result.json").exists():
        return "was not recorded"
    old = json.loads((place / "result.json").read_text())
    new = launch(case, work / case.name)
    different = first_difference(old, new)
    if different and new["exit"] == old["exit"] == "0" and (place / "run/final").exists():
        different += difference_of_weights(place / "run/final", work / case.name / "final")
    if inputs := changed_inputs(old, new):
        print(f"{'':<6}inputs: {inputs}")
    if different or old["exit"] != "0":
        return different
    killed = work / f"{case.name}-killed"  # as a run that was killed after its first checkpoint
    shutil.copytree(place / "run", killed, ignore=shutil.ignore_patterns("final", "exit.json"))
    different = first_difference(old, launch(case, killed), resumed=True)
    return f"resumed from the recorded checkpoint: {different}" if different else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="names of runs, or beginnings of them")
    options = parser.parse_args()
    folder = options.folder.resolve()
    environment = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", "WANDB_MODE": "offline", "OMP_NUM_THREADS": "1"}
    os.environ |= environment
    if options.mode == "record" and not (folder / "inputs").exists():
        make_inputs(folder / "inputs")
    chosen = [case for case in cases(folder / "inputs") if any(map(case.name.startswith, options.only or [""]))]
    differing = 0
    cache = folder / "cache"  # one place, since a run's settings name the demo's model in it
    shutil.rmtree(cache, ignore_errors=True)
    os.environ["TEMPLATES_CACHE"] = str(cache)
    with tempfile.TemporaryDirectory() as work:
        for number, case in enumerate(chosen, 1):
            began = time.monotonic()
            said = (record if options.mode == "record" else compare)(folder, case, Path(work))
            differing += options.mode == "compare" and bool(said)
            seconds = time.monotonic() - began
            print(f"{number:>2}/{len(chosen)} {case.name:<30} {seconds:4.0f} s  {said or 'same'}", flush=True)
            for made in Path(work).glob(f"{case.name}*"):
                shutil.rmtree(made)
    tests_launcher().LAUNCHER.close()
    if options.mode == "compare":
        print(f"{len(chosen) - differing} of {len(chosen)} the same")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
