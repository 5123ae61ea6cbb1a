"""What the templates do with each model family: the table of docs/families.md.

    python benchmarks/families.py                      # all families: about 10 minutes on two CPU cores
    python benchmarks/families.py qwen3_5 gpt_oss      # renew the rows of these

Each family is a small checkpoint with random weights (tests/model_families.py) that templates/lora_finetune.py really
trains: with default flags, with --load_in_4bit, and on a picture where tests/vision_models.py has a processor.
"""

import argparse
import importlib
import json
import os
import random
import re
import runpy
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import torch
import vision_models
from about import about, line
from model_families import FAMILIES, MORE_THAT_SEE, make
from PIL import Image

from shared.extras.tensor import tensor_parallel
from shared.models.loading import class_of
from shared.process.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
TEMPLATE = ROOT / "templates" / "lora_finetune.py"
COLUMNS = ("family", "class", "attention", "packed", "adapters on experts", "tensor parallel", "4 bits", "images")


def fork(work: Any) -> tuple[int, str]:
    """(exit code, output) of a function in a process of its own, with all imports done."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if not pid:
            code = 1
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            try:
                work()
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        return code, output.read().decode(errors="replace")


def write_rows(path: Path) -> None:
    rng, words = random.Random(0), "the model reads a line of text and says what comes next".split()  # noqa: SIM905
    texts = [" ".join(rng.choices(words, k=rng.randint(5, 40))) for _ in range(24)]
    path.write_text("".join(json.dumps({"instruction": text[:20], "output": text}) + "\n" for text in texts))


def fine_tune(base: Path, rows: Path, folder: Path, *more: str) -> tuple[int, str]:
    shutil.rmtree(folder, ignore_errors=True)
    flags = ["--model_name_or_path", base, "--train_file", rows, "--output_dir", folder, "--report_to", "none"]
    flags += ["--seq_length", "512", "--max_steps", "1", "--global_batch_size", "2", "--show_answers", "0", *more]

    def work() -> None:
        sys.argv = ["lora_finetune.py", *map(str, flags)]
        runpy.run_path(str(TEMPLATE), run_name="__main__")

    return fork(work)


def in_summary(run: Path, name: str) -> str:
    """A line of a run's summary."""
    found = re.search(rf"^  {name} +(.+)$", (run / "summary.txt").read_text(), re.MULTILINE)
    assert found, name
    return found[1]


def error(output: str) -> str:
    """The last line of a run that failed, without the checkpoint's name."""
    last = ([text for text in output.splitlines() if text.strip()] or ["nothing printed"])[-1]
    return re.sub(r"^error: (/\S+: )?", "", last)[:120]


def is_packed(packing: str) -> str:
    """How documents of one row are kept apart, in a word; no, where a row has one document."""
    if not packing.startswith("off"):
        return "by its own attention" if "own attention" in packing else "yes"
    kernels = re.search(r"Install `(\w+)`", packing)
    return f"with {kernels[1]}" if kernels else "no"


def learns_from_images(family: str, base: Path, rows: Path) -> str:
    """Whether a conversation with a picture trains; nothing where the tests have no processor for the family."""
    if family not in vision_models.FAMILIES:
        return ""
    vision_models.make(family, base)
    Image.effect_noise((60, 40), 90).convert("RGB").save(rows.parent / "picture.png")
    asked = {"role": "user", "content": [{"type": "image", "path": "picture.png"}, {"type": "text", "text": "What is it?"}]}
    chat = {"messages": [asked, {"role": "assistant", "content": "noise"}]}
    file = rows.parent / "images.jsonl"
    file.write_text((json.dumps(chat) + "\n") * 24)
    code, output = fine_tune(base, file, base.parent / "run")
    shutil.rmtree(base)
    return f"no: {error(output)}" if code else "yes"


def can_be_tensor_parallel(base: Path) -> str:
    """What shared.extras.tensor says of cutting the model in two; nothing is cut."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        made = class_of(config)
        model = made.from_config(config) if hasattr(made, "from_config") else made(config)
    with mock.patch("shared.extras.tensor.parallelize_module"):
        try:
            tensor_parallel(model, SimpleNamespace(size=lambda: 2, device_type="meta"))  # type: ignore[arg-type]
        except ConfigError:
            return "no"
    return "yes"


def row_of(family: str, folder: Path, rows: Path) -> tuple[str, ...]:
    base = folder / family
    model_class = make(family, base)
    code, output = fine_tune(base, rows, folder / "run")
    if code:
        return (family, f"`{model_class.__name__}`", *("",) * 5, f"**fails**: {error(output)}")
    attention, packing, adapters = (in_summary(folder / "run", name) for name in ("attention", "packing", "adapters"))
    experts = ""
    if "expert" in (base / "config.json").read_text():
        experts = "yes" if "expert" in adapters else "no"
    bits, quantised = fine_tune(base, rows, folder / "run", "--load_in_4bit")
    tensor = can_be_tensor_parallel(base)
    shutil.rmtree(base)
    trains = "not experts" if "stay in 16 bits" in quantised else "yes"
    about_bits = f"no: {error(quantised)}" if bits else trains
    seen = learns_from_images(family, base, rows)
    attention = attention.partition(":")[0]
    return family, f"`{model_class.__name__}`", attention, is_packed(packing), experts, tensor, about_bits, seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    chosen = parser.parse_args().families
    families = [*FAMILIES, *MORE_THAT_SEE]
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    torch.set_num_threads(1)  # threads do not survive a fork
    for name in ("peft", "bitsandbytes", "datasets", "matplotlib.pyplot", "torch.distributed.checkpoint"):
        importlib.import_module(name)  # once, before the forks
    runpy.run_path(str(TEMPLATE), run_name="imported")
    start, _, old = PAGE.read_text().partition("\n| family |")
    rows = {text.split()[1]: text for text in old.splitlines() if text.startswith("| ")} if chosen else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMPLATES_CACHE"] = f"{folder}/cache"
        write_rows(Path(folder, "rows.jsonl"))
        for family in chosen or families:
            cells = row_of(family, Path(folder), Path(folder, "rows.jsonl"))
            rows[family] = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
            print(rows[family], flush=True)
    head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    made = f"Made by `python benchmarks/families.py`: {line(about(('torch', 'transformers', 'peft')))}"
    table = [*head, *(rows[family] for family in families if family in rows), "", made, ""]
    PAGE.write_text("\n".join([start.rstrip(), "", *table]))


if __name__ == "__main__":
    main()
