"""One optimizer step of two micro-batches as the templates make it, its peak seen by the allocator. Prints bytes.

accelerate launch ... tests/measure_memory.py CHECKPOINTING LORA_R LENGTH OUTPUT [ARCHITECTURE]

ARCHITECTURE is one of tests/small_models.py, in place of the Llama below.
Rows of LENGTH tokens are packed, of documents of a quarter, where they are longer than 256.
"""

import json
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from shared.config.options import OptimConfig
from shared.models import fused_head
from shared.models import loss as lm_loss
from shared.models.adapters import add_adapters
from shared.models.blocks import set_gradient_checkpointing
from shared.models.hub import from_architecture
from shared.models.loading import class_of, freeze_outer_parts, use_launch_precision
from shared.models.options import AdapterConfig
from shared.parallel import sharding
from shared.parallel.strategy import strategy_of_rows as strategy_of
from shared.run import launch
from shared.training import optim, step

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "benchmarks")]
from recipe_table import traced_peak  # noqa: E402

from tests.small_models import architectures  # noqa: E402

SHAPE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE |= {"intermediate_size": 384, "vocab_size": 1024, "max_position_embeddings": 1024, "tie_word_embeddings": True}
ROWS, LENGTH, LONG = 2, 256, 512


def main(checkpointing: str, lora_r: int, length: int, output: Path, architecture: str = "") -> None:
    accelerator = launch.start(0)
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()
    stored = torch.bfloat16 if accelerator.mixed_precision == "bf16" and lora_r else torch.float32
    shape = architectures()[architecture] if architecture else LlamaConfig(**SHAPE)
    whole = from_architecture(class_of(shape), shape, dtype=stored)
    freeze_outer_parts(whole)
    use_launch_precision(whole)
    set_gradient_checkpointing(whole, checkpointing)
    if lora_r:
        whole = add_adapters(whole, AdapterConfig(lora_r=lora_r))
    whole.train()
    config = OptimConfig(learning_rate=3e-4)
    strategy = strategy_of(accelerator)
    prepared, optimizers = strategy.prepare(whole, optim.build(whole, config), config)
    fused_head.fuse_head(accelerator, prepared)
    tokens = torch.zeros(ROWS, length, dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    if length > LENGTH:
        batch["position_ids"] = (torch.arange(length) % (length // 4)).expand(ROWS, -1)
    batch = sharding.share(accelerator).cut(batch)

    def train() -> None:
        for last in (False, True):
            with step.reduced(accelerator, [prepared], last=last):
                strategy.backward(lm_loss.causal_lm_loss(prepared, batch), 1 / 1000)
        norm = strategy.clip([prepared], 1.0)
        strategy.update(optimizers, norm.isfinite(), norm)

    train()
    start = time.time_ns()
    train()
    profiler.stop()
    if accelerator.is_main_process:
        facts = {"peak": traced_peak(profiler, start), "strategy": launch.strategy(accelerator)}
        output.write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), *sys.argv[5:])
