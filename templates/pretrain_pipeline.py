r"""Pretrain a causal language model whose blocks are spread over GPUs as a pipeline.

    # offline demo on two CPU processes
    ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/ddp.yaml \
        --mixed_precision no templates/pretrain_pipeline.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 \
        templates/pretrain_pipeline.py --pipeline_ranks 4 --train_file corpus/ \
        --model_preset 1B --vocab_size 32768
    docker run --gpus all IMAGE accelerate launch --multi_gpu templates/pretrain_pipeline.py

Neighbouring ranks have consecutive blocks and pass micro-batches on, one forward and one backward
in turns (1F1B, arXiv 2006.09503). Only activations cross the links between GPUs, so these may be
slow. A pipeline cannot tie embeddings; apart from that, it learns what templates/pretrain.py
learns. Evaluation uses micro-batches of training's size.
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
from shared.config.types import Count, Free, within
from shared.models.options import ModelConfig
from shared.process import ranks
from shared.process.errors import ConfigError
from shared.text.options import CorpusConfig

DEMO = {"max_steps": 80}  # about two minutes on two CPU cores


@dataclass(frozen=True)
class Config:
    """Pretrain a causal language model as a pipeline."""

    seq_length: Count = 256  # Tokens of a sequence
    max_tokens: Count | None = None  # Budget in tokens, in place of max_steps or num_train_epochs
    # Precision of the weights in final/; training and checkpoints keep fp32
    final_dtype: Free[Literal["fp32", "bf16"]] = "fp32"
    # Neighbouring processes that share one model; must divide the number of processes
    pipeline_ranks: Free[Annotated[int, within(at_least=2)]] = 2

    model: ModelConfig = ModelConfig(model_preset="3M")
    data: CorpusConfig = CorpusConfig(eval_samples=64)
    batch: BatchConfig = BatchConfig(global_batch_size=16, per_device_train_batch_size=2)
    optim: FullOptimConfig = FullOptimConfig(optim=None)
    speed: FullSpeedConfig = FullSpeedConfig()
    evaluation: EvaluationConfig = EvaluationConfig(eval_steps=0.02, metric_for_best_model="none")
    checkpoint: CheckpointConfig = CheckpointConfig(save_steps=0.02)
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        eval_size = self.batch.per_device_eval_batch_size
        not_here = {
            "--streaming": self.data.streaming,
            "--isolate_documents": self.data.isolate_documents,
            "--find_batch_size": self.batch.find_batch_size,
            "--per_device_eval_batch_size (all batches have one size)": eval_size != 8,
            "--dress_rehearsal": self.checkpoint.dress_rehearsal,
            "--layer_decay": self.optim.layer_decay < 1,
            "--optim adamw_8bit": self.optim.optim == "adamw_8bit",
            "--ema_decay": self.evaluation.ema_decay > 0,
        }
        if refused := [flag for flag, given in not_here.items() if given]:
            raise ConfigError(f"{', '.join(refused)}: not with a pipeline")
        ranks.set_pipeline_ranks(self.pipeline_ranks)
        self.batch.micro_batch()  # refuses what does not divide
        if self.max_tokens is not None and (self.batch.max_steps or self.batch.num_train_epochs):
            raise ConfigError(
                "--max_tokens and --max_steps or --num_train_epochs both give the budget: keep one"
            )


# before torch is imported, so that --help and a mistyped flag answer at once
if __name__ == "__main__":
    CONFIG = configs.parse_or_exit(Config)

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from shared.extras.pipeline import Pipeline
from shared.models.blocks import set_gradient_checkpointing
from shared.models.counts import count_parameters, describe_parameters, flops_per_token
from shared.models.loading import save_causal_lm
from shared.models.pretraining import build_causal_lm
from shared.models.weights import DTYPES
from shared.process.files import whole_folder
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.run.tensors import read_weights
from shared.text.pretraining import CorpusData, choose_optimizer, open_data, total_steps
from shared.training import optim


def build_model(config: Config, tokenizer: Any) -> Any:
    """The model to train, with fp32 weights; mixed precision casts where it computes."""
    attention = config.speed.attn_implementation
    # embeddings are not tied: the first and the last stage would share them
    model = build_causal_lm(
        config.model,
        tokenizer,
        seq_length=config.seq_length,
        attn_implementation=attention,
        tie_word_embeddings=False,
    )
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    return model.train()  # from_pretrained leaves dropout off


def evaluate(run: Run, pipeline: Pipeline, model: nn.Module, data: CorpusData) -> None:
    """Log loss, perplexity and bits per byte of the validation sequences, each counted once on any
    world size.
    """
    with run.evaluating(model):
        total = torch.zeros((), device=run.device)
        targets = 0
        for window in run.read(data.validation):
            total += pipeline.evaluate(list(window.micro_batches))
            targets += window.num_targets
        loss = run.sum(total).item() / targets
        values = {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 100))}
        if data.bytes_per_token:
            values["eval_bits_per_byte"] = loss / math.log(2) / data.bytes_per_token
        run.log_evaluation(values)


def save_final(run: Run, model: Any, data: CorpusData) -> None:
    """Write final/: model, tokenizer, card. The weights of all stages are in the checkpoint."""
    if not run.is_main:
        return
    dtype = DTYPES[run.config.final_dtype]
    weights = read_weights(run.best_checkpoint, dtype=dtype)
    base = run.config.model.model_name_or_path
    with whole_folder(run.dir / "final") as folder:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(model.config)
        whole.generation_config = model.generation_config
        save_causal_lm(folder, whole, weights, data.tokenizer, dtype=dtype, base=base)
        load = 'transformers.AutoModelForCausalLM.from_pretrained("final")'
        run.write_card(folder, "Pretrained language model", load=load)


def main(config: Config) -> None:
    setup = Setup(config, "pretrain_pipeline", demo=DEMO)
    data = open_data(setup, as_in_training=True)
    model = build_model(config, data.tokenizer)
    setup.flops = flops_per_token(model, config.seq_length)
    setup.about["model"] = f"{type(model).__name__}, {describe_parameters(model)}"
    choose_optimizer(setup, model)
    micro_batches = setup.config.batch.micro_batch()[1]
    ranks_of_one = config.pipeline_ranks
    pipeline = Pipeline(setup.accelerator, model, ranks=ranks_of_one, micro_batches=micro_batches)
    own = count_parameters(model)[1]  # of this rank's blocks: the others are gone
    setup.about["each process holds"] = f"its own blocks, here {own:,} parameters"
    model, optimizers = setup.prepare(model, optim.build(model, setup.config.optim), spread=False)
    # compiled where that pays; from the newest checkpoint, if there is one
    steps = total_steps(setup, data)
    run = setup.start(data.train, None, fingerprint=data.fingerprint, steps=steps)

    if run.should_evaluate():
        evaluate(run, pipeline, model, data)
    for step in run.steps():
        # forward and backward of all micro-batches, from stage to stage
        step.record(pipeline.train(step.batches, step.scale))
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, pipeline, model, data)
    run.load_best_weights()
    save_final(run, model, data)
    run.close(f"wrote {run.dir}/final (load it with from_pretrained), curves.png and metrics.jsonl")


if __name__ == "__main__":
    exits.run(main, CONFIG)
