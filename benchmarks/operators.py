"""Operators of one training step of the 1B preset beside nanochat's GPT of the same size, counted on fake tensors.

    python benchmarks/operators.py --nanochat PATH   # a checkout of github.com/karpathy/nanochat; without it, ours alone

The same width, blocks, heads, vocabulary and tokens, attention to all earlier tokens, bf16 over fp32, clipping and fused
AdamW. Counted as in tools/throughput.py: no figure is measured. The models differ where their authors want them
to: nanochat has two matrices of feed-forward to our three, further embeddings, an untied head, soft-capped logits in fp32.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from about import about, line
from torch._subclasses import FakeTensorMode

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shared.models import fused_head  # noqa: E402
from shared.models.counts import flops_per_token  # noqa: E402
from shared.models.options import PRESETS  # noqa: E402
from tools import memory, throughput  # noqa: E402
from tools.gpus import find_gpu  # noqa: E402

GPU = find_gpu("H100")
VOCABULARY = 128256  # as gpu.py's rows of 1B have it


def figures(steps: dict[str, tuple], parameters: int, flops_a_token: float) -> dict[str, Any]:
    """What a step of one micro-batch is made of."""
    found: dict[str, Any] = {"parameters": parameters, "flops_a_token": flops_a_token}
    for way, (micro_batch, _, update) in steps.items():
        operators = [*throughput.fuse(micro_batch)] if way == "compiled" else micro_batch
        table = throughput.costs(operators, GPU)
        found[way] = dict(zip(throughput.KINDS, table[:, 1].tolist(), strict=True))
        found[way] |= {
            "update": throughput.costs(update, GPU)[:, 1].sum(),
            "kernels": len(operators),
            "flops": table[:, 0].sum(),
        }
    return found


def ours(job: memory.Job) -> dict[str, Any]:
    blocks = (*range(job.config.num_hidden_layers),)
    steps = {way: throughput.record(job, blocks, throughput.Setting(way == "compiled")) for way in ("eager", "compiled")}
    return figures(steps, memory.count(job).all, flops_per_token(memory._on_meta(job), job.length) or 0.0)


def nanochats(job: memory.Job, checkout: Path) -> dict[str, Any]:
    os.environ["NANOCHAT_DTYPE"] = "bfloat16"  # read when it is imported
    sys.path.insert(0, str(checkout))
    from nanochat.gpt import GPT, GPTConfig  # type: ignore[import-not-found]

    config = job.config
    heads = {"n_head": config.num_attention_heads, "n_kv_head": config.num_key_value_heads}
    size = {"n_layer": config.num_hidden_layers, "n_embd": config.hidden_size, "vocab_size": config.vocab_size}
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence_len=job.length, window_pattern="L", **size, **heads))
        model.init_weights()  # which also casts
    with FakeTensorMode(), torch.compiler.set_stance("force_eager"):
        memory.to_fake(model)
        tokens = torch.zeros(job.batch, job.length, dtype=torch.int64)
        step = throughput.record_step(model, lambda: model(tokens, tokens))
    return figures({"eager": step, "compiled": step}, sum(p.numel() for p in model.parameters()), model.estimate_flops())


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line a figure, a column a contender, and their ratio."""
    names = {"product": "matrix products", "weights": "casts of weights and gradients", "update": "clipping and AdamW"}
    lines = [("parameters, M", [f["parameters"] / 1e6 for f in found.values()])]
    lines += [("GFLOP a token, as MFU counts", [f["flops_a_token"] / 1e9 for f in found.values()])]
    lines += [("TFLOP of a micro-batch, counted", [f["eager"]["flops"] / 1e12 for f in found.values()])]
    for way in ("eager", "compiled"):
        for kind in (*throughput.KINDS, "update"):
            lines += [(f"GB, {way}: {names.get(kind, kind)}", [f[way][kind] / 1e9 for f in found.values()])]
        moved = [sum(f[way][kind] for kind in (*throughput.KINDS, "update")) for f in found.values()]
        lines += [(f"GB, {way}: all", [m / 1e9 for m in moved])]
        lines += [(f"GB a TFLOP, {way}", [1e3 * m / f[way]["flops"] for m, f in zip(moved, found.values(), strict=True)])]
        lines += [(f"operators, {way}", [f[way]["kernels"] for f in found.values()])]
    head = ["", *found, *(["ratio"] if len(found) == 2 else [])]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, values in lines:
        cells = [f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:,.1f}" for value in values]
        cells += [f"{values[1] / values[0]:.2f}"] if len(values) == 2 else []
        rows.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(rows)


def levers(job: memory.Job) -> str:
    """What changes would gain of a compiled step, of 1 and of 8 micro-batches, by the same estimate."""
    bytes_a_second = GPU.bandwidth * throughput.SHARES["bandwidth"]
    numbers = memory.count(job)
    embedding = job.config.vocab_size * job.config.hidden_size

    def seconds(n: int) -> float:
        return float(throughput.estimate(job, throughput.Setting(True, micro_batches=n), GPU).sum(0)[4])

    before = {n: seconds(n) for n in (1, 8)}
    gains = {
        "clip inside AdamW (its grad_scale) in place of a pass of its own": lambda n: 4 * numbers.trained,
        "sum gradients in the kernel that casts them": lambda n: 8 * (n - 1) * numbers.trained,
        "cast weights once a step, not once a micro-batch": lambda n: 6 * (n - 1) * numbers.trained,
        "scale the loss before the head's gradient, not after": lambda n: 8 * n * embedding,
        "add the embedding's gradient into the tied head's, row by row": lambda n: 16 * n * embedding,
    }
    after = {name: {n: before[n] - gain(n) / bytes_a_second for n in before} for name, gain in gains.items()}

    build, limit, shares = memory._build, fused_head.MAX_LOGITS, dict(throughput.SHARES)

    def in_16_bits(job: memory.Job, chosen: tuple[int, ...], gathered: bool) -> torch.nn.Module:
        model = build(job, chosen, gathered)
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
        embeddings.register_forward_hook(lambda module, inputs, output: output.to(torch.bfloat16))
        return model

    def patched(name: str) -> None:
        throughput.record.cache_clear()
        after[name] = {n: seconds(n) for n in before}
        memory._build, fused_head.MAX_LOGITS = build, limit
        throughput.SHARES.update(shares)

    memory._build = in_16_bits
    patched("residual stream in bf16 (other numerics)")
    fused_head.MAX_LOGITS = 2**31
    patched("head and loss in one chunk of tokens (2 GB more memory)")
    throughput.SHARES["attention"] = 0.6
    patched("an attention kernel with 60 % of the peak, as FlashAttention-3 is said to have up to 75 %")
    rows = ["| change | of 1 micro-batch | of 8 |", "|---|---|---|"]
    ranked = sorted(after.items(), key=lambda found: found[1][8] / before[8])
    rows += [f"| {name} | {before[1] / a[1] - 1:.1%} | {before[8] / a[8] - 1:.1%} |" for name, a in ranked]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanochat", type=Path, help="a checkout")
    parser.add_argument("--levers", action="store_true", help="print what changes would gain instead")
    parser.add_argument("--model_preset", default="1B", choices=PRESETS)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    from transformers import LlamaConfig

    width, blocks, heads, kv_heads, feed_forward = PRESETS[options.model_preset]
    shape: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": blocks, "intermediate_size": feed_forward}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": VOCABULARY}
    job = memory.Job(LlamaConfig(**shape, tie_word_embeddings=True), options.rows, options.seq_length)
    if options.levers:
        print(levers(job))
        return
    found = {"ours": ours(job)}
    if options.nanochat:
        found["nanochat"] = nanochats(job, options.nanochat)
    else:
        print("nanochat is left out: --nanochat PATH names a checkout of it", file=sys.stderr)
    facts = about(("torch", "transformers"))
    options.output.write_text(json.dumps({"about": facts, "rows": found}, indent=1) + "\n")
    print(f"{table(found)}\n\nA micro-batch of {options.rows} x {options.seq_length} tokens and its update.\n{line(facts)}")


if __name__ == "__main__":
    main()
