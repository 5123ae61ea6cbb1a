"""What one GPU does: its limits, the templates' steps beside them and beside a bare loop, and whether the sums are right.

    python benchmarks/gpu.py                              # under 9 minutes on an H100; writes benchmarks/gpu.json
    python benchmarks/gpu.py --only "LoRA|packed"         # rows whose names match, further ones, too; other figures stay
    python benchmarks/gpu.py --toy --output toy.json      # a rehearsal at toy size on any machine: no figure means anything

Each row is measured in a process of its own with a time limit, so that one that fails leaves the others; the file is
written after every row. The process of the next row starts, and does its imports, while a row sets itself up. Rows whose
time is not taken (losses, resuming) run side by side. What does not fit into --limit is said to be not measured.

How each is measured is in gpu_measures.py. Speed is in tokens or images a second; MFU counts operations as the templates
do (`shared.models.counts`: nothing for recomputation, attention within documents as if it were not causal), over
an H100's 989 TFLOP/s (data sheet, SXM) and over the rate of a large matrix product that is measured here. Losses are
compared with those of the row "losses, plain".
"""

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # also where the project is not installed
import gpu_measures as measures  # noqa: E402
from about import about, cores, line  # noqa: E402

H100_TFLOPS = 989.0  # dense bf16, data sheet
PACKAGES = ("torch", "transformers", "accelerate", "peft", "torchvision", "torchao", "bitsandbytes", "flash_attn")
PRELOADED = (  # by each process before it is told its row
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
    *("accelerate", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "peft"),
    *("transformers.models.resnet.modeling_resnet", "transformers.models.vit.modeling_vit", "torchvision.transforms.v2"),
    *("torch.utils.flop_counter", "tqdm", "matplotlib.pyplot", "sklearn.metrics"),
)

# Rows ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    measure: Callable[..., dict[str, Any]]
    seconds: int  # expected on an H100
    options: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    timed: bool = True  # else it may run beside others
    rehearsed: bool = True  # at toy size, where it is not asked for by name


SHARED = ("yaml", "accelerate", "transformers")  # what the package shared/ imports
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
FSDP2 = ONE_RANK | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP2 |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
LABEL = {"125M": "125M", "1B": "1.2B", "8B": "8B"}


def _pretrain(size: str, shape: str, more: str, expected: int, environment: dict | None = None, **options: Any) -> Row:
    rows, length = (int(n) for n in shape.split(" x "))
    needs = (*SHARED, *(["torchao"] if environment is FP8 else []))
    needs += ("flash_attn",) if options.get("attention") == "flash_attention_2" else ()
    options |= {"size": size, "rows": rows, "length": length}
    return Row(f"{LABEL[size]}, {shape}{more}", measures.pretraining, expected, options, needs, environment or {})


def _lora(size: str, rows: int, more: str, expected: int, **options: Any) -> Row:
    four_bits = options.get("quantised", False)
    name = f"{'QLoRA' if four_bits else 'LoRA'} {LABEL[size]}, {rows} x 2048{more}"
    needs = (*SHARED, "peft", *(["bitsandbytes"] if four_bits else []))
    return Row(name, measures.lora, expected, options | {"size": size, "rows": rows}, needs)


def _images(kind: str, rows: int, more: str, expected: int, **options: Any) -> Row:
    options |= {"kind": kind, "batch_size": rows}
    return Row(f"{kind}, {rows} images{more}", measures.image_step, expected, options, (*SHARED, "torchvision", "sklearn"))


def _losses(more: str, tolerance: float | None, environment: dict | None = None, **options: Any) -> Row:
    needs = (*SHARED, *(["torchao"] if environment is FP8 else []))
    variables = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | (environment or {})  # cuBLAS, too, adds up in one order
    return Row(f"losses, {more}", measures.losses, 60, options | {"tolerance": tolerance}, needs, variables, timed=False)


def _waiting(of: str, *needs: str) -> Row:
    return Row(f"no step waits for the GPU, {of}", measures.waiting, 60, {"of": of}, (*SHARED, *needs), timed=False)


ROWS = [  # the most telling first: the last ones may find no time
    Row("matrix product, bf16", measures.matrix_product, 4, {"fp8": False}),
    Row("matrix product, fp8", measures.matrix_product, 4, {"fp8": True}),
    Row("memory bandwidth", measures.bandwidth, 4),
    _pretrain("1B", "4 x 2048", ", compiled", 18, compiled=True),
    _pretrain("1B", "8 x 2048", ", compiled", 22, compiled=True),
    _pretrain("1B", "4 x 2048", "", 10),
    _pretrain("125M", "16 x 2048", ", compiled", 15, compiled=True),
    _pretrain("125M", "16 x 2048", "", 8),
    _losses("plain", None),
    _losses("plain once more", 0.0),
    _losses("whole logits", 0.02, fused=False),
    _losses("kernels that add up in any order", 0.02, deterministic=False),
    _losses("compiled", 0.02, compiled=True),
    _losses("gradient checkpointing", 1e-3, checkpointing="full"),
    _losses("fp8, compiled", 0.05, FP8, compiled=True),
    _losses("DDP of one process", 1e-3, ONE_RANK),
    _losses("FSDP2 of one process", 0.02, FSDP2),
    _waiting("images", "torchvision", "sklearn"),
    _waiting("tokens"),
    _waiting("packed tokens"),
    Row("angles of positions", measures.positions, 20, {}, SHARED, timed=False),
    Row("attention of variable lengths", measures.packed_attention, 20, {}, SHARED, timed=False),
    Row("resuming after a kill", measures.resuming, 80, {}, (*SHARED, "tyro", "psutil"), timed=False, rehearsed=False),
    _pretrain("1B", "4 x 2048", ", fp8, compiled", 25, FP8, compiled=True),
    _lora("8B", 2, "", 12),
    _lora("8B", 2, ", packed by a mask", 12, masked=True),
    _lora("8B", 2, ", whole logits", 12, fused=False),
    _lora("8B", 4, ", gradient checkpointing", 15, checkpointing="full"),
    _lora("8B", 4, ", gradient checkpointing", 15, checkpointing="full", quantised=True),
    _lora("8B", 1, ", gradient checkpointing", 12, checkpointing="full", quantised=True),
    _lora("1B", 4, "", 10),
    _images("ResNet-50", 256, ", channels last", 10, channels_last=True),
    _images("ResNet-50", 256, ", channels last, compiled", 60, channels_last=True, compiled=True),
    _images("ViT-S/16", 256, ", compiled", 45, compiled=True),
    Row("checkpoint of 1.2B, in the background", measures.save_stall, 60, {"in_background": True}, SHARED),
    _images("ViT-B/16", 128, "", 10),
    _pretrain("125M", "4 x 8192", "", 8),
    _pretrain("125M", "4 x 8192", ", packed", 10, documents=True),
    _pretrain("125M", "4 x 8192", ", packed by a mask", 10, documents=True, masked=True),
    _pretrain("125M", "4 x 8192", ", packed, flash attention", 10, documents=True, flat=True, attention="flash_attention_2"),
    _pretrain("1B", "4 x 2048", ", checkpointing every 2nd block, compiled", 16, compiled=True, checkpointing="2"),
    _pretrain("1B", "1 x 8192", ", compiled", 18, compiled=True),
    Row("image input", measures.image_input, 20, {}, (*SHARED, "torchvision", "sklearn")),
]
FURTHER = [  # measured where --only asks for them, in another call: one has no time for them
    Row("checkpoint of 1.2B", measures.save_stall, 45, {"in_background": False}, SHARED),
    _pretrain("1B", "4 x 2048", ", whole logits, compiled", 12, compiled=True, fused=False),
    _pretrain("125M", "16 x 2048", ", FSDP2 of one process", 10, FSDP2),
    _lora("8B", 2, ", compiled", 30, compiled=True),
    _lora("8B", 4, ", gradient checkpointing, whole logits", 15, checkpointing="full", fused=False),
    _lora("8B", 1, ", gradient checkpointing, whole logits", 12, checkpointing="full", quantised=True, fused=False),
    _lora("1B", 4, ", whole logits", 10, fused=False),
    _lora("1B", 4, ", gradient checkpointing", 10, checkpointing="full"),
    _images("ViT-S/16", 256, "", 10),
    _images("ViT-B/16", 128, ", compiled", 25, compiled=True),
    _pretrain("1B", "4 x 2048", ", checkpointing every block, compiled", 16, compiled=True, checkpointing="full"),
    _pretrain("1B", "1 x 8192", "", 10),
    _pretrain("125M", "4 x 8192", ", compiled", 15, compiled=True),
    _pretrain("125M", "4 x 8192", ", packed, compiled", 15, documents=True, compiled=True),
    _pretrain("125M", "4 x 8192", ", packed, flex attention", 25, documents=True, attention="flex_attention"),
]
ALL = ROWS + FURTHER


# Processes -------------------------------------------------------------------------------------------------------------


def preload() -> None:
    for name in PRELOADED:
        with contextlib.suppress(Exception):  # the row that needs it says what is wrong
            importlib.import_module(name)


def serve(connection: Any, folder: str, parent: int) -> None:
    """A process of one row: imports, waits to be told which, measures it, and leaves outcome.json in `folder`."""
    os.setsid()  # so that whatever it starts is ended with it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    preload()
    connection.send("ready")
    while not connection.poll(1):
        if os.getppid() != parent:
            os._exit(0)
    name, measures.toy = connection.recv()
    row = next(row for row in ALL if row.name == name)
    os.environ |= {"ACCELERATE_MIXED_PRECISION": "bf16", **row.environment}
    if "RANK" in row.environment:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    if not torch.cuda.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if measures.toy:  # traced only: a compiler would take most of the time
        nn.Module.compile = partialmethod(nn.Module.compile, backend="eager")  # type: ignore[assignment, method-assign]
        torch.compile = partial(torch.compile, backend="eager")  # type: ignore[assignment]
    tempfile.tempdir = folder
    try:
        outcome: dict[str, Any] = {"figures": row.measure(**row.options)}
    except measures.Skipped as reason:
        outcome = {"skipped": str(reason)}
    except BaseException as error:
        traceback.print_exc()
        said = next((text.strip() for text in str(error).splitlines() if text.strip()), "")
        outcome = {"failed": f"{type(error).__name__}: {said}"[:300]}
    with contextlib.suppress(Exception):  # a device that an error has left unusable, a package without metadata
        facts = about(package for package in PACKAGES if importlib.util.find_spec(package))
        outcome["about"] = facts | ({"CUDA": torch.version.cuda} if torch.cuda.is_available() else {})
    Path(folder, "outcome.tmp").write_text(json.dumps(outcome))
    Path(folder, "outcome.tmp").rename(Path(folder, "outcome.json"))
    sys.stdout.flush()
    os._exit(0)  # without waiting for what still writes in the background


class Worker:
    """A process that imports, and then measures the row it is told."""

    def __init__(self, context: Any, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.connection, its_end = context.Pipe()
        self.process = context.Process(target=serve, args=(its_end, str(self.folder), os.getpid()))
        self.process.start()
        self.started, self.ended = 0.0, False

    def begin(self, row: Row) -> None:
        with contextlib.suppress(OSError, EOFError):  # it has died, which `outcome` will see
            if self.connection.poll(180):
                self.connection.recv()
            self.connection.send((row.name, measures.toy))
        self.started = time.monotonic()

    def outcome(self, limit: float) -> dict[str, Any]:
        """What the row gave, or why it gave nothing, at most `limit` seconds after its beginning."""
        self.process.join(max(0.0, self.started + limit - time.monotonic()))
        code, file, log = self.process.exitcode, self.folder / "outcome.json", self.folder / "log"
        found = {"failed": f"took more than {limit:.0f} s" if code is None else f"ended with exit code {code}"}
        found = json.loads(file.read_text()) if file.exists() else found
        if "failed" in found and log.exists():
            found["log"] = log.read_text(errors="replace")[-4000:]
        self.end()
        return found | {"seconds": round(time.monotonic() - self.started, 1)}

    def end(self) -> None:
        """Kill the process and what it has started, and remove its files."""
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # in case it was too young to lead a group
        self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def run(rows: list[Row], limit: float, record: Callable[[Row, dict[str, Any]], None]) -> None:
    """Measure the rows in their order within `limit` seconds, and record each outcome as it comes."""
    deadline, waiting = time.monotonic() + limit, []
    for row in rows:
        if missing := [package for package in row.needs if importlib.util.find_spec(package) is None]:
            record(row, {"skipped": f"needs {', '.join(missing)}"})
        else:
            waiting.append(row)
    on_gpu = torch.cuda.is_available()
    context = multiprocessing.get_context("spawn" if on_gpu else "fork")  # CUDA does not survive a fork
    if not on_gpu:
        preload()  # once for all
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{folder}/inductor")
        spares: list[Worker] = []
        running: list[tuple[Row, Worker]] = []
        try:
            while waiting:
                group = [waiting.pop(0)]
                while waiting and len(group) < cores() and not (group[0].timed or waiting[0].timed):
                    group.append(waiting.pop(0))
                if max(1 if measures.toy else row.seconds for row in group) > deadline - time.monotonic():
                    for row in group:
                        record(row, {"not measured": "out of time"})
                    continue
                while len(spares) < len(group):
                    spares.append(Worker(context, folder))
                running = [(row, spares.pop(0)) for row in group]
                for row, worker in running:
                    worker.begin(row)
                spares.append(Worker(context, folder))
                for row, worker in running:
                    patience = 300 if measures.toy else 30 + 2 * row.seconds
                    record(row, worker.outcome(min(patience, deadline - worker.started)))
        finally:
            for worker in [*spares, *(worker for _, worker in running)]:
                worker.end()


# Report ----------------------------------------------------------------------------------------------------------------


def verdict(figures: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """Losses beside those of the plain row."""
    values, tolerance = figures["losses"], figures["tolerance"]
    course = f"{values[0]:.4f} to {values[-1]:.4f} in {figures['strategy']}"
    if tolerance is None or reference is None:
        return course
    apart = max(abs(a - b) for a, b in zip(values, reference["losses"], strict=True))
    plain = f"{reference['losses'][0]:.4f} to {reference['losses'][-1]:.4f}"
    far = f"at most {apart:.1e} apart, {tolerance:g} allowed" if apart else "the same bit for bit"
    return f"{'pass' if apart <= tolerance else 'FAIL'}: {course}, plain {plain}; {far}"


def cells(outcome: dict[str, Any], results: dict[str, dict[str, Any]]) -> list[str]:
    """A row's cells after its name."""
    for word in ("failed", "skipped", "not measured"):
        if word in outcome:
            return [""] * 6 + [f"{word} ({outcome[word]})" if word == "not measured" else f"{word}: {outcome[word]}"]
    figures = outcome["figures"]
    notes = []
    for key, form in {
        "measured_tflops": "{:,.0f} TFLOP/s",
        "tb_per_second": "{:.2f} TB/s",
        "stands_still_seconds": "stands still for {:.1f} s",
        "note": "{}",
        "beside": "{}",
        "first_step_seconds": "first step {:.1f} s",
    }.items():
        notes += [form.format(figures[key])] if key in figures else []
    if "passed" in figures:
        notes.insert(0, "pass" if figures["passed"] else "FAIL")
    if "losses" in figures:
        notes.append(verdict(figures, results.get("losses, plain", {}).get("figures")))
    rate = results.get("matrix product, bf16", {}).get("figures", {}).get("measured_tflops")
    shares = [f"{figures['tflops'] / of:.1%}" if "tflops" in figures and of else "" for of in (H100_TFLOPS, rate)]
    numbers = {"a_second": ",.0f", "step_ms": ",.1f", "peak_gb": ".1f"}
    speed, step, peak = (f"{figures[key]:{form}}" if key in figures else "" for key, form in numbers.items())
    ratios = figures.get("ratios")
    ratio = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})" if ratios else ""
    return [speed, step, *shares, peak, ratio, "; ".join(notes)]


def table(results: dict[str, dict[str, Any]]) -> str:
    """The Markdown table of all rows, measured or not."""
    head = ["what", "a second", "step, ms", "MFU", "of measured", "peak, GB", "beside a bare loop", "note"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in ALL:
        outcome = results.get(row.name, {"not measured": "not asked for"})
        lines.append(" | ".join([f"| {row.name}", *(cell.replace("|", "/") for cell in cells(outcome, results))]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="regular expression, searched for in the rows' names")
    parser.add_argument("--limit", type=float, default=520, help="seconds; rows that do not fit are not measured")
    parser.add_argument("--toy", action="store_true", help="tiny models, to see that all works, also without a GPU")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="all figures, as JSON")
    parser.add_argument("--list", action="store_true", help="print the rows with the seconds each is expected to take")
    options = parser.parse_args()
    measures.toy = options.toy
    if options.list:
        print("\n".join(f"{row.seconds:4} s  {row.name}" for row in ALL))
        return
    if not options.toy and not torch.cuda.is_available():
        parser.error("there is no GPU here: --toy rehearses without one")
    rows = [row for row in ROWS if not options.toy] or [row for row in ALL if row.rehearsed]
    if options.only:
        rows = [row for row in ALL if re.search(options.only, row.name)]
    if not rows:
        parser.error(f"--only {options.only}: in no row's name; --list prints all")
    before = json.loads(options.output.read_text()) if options.only and options.output.exists() else {}
    content: dict[str, Any] = {"about": None, "toy": options.toy, "rows": {}}

    def record(row: Row, outcome: dict[str, Any]) -> None:
        facts = outcome.pop("about", None)
        if facts and content["about"] is None:
            content["about"] = facts
            here, there = ({k: v for k, v in (f or {}).items() if k != "date"} for f in (facts, before.get("about")))
            if here == there and before["toy"] == options.toy:  # not the figures of another machine beside these
                content["rows"] = before["rows"] | content["rows"]
        content["rows"][row.name] = outcome
        temporary = options.output.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(options.output)
        said = "; ".join(filter(None, cells(outcome, content["rows"])))
        print(f"{row.name}: {said} [{outcome.get('seconds', 0)} s]", file=sys.stderr, flush=True)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and their files are cleared away
    start = time.monotonic()
    run(rows, options.limit, record)
    print(f"{table(content['rows'])}\n\nTokens or images a second: medians of 4 blocks; ratios with their ranges.")
    print(f"Taken in {time.monotonic() - start:.0f} s." + (" At toy size: no figure means anything." if options.toy else ""))
    if content["about"]:
        print(line(content["about"]))


if __name__ == "__main__":
    main()
