"""What `gpu.py` measures: each function here is called in a process of its own, and returns a row's figures.

- Training rows make the templates' optimizer step (seeds, learning rate, forward, loss, backward, clipping, the guard
  against what is not finite, update) on batches that lie ready on the device, so reading data and logging are not in
  them: see peers_pretrain.py and overhead.py. Models have random weights; pretraining computes in bf16 over fp32 weights.
- The bare loop is written by hand on the same model, blocks compiled or not as there: autocast, a loss from whole logits,
  backward, clip, one fused AdamW. The two alternate, block by block; a ratio pairs neighbouring blocks, and above 1 the
  templates' step is the faster one. A block lasts about half a second; the device is waited for before and after it.
  transformers looks up at each step of it whether rows are packed, which the host waits for.
- Losses are those of ten steps of one small model with what --deterministic sets, and once without it.
"""

import cProfile
import importlib
import io
import itertools
import json
import math
import os
import pstats
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from about import cores
from torch import nn
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY = {"125M": 32768, "1B": 128256, "8B": 128256}
toy = False  # tiny models, few steps: whether all works
# Products in fp8 are computed number by number where a CPU has no unit for them.
TOY_SHAPE = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"


class Skipped(Exception):
    """This row cannot be measured here, and that is nobody's fault."""


# Timing ----------------------------------------------------------------------------------------------------------------


def device() -> torch.device:
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return torch.device("cuda" if torch.cuda.is_available() and not on_cpu else "cpu")


def seconds(function: Callable[[], Any], times: int = 1) -> float:
    """How long so many calls take, the device's work included."""
    synchronize = torch.cuda.synchronize if device().type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(times):
        function()
    synchronize()
    return time.perf_counter() - start


def pace(step: Callable[[], Any], units: int, flops: float | None, other: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Figures of a step that computes `units` tokens or images with so many operations each, beside another step's."""
    figures: dict[str, Any] = {"first_step_seconds": seconds(step)}  # compiles, where that is asked for
    seconds(step, 1 if toy else 2)
    if device().type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    once = seconds(step)
    if device().type == "cuda":
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        figures["grows_in_place"] = all(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())
    times = 1 if toy else max(2, min(50, math.ceil(0.5 / once)))
    if other is not None:
        try:
            seconds(other, 1 if toy else 3)
        except torch.OutOfMemoryError:
            figures["beside"], other = "the bare loop runs out of memory", None
    own, others = [], []
    for _ in range(2 if toy else 4):
        own.append(seconds(step, times) / times)
        if other is not None:
            others.append(seconds(other, times) / times)
    median = statistics.median(own)
    figures |= {"step_ms": 1000 * median, "a_second": units / median, "step_ms_each": [1000 * s for s in own]}
    if flops:
        figures["tflops"] = flops * units / median / 1e12
    if others:
        figures["ratios"] = [b / a for a, b in zip(own, others, strict=True)]
    return figures | (kernels(step) if device().type == "cuda" else {})


def kernels(step: Callable[[], Any], times: int = 2) -> dict[str, Any]:
    """The kernels of a step that take most of the device's time, by name: [ms, launches]; the device's busy share; and the
    host's own work, where that share is small."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        taken = seconds(step, times)
    events = [event for event in profile.key_averages() if not event.is_user_annotation]
    found = [(e.self_device_time_total / 1000 / times, e.count // times, e.key[:160]) for e in events]
    found = sorted((row for row in found if row[0] > 0), reverse=True)
    busy = sum(ms for ms, _, _ in found) * times / 1000 / taken
    figures: dict[str, Any] = {"kernels": {name: [ms, count] for ms, count, name in found[:40]}}
    figures |= {"busy": busy, "launches": sum(count for _, count, _ in found)}
    if busy < 0.8:
        host = cProfile.Profile()
        host.runcall(seconds, step, times)
        text = io.StringIO()
        for order in ("tottime", "cumtime"):
            pstats.Stats(host, stream=text).sort_stats(order).print_stats(45)
        figures["host"] = re.sub(r"/\S*/(site|dist)-packages/", "", text.getvalue())
    return figures


def set_inductor(settings: dict[str, Any] | None) -> None:
    """Set options of PyTorch's compiler, by name."""
    for name, value in (settings or {}).items():
        setattr(torch._inductor.config, name, value)  # type: ignore[attr-defined]


# Limits of the device --------------------------------------------------------------------------------------------------


def best(function: Callable[[], Any]) -> float:
    """Seconds of a call in the fastest of several blocks."""
    times = 2 if toy else 20
    seconds(function, times)
    return min(seconds(function, times) / times for _ in range(8))


def matrix_product(*, fp8: bool) -> dict[str, Any]:
    n, where = 64 if toy else 8192, device()
    a, b = (torch.randn(n, n, device=where, dtype=torch.bfloat16) for _ in range(2))
    product: Callable[[], Any] = partial(torch.mm, a, b)
    if fp8:  # one scale a tensor, and b column by column, as the kernel wants it
        a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t(), torch.ones((), device=where)
        product = partial(torch._scaled_mm, a8, b8, one, one, out_dtype=torch.bfloat16, use_fast_accum=where.type == "cuda")
    return {"measured_tflops": 2 * n**3 / best(product) / 1e12, "note": f"{n} x {n} x {n}, random numbers"}


def bandwidth() -> dict[str, Any]:
    source = torch.randn(2**20 if toy else 2**30, device=device())
    copy = torch.empty_like(source)
    size = source.numel() * source.element_size()
    rate = 2 * size / best(partial(copy.copy_, source)) / 1e12
    return {"tb_per_second": rate, "note": f"a copy of {size / 1e9:.1f} GB, bytes read and bytes written"}


# The templates' step ---------------------------------------------------------------------------------------------------


def template(name: str) -> Any:
    """A template as a module."""
    return importlib.import_module(f"templates.{name}")


def start_accelerator(*, deterministic: bool = False) -> Any:
    from shared.run import launch

    return launch.start(0, deterministic=deterministic)


class Loop:
    """The templates' optimizer step on batches that lie ready."""

    def __init__(self, accelerator: Any, model: nn.Module, batches: list[dict], loss: Callable, **settings: Any) -> None:
        import numpy as np

        from shared.config.options import OptimConfig
        from shared.data.loader import Window
        from shared.parallel.strategy import Strategy
        from shared.run.guard import Guard
        from shared.run.state import TrainState
        from shared.training import optim

        self.config = OptimConfig(**{"learning_rate": 3e-4} | settings)
        self.strategy = Strategy(accelerator)
        optimizers = optim.build(model, self.config)
        self.model, self.optimizers = self.strategy.prepare(model, optimizers, self.config)
        self.accelerator, self.loss, self.state = accelerator, loss, TrainState()
        targets = [(batch, int((batch["labels"] != -100).sum()), len(batch["labels"])) for batch in batches]
        self.windows = [Window([batch], n, rows, 0, None, np.arange(rows)[None]) for batch, n, rows in targets]
        self.guard = Guard(self.strategy, [self.model], self.state, max_skipped=0)

    def step(self) -> torch.Tensor:
        """The loss summed over the batch, on the device."""
        from shared.data.order import seed_all
        from shared.training import optim
        from shared.training.step import Step

        window, finite = self.windows[self.state.step % len(self.windows)], self.guard.finite
        seed_all(0, self.state.step, 0)
        rate = optim.set_learning_rate(self.optimizers, self.config, self.state.step, 10_000)
        self.state.advance(window)
        step = Step(self.strategy, [self.model], window, number=self.state.step, rate=rate, verdict=finite)
        for batch in step.micro_batches():
            loss = self.loss(self.model, batch)
            step.backward(loss)
        step.clip_gradients(self.config.max_grad_norm)
        step.update(self.optimizers)
        self.guard.stop_if_asked()
        return loss.detach()


def language_loop(
    accelerator: Any,
    model: nn.Module,
    size: str,
    batches: list[dict],
    *,
    fused: bool = True,
    masked: bool = False,
    compiled: bool = False,
    **settings: Any,
) -> tuple[Loop, dict[str, Any]]:
    """(the loop of a language model, what is said of it); `fused` and not `masked` as the templates do: head and loss in
    one, and packed documents kept apart without a mask; `compiled` as the model's blocks are."""
    from shared.models.fused_head import fuse_head
    from shared.models.isolation import isolate_documents
    from shared.models.loss import causal_lm_loss

    assert compiled == any(module._compiled_call_impl for module in model.modules())
    loop = Loop(accelerator, model, batches, causal_lm_loss, **settings)
    notes = []
    if "cu_seqlens" in batches[0] and not masked:
        notes.append(isolate_documents(loop.model, accelerator.device, len(batches[0]["input_ids"]))[1])
    if fused and not (word := fuse_head(accelerator, loop.model, compiled=compiled)).startswith("fused"):
        notes.append(f"loss {word}")
    said = {"strategy": type(loop.model).__name__}
    return loop, said | ({"note": "; ".join(notes)} if notes else {})


def bare_step(model: nn.Module, batch: dict[str, torch.Tensor], moments_of: Any) -> Callable[[], None]:
    """A training step without anything of this project or of Accelerate. Model and moments are the templates' step's own:
    two of each would not fit."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    optimizer.state = moments_of.state
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    labels, forward = batch["labels"], type(model).forward  # not the instance's, which Accelerate has wrapped

    def step() -> None:
        with torch.autocast(labels.device.type, torch.bfloat16):
            logits = forward(model, **inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


class Tokenizer:
    """As much of a tokenizer as building a model asks for."""

    bos_token_id = eos_token_id = pad_token_id = 0

    def __init__(self, size: str) -> None:
        self.tokens = 512 if toy else VOCABULARY[size]

    def __len__(self) -> int:
        return self.tokens

    def get_vocab(self) -> dict[str, int]:
        return {str(number): number for number in range(self.tokens)}


def token_batch(size: str, rows: int, length: int, *, documents: bool = False, seed: int = 0) -> dict:
    """Rows of counting tokens, which a model can learn; of documents one to four eighths of a row long, if asked."""
    from shared.data.loader import cu_seqlens_of

    generator, lengths, vocabulary = torch.Generator().manual_seed(seed), random.Random(seed), len(Tokenizer(size))
    start = torch.randint(0, vocabulary, (rows, 1), generator=generator)
    stride = torch.randint(1, 9, (rows, 1), generator=generator)
    tokens = (start + stride * torch.arange(length + 1)) % vocabulary
    batch = {"input_ids": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone()}
    if documents:
        batch["position_ids"] = torch.arange(length).repeat(rows, 1)
        for labels, positions in zip(batch["labels"], batch["position_ids"], strict=True):
            at = 0
            while at < length:
                end = min(length, at + lengths.randrange(length // 8, length // 2))
                positions[at:end] -= at
                labels[end - 1] = -100  # the next token is another document's
                at = end
    if documents:
        batch["cu_seqlens"] = torch.from_numpy(cu_seqlens_of(batch["position_ids"].numpy()))
        batch["targets"] = (batch["labels"] != -100).flatten().nonzero().flatten()
    return {key: value.to(device()) for key, value in batch.items()}


def seen(batch: dict[str, torch.Tensor], length: int) -> float:
    """Tokens that a token of the batch shares its document with, in the mean."""
    if "cu_seqlens" not in batch:
        return length
    lengths = batch["cu_seqlens"].diff().double()
    return float((lengths**2).sum() / lengths.sum())


def language_model(size: str, length: int, *, compiled: bool = False, checkpointing: str = "none", attention: str = "sdpa"):
    """What templates/pretrain.py builds for these settings, made on the device."""
    from shared.config.options import SpeedConfig
    from shared.models.blocks import compile_blocks
    from shared.models.options import ModelConfig

    pretrain = template("pretrain")
    speed = SpeedConfig(torch_compile=compiled, gradient_checkpointing=checkpointing, attn_implementation=attention)  # type: ignore[arg-type]
    model = ModelConfig("3M", config_overrides=TOY_SHAPE) if toy else ModelConfig(size)
    with device():
        built = pretrain.build_model(pretrain.Config(seq_length=length, speed=speed, model=model), Tokenizer(size))
    if compiled:
        compile_blocks(built)
    return built


def pretraining(
    size: str,
    length: int,
    rows: int,
    *,
    documents: bool = False,
    masked: bool = False,
    optim: str = "adamw",
    bf16_weights: bool = False,
    alone: bool = False,
    inductor: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Tokens a second of the pretraining step, and of a bare loop unless rows are packed documents or it is asked to be
    alone. With `bf16_weights` it is the step of full_finetune.py with --weights_dtype bf16."""
    from shared.models.counts import flops_per_token

    if settings.get("attention") == "flex_attention" and device().type == "cpu":
        raise Skipped("flex attention has no backward on a CPU")
    length, rows = (64, 2) if toy else (length, rows)
    set_inductor(inductor)
    accelerator = start_accelerator()
    model = language_model(size, length, **settings)
    if bf16_weights:
        model.to(torch.bfloat16)
    batch = token_batch(size, rows, length, documents=documents)
    flops = flops_per_token(model, seen(batch, length))
    how: dict[str, Any] = {"masked": masked, "compiled": settings.get("compiled", False), "optim": optim}
    loop, said = language_loop(accelerator, model, size, [batch], **how)
    bare = None if documents or alone else bare_step(model, batch, loop.optimizers[0])
    return said | pace(loop.step, rows * length, flops, bare)


def quantise(model: nn.Module) -> None:
    """Linear layers but the head to nf4 in place, as loading in 4 bits does; for a model that comes from no file."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    options: dict[str, Any] = {"compress_statistics": True, "quant_type": "nf4"}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                four = Linear4bit(child.in_features, child.out_features, False, torch.bfloat16, device="meta", **options)
                four.weight = Params4bit(child.weight.detach(), requires_grad=False, **options)
                setattr(parent, name, four.to(device()))  # which quantises
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # what PEFT asks for


def lora(
    size: str,
    rows: int,
    *,
    checkpointing: str = "none",
    compiled: bool = False,
    fused: bool = True,
    length: int = 2048,
    masked: bool = False,
    packed: bool = True,
    quantised: bool = False,
    inductor: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Tokens a second of the fine-tuning step on full rows, packed unless said otherwise: all of their tokens are useful."""
    set_inductor(inductor)
    accelerator, model, batch = lora_model(
        size, rows, length, checkpointing=checkpointing, compiled=compiled, packed=packed, quantised=quantised
    )
    from shared.models.counts import flops_per_token

    rows, length = batch["input_ids"].shape
    flops = flops_per_token(model, seen(batch, length))
    how: dict[str, Any] = {"fused": fused, "masked": masked, "compiled": compiled}
    loop, said = language_loop(accelerator, model, size, [batch], **how, weight_decay=0.0)
    return said | pace(loop.step, rows * length, flops)


def lora_model(
    size: str, rows: int, length: int, *, checkpointing: str, compiled: bool, packed: bool, quantised: bool
) -> tuple[Any, nn.Module, dict[str, torch.Tensor]]:
    """(accelerator, the base with adapters as lora_finetune.py has it, a batch)."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    from shared.models.adapters import trained_in_fp32
    from shared.models.blocks import compile_blocks, set_gradient_checkpointing
    from shared.models.hub import from_architecture
    from shared.models.options import PRESETS

    accelerator = start_accelerator()
    length, rows = (64, min(2, rows)) if toy else (length, rows)
    presets = PRESETS | {"8B": (4096, 32, 32, 8, 14336)}
    hidden, blocks, heads, kv_heads, feed_forward = (64, 2, 4, 2, 128) if toy else presets[size]
    architecture = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=feed_forward,
        vocab_size=len(Tokenizer(size)),
        max_position_embeddings=length,
        tie_word_embeddings=size != "8B",
    )
    options = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    with device():
        base = from_architecture(AutoModelForCausalLM, architecture, **options)
    if quantised:
        quantise(base)
    set_gradient_checkpointing(base, checkpointing)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear")
    model = trained_in_fp32(get_peft_model(base, adapters))
    if compiled:
        compile_blocks(model)
    return accelerator, model, token_batch(size, rows, length, documents=packed)


def trl_lora(size: str, rows: int, *, steps: int = 12) -> dict[str, Any]:
    """TRL's SFTTrainer with Liger's kernels and gradient checkpointing, its default, on the same base, adapters and rows."""
    import transformers
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from shared.models.counts import flops_per_token

    model: Any
    _, model, batch = lora_model(size, rows, 2048, checkpointing="none", compiled=False, packed=False, quantised=False)
    rows, length = batch["input_ids"].shape
    flops, ends = flops_per_token(model, length), []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **more: Any) -> None:
            if device().type == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    ids = batch["input_ids"].repeat(steps, 1).tolist()
    settings: dict[str, Any] = {"per_device_train_batch_size": rows, "max_steps": steps, "max_length": length}
    settings |= {
        "bf16": True,
        "use_cpu": device().type == "cpu",
        "use_liger_kernel": device().type == "cuda",
        "gradient_checkpointing": True,
        "report_to": "none",
    }
    config = SFTConfig(output_dir=tempfile.mkdtemp(), save_strategy="no", logging_steps=steps, **settings)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_one_word_tokenizer(), pad_token="<pad>", eos_token="<pad>"
    )
    data = Dataset.from_dict({"input_ids": ids, "labels": ids})
    trainer = SFTTrainer(model=model, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Clock()])
    trainer.train()
    step = statistics.median(b - a for a, b in itertools.pairwise(ends[2:]))
    units, figures = rows * length, {"step_ms": 1000 * step, "a_second": rows * length / step}
    figures |= {"tflops": flops * units / step / 1e12} if flops else {}
    if device().type == "cuda":
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return figures | {"note": f"rows of one document; trl {version('trl')}, liger-kernel {version('liger-kernel')}"}


def _one_word_tokenizer() -> Any:
    import tokenizers

    return tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0}, unk_token="<pad>"))


def texts(rows: int, length: int, *, compiled: bool = False) -> dict[str, Any]:
    """Texts a second of the step of text_classification.py: BERT-base's size, all texts equally long."""
    from transformers import AutoModelForSequenceClassification, BertConfig

    from shared.models.blocks import compile_blocks
    from shared.models.counts import measure
    from shared.models.hub import from_architecture

    accelerator = start_accelerator()
    rows, length = (2, 16) if toy else (rows, length)
    small: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    architecture = BertConfig(**(small if toy else {}))
    architecture.num_labels = 8
    with device():
        model: Any = from_architecture(AutoModelForSequenceClassification, architecture, dtype=torch.float32)
        batch = {"input_ids": torch.randint(0, architecture.vocab_size, (rows, length)), "labels": torch.arange(rows) % 8}
    inputs = {"input_ids": batch["input_ids"], "attention_mask": torch.ones_like(batch["input_ids"])}
    with accelerator.autocast():
        flops = measure(model, {name: value[:1] for name, value in inputs.items()})
    if compiled:
        compile_blocks(model)

    def loss(prepared: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(prepared(**inputs).logits.float(), batch["labels"], reduction="sum")

    return pace(Loop(accelerator, model.train(), [batch], loss).step, rows, flops)


# Images ----------------------------------------------------------------------------------------------------------------


def image_step(
    kind: str,
    batch_size: int,
    *,
    compiled: bool = False,
    channels_last: bool = False,
    inductor: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Images a second of the image template's step on uint8 images that lie on the device."""
    set_inductor(inductor)
    loop, flops = image_loop(kind, batch_size, compiled=compiled, channels_last=channels_last)
    return pace(loop.step, len(loop.windows[0].indices[0]), flops)


def timm_step(name: str, batch_size: int) -> dict[str, Any]:
    """The step of timm's train.py on images that lie normalised on the device: autocast, clip, AdamW, compiled whole."""
    import timm

    rows, classes = (4, 10) if toy else (batch_size, 1000)
    model = timm.create_model(name, num_classes=classes).to(device())
    if name.startswith("resnet"):
        model.to(memory_format=torch.channels_last)
    torch.backends.cudnn.benchmark = True  # as its train.py sets it
    compiled: Any = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05, fused=True)
    images = torch.randn(rows, 3, 224, 224, device=device())
    if name.startswith("resnet"):
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(rows, device=device()) % classes

    def step() -> None:
        with torch.autocast(device().type, torch.bfloat16):
            loss = F.cross_entropy(compiled(images), labels, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return pace(step, rows, None) | {"note": f"timm {version('timm')}"}


def waiting(*, of: str) -> dict[str, Any]:
    """Whether the host waits for the GPU anywhere in a step of images, tokens or packed tokens, as CUDA itself sees it."""
    if of == "images":
        loop, _ = image_loop("ResNet-50", 8)
    else:
        rows, length = (2, 64) if toy else (4, 1024)  # tokens enough for the kernels that training uses
        batch = token_batch("125M", rows, length, documents=of == "packed tokens")
        accelerator = start_accelerator()
        loop, _ = language_loop(accelerator, language_model("125M", length), "125M", [batch])
    for _ in range(3):
        loop.step()
    if device().type == "cpu":
        return {"passed": True, "note": "no GPU to wait for"}
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            loop.step()
    except RuntimeError as error:
        return {"passed": False, "note": str(error).splitlines()[0]}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"passed": True, "note": "three steps without a synchronisation"}


def image_loop(kind: str, batch_size: int, *, compiled: bool = False, channels_last: bool = False) -> tuple[Loop, float]:
    """(the image template's step on uint8 images that lie on the device, FLOPs of an image)."""
    from transformers import AutoModelForImageClassification, ResNetConfig, ViTConfig

    from shared.images.processor import ToModel, image_processor
    from shared.models import image_classifier
    from shared.models.blocks import compile_images
    from shared.models.counts import measure
    from shared.models.hub import from_architecture

    size, rows, classes = (32, 4, 10) if toy else (224, batch_size, 1000)
    accelerator = start_accelerator()
    small: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    tiny: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    architecture: Any
    if kind == "ResNet-50":
        architecture = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1]) if toy else ResNetConfig()
    else:
        architecture = ViTConfig(**(tiny if toy else small if kind == "ViT-S/16" else {}))  # whose default is ViT-B/16
    architecture.num_labels, architecture.image_size = classes, size
    model: nn.Module = from_architecture(AutoModelForImageClassification, architecture, dtype=torch.float32)
    processor = image_processor(None, size, None)
    to_model = ToModel(processor, accelerator.device, channels_last=channels_last)
    model.to(accelerator.device).to(memory_format=to_model.memory_format)  # type: ignore[call-overload]
    with accelerator.autocast():
        flops = measure(model, {"pixel_values": torch.zeros(1, 3, size, size, device=accelerator.device)})
    if compiled:
        compile_images(model)
    image_classifier.training_mode(model)
    batch = {"pixel_values": torch.randint(0, 256, (rows, 3, size, size)).to(torch.uint8)}
    batch = {k: v.to(accelerator.device) for k, v in (batch | {"labels": torch.arange(rows) % classes}).items()}

    def loss(prepared: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = prepared(pixel_values=to_model(batch["pixel_values"])).logits.float()
        return F.cross_entropy(logits, batch["labels"], label_smoothing=0.1, reduction="sum")

    return Loop(accelerator, model, [batch], loss), flops


def image_input(*, shrunk: bool = False) -> dict[str, Any]:
    """Images a second that the image template's loader decodes, augments and puts on the device, with no model; of a copy
    that `python -m shared shrink` has made, if asked."""
    import numpy as np
    from PIL import Image

    from shared.config.options import BatchConfig, CheckpointConfig, LogConfig
    from shared.images import files as images
    from shared.images.options import ImageConfig
    from shared.images.processor import ToModel, image_processor
    from shared.run.setup import Setup

    classify = template("image_classification")
    count, rows, width, height = (24, 4, 48, 40) if toy else (640, 64, 500, 375)
    folder, workers = Path(tempfile.mkdtemp()), 1 if toy else cores()
    os.environ["TEMPLATES_CACHE"] = str(folder / "cache")

    def make(number: int) -> None:
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        pixels = (pixels + rng.integers(-9, 10, pixels.shape, dtype=np.int16)).clip(0, 255)
        place = folder / "images" / f"class-{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number}.jpg", quality=90)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(make, range(count)))
    if shrunk:
        command = [sys.executable, "-m", "shared", "shrink", str(folder / "images"), str(folder / "small")]
        subprocess.run([*command, "--size", "24" if toy else "256"], check=True)
        shutil.rmtree(folder / "images")
        (folder / "small").rename(folder / "images")
    config = classify.Config(
        data=ImageConfig(train_dir=(folder / "images",)),
        batch=BatchConfig(global_batch_size=rows, per_device_train_batch_size=rows, dataloader_num_workers=workers),
        checkpoint=CheckpointConfig(output_dir=folder / "run"),
        log=LogConfig(report_to="none"),
    )
    setup = Setup(classify.with_defaults(config), "image_classification", unit="images")
    processor = image_processor(None, 32 if toy else 224, None)
    to_model = ToModel(processor, setup.device)
    loader, _ = classify.build_loaders(setup, images.prepare(setup.config.data), processor, nn.Identity())
    windows: Iterator[Any] = loader.windows(0, 100_000)  # more than are read: at the end workers have nothing to do

    def read() -> None:
        to_model(next(iter(next(windows).micro_batches))["pixel_values"])

    warm, times = (6, 6) if toy else (5 * workers, 200)  # 4 batches a worker are read ahead
    seconds(read, warm)
    rate = rows * times / seconds(read, times)
    return {"a_second": rate, "note": f"{workers} workers, JPEGs of {width} x {height} pixels" + ", shrunk to 256" * shrunk}


# Checkpoints -----------------------------------------------------------------------------------------------------------


def save_stall(*, in_background: bool) -> dict[str, Any]:
    """Seconds that training stands still for a checkpoint of a 1.2B model with AdamW's state."""
    from shared.config.options import CheckpointConfig, FullSpeedConfig
    from shared.run.checkpoint import Checkpointer
    from shared.run.prepared import Prepared

    accelerator = start_accelerator()
    length, rows = (64, 2) if toy else (2048, 4)
    batch = token_batch("1B", rows, length)
    loop, _ = language_loop(accelerator, language_model("1B", length), "1B", [batch])
    seconds(loop.step, 3)
    usual = statistics.median(seconds(loop.step) for _ in range(5))
    folder = Path(tempfile.mkdtemp())
    config = template("pretrain").Config(
        speed=FullSpeedConfig(async_save=in_background), checkpoint=CheckpointConfig(save_total_limit=1)
    )
    run = Prepared(config, "pretrain", "tokens", loop.strategy.accelerator, loop.strategy, folder)
    run.models["model"], run.optimizers = loop.model, loop.optimizers
    saver = Checkpointer(run, "none")
    states = [values for optimizer in loop.optimizers for values in optimizer.state.values()]
    tensors = [*loop.model.parameters(), *(tensor for values in states for tensor in values.values())]
    size, free = sum(tensor.nbytes for tensor in tensors), shutil.disk_usage(folder).free
    if free < (1.5 if in_background else 1.2) * size:
        raise Skipped(f"a checkpoint has {size / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free in {folder.parent}")
    note = f"{size / 1e9:.1f} GB; a step takes {1000 * usual:.0f} ms"
    figures: dict[str, Any] = {"gb": size / 1e9, "usual_step_ms": 1000 * usual}

    figures["stands_still_seconds"] = seconds(partial(saver.save, loop.state))
    if in_background:
        start, taken = time.perf_counter(), 0
        while saver.pending is not None and not saver.pending.done() and time.perf_counter() - start < 20:
            seconds(loop.step)
            taken += 1
        figures["slower_seconds"] = slower = time.perf_counter() - start - taken * usual
        note += f"; in {taken} steps beside writing training lost {slower:.1f} s"
        saver.wait()  # raises what went wrong
        loop.state.step += 1
        figures["stands_still_again_seconds"] = again = seconds(partial(saver.save, loop.state))
        note += f"; a second save stands still for {again:.2f} s"
    else:
        shutil.rmtree(folder)
        folder.mkdir()
        figures["torch_save_seconds"] = beside = seconds(lambda: torch.save(tensors, folder / "all.pt"))
        note += f"; torch.save of the same stands still for {beside:.1f} s"
    return figures | {"note": note}


# Right or wrong --------------------------------------------------------------------------------------------------------


def losses(
    tolerance: float | None = None, *, fused: bool = True, deterministic: bool = True, **settings: Any
) -> dict[str, Any]:
    """Losses of ten optimizer steps of the 125M model; without `deterministic` by the kernels that training uses."""
    accelerator = start_accelerator(deterministic=deterministic)
    length, rows = (32, 2) if toy else (1024, 4)
    model = language_model("125M", length, **settings)
    batches = [token_batch("125M", rows, length, seed=seed) for seed in range(10)]
    constant: dict[str, Any] = {"learning_rate": 1e-4, "lr_scheduler_type": "constant", "warmup_steps": 0.0}
    constant["compiled"] = settings.get("compiled", False)
    loop, said = language_loop(accelerator, model, "125M", batches, fused=fused, **constant)
    return said | {"losses": [loop.step().item() / (rows * length) for _ in batches], "tolerance": tolerance}


def positions() -> dict[str, Any]:
    """Whether a model turns 8192 positions of several rows by the right angles: products in TF32 would not."""
    accelerator = start_accelerator()
    rows, length = 4, 64 if toy else 8192
    rotary = language_model("125M", length).model.rotary_emb
    numbers = torch.arange(length, device=accelerator.device).repeat(rows, 1)
    with accelerator.autocast():
        cos, sin = rotary(torch.zeros(1, device=accelerator.device), numbers)
    exact = numbers[..., None].double() * torch.cat([rotary.inv_freq, rotary.inv_freq]).double()
    apart = max(float((given.double() - right).abs().max()) for given, right in ((cos, exact.cos()), (sin, exact.sin())))
    return {"passed": apart < 2e-3, "note": f"at most {apart:.1e} apart from fp64, up to position {length - 1}"}


def packed_attention() -> dict[str, Any]:
    """Whether PyTorch's attention of variable lengths gives what a mask gives, for the heads of usual models."""
    from shared.models.isolation import MAX_ERROR, error_of, find_kernel

    kernel = find_kernel(device())
    if kernel is None:
        raise Skipped(f"attention of variable lengths has no kernel on a {device().type.upper()}")
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in training
    heads = [(12, 12, 64), (32, 8, 64), (32, 8, 128), (16, 8, 256)]
    wrong = []
    for many, of_keys, size in heads:
        error = error_of(kernel, (many, of_keys, size, size, torch.bfloat16), device())
        if not error <= MAX_ERROR:
            wrong.append(f"{many}, {of_keys}, {size}: off by {error:.2g}")
    return {"passed": not wrong, "note": "; ".join(wrong) or f"heads, of keys, head_dim: {str(heads)[1:-1]}"}


def launch_command(name: str) -> list[str]:
    """`accelerate launch` a template with its embedded default."""
    on_cpu = device().type == "cpu"
    config = "cpu" if on_cpu else "single_gpu"
    if name == "pretrain_pipeline":
        if not on_cpu and torch.cuda.device_count() < 2:
            raise Skipped("a pipeline needs two GPUs")
        config = "ddp"
    flags = ["--config_file", f"{ROOT}/accelerate_configs/{config}.yaml", *(["--mixed_precision", "no"] if on_cpu else [])]
    return [sys.executable, "-m", "accelerate.commands.launch", *flags, f"{ROOT}/templates/{name}.py"]


def logged(run_dir: Path) -> list[dict[str, Any]]:
    """What a run logged of its training steps."""
    rows = [json.loads(text) for text in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def logged_losses(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in logged(run_dir)}


def trains(*, name: str, flags: str) -> dict[str, Any]:
    """Whether a template, launched as users do, ends by itself with finite losses and writes final/."""
    folder, steps = Path(tempfile.mkdtemp()), 2 if toy else 20
    common = ["--max_steps", str(steps), "--logging_steps", "1", "--report_to", "none", "--output_dir", str(folder)]
    log, start = Path(tempfile.gettempdir(), "log"), time.perf_counter()  # where this process's output goes, too
    code = subprocess.run([*launch_command(name), *common, *flags.split()], stderr=subprocess.STDOUT).returncode
    taken = time.perf_counter() - start
    if code:  # the launcher's traceback comes after the template's own last words, and ends with how the template ended
        said, _, launcher = log.read_text(errors="replace").rstrip().rpartition("Traceback (most")
        own = [text.strip() for text in said.splitlines() if text.strip()]
        last = " / ".join([*own[-2:], launcher.rpartition("]' ")[2]])
        raise RuntimeError(next((text for text in own if text.startswith("error: ")), last))
    losses = list(logged_losses(folder).values())
    passed = len(losses) == steps and all(map(math.isfinite, losses)) and any((folder / "final").iterdir())
    note = f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {steps} steps; {taken:.0f} s from start to end"
    if "--find_batch_size" in flags:
        tried = re.findall(r"out of memory with (\d+) at once; trying (\d+)", log.read_text(errors="replace"))
        passed &= bool(tried) or toy
        note += "".join(f"; out of memory with {rows} rows at once, so {fewer}" for rows, fewer in tried)
    return {"passed": passed, "note": note}


def launched(*, flags: str) -> dict[str, Any]:
    """What pretraining logs of its own speed, launched as users do: medians from step 60 on."""
    folder, steps, every, first = Path(tempfile.mkdtemp()), *((12, 1, 3) if toy else (240, 20, 60))
    common = ["--max_steps", str(steps), "--logging_steps", str(every), "--eval_samples", "16", "--report_to", "none"]
    command = [*launch_command("pretrain"), *common, "--output_dir", str(folder), *([] if toy else flags.split())]
    subprocess.run(command, stderr=subprocess.STDOUT, check=True)
    rows = [row for row in logged(folder) if row["step"] >= first]
    middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    mfu = f"it logs an MFU of {middle['mfu']:.1%}, and " if "mfu" in middle else ""
    note = f"{mfu}waits for data for {middle['data_wait_share']:.1%} of the time; "
    note += f"loss {rows[0]['loss']:.3f} to {rows[-1]['loss']:.3f}"
    return {"a_second": middle["trained_tokens_per_second"], "peak_gb": middle["peak_memory_gb"], "note": note}


def resumes(*, name: str, deterministic: bool, flags: str) -> dict[str, Any]:
    """`verify-resume` on a template, `--deterministic` or not: without it, how far the losses of both runs are apart."""
    from shared.commands.verify_resume import verify

    folder = Path(tempfile.mkdtemp())
    command = [*launch_command(name), *flags.split()]
    found = verify(command, folder, 12 if toy else 30, verbose=True, deterministic=deterministic)
    unlike = [f"{part} differ {how}" for part, how in found.items() if how]
    one, other = (logged_losses(folder / run) for run in ("straight", "killed"))
    apart = max(abs(one[step] - other.get(step, math.nan)) for step in one)
    note = f"losses at most {apart:.1e} apart; {'; '.join(unlike)}" if unlike else "the same, bit for bit"
    return {"note": f"killed and resumed: {note}"} | ({"passed": not unlike} if deterministic else {})
