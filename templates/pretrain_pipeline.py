"""Pretrain a causal language model whose blocks are spread over GPUs as a pipeline.

    ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision no \\
        templates/pretrain_pipeline.py                                        # offline demo on two CPU processes
    accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 8 templates/pretrain_pipeline.py \\
        --pipeline_ranks 4 --train_file corpus/ --model_preset 1B --vocab_size 32768
    docker run --gpus all IMAGE accelerate launch --multi_gpu templates/pretrain_pipeline.py

Neighbouring ranks hold consecutive blocks and hand micro-batches on, one forward and one backward in turns (1F1B, arXiv
2006.09503); with stages_per_rank above 1 they hold several shorter stretches (interleaved, arXiv 2104.04473). What is
learned is what templates/pretrain.py learns with embeddings that are not tied, as they cannot be here. For slow links
between GPUs: only activations cross them. Evaluates in micro-batches of training's size.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from shared.config import parse as configs
from shared.config.options import BatchConfig, CheckpointConfig, LogConfig, OptimConfig, SpeedConfig
from shared.process import ranks
from shared.process.errors import ConfigError
from shared.text.options import CorpusConfig

DEMO_STEPS = 80  # about two minutes on two CPU cores
PRESETS = {  # hidden size, blocks, attention heads, key-value heads, feed-forward size
    "3M": (192, 6, 6, 6, 512),
    "30M": (512, 8, 8, 8, 1408),
    "125M": (768, 12, 12, 12, 2048),
    "350M": (1024, 24, 16, 16, 2816),
    "1B": (2048, 16, 32, 8, 8192),
}


@dataclass(frozen=True)
class Config:
    """Pretrain a causal language model as a pipeline."""

    # What may differ from the checkpoint on resume, because it does not change what is learned.
    FREE: ClassVar = frozenset({"eval_steps", "eval_samples", "final_dtype", "pipeline_ranks", "stages_per_rank"})

    model_preset: str = "3M"
    """Llama-style model of about this many parameters: 3M, 30M, 125M, 350M or 1B."""
    config_name: str | None = None
    """Architecture on the Hub or in a folder, with random weights, in place of model_preset."""
    model_name_or_path: str | None = None
    """Model on the Hub or in a folder whose weights to continue from, in place of model_preset."""
    config_overrides: str | None = None
    """Changes to the architecture: hidden_size=256,num_hidden_layers=4."""
    seq_length: int = 256
    """Tokens of one sequence."""
    max_tokens: int | None = None
    """Budget in tokens, in place of max_steps or num_train_epochs."""
    eval_steps: int = 50
    """Optimizer steps between evaluations; one is always made at the end."""
    eval_samples: int = 64
    """Validation sequences that an evaluation uses, at most."""
    final_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights in final/; training and checkpoints keep fp32."""
    pipeline_ranks: int = 2
    """Neighbouring processes that hold the blocks of one model; the launch has a multiple of them."""
    stages_per_rank: int = 1
    """Stretches of blocks on each rank; more than 1 interleaves them, for less idle time and more communication."""
    text: CorpusConfig = field(default_factory=CorpusConfig)
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_batch_size=16, per_device_train_batch_size=2))
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=3e-3))
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(save_steps=50))
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.model_preset not in PRESETS:
            raise ConfigError(f"--model_preset {self.model_preset}: expected one of {', '.join(PRESETS)}")
        if self.config_name and self.model_name_or_path:
            raise ConfigError("--config_name and --model_name_or_path both name the model: drop one of them")
        if self.pipeline_ranks < 2 or self.stages_per_rank < 1:
            raise ConfigError("--pipeline_ranks must be at least 2 and --stages_per_rank at least 1")
        if self.text.streaming or self.batch.find_batch_size or self.speed.ddp_comm_hook != "none":
            raise ConfigError("--streaming, --find_batch_size and --ddp_comm_hook do not work with a pipeline")
        if self.batch.per_device_eval_batch_size != BatchConfig.per_device_eval_batch_size:
            raise ConfigError("--per_device_eval_batch_size does not work with a pipeline: it has one size")
        if self.checkpoint.dress_rehearsal:
            raise ConfigError("--dress_rehearsal does not work with a pipeline")
        if self.optim.layer_decay < 1 or self.optim.optim == "adamw_8bit":
            raise ConfigError("--layer_decay and --optim adamw_8bit do not work with a pipeline")
        ranks.set_pipeline_ranks(self.pipeline_ranks)
        configs.require_at_least_one(self, "seq_length", "max_tokens", "eval_steps", "eval_samples")
        self.batch.micro_batch()  # refuses what does not divide
        if self.max_tokens is not None and (self.batch.max_steps or self.batch.num_train_epochs):
            raise ConfigError("--max_tokens and --max_steps or --num_train_epochs both give the budget: keep one")


if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped flag answer at once
    CONFIG = configs.parse_or_exit(Config)

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from shared.data.loader import Loader
from shared.data.order import Order, Spread
from shared.models.blocks import compile_blocks, set_gradient_checkpointing
from shared.models.card import model_card
from shared.models.checks import require_fit
from shared.models.counts import count_parameters, flops_per_token
from shared.models.hub import from_architecture, from_hub, override
from shared.parallel import sharding
from shared.parallel.pipeline import Pipeline
from shared.process.files import whole_folder
from shared.process.printing import print_main, summary
from shared.run import exits, launch, metrics
from shared.run.checkpoint import Checkpointer
from shared.run.checkpoint_files import read_weights
from shared.run.folder import open_run
from shared.run.guard import Guard
from shared.text import corpus
from shared.training import optim, step


@dataclass
class Data:
    train: Loader
    validation: Loader
    tokenizer: PreTrainedTokenizerFast
    about: str  # a line for people
    identity: str  # changes when the samples do
    bytes_per_token: float  # of the validation text


def build_datasets(config: Config, accelerator: Accelerator) -> Data:
    """Tokenizer, and windows of training and validation sequences."""
    text, batch = config.text, config.batch
    name = text.tokenizer_name or config.model_name_or_path
    tokenizer = from_hub(AutoTokenizer, name) if name else None
    folder = corpus.prepare(text, tokenizer)
    tokenizer = tokenizer or corpus.load_tokenizer(folder)
    tokens, held_out, split = corpus.open_splits(folder, config.seq_length, text.validation_split_percentage)
    if len(tokens) < batch.global_batch_size:
        raise ConfigError(
            f"{len(tokens)} sequences of --seq_length {config.seq_length} are fewer than one --global_batch_size "
            f"of {batch.global_batch_size}: choose a smaller one"
        )
    loading = sharding.share(accelerator) | {"per_device": batch.micro_batch()[0]}
    order = Order(len(tokens), batch.global_batch_size, batch.seed)
    train = Loader(tokens, corpus.collate, order, num_workers=batch.dataloader_num_workers, **loading)
    about = f"{tokens.meta['source']}: {tokens.num_tokens:,} tokens to train on; validation: {split}"
    chosen = Spread(held_out, config.eval_samples)
    validation = Loader(chosen, corpus.collate, Order(len(chosen), batch.global_batch_size, 0, shuffle=False), **loading)
    return Data(train, validation, tokenizer, about, tokens.meta["train"]["sha256"], held_out.bytes_per_token)


def build_model(config: Config, tokenizer) -> nn.Module:
    """The model to train, with fp32 weights; mixed precision casts where it computes."""
    options = {"attn_implementation": config.speed.attn_implementation}
    if config.model_name_or_path:
        if config.config_overrides:
            raise ConfigError("--config_overrides cannot change a model whose weights are loaded")
        model = from_hub(
            AutoModelForCausalLM, config.model_name_or_path, dtype=torch.float32, use_safetensors=True, **options
        )
    else:
        hidden, blocks, heads, kv_heads, feed_forward = PRESETS[config.model_preset]
        architecture = LlamaConfig(
            hidden_size=hidden,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            intermediate_size=feed_forward,
            max_position_embeddings=max(2048, config.seq_length),
            tie_word_embeddings=False,  # the first and the last stage would share them
        )
        if config.config_name:
            architecture = from_hub(AutoConfig, config.config_name)
        architecture.vocab_size = len(tokenizer)
        architecture.bos_token_id, architecture.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        architecture.pad_token_id = None  # nothing is padded; where it is another token, too, that would learn nothing
        override(architecture, config.config_overrides)
        model = from_architecture(AutoModelForCausalLM, architecture, dtype=torch.float32, **options)
        model.config.pad_token_id = tokenizer.pad_token_id
    require_fit(model, tokenizer, config.seq_length)
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    if config.speed.torch_compile:
        compile_blocks(model)
    return model.train()  # from_pretrained leaves dropout off


def evaluate(
    accelerator: Accelerator, pipeline: Pipeline, loader: Loader, guard: Guard, bytes_per_token: float
) -> dict[str, float]:
    """Loss, perplexity and bits per byte of the validation sequences, each counted once on any world size."""
    total, targets = torch.zeros((), device=accelerator.device), 0
    for window in guard.watch(loader.windows(0, loader.order.steps_per_epoch)):
        total += pipeline.evaluate(window.micro_batches)
        targets += window.num_targets
    loss = sharding.total(accelerator, total).item() / targets
    bits = loss / math.log(2) / bytes_per_token
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 100)), "eval_bits_per_byte": bits}


def main(config: Config) -> None:
    # Setup -------------------------------------------------------------------------------------------------------
    tracker = metrics.tracker_name(config.log.report_to)
    accelerator = launch.start(config.batch.seed, log_with=tracker, timeout=config.speed.ddp_timeout)

    # Data --------------------------------------------------------------------------------------------------------
    data = build_datasets(config, accelerator)
    if config.text.preprocess_only:
        print_main(f"prepared {data.about}")
        return
    run_dir = open_run(accelerator, config.checkpoint.output_dir, "pretrain_pipeline")
    tokens_per_step = config.batch.global_batch_size * config.seq_length
    if config.max_tokens is not None:
        total_steps = max(1, config.max_tokens // tokens_per_step)
    else:
        default = DEMO_STEPS if config.text.is_demo else None
        total_steps = config.batch.total_steps(data.train.steps_per_epoch, default=default)

    # Model and optimizer -----------------------------------------------------------------------------------------
    model = build_model(config, data.tokenizer)
    flops = flops_per_token(model, config.seq_length)
    _, num_parameters = count_parameters(model)
    pipeline = Pipeline(
        accelerator,
        model,
        ranks=config.pipeline_ranks,
        stages_per_rank=config.stages_per_rank,
        micro_batches=config.batch.micro_batch()[1],
    )
    _, num_own = count_parameters(model)
    optimizers = optim.build(model, config.optim)

    # Resume ------------------------------------------------------------------------------------------------------
    saver = Checkpointer(accelerator, model, optimizers, run_dir, config, data=data.identity)
    state = saver.resume(config.checkpoint.resume_from_checkpoint, total_steps=total_steps)
    if state.step >= total_steps and (run_dir / "final").exists():
        launch.say_finished(run_dir, state.step, config)
        return
    if accelerator.is_main_process:
        configs.save(configs.replace(config, output_dir=run_dir), run_dir / "config.yaml")
    summary(
        "pretrain_pipeline",
        {
            "run on": launch.strategy(accelerator),
            "each process holds": f"its own blocks, here {num_own:,} parameters",
            "data": data.about,
            "model": f"{type(accelerator.unwrap_model(model)).__name__}, {num_parameters:,} parameters",
            "batch": launch.batch_line(config.batch, accelerator, f"sequences x {config.seq_length} tokens"),
            "budget": f"{total_steps:,} steps, at most {total_steps * tokens_per_step:,} tokens",
            "optimizer": f"{config.optim.optim}, {config.optim.lr_scheduler_type} from {config.optim.learning_rate:g}",
            "output": run_dir,
        },
    )

    # Train -------------------------------------------------------------------------------------------------------
    settings = configs.flatten(config)
    logger = metrics.Logger(
        accelerator, config.log, run_dir, state, total_steps, settings, template="pretrain_pipeline", flops=flops
    )
    guard = Guard(accelerator, model, state, max_skipped=config.optim.max_skipped_steps)

    def evaluate_and_log() -> dict[str, float]:
        values = evaluate(accelerator, pipeline, data.validation, guard, data.bytes_per_token)
        logger.log_evaluation(values)
        return values

    try:
        if state.step < total_steps and state.owes_evaluation(config.eval_steps):
            with logger.pause():
                evaluate_and_log()
        for window in logger.waiting(data.train.windows(state.step, total_steps)):
            launch.seed_step(config.batch.seed, state.step, sharding.data_rank(accelerator))
            learning_rate = optim.set_learning_rate(optimizers, config.optim, state.step, total_steps)
            scale = step.loss_scale(window.num_targets)
            losses = [pipeline.train(window.micro_batches, scale)]
            grad_norm = step.clip_gradients(accelerator, model, config.optim.max_grad_norm)
            finite = guard.finite(losses, grad_norm, window)
            step.update(accelerator, optimizers, finite, grad_norm)

            state.advance(window)
            logger.step(losses, finite, window, grad_norm=grad_norm, learning_rate=learning_rate)
            last = state.step == total_steps
            evaluating = not last and state.owes_evaluation(config.eval_steps)
            saving = last or state.step % config.checkpoint.save_steps == 0
            guard.stop_if_asked(now=evaluating or saving)
            with logger.pause():
                if evaluating:
                    evaluate_and_log()
                    logger.draw()
                if saving:
                    saver.save(state)
    except exits.Stopped:  # by a signal, on all ranks
        saver.save(state)
        saver.wait()
        logger.close()
        raise
    saver.wait()
    guard.release()

    # Finish ------------------------------------------------------------------------------------------------------
    assert saver.latest is not None
    values = evaluate_and_log()
    if accelerator.is_main_process:
        weights = read_weights(saver.latest, dtype=getattr(torch, config.final_dtype))  # of all stages
        with whole_folder(run_dir / "final") as folder:
            with torch.device("meta"):
                whole = AutoModelForCausalLM.from_config(model.config)
            whole.generation_config = model.generation_config
            whole.save_pretrained(folder, state_dict=weights)
            whole.config.dtype = config.final_dtype
            whole.config.save_pretrained(folder)
            data.tokenizer.save_pretrained(folder)
            load = 'transformers.AutoModelForCausalLM.from_pretrained("final")'
            card = model_card("Pretrained language model", data.about, values, settings, load=load)
            (folder / "README.md").write_text(card, encoding="utf-8")
    logger.close()
    print_main(f"wrote {run_dir}/final (load it with from_pretrained), curves.png and metrics.jsonl")


if __name__ == "__main__":
    exits.run(main, CONFIG)
