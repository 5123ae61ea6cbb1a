"""What one GPU does: its limits, the templates' steps beside them and beside a bare loop, and whether the sums are right.

    python benchmarks/gpu.py                              # at most 9 minutes; writes benchmarks/gpu.json
    python benchmarks/gpu.py                              # goes on where the first call stopped; --list: which call has what
    python benchmarks/gpu.py --before gpu.json --output "$OUT/gpu.json"   # the same where the output starts empty
    python benchmarks/gpu.py --only "LoRA|packed"         # measures these rows again; other figures stay
    python benchmarks/gpu.py --toy --output toy.json      # a rehearsal at toy size on any machine: no figure means anything

Each row is measured in a process of its own with a time limit, so that one that fails leaves the others; it is printed and
written when it is done. The processes of the next rows start, and do their imports, while a row is measured. Rows whose
time is not taken (losses, resuming) run side by side. A row that does not fit into --limit is left to the next call. That
call keeps the figures of the same machine and versions. It tries a row that failed again, after all others.

How each is measured is in gpu_measures.py. Speed is in tokens or images a second; MFU counts operations as the templates
do (`shared.models.counts`: nothing for recomputation, attention within documents as if it were not causal), over
an H100's 989 TFLOP/s (data sheet, SXM) and over the rate of a large matrix product that is measured here. Losses are
compared with those of the row "losses, plain".
"""

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

START = time.monotonic()  # importing torch for the first time can take a minute of the call
import torch  # noqa: E402
from torch import nn  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]  # also where the project is not installed
import gpu_measures as measures  # noqa: E402
from about import about, cores, line  # noqa: E402

H100_TFLOPS = 989.0  # dense bf16, data sheet
PACKAGES = ("torch", "transformers", "accelerate", "peft", "torchvision", "torchao", "bitsandbytes")
SIDE_BY_SIDE = 8  # rows whose time is not taken
PATIENCE = 30  # seconds that a row may take more than twice what is expected
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
    rehearsed: bool = True  # at toy size, where it is not asked for by name: see `rehearsal`


SHARED = ("yaml", "accelerate", "transformers")  # what the package shared/ imports
LAUNCHED = (*SHARED, "tyro", "psutil")  # what a template is launched with
IMAGES = ("torchvision", "sklearn")
FSDP2 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
FSDP2 |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
FSDP2 |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}
SMALL_MODEL = "--model_preset 125M --vocab_size 32768 --seq_length 2048"
AS_LAUNCHED = f"{SMALL_MODEL} --torch_compile --per_device_train_batch_size 16 --global_batch_size 16"
TOO_MANY_ROWS = f"{SMALL_MODEL} --find_batch_size --per_device_train_batch_size 192 --global_batch_size 192"
LABEL = {"125M": "125M", "1B": "1.2B", "8B": "8B"}


def _trains(template: str, *needs: str, flags: str = "") -> Row:
    needs, rehearsed = (*LAUNCHED, *needs), template == "image_classification"  # tests launch the others, too
    options, name = {"name": template, "flags": flags}, " ".join([template, *flags.split()])
    return Row(f"{name} trains", measures.trains, 90, options, needs, timed=False, rehearsed=rehearsed)


def _resumes(template: str, deterministic: bool, *needs: str, flags: str = "") -> Row:
    options, needs = {"name": template, "deterministic": deterministic, "flags": flags}, (*LAUNCHED, *needs)
    name = " ".join([template, *flags.split(), f"resumes {'bit for bit' if deterministic else 'without --deterministic'}"])
    return Row(name, measures.resumes, 120, options, needs, timed=False, rehearsed=False)


def _pretrain(size: str, shape: str, more: str, expected: int, environment: dict | None = None, **options: Any) -> Row:
    rows, length = (int(n) for n in shape.split(" x "))
    needs = (*SHARED, *(["torchao"] if environment is FP8 else []))
    options |= {"size": size, "rows": rows, "length": length}
    return Row(f"{LABEL[size]}, {shape}{more}", measures.pretraining, expected, options, needs, environment or {})


def _lora(
    size: str, rows: int, more: str, expected: int, environment: dict | None = None, length: int = 2048, **options: Any
) -> Row:
    four_bits = options.get("quantised", False)
    name = f"{'QLoRA' if four_bits else 'LoRA'} {LABEL[size]}, {rows} x {length}{more}"
    needs = (*SHARED, "peft", *(["bitsandbytes"] if four_bits else []))
    options |= {"size": size, "rows": rows, "length": length}
    return Row(name, measures.lora, expected, options, needs, environment or {})


def _images(kind: str, rows: int, more: str, expected: int, **options: Any) -> Row:
    options |= {"kind": kind, "batch_size": rows}
    return Row(f"{kind}, {rows} images{more}", measures.image_step, expected, options, (*SHARED, *IMAGES))


def _timm(name: str, rows: int, expected: int) -> Row:
    options = {"name": name, "batch_size": rows}
    return Row(f"timm's {name}, {rows} images, compiled", measures.timm_step, expected, options, ("timm",))


def _trl(size: str, rows: int, expected: int) -> Row:
    name = f"TRL with Liger, LoRA {LABEL[size]}, {rows} x 2048, gradient checkpointing"
    needs = (*SHARED, "peft", "datasets", "trl", "liger_kernel")
    return Row(name, measures.trl_lora, expected, {"size": size, "rows": rows}, needs)


def _texts(rows: int, length: int, more: str, expected: int, **options: Any) -> Row:
    options |= {"rows": rows, "length": length}
    return Row(f"BERT-base, {rows} texts of {length} tokens{more}", measures.texts, expected, options, SHARED)


def _losses(more: str, tolerance: float | None, environment: dict | None = None, **options: Any) -> Row:
    needs = (*SHARED, *(["torchao"] if environment is FP8 else []))
    options |= {"tolerance": tolerance}
    return Row(f"losses, {more}", measures.losses, 60, options, needs, environment or {}, timed=False)


def _waiting(of: str, *needs: str) -> Row:
    return Row(f"no step waits for the GPU, {of}", measures.waiting, 60, {"of": of}, (*SHARED, *needs), timed=False)


ROWS = [  # the most telling first: the first call answers whether all trains and resumes, and how fast
    Row("matrix product, bf16", measures.matrix_product, 4, {"fp8": False}),
    Row("memory bandwidth", measures.bandwidth, 4),
    _trains("pretrain"),
    _trains("lora_finetune", "peft"),
    _trains("lora_finetune", "peft", "bitsandbytes", flags="--load_in_4bit"),
    _trains("full_finetune", "torchao", flags="--optim adamw_8bit"),
    _trains("full_finetune", flags="--weights_dtype bf16"),
    _trains("dpo", "peft"),
    _trains("text_classification"),
    _trains("image_classification", *IMAGES),
    _trains("pretrain_pipeline"),
    _resumes("pretrain", True),
    _resumes("lora_finetune", True, "peft"),
    _resumes("pretrain", True, flags="--torch_compile --async_save"),
    _resumes("pretrain", False),
    Row(
        "pretrain --find_batch_size trains",
        measures.trains,
        90,
        {"name": "pretrain", "flags": TOO_MANY_ROWS},
        LAUNCHED,
        rehearsed=False,
    ),
    _pretrain("125M", "16 x 2048", ", compiled", 15, compiled=True),
    Row("125M, 16 x 2048, compiled, as launched", measures.launched, 90, {"flags": AS_LAUNCHED}, LAUNCHED),
    _pretrain("125M", "16 x 2048", "", 10),
    _pretrain("1B", "4 x 2048", ", compiled", 18, compiled=True),
    _pretrain("1B", "4 x 2048", "", 10),
    _pretrain("1B", "8 x 2048", ", compiled", 22, compiled=True),
    _lora("8B", 2, "", 12),
    _lora("8B", 4, ", gradient checkpointing", 15, checkpointing="full"),
    _images("ResNet-50", 256, ", channels last", 10, channels_last=True),
    _images("ViT-B/16", 128, "", 10),
    _images("ViT-B/16", 128, ", compiled", 20, compiled=True),
    _images("ViT-S/16", 256, ", compiled", 20, compiled=True),
    _timm("vit_small_patch16_224", 256, 45),
    _losses("plain", None),
    _losses("plain once more", 0.0),
    _losses("whole logits", 0.02, fused=False),
    _losses("kernels that add up in any order", 0.02, deterministic=False),
    _losses("compiled", 0.02, compiled=True),
    _losses("gradient checkpointing", 1e-3, checkpointing="full"),
    _losses("FSDP2 of one process", 0.02, FSDP2),
    _losses("fp8, compiled", 0.05, FP8, compiled=True),
    _waiting("images", *IMAGES),
    _waiting("tokens"),
    _waiting("packed tokens"),
    Row("angles of positions", measures.positions, 20, {}, SHARED, timed=False),
    Row("attention of variable lengths", measures.packed_attention, 20, {}, SHARED, timed=False),
    Row("matrix product, fp8", measures.matrix_product, 4, {"fp8": True}),
    _pretrain("1B", "4 x 2048", ", fp8, compiled", 25, FP8, compiled=True),
    _pretrain("1B", "8 x 2048", ", fp8, compiled", 25, FP8, compiled=True, alone=True),
    _pretrain("1B", "16 x 2048", ", fp8, compiled", 30, FP8, compiled=True, alone=True),
    _pretrain("125M", "16 x 2048", ", Muon, compiled", 20, compiled=True, alone=True, optim="muon"),
    _pretrain("1B", "4 x 2048", ", bf16 weights, compiled", 20, compiled=True, alone=True, bf16_weights=True),
    _pretrain("1B", "4 x 2048", ", 8-bit AdamW, compiled", 40, compiled=True, alone=True, optim="adamw_8bit"),
    _texts(128, 128, ", compiled", 20, compiled=True),
    _pretrain("125M", "4 x 8192", "", 10),
    _pretrain("125M", "4 x 8192", ", packed", 10, documents=True),
    _pretrain("125M", "4 x 8192", ", packed by a mask", 10, documents=True, masked=True),
    _pretrain("125M", "4 x 8192", ", packed, compiled", 15, documents=True, compiled=True),
    _pretrain("125M", "4 x 8192", ", packed, flex attention", 25, documents=True, attention="flex_attention"),
    Row("checkpoint of 1.2B, in the background", measures.save_stall, 60, {"in_background": True}, SHARED),
    Row("checkpoint of 1.2B", measures.save_stall, 45, {"in_background": False}, SHARED),
    _images("ResNet-50", 256, ", channels last, compiled", 60, channels_last=True, compiled=True),
    _timm("resnet50", 256, 60),
    Row("image input", measures.image_input, 20, {}, (*SHARED, *IMAGES)),
    Row("image input, shrunk", measures.image_input, 20, {"shrunk": True}, (*SHARED, *IMAGES)),
    _lora("8B", 2, ", compiled", 30, compiled=True),
    _lora("8B", 2, ", not packed, compiled", 30, length=4096, packed=False, compiled=True),
    _lora("8B", 4, ", compiled", 30, compiled=True),
    _lora("8B", 4, ", gradient checkpointing, compiled", 30, checkpointing="full", compiled=True),
    _trl("8B", 4, 45),
    _lora("8B", 2, ", packed by a mask", 12, masked=True),
    _lora("8B", 2, ", whole logits", 12, fused=False),
    _lora("8B", 4, ", gradient checkpointing", 15, checkpointing="full", quantised=True),
    _lora("8B", 1, ", gradient checkpointing", 12, checkpointing="full", quantised=True),
    _lora("8B", 4, ", gradient checkpointing, compiled", 35, checkpointing="full", quantised=True, compiled=True),
    _lora("8B", 1, ", gradient checkpointing, compiled", 35, checkpointing="full", quantised=True, compiled=True),
    _lora("1B", 4, "", 10),
    _pretrain("1B", "4 x 2048", ", checkpointing every 2nd block, compiled", 16, compiled=True, checkpointing="2"),
    _pretrain("1B", "4 x 2048", ", checkpointing every block, compiled", 16, compiled=True, checkpointing="full"),
    _pretrain("1B", "1 x 8192", ", compiled", 18, compiled=True),
]


COMBINED = {"combo_kernels": True}  # independent small kernels, such as the casts of weights, in one
AS_MATRICES = {"conv_1x1_as_mm": True}
ROWS += [  # what a setting would gain
    _pretrain("125M", "16 x 2048", ", combined kernels, compiled", 15, compiled=True, alone=True, inductor=COMBINED),
    _images("ViT-S/16", 256, ", combined kernels, compiled", 20, compiled=True, inductor=COMBINED),
    _lora("8B", 2, ", combined kernels, compiled", 30, compiled=True, inductor=COMBINED),
    _images("ResNet-50", 256, ", as matrices, compiled", 60, channels_last=True, compiled=True, inductor=AS_MATRICES),
]


def rehearsal() -> list[Row]:
    """The rows that differ at toy size, where all models and batches have the same."""
    sizes = ("size", "rows", "length", "batch_size")
    kept: dict[str, Row] = {}
    for row in ROWS:
        options = {name: value for name, value in row.options.items() if name not in sizes}
        if row.rehearsed:
            kept.setdefault(f"{row.measure.__name__} {options} {row.environment} {row.timed}", row)
    return list(kept.values())


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
    row = next(row for row in ROWS if row.name == name)
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
        self.started, self.latest, self.ended = 0.0, 0.0, False

    def begin(self, row: Row) -> None:
        with contextlib.suppress(OSError, EOFError):  # it has died, which `outcome` will see
            if self.connection.poll(180):
                self.connection.recv()
            self.connection.send((row.name, measures.toy))
        self.started = time.monotonic()
        self.latest = self.started + (10 * PATIENCE if measures.toy else PATIENCE + 2 * row.seconds)

    def outcome(self, deadline: float) -> dict[str, Any]:
        """What the row gave, or why it gave nothing. At the deadline of the call a row may only have begun too late."""
        self.process.join(max(0.0, min(self.latest, deadline) - time.monotonic()))
        now, file, log, code = time.monotonic(), self.folder / "outcome.json", self.folder / "log", self.process.exitcode
        taken = now - self.started
        if file.exists():
            found = json.loads(file.read_text())
        elif code is None and now >= deadline:
            found = {"not measured": "out of time"}
        else:
            found = {"failed": f"took more than {taken:.0f} s" if code is None else f"ended with exit code {code}"}
        if "failed" in found and log.exists():
            found["log"] = log.read_text(errors="replace")[-4000:]
        self.end()
        return found | {"seconds": round(taken, 1)}

    def end(self) -> None:
        """Kill the process and what it has started, and remove its files."""
        if self.ended:
            return
        self.ended = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # in case it was too young to lead a group
        self.process.join(20)  # a driver may hold it for good
        shutil.rmtree(self.folder, ignore_errors=True)


def groups(rows: list[Row], most: int) -> Iterator[list[Row]]:
    """The rows in their order; those whose time is not taken together, but not more than `most`."""
    rows = list(rows)
    while rows:
        group = [rows.pop(0)]
        while rows and len(group) < most and not (group[0].timed or rows[0].timed):
            group.append(rows.pop(0))
        yield group


def expected(group: list[Row]) -> int:
    return max(row.seconds for row in group)


def run(rows: list[Row], deadline: float, record: Callable[[Row, dict[str, Any]], None]) -> None:
    """Measure the rows in their order, and record each outcome as it comes; at the deadline what runs is ended."""
    waiting = []
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
        os.environ.setdefault("TEMPLATES_CACHE", f"{folder}/prepared")
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        spares: list[Worker] = []
        running: dict[Any, tuple[Row, Worker]] = {}  # by what is ready when the process ends
        try:
            for group in groups(waiting, SIDE_BY_SIDE if on_gpu else cores()):
                if (1 if measures.toy else expected(group)) > deadline - time.monotonic():
                    for row in group:
                        record(row, {"not measured": "out of time"})
                    continue
                while len(spares) < len(group):
                    spares.append(Worker(context, folder))
                for row in group:
                    worker = spares.pop(0)
                    running[worker.process.sentinel] = row, worker
                    worker.begin(row)
                while len(spares) < 2:
                    spares.append(Worker(context, folder))
                while running:
                    ends = {sentinel: min(deadline, worker.latest) for sentinel, (_, worker) in running.items()}
                    first = min(ends, key=lambda sentinel: ends[sentinel])
                    ended = multiprocessing.connection.wait(list(ends), max(0.0, ends[first] - time.monotonic()))
                    for sentinel in ended or [first]:
                        row, worker = running.pop(sentinel)
                        record(row, worker.outcome(deadline))
        finally:
            for worker in [*spares, *(worker for _, worker in running.values())]:
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
        "stands_still_seconds": "stands still for {:.2f} s",
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
    for row in ROWS:
        outcome = results.get(row.name, {"not measured": "not asked for yet"})
        lines.append(" | ".join([f"| {row.name}", *(cell.replace("|", "/") for cell in cells(outcome, results))]) + " |")
    return "\n".join(lines)


def largest_kernels(results: dict[str, dict[str, Any]]) -> str:
    """The kernels that take most of a step, of rows below 60 % of the matrix product's rate."""
    rate = results.get("matrix product, bf16", {}).get("figures", {}).get("measured_tflops", H100_TFLOPS)
    lines = ["| what | GPU busy | launches | ms of a step, launches, kernel |", "|---|---|---|---|"]
    for name, outcome in results.items():
        figures = outcome.get("figures", {})
        if "kernels" in figures and figures.get("tflops", 0) < 0.6 * rate:
            most = [f"{ms:.2f}, {count}, {kernel[:90]}" for kernel, (ms, count) in [*figures["kernels"].items()][:10]]
            said = "<br>".join(most).replace("|", "/")
            lines.append(f"| {name} | {figures['busy']:.0%} | {figures['launches']} | {said} |")
    return "\n".join(lines)


def schedule(limit: float) -> str:
    """The rows, the call of so many seconds that measures each at the latest, and the seconds of that call up to it."""
    lines, call, total = [], 1, 0
    for group in groups(ROWS, SIDE_BY_SIDE):
        total += expected(group)
        if total > limit:
            call, total = call + 1, expected(group)
        lines += [f"call {call}, {row.seconds:3} s, in all {total:3} s  {row.name}" for row in group]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="regular expression, searched for in the rows' names")
    parser.add_argument("--limit", type=float, default=520, help="seconds of this call; other rows are left to the next")
    parser.add_argument("--toy", action="store_true", help="tiny models, to see that all works, also without a GPU")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="all figures, as JSON")
    parser.add_argument("--before", type=Path, help="figures of earlier calls; if not given, those in --output")
    parser.add_argument("--list", action="store_true", help="print the rows, the seconds expected of each, and its call")
    options = parser.parse_args()
    measures.toy = options.toy
    if options.list:
        print(schedule(options.limit))
        return
    if not options.toy and not torch.cuda.is_available():
        parser.error("there is no GPU here: --toy rehearses without one")
    installed = importlib.metadata.packages_distributions()
    facts = about(package for package in PACKAGES if package in installed) | {"CUDA": torch.version.cuda}
    content: dict[str, Any] = {"about": facts, "toy": options.toy, "rows": {}}
    before = options.before or options.output
    if before.exists():
        earlier = json.loads(before.read_text())
        if earlier["toy"] == options.toy and (earlier["about"] | {"date": None}) == (facts | {"date": None}):
            content["rows"] = earlier["rows"]
        else:
            print(f"{before} is of another machine or other versions: all is measured again", file=sys.stderr)
    if options.only:
        rows = [row for row in ROWS if re.search(options.only, row.name)]
        if not rows:
            parser.error(f"--only {options.only}: in no row's name; --list prints all")
    else:
        known = {row.name: content["rows"].get(row.name, {}) for row in ROWS}
        rows = [row for row in (rehearsal() if options.toy else ROWS) if "figures" not in known[row.name]]
        rows.sort(key=lambda row: "failed" in known[row.name])  # these again, after those that were not tried yet

    def record(row: Row, outcome: dict[str, Any]) -> None:
        content["rows"][row.name] = outcome
        temporary = options.output.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(options.output)
        said = "; ".join(filter(None, cells(outcome, content["rows"])))
        print(f"{row.name}: {said} [{outcome.get('seconds', 0)} s]", file=sys.stderr, flush=True)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and their files are cleared away
    run(rows, START + options.limit, record)
    print(table(content["rows"]), largest_kernels(content["rows"]), sep="\n\n")
    print("\nTokens or images a second: medians of 4 blocks; ratios with their ranges.")
    print(f"Taken in {time.monotonic() - START:.0f} s." + (" At toy size: no figure means anything." if options.toy else ""))
    print(line(facts))


if __name__ == "__main__":
    main()
