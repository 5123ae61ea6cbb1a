r"""Pretrain a language model, causal or masked, from scratch or continued.

    accelerate launch templates/pretrain.py  # offline demo: Python's own source
    accelerate launch templates/pretrain.py --train_file corpus/ --model_preset 125M \
        --vocab_size 32768
    accelerate launch --config_file accelerate_configs/ddp.yaml templates/pretrain.py \
        --dataset_name ORG/NAME
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/pretrain.py \
        --model_name_or_path ORG/NAME
    accelerate launch templates/pretrain.py --objective mlm --train_file corpus/ \
        --model_name_or_path ORG/BERT
    docker run --gpus all IMAGE accelerate launch templates/pretrain.py

Next-token prediction on sequences cut from the concatenated documents (Radford et al. 2019), with a
Llama-style model (Touvron et al., arXiv 2302.13971) unless another is named; or prediction of
masked tokens (Devlin et al., arXiv 1810.04805), with a ModernBERT.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

# the shared/ beside this file, before one that is installed
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from shared.config import parse as configs
from shared.config.options import (
    BatchConfig,
    CheckpointConfig,
    EvaluationConfig,
    FullOptimConfig,
    FullSpeedConfig,
    LogConfig,
)
from shared.config.types import Count, Free, PositiveShare, Share
from shared.models.options import ModelConfig
from shared.process.errors import ConfigError
from shared.text.options import CorpusConfig
from shared.training.options import SyncConfig

DEMO = {"max_steps": 80}  # about two minutes on two CPU cores


@dataclass(frozen=True)
class Config:
    """Pretrain a language model."""

    # clm: predict the next token; mlm: find masked tokens, with an encoder
    objective: Literal["clm", "mlm"] = "clm"
    mlm_probability: PositiveShare = 0.3  # With mlm: share of the tokens that are to be found
    # With mlm: share of these that are not masked, half of them other tokens; BERT: 0.15 and 0.2
    mlm_unmasked: Share = 0.0
    whole_words: bool = False  # With mlm: mask all tokens of a word, where its tokens tell
    seq_length: Count = 256  # Tokens of a sequence
    max_tokens: Count | None = None  # Budget in tokens, in place of max_steps or num_train_epochs
    # Precision of the weights in final/; training and checkpoints keep fp32
    final_dtype: Free[Literal["fp32", "bf16"]] = "fp32"
    sample_prompt: Free[str] = "def "  # Text that the model continues after each evaluation
    model: ModelConfig = ModelConfig(model_preset="3M")
    data: CorpusConfig = CorpusConfig(eval_samples=64)
    batch: BatchConfig = BatchConfig(global_batch_size=16, per_device_train_batch_size=2)
    optim: FullOptimConfig = FullOptimConfig(optim=None)
    sync: SyncConfig = SyncConfig()
    speed: FullSpeedConfig = FullSpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=0.02, metric_for_best_model="none")
    checkpoint: CheckpointConfig = CheckpointConfig(save_steps=0.02)
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        self.batch.micro_batch()  # refuses what does not divide
        if self.data.streaming and self.batch.find_batch_size:
            raise ConfigError("--find_batch_size does not work with --streaming")
        if self.max_tokens is not None and (self.batch.max_steps or self.batch.num_train_epochs):
            raise ConfigError(
                "--max_tokens and --max_steps or --num_train_epochs both give the budget: keep one"
            )


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

from torch import nn

from shared.models.blocks import set_gradient_checkpointing
from shared.models.counts import flops_per_token
from shared.models.fused_head import TokenLoss
from shared.models.generation import continuations
from shared.models.isolation import isolate_documents
from shared.models.loading import save_causal_lm
from shared.models.pretraining import build_causal_lm
from shared.models.weights import DTYPES, gather_weights
from shared.parallel.strategy import strategy_of_rows
from shared.process.files import whole_folder
from shared.process.printing import print_main
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.text.pretraining import CorpusData, choose_optimizer, open_data, total_steps
from shared.training import optim


def build_model(config: Config, tokenizer: Any) -> nn.Module:
    """The model to train, with fp32 weights; mixed precision casts where it computes."""
    attention = config.speed.attn_implementation
    if config.objective == "mlm":
        from shared.extras.masked.masking import build_masked_lm

        model = build_masked_lm(config.model, tokenizer, config.seq_length, attention)
    else:
        model = build_causal_lm(
            config.model,
            tokenizer,
            seq_length=config.seq_length,
            attn_implementation=attention,
            tie_word_embeddings=True,
        )
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    return model.train()  # from_pretrained leaves dropout off


def keep_documents_apart(setup: Setup, model: nn.Module) -> None:
    """Let documents in one sequence not attend to each other, with --isolate_documents."""
    config = setup.config
    documents = "those of one sequence attend to each other (--isolate_documents keeps them apart)"
    if config.data.isolate_documents:
        at_once = config.batch.micro_batch()[0]
        _, documents = isolate_documents(
            model, setup.device, at_once, length=config.seq_length, required=True
        )
    setup.details["documents"] = documents


def evaluate(run: Run, model: nn.Module, data: CorpusData) -> None:
    """Log loss, perplexity and bits per byte of the validation sequences, each counted once on any
    world size.
    """
    with run.evaluating(model):
        loss = run.mean_loss(data.validation, TokenLoss(model))
        values = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 100))}
        if data.bytes_per_token:
            values["eval_bits_per_byte"] = loss / math.log(2) / data.bytes_per_token
        run.log_evaluation(values)
        if run.config.objective == "mlm":  # which writes no text
            return
        text = run.config.sample_prompt
        prompt = data.tokenizer(text, add_special_tokens=False)["input_ids"] or [
            data.tokenizer.eos_token_id
        ]
        (answer,) = continuations(model, data.tokenizer, [prompt], max_new_tokens=48, sample=True)
        run.logger.tracker.log_table(
            "samples", ["step", "text"], [[str(run.state.step), text + answer]]
        )
        print_main("  " + repr(text + answer))


def save_final(run: Run, model: nn.Module, data: CorpusData) -> None:
    """Write final/: model, tokenizer, card. Every rank calls this."""
    dtype = DTYPES[run.config.final_dtype]
    weights = gather_weights(run.accelerator, model, dtype=dtype)
    if not run.is_main:
        return
    with whole_folder(run.dir / "final") as folder:
        whole = run.unwrap(model)
        save_causal_lm(
            folder,
            whole,
            weights,
            data.tokenizer,
            dtype=dtype,
            base=run.config.model.model_name_or_path,
        )
        load = f'transformers.{type(whole).__name__}.from_pretrained("final")'
        run.write_card(folder, "Pretrained language model", load=load)


def main(config: Config) -> None:
    strategy = strategy_of_rows
    if config.sync.sync_every > 1:  # each process trains its own weights, and agrees now and then
        from shared.extras.replicas import Replicas

        strategy = partial(Replicas, options=config.sync)
    setup = Setup(config, "pretrain", demo=DEMO, strategy=strategy)
    data = open_data(setup)
    if config.objective == "mlm":
        from shared.extras.masked.masking import mask

        mask(data, config.mlm_probability, config.mlm_unmasked, config.whole_words)
    model = build_model(config, data.tokenizer)
    setup.flops = flops_per_token(model, config.seq_length)
    choose_optimizer(setup, model)
    # on the device, sharded as the launch config says
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim))
    keep_documents_apart(setup, model)
    loss = TokenLoss(model)  # cross-entropy, summed over a micro-batch's target tokens
    steps = total_steps(setup, data)
    # compiled and fused where that pays; from the newest checkpoint, if there is one
    run = setup.start(data.train, loss, fingerprint=data.fingerprint, steps=steps)

    if run.should_evaluate():
        evaluate(run, model, data)
    for step in run.steps():
        for batch in step.micro_batches():
            step.backward(loss(batch, log=step.log))  # scaled to the mean over the global batch
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, model, data)
    run.load_best_weights()
    save_final(run, model, data)
    run.close(f"wrote {run.dir}/final (load it with from_pretrained), curves.png and metrics.jsonl")


if __name__ == "__main__":
    exits.run(main, CONFIG)
