"""What grows with the model: the memory of heads and of loading, the time of sample texts.

    python benchmarks/growth_model.py                            # writes benchmarks/growth_model.json
    python benchmarks/growth_model.py --works head --rounds 1

- head: forward and backward of one block of width 256 on 2,048 tokens of a vocabulary of 152,064, fp32; how much the
  process's peak rises. The head as it is (whole logits), and as `fuse_head` leaves it.
- loading: the peak of each process's memory above that before, while it builds a model of 400M parameters (fp32), or reads
  one from a checkpoint, and `sharding.prepare` shards it by FSDP2; the largest of all processes.
- sample text: 64 tokens after 64 by a model of 30M parameters, beside `generate` of transformers.

Every cell is a process of its own, or several.
"""

import argparse
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import rounds
from rounds import Row

HEADS = ("plain", "bias", "cap", "scale", "modules_to_save", "adapter", "plain, fp16", "plain, whole logits")
VOCAB, TOKENS = 152_064, 2048


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def head(options: argparse.Namespace) -> Row:
    import torch
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, LlamaConfig, PhiConfig

    from shared.models.fused_head import fuse_head
    from shared.models.loss import causal_lm_loss

    kind, _, how = options.kind.partition(", ")
    classes = {"bias": PhiConfig, "cap": Gemma2Config, "scale": CohereConfig}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = classes.get(kind, LlamaConfig)(**sizes, vocab_size=VOCAB, num_key_value_heads=4, tie_word_embeddings=False)
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    if kind in ("modules_to_save", "adapter"):
        from peft import LoraConfig, get_peft_model

        saved: Any = {"modules_to_save": ["lm_head"]} if kind == "modules_to_save" else {}
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"] if saved else ["lm_head"], **saved))
    accelerator = Accelerator(cpu=True)
    accelerator.state._mixed_precision = how if how == "fp16" else "no"
    said = "whole" if how == "whole logits" else fuse_head(accelerator, model)

    def train(tokens: int) -> None:
        ids = torch.randint(0, VOCAB, (1, tokens))
        causal_lm_loss(model, {"input_ids": ids, "labels": ids}).backward()

    train(8)  # gradients exist
    before = peak()
    train(TOKENS)
    return {"memory": peak() - before, "said": said}


def loading(options: argparse.Namespace) -> Row:
    """Launched by torchrun's arguments on each process, which writes its figure beside the others."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    flags = ["--nproc_per_node", str(options.size), __file__, "--rank", options.folder, options.kind]
    environment = {**rounds.os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    if options.size > 1:
        environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
        environment |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    if options.kind == "checkpoint":
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(options.folder)
    rounds.run(["-m", "torch.distributed.run", *flags], environment)
    figures = [float(path.read_text()) for path in Path(options.folder).glob("rank-*")]
    return {"memory": max(figures)}


SHAPE: Any = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16}
SHAPE |= {"intermediate_size": 2816, "vocab_size": 46_000}  # 402M


def load_here(folder: str, kind: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shared.config.options import OptimConfig
    from shared.models import pretraining
    from shared.models.loading import load_causal_lm
    from shared.models.options import ModelConfig
    from shared.parallel import sharding
    from shared.run import launch
    from shared.training import optim

    accelerator = launch.start(0)
    LlamaForCausalLM(
        LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )  # imports
    before = peak()
    if kind == "checkpoint":
        model = load_causal_lm(folder, attn_implementation="sdpa", dtype=torch.float32)
    else:
        own = f"{folder}/config-{accelerator.process_index}"
        LlamaConfig(**SHAPE).save_pretrained(own)
        tokenizer: Any = SimpleNamespace(get_vocab=lambda: {str(i): i for i in range(SHAPE["vocab_size"])})
        tokenizer.bos_token_id = tokenizer.eos_token_id = tokenizer.pad_token_id = 0
        config = ModelConfig(config_name=own)
        given: Any = {"seq_length": 128, "attn_implementation": "sdpa", "tie_word_embeddings": False}
        model = pretraining.build_causal_lm(config, tokenizer, **given)
    count = sum(p.numel() for p in model.parameters())
    model, _ = sharding.prepare(accelerator, model, optim.build(model, OptimConfig(learning_rate=3e-4)))
    Path(folder, f"rank-{accelerator.process_index}").write_text(str(peak() - before))
    print(f"{count / 1e6:.0f}M parameters: rank {accelerator.process_index}: {peak() - before:,.0f} MB above {before:,.0f}")


def samples(options: argparse.Namespace) -> Row:
    import torch
    from accelerate import Accelerator
    from transformers import LlamaConfig, LlamaForCausalLM

    from shared.models.generation import continuations

    sizes: Any = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1408}
    Accelerator(cpu=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCAB if options.size > 1 else 32_768)).eval()
    model.generation_config.eos_token_id = None
    prompt = torch.randint(5, 1000, (1, 64))
    tokenizer = SimpleNamespace(eos_token_id=None, decode=lambda ids, **_: " ".join(str(int(i)) for i in ids))

    def ours() -> Any:
        return continuations(model, tokenizer, prompt.tolist(), max_new_tokens=64)[0]

    def theirs() -> Any:
        found = model.generate(prompt, max_new_tokens=64, do_sample=False, pad_token_id=0)
        return tokenizer.decode(found[0, 64:])

    work = ours if options.kind == "continuations" else theirs
    before = peak()
    work()
    memory, started = peak() - before, time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - started, "memory": memory}


WORK: Any = {"head": head, "loading": loading, "sample text": samples}
CELLS = [("head", kind, 1) for kind in HEADS]
CELLS += [("loading", kind, size) for kind in ("scratch", "checkpoint") for size in (1, 2, 4)]
CELLS += [("sample text", kind, 1) for kind in ("continuations", "generate")]


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=1, steps=1, least=1)
    parser.add_argument("--works", nargs="+", choices=list(WORK), default=list(WORK), help="parts of the table")
    options = rounds.parse(parser, WORK)

    def measure(contender: str, number: int) -> Row:
        work, kind, size = contender.split(" | ")
        with rounds.folder(options) as environment:
            found = rounds.worker(__file__, work, options, environment, kind=kind, size=int(size))
        print(f"{contender}: {found}", file=sys.stderr)
        return {"megabytes": found["memory"], "milliseconds": 1e3 * found.get("seconds", float("nan"))}

    names = [f"{work} | {kind} | {size}" for work, kind, size in CELLS if work in options.works]
    rows = rounds.alternate(names, options.rounds, measure)
    columns = {"memory, MB": ("megabytes", ",.0f"), "time, ms": ("milliseconds", ",.0f")}
    rounds.report(options, rows, rounds.table("what | kind | processes", rows, columns), [])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        load_here(*sys.argv[2:])
    else:
        main()
