"""What the templates do with each model family: the table of docs/families.md.

    python benchmarks/families.py                      # all families: about 10 minutes on two CPU cores
    python benchmarks/families.py qwen3_5 gpt_oss      # renew the rows of these

Each family is a small checkpoint with random weights (tests/model_families.py) that templates/lora_finetune.py really
trains, with default flags and again with --load_in_4bit. The cells are what these runs print.
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
from about import about, line
from model_families import FAMILIES, make

from shared.models.loading import class_of
from shared.parallel.tensor import tensor_parallel
from shared.process.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "families.md"
TEMPLATE = ROOT / "templates" / "lora_finetune.py"
COLUMNS = ("family", "class", "attention", "rows", "adapters on experts", "tensor parallel", "4 bits")


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
    flags = ["--model_name_or_path", base, "--train_file", rows, "--output_dir", folder, "--report_to", "none", *more]
    flags += ["--seq_length", "128", "--max_steps", "1", "--global_batch_size", "2", "--num_generations", "0"]

    def work() -> None:
        sys.argv = ["lora_finetune.py", *map(str, flags)]
        runpy.run_path(str(TEMPLATE), run_name="__main__")

    return fork(work)


def printed(output: str, name: str) -> str:
    """A line of the summary."""
    found = re.search(rf"^  {name} +(.+)$", output, re.MULTILINE)
    return found[1] if found else ""


def error(output: str) -> str:
    """The last line of a run that failed, without the checkpoint's name."""
    last = ([text for text in output.splitlines() if text.strip()] or ["nothing printed"])[-1]
    return re.sub(r"^error: (/\S+: )?", "", last)[:120]


def can_be_tensor_parallel(base: Path) -> str:
    """What shared.parallel.tensor says of cutting the model in two; nothing is cut."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):
        made = class_of(config)
        model = made.from_config(config) if hasattr(made, "from_config") else made(config)
    with mock.patch("shared.parallel.tensor.parallelize_module"):
        try:
            tensor_parallel(model, SimpleNamespace(size=lambda: 2, device_type="meta"))  # type: ignore[arg-type]
        except ConfigError as refusal:
            reason = re.search(r"\((.+)\)", str(refusal))
            return f"no: {reason[1] if reason else refusal}".replace("its plan: none", "no plan").replace("its plan: ", "")
    return "yes"


def row_of(family: str, folder: Path, rows: Path) -> tuple[str, ...]:
    base = folder / family
    model_class = make(family, base)
    code, output = fine_tune(base, rows, folder / "run")
    if code:
        return (family, model_class.__name__, *("",) * 3, "", f"**fails**: {error(output)}")
    packing = printed(output, "packing").replace(f"{model_class.__name__} lets", "the model lets")
    adapters = [part.rpartition(" ")[0] for part in printed(output, "adapters").split(", ")]
    has_experts = "expert" in (base / "config.json").read_text()
    experts = "none" if has_experts else ""
    experts = ", ".join(name for name in adapters if "expert" in name) or experts
    bits, quantised = fine_tune(base, rows, folder / "run", "--load_in_4bit")
    attention, tensor = printed(output, "attention"), can_be_tensor_parallel(base)
    shutil.rmtree(base)
    trains = "yes, but experts stay in 16 bits" if "stay in 16 bits" in quantised else "yes"
    about_bits = f"no: {error(quantised)}" if bits else trains
    return family, f"`{model_class.__name__}`", attention, packing, experts, tensor, about_bits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="default: all")
    chosen = parser.parse_args().families
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
        for family in chosen or FAMILIES:
            cells = row_of(family, Path(folder), Path(folder, "rows.jsonl"))
            rows[family] = "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
            print(rows[family], flush=True)
    head = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    made = f"Made by `python benchmarks/families.py`: {line(about(('torch', 'transformers', 'peft')))}"
    table = [*head, *(rows[family] for family in FAMILIES if family in rows), "", made, ""]
    PAGE.write_text("\n".join([start.rstrip(), "", *table]))


if __name__ == "__main__":
    main()
