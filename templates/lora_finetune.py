"""Fine-tune a causal language model with LoRA or QLoRA.

    accelerate launch templates/lora_finetune.py                         # offline demo, any machine
    accelerate launch templates/lora_finetune.py --model_name_or_path ORG/NAME --train_file chats.jsonl --load_in_4bit
    accelerate launch --config_file accelerate_configs/ddp.yaml templates/lora_finetune.py --model_name_or_path ...
    accelerate launch --config_file accelerate_configs/fsdp2.yaml templates/lora_finetune.py --model_name_or_path ...
    docker run --gpus all IMAGE accelerate launch templates/lora_finetune.py

LoRA: Hu et al., arXiv 2106.09685. QLoRA: Dettmers et al., arXiv 2305.14314. rsLoRA: Kalajdzievski, arXiv 2312.03732.
DoRA: Liu et al., arXiv 2402.09353. PiSSA: Meng et al., arXiv 2404.02948.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared import demo
from shared.config import parse as configs
from shared.config.options import BatchConfig, CheckpointConfig, LogConfig, OptimConfig, SpeedConfig
from shared.process.errors import ConfigError
from shared.text.options import ChatConfig

DEMO_STEPS = 40  # about two minutes on two CPU cores
DEMO_SAMPLES = 2000


@dataclass(frozen=True)
class Config:
    """Fine-tune a causal language model with LoRA or QLoRA."""

    # What may differ from the checkpoint on resume, because it does not change what is learned.
    FREE: ClassVar = frozenset({"eval_steps", "eval_samples", "num_generations", "max_new_tokens", "merge_adapter"})

    model_name_or_path: str = str(demo.MODEL)
    """Model on the Hub or in a folder."""
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: int = 32
    """Scale: updates are multiplied by alpha / r, or alpha / sqrt(r) with use_rslora."""
    lora_dropout: float = 0.0
    """Dropout on the adapters' inputs."""
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    """Names (or ends of names) of the layers that get adapters; all-linear: every linear layer but the head."""
    modules_to_save: tuple[str, ...] = ()
    """Modules that are trained and saved whole, such as lm_head."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r), which keeps high ranks stable."""
    use_dora: bool = False
    """Learn magnitude and direction apart."""
    init_lora_weights: Literal["default", "gaussian", "pissa"] = "default"
    """Initial adapters; pissa: the base weights' principal components (saved as an ordinary adapter of rank 2r)."""
    adapter_name_or_path: str | None = None
    """Adapter to continue from, whose own rank, alpha, dropout and targets stay; the flags of new ones are refused."""
    load_in_4bit: bool = False
    """Quantise the frozen base to 4 bits (nf4, double quantisation): QLoRA."""
    load_in_8bit: bool = False
    """Quantise the frozen base to 8 bits; 4 are faster, since every layer here makes the host wait for the GPU."""
    merge_adapter: bool = False
    """Also write merged/, the base (dequantised, if it was quantised) with the adapter added in."""
    eval_steps: int = 50
    """Optimizer steps between evaluations; one is made before and one after training."""
    eval_samples: int = 256
    """Validation samples that an evaluation uses, at most."""
    num_generations: int = 1
    """Validation prompts answered before and after training."""
    max_new_tokens: int = 48
    """Tokens of such an answer, at most."""
    chat: ChatConfig = field(default_factory=lambda: ChatConfig(seq_length=512))
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(global_batch_size=16, per_device_train_batch_size=2))
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3, weight_decay=0.0, adam_beta2=0.999))
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    checkpoint: CheckpointConfig = field(default_factory=lambda: CheckpointConfig(save_steps=20))
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self) -> None:
        if self.load_in_4bit and self.load_in_8bit:
            raise ConfigError("--load_in_4bit and --load_in_8bit both quantise the base: drop one of them")
        if self.init_lora_weights == "pissa" and (self.load_in_4bit or self.load_in_8bit or self.use_dora):
            raise ConfigError("--init_lora_weights pissa changes the base weights: not with a quantised base, nor DoRA")
        self.batch.micro_batch()  # refuses what does not divide
        if not 0 <= self.lora_dropout < 1 or not self.lora_alpha > 0:
            raise ConfigError("--lora_dropout must be at least 0 and below 1, and --lora_alpha positive")
        of_new_ones = (
            "lora_r lora_alpha lora_dropout lora_target_modules modules_to_save use_rslora use_dora init_lora_weights"
        )
        given = [f"--{name}" for name in of_new_ones.split() if getattr(self, name) != getattr(Config, name)]
        if given and self.adapter_name_or_path:
            raise ConfigError(
                f"--adapter_name_or_path continues from that adapter as it was made: drop {', '.join(given)} (from the "
                "command line, or from the --config file)"
            )
        configs.require_at_least_one(self, "lora_r", "eval_steps", "eval_samples", "max_new_tokens")
        if self.num_generations < 0:
            raise ConfigError(f"--num_generations must not be negative, not {self.num_generations}")


if __name__ == "__main__":  # before torch is imported, so that --help and a mistyped flag answer at once
    CONFIG = configs.parse_or_exit(Config)

import torch
from accelerate import Accelerator, DistributedType
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

from shared.data.loader import Loader
from shared.data.order import Order, Samples, Spread
from shared.models import attention
from shared.models.adapters import keep_quantized, pissa_to_lora, trained_in_fp32
from shared.models.blocks import compile_blocks, set_gradient_checkpointing, uncompiled
from shared.models.card import model_card
from shared.models.checks import outside_of_text, require_fit, require_own_embeddings
from shared.models.counts import count_parameters, flops_per_token
from shared.models.generation import continuations, end_generation_at, first_lines
from shared.models.hub import from_hub, identity_of_frozen
from shared.models.loss import causal_lm_loss, fuse_head
from shared.models.weights import gather_weights
from shared.parallel import sharding
from shared.process.files import whole_folder
from shared.process.printing import print_main, summary
from shared.run import exits, launch, metrics
from shared.run.checkpoint import Checkpointer
from shared.run.folder import open_run
from shared.run.guard import Guard
from shared.run.rehearsal import dress_rehearsal, largest_that_fits, warm_up
from shared.text import chat
from shared.text.packing import GroupedOrder, Packed, collate_packed, collate_padded
from shared.training import optim, step


def build_datasets(config: Config, tokenizer, accelerator: Accelerator) -> tuple[Loader, Loader, chat.Conversations, str]:
    """(training windows, validation windows, the validation samples, a line about the data)."""
    options = config.chat
    if options.is_demo and options.max_train_samples is None:
        options = configs.replace(options, max_train_samples=DEMO_SAMPLES)
    folder = chat.prepare(options, tokenizer)
    train, held_out = chat.Conversations(folder, "train"), chat.Conversations(folder, "validation")
    about_data = chat.describe(train, options)
    print_main(about_data)
    print_main("first sample, what is learned between ⟦ and ⟧:\n" + chat.marked(train, tokenizer))
    size, seed = config.batch.global_batch_size, config.batch.seed
    samples: Samples = train
    # Few different lengths: kernels are chosen, and compiled, for each.
    collate = partial(collate_padded, multiple_of=16, at_most=options.seq_length)
    order: Order = GroupedOrder(len(train), size, seed, lengths=train.lengths)
    if options.packing:
        samples = packed = Packed(train, options.seq_length)
        flat = config.speed.attn_implementation.startswith("flash")
        collate = partial(collate_packed, flat=flat, multiple_of=64, at_most=options.seq_length)
        order = Order(len(packed), size, seed)
        print_main(f"packed into {len(packed):,} rows of {options.seq_length} tokens, {packed.waste:.1%} of them empty")
    if len(samples) < size:
        rows, other = ("packed rows", ", or --no_packing") if options.packing else ("rows", "")
        raise ConfigError(
            f"{len(train):,} samples in {len(samples):,} {rows} are fewer than one --global_batch_size of {size} rows: "
            f"choose {len(samples)} or less{other}"
        )
    loading = sharding.share(accelerator)
    workers, per_device = config.batch.dataloader_num_workers, config.batch.per_device_eval_batch_size
    train_loader = Loader(samples, collate, order, per_device=config.batch.micro_batch()[0], num_workers=workers, **loading)
    chosen = Spread(held_out, config.eval_samples)
    eval_order = Order(len(chosen), per_device * loading["world_size"], 0, shuffle=False)
    padded = partial(collate_padded, multiple_of=64, at_most=options.seq_length)
    return train_loader, Loader(chosen, padded, eval_order, per_device=per_device, **loading), held_out, about_data


def load_base(config: Config, accelerator: Accelerator, device: torch.device) -> PreTrainedModel:
    """The frozen base model, in the launch config's precision, quantised if asked."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": config.speed.attn_implementation,
        "use_safetensors": True,
    }
    if config.load_in_4bit or config.load_in_8bit:
        if config.load_in_8bit and accelerator.distributed_type == DistributedType.FSDP:
            raise ConfigError("--load_in_8bit cannot be sharded: use --load_in_4bit, or accelerate_configs/ddp.yaml")
        options["device_map"] = {"": device}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=config.load_in_4bit,
            load_in_8bit=config.load_in_8bit,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
            # FSDP2 shards 4-bit weights only if they are stored as the floating type that it communicates in.
            bnb_4bit_quant_storage=dtype if accelerator.distributed_type == DistributedType.FSDP else torch.uint8,
        )
    base = from_hub(AutoModelForCausalLM, config.model_name_or_path, **options)
    keep_quantized(base)
    return base


def build_model(config: Config, tokenizer, accelerator: Accelerator) -> nn.Module:
    """The base with trainable adapters."""
    base = load_base(config, accelerator, accelerator.device)
    require_fit(base, tokenizer, config.chat.seq_length)
    set_gradient_checkpointing(base, config.speed.gradient_checkpointing)
    if config.adapter_name_or_path:
        model = from_hub(PeftModel, config.adapter_name_or_path, first=base, is_trainable=True)
    else:
        model = add_adapters(config, base)
    if config.merge_adapter or config.init_lora_weights == "pissa":
        require_own_embeddings(model, "--merge_adapter" if config.merge_adapter else "--init_lora_weights pissa")
    return trained_in_fp32(model)


def add_adapters(config: Config, base: PreTrainedModel) -> PeftModel:
    """New adapters, as the flags say."""
    targets = config.lora_target_modules
    last_names = {name.rpartition(".")[2] for name, _ in base.named_modules() if name}
    for flag, names in (("lora_target_modules", targets), ("modules_to_save", config.modules_to_save)):
        for name in names if names != ("all-linear",) else ():  # of several, PEFT leaves out those that it does not find
            if name.rpartition(".")[2] not in last_names:
                raise ConfigError(f"--{flag} {name}: the model has no module of that name")
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        exclude_modules=outside_of_text(base),
        modules_to_save=list(config.modules_to_save) or None,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights=True if config.init_lora_weights == "default" else config.init_lora_weights,
    )
    try:
        return get_peft_model(base, lora)
    except (AttributeError, ValueError) as error:
        raise ConfigError(f"--lora_target_modules {' '.join(targets)}: {str(error).splitlines()[0]}") from None


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, loader: Loader, guard: Guard) -> dict[str, float]:
    """Loss a learned token, and perplexity, of the validation samples, each counted once on any world size."""
    model.eval()
    total, targets = torch.zeros((), device=accelerator.device), 0
    with uncompiled(model):
        for window in guard.watch(loader.windows(0, loader.order.steps_per_epoch)):
            for batch in window.micro_batches:
                total += causal_lm_loss(model, batch)
            targets += window.num_targets
    model.train()
    loss = sharding.total(accelerator, total).item() / targets
    return {"eval_loss": loss, "eval_perplexity": math.exp(min(loss, 100))}


def save_final(
    config: Config, accelerator: Accelerator, model: nn.Module, tokenizer, end: int | None, run_dir: Path, initial, card: str
) -> None:
    """Write final/ (adapter, tokenizer, card) and, if asked, merged/, which ends texts at `end`. Every rank calls this."""
    weights = gather_weights(accelerator, model, trainable_only=True)
    if not accelerator.is_main_process:
        return
    peft_model = accelerator.unwrap_model(model)
    with whole_folder(run_dir / "final") as folder:
        lora = peft_model.peft_config["default"]
        if config.init_lora_weights == "pissa":
            weights = pissa_to_lora(weights, initial)
            lora.r, lora.init_lora_weights = 2 * lora.r, True
            lora.lora_alpha *= math.sqrt(2) if lora.use_rslora else 2  # type: ignore[assignment]  # the scale stays
        peft_model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        tokenizer.save_pretrained(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
    if config.merge_adapter:
        base = load_base(config, accelerator, torch.device("cpu"))  # the device still holds the model in training
        base = base.dequantize() if config.load_in_4bit or config.load_in_8bit else base
        merged = PeftModel.from_pretrained(base, str(run_dir / "final")).merge_and_unload()
        end_generation_at(merged, end)
        with whole_folder(run_dir / "merged") as folder:
            merged.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        print_main(f"base with adapter in {run_dir}/merged")
    elif (run_dir / "merged").exists():
        print_main(f"warning: {run_dir}/merged holds an earlier adapter: the same command with --merge_adapter renews it")


def main(config: Config) -> None:
    # Setup -------------------------------------------------------------------------------------------------------
    tracker = metrics.tracker_name(config.log.report_to)
    accelerator = launch.start(config.batch.seed, log_with=tracker, timeout=config.speed.ddp_timeout)
    run_dir = open_run(accelerator, config.checkpoint.output_dir, "lora_finetune")

    # Data --------------------------------------------------------------------------------------------------------
    tokenizer = from_hub(AutoTokenizer, config.model_name_or_path)
    train_loader, eval_loader, held_out, about_data = build_datasets(config, tokenizer, accelerator)
    steps_per_epoch = train_loader.order.steps_per_epoch
    total_steps = config.batch.total_steps(steps_per_epoch, default=DEMO_STEPS if config.chat.is_demo else None)
    end = held_out.meta["end"]  # the token that ends what is learned

    # Model and optimizer -----------------------------------------------------------------------------------------
    model = build_model(config, tokenizer, accelerator)
    initial = {}
    if config.init_lora_weights == "pissa":  # whose adapters begin elsewhere than at zero: see save_final
        initial = {n: p.detach().cpu().clone() for n, p in model.named_parameters() if p.requires_grad}
    trainable, total = count_parameters(model)
    flops = flops_per_token(model, held_out.meta["context"])
    if config.speed.torch_compile:
        compile_blocks(model)
    optimizers = optim.build(model, config.optim)
    model, optimizers = sharding.prepare(
        *(accelerator, model, optimizers), max_grad_norm=config.optim.max_grad_norm, comm_hook=config.speed.ddp_comm_hook
    )
    packing = "off"
    if config.chat.packing:
        at_once = 1 if config.speed.attn_implementation.startswith("flash") else config.batch.micro_batch()[0]
        packing = attention.isolate_documents(model, accelerator.device, len(tokenizer), at_once)

    # Resume ------------------------------------------------------------------------------------------------------
    base = identity_of_frozen(config.model_name_or_path, accelerator.unwrap_model(model))
    saver = Checkpointer(accelerator, model, optimizers, run_dir, config, data=held_out.meta["sha256"], base=base)
    state = saver.resume(config.checkpoint.resume_from_checkpoint, total_steps=total_steps)
    last_made = run_dir / ("merged" if config.merge_adapter else "final")
    if state.step >= total_steps and last_made.exists():
        launch.say_finished(run_dir, state.step, config)
        return
    loss_note = fuse_head(accelerator, model, len(tokenizer), compiled=config.speed.torch_compile)
    batch_loss = partial(causal_lm_loss, model)
    if config.batch.find_batch_size:
        rows = largest_that_fits(accelerator, model, optimizers, train_loader, batch_loss)
        config = configs.replace(config, per_device_train_batch_size=rows)
    if accelerator.is_main_process:
        configs.save(configs.replace(config, output_dir=run_dir), run_dir / "config.yaml")
    summary(
        "lora_finetune",
        {
            "run on": launch.strategy(accelerator),
            "each process holds": sharding.sharding_summary(accelerator, model, optimizers),
            "model": f"{config.model_name_or_path}, {total:,} parameters",
            "trained": f"{trainable:,} parameters ({trainable / total:.2%})",
            "batch": launch.batch_line(config.batch, accelerator, "rows"),
            "budget": f"{total_steps:,} steps, {total_steps / steps_per_epoch:.2f} epochs",
            "packing": packing,
            "loss": loss_note,
            "optimizer": f"{config.optim.optim}, {config.optim.lr_scheduler_type} from {config.optim.learning_rate:g}",
            "output": run_dir,
        },
    )

    # Train -------------------------------------------------------------------------------------------------------
    settings = configs.flatten(config)
    logger = metrics.Logger(
        accelerator,
        config.log,
        run_dir,
        state,
        total_steps,
        settings,
        template="lora_finetune",
        flops=flops,
    )
    guard = Guard(accelerator, model, state, max_skipped=config.optim.max_skipped_steps)

    def evaluate_and_log(*, generate: bool = False) -> dict[str, float]:
        values = evaluate(accelerator, model, eval_loader, guard)
        logger.log_evaluation(values)
        if state.step == 0:
            state.notes["before"] = values
        prompts = [held_out.prompt(i) for i in range(min(config.num_generations, len(held_out)) if generate else 0)]
        outputs = continuations(model, tokenizer, [p for p, _ in prompts], max_new_tokens=config.max_new_tokens, end=end)
        rows = [
            [tokenizer.decode(p), tokenizer.decode(r, skip_special_tokens=True).strip(), o]
            for (p, r), o in zip(prompts, outputs, strict=True)
        ]
        for prompt, reference, output in rows:
            said = first_lines(output)
            print_main(f"--- prompt\n{prompt}\n--- reference\n{reference}\n--- model at step {state.step}\n{said}\n---")
        if rows:
            logger.log_table("generations", ["step", "prompt", "reference", "output"], [[str(state.step), *r] for r in rows])
        return values

    warm_up(accelerator, model, optimizers, train_loader, batch_loss)
    if config.checkpoint.dress_rehearsal and state.step == 0:
        dress_rehearsal(accelerator, model, optimizers, train_loader, batch_loss, saver, state)
    try:
        if state.step < total_steps and state.owes_evaluation(config.eval_steps):
            with logger.pause():
                evaluate_and_log(generate=state.step == 0)
        for window in logger.waiting(train_loader.windows(state.step, total_steps)):
            launch.seed_step(config.batch.seed, state.step, sharding.data_rank(accelerator))
            learning_rate = optim.set_learning_rate(optimizers, config.optim, state.step, total_steps)
            scale = step.loss_scale(window.num_targets)
            losses = []
            for batch in step.accumulate(accelerator, model, window.micro_batches):
                loss = batch_loss(batch)
                step.backward(accelerator, loss, scale)
                losses.append(loss.detach())
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
    values = evaluate_and_log(generate=True)
    before = {f"{name}_before": value for name, value in state.notes.get("before", {}).items()}
    card = model_card(
        *(f"LoRA adapter of {Path(config.model_name_or_path).name}", about_data, before | values, settings),
        load='peft.AutoPeftModelForCausalLM.from_pretrained("final")',
        library_name="peft",
        base_model=config.model_name_or_path,
    )
    save_final(config, accelerator, model, tokenizer, end, run_dir, initial, card)
    logger.close()
    print_main(
        f"validation loss {before.get('eval_loss_before', math.nan):.4f} before, {values['eval_loss']:.4f} after training"
    )
    print_main(f"adapter in {run_dir}/final; curves.png, metrics.jsonl and config.yaml beside it")


if __name__ == "__main__":
    exits.run(main, CONFIG)
