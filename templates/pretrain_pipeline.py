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

DEMO_STEPS = 80  # about two minutes on two CPU cores


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
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM

from shared.data.loader import Loader
from shared.data.mixture import training_order
from shared.data.order import EvenSubset, Order
from shared.models.blocks import set_gradient_checkpointing
from shared.models.counts import count_parameters, flops_per_token
from shared.models.loading import save_causal_lm
from shared.models.pipeline import Pipeline
from shared.models.pretraining import build_causal_lm
from shared.models.tokenizers import load_tokenizer
from shared.models.weights import DTYPES
from shared.parallel import sharding
from shared.process.files import whole_folder
from shared.process.printing import print_main
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup
from shared.run.tensors import read_weights
from shared.text import corpus
from shared.training import defaults, optim


@dataclass
class Data:
    train: Loader  # micro-batches of sequences
    validation: Loader
    tokenizer: Any
    about: str  # a line for people
    fingerprint: str  # changes when the samples do
    bytes_per_token: float  # of the validation text


def build_datasets(setup: Setup) -> Data:
    """Tokenizer, and sequences of `seq_length` tokens to train and to validate on."""
    config = setup.config
    options = setup.config.data
    batch = setup.config.batch
    name = options.tokenizer_name or config.model.model_name_or_path
    tokenizer = load_tokenizer(name) if name else None
    text = corpus.open_corpus(options, tokenizer, config.seq_length)
    batch.require_full_batch(len(text.train), f"sequences of --seq_length {config.seq_length}")
    share = sharding.share(setup.accelerator)
    rows = batch.micro_batch()[0]
    order = training_order(text.train, batch.global_batch_size, batch.seed, options.mix_weights)
    train = Loader(
        text.train,
        default_collate,
        order,
        share,
        per_device=rows,
        num_workers=batch.dataloader_num_workers or 0,
    )
    chosen = EvenSubset(text.validation, options.eval_samples)
    eval_order = Order(len(chosen), batch.global_batch_size, 0, shuffle=False)
    validation = Loader(chosen, default_collate, eval_order, share, per_device=rows)
    return Data(
        train, validation, text.tokenizer, text.about, text.fingerprint, text.bytes_per_token
    )


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


def evaluate(run: Run, pipeline: Pipeline, model: nn.Module, data: Data) -> None:
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
        bits = loss / math.log(2) / data.bytes_per_token
        run.log_evaluation(
            {
                "eval_loss": loss,
                "eval_perplexity": math.exp(min(loss, 100)),
                "eval_bits_per_byte": bits,
            }
        )


def save_final(run: Run, model: Any, data: Data) -> None:
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
        run.write_card(folder, "Pretrained language model", data.about, load=load)


def main(config: Config) -> None:
    setup = Setup(config, "pretrain_pipeline")
    if config.data.is_demo:
        config = setup.set_defaults("the demo", max_steps=DEMO_STEPS)
    data = build_datasets(setup)
    if config.data.preprocess_only:
        print_main(f"prepared {data.about}")
        return
    model = build_model(config, data.tokenizer)
    flops = flops_per_token(model, config.seq_length)
    (_, parameters) = count_parameters(model)
    trained = config.model.model_name_or_path is not None
    what = f"{parameters:,} parameters, {'trained' if trained else 'random'}"
    rate = defaults.pretraining_rate(parameters, trained=trained)
    config = setup.set_defaults(
        what,
        learning_rate=rate,
        optim=defaults.pretraining_optimizer(setup.strategy, trained=trained),
    )
    tokens_per_step = config.batch.global_batch_size * config.seq_length
    steps = max(1, config.max_tokens // tokens_per_step) if config.max_tokens else None
    steps = steps or config.batch.total_steps(data.train.steps_per_epoch)
    config = setup.compile(model, steps)  # by flag, or where it saves time
    pipeline = Pipeline(
        setup.accelerator,
        model,
        ranks=config.pipeline_ranks,
        micro_batches=config.batch.micro_batch()[1],
    )
    _, own = count_parameters(model)  # of this rank's blocks: the others are gone

    model, optimizers = setup.prepare(model, optim.build(model, config.optim), spread=False)
    about = {"each_process_holds": f"its own blocks, here {own:,} parameters", "data": data.about}
    about["model"] = f"{type(model).__name__}, {parameters:,} parameters"
    about["tokens"] = f"at most {steps * tokens_per_step:,} in all"
    # from the newest checkpoint, if there is one
    run = setup.start(
        data.train,
        fingerprint=data.fingerprint,
        total_steps=steps,
        samples=f"sequences x {config.seq_length} tokens",
        flops=flops,
        **about,
    )

    if run.should_evaluate():
        evaluate(run, pipeline, model, data)
    for step in run.steps():
        # forward and backward of all micro-batches, from stage to stage
        loss = pipeline.train(step.batches, step.scale)
        step.record(loss)
        step.clip_gradients(config.optim.max_grad_norm)
        step.update(optimizers)  # skipped on all ranks if loss or gradient is not finite
        if run.should_evaluate():
            evaluate(run, pipeline, model, data)
    run.load_best_weights()
    save_final(run, model, data)
    run.close(f"wrote {run.dir}/final (load it with from_pretrained), curves.png and metrics.jsonl")


if __name__ == "__main__":
    exits.run(main, CONFIG)
