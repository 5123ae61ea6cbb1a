"""What few runs need: shared/extras/. A project gets it on request."""

from collections.abc import Collection, Iterable
from pathlib import Path

from shared.process.errors import ConfigError

SOURCE = Path(__file__).resolve().parents[1]
# What few runs need, and what asks for it. A project without one ends such a run with one line.
EXTRAS = {
    "averages": "--ema_decay",
    "comparisons": "python -m shared fork, compare, repeat, reproduce",
    "deepspeed": "accelerate_configs/deepspeed_*.yaml",
    "distillation": "distill.py",
    "engines": "--rollout_engine",
    "experts": "a model of experts",
    "masked": "--objective mlm",
    "mirror": "--mirror_to",
    "mixture": "--mix_weights",
    "optimizers": "--optim muon (pretraining's default for random weights) or adamw_8bit, "
    "--layer_decay, --weights_dtype bf16",
    "pipeline": "pretrain_pipeline.py",
    "proofs": "python -m shared check, verify-launch, replay",
    "refill": "answers that grpo.py and distill.py sample",
    "rehearsal": "--find_batch_size, --dress_rehearsal",
    "remote": "URLs of files",
    "replicas": "--sync_every",
    "report": "data.json, --preprocess_only, --fail_on",
    "reward_model": "dpo.py --loss_type reward, grpo.py --reward_model",
    "sequence": "accelerate_configs/sequence_parallel.yaml",
    "streaming": "--streaming",
    "tagging": "token_classification.py",
    "tars": "tar files of images",
    "tensor": "accelerate_configs/tensor_parallel.yaml",
    "turns": "--max_turns",
    "vision": "conversations with images",
}
ALWAYS = {"proofs", "report"}  # in every project
CANNOT_DO_WITHOUT = {
    "distill": {"distillation", "refill"},
    "grpo": {"refill"},
    "pretrain": {"optimizers"},
    "pretrain_pipeline": {"optimizers", "pipeline"},
    "token_classification": {"tagging"},
}
# Of no others but those that cannot do without, or can use it.
OF_A_TEMPLATE = {
    "distillation",
    "engines",
    "pipeline",
    "refill",
    "reward_model",
    "tagging",
    "turns",
}
CAN_USE = {"dpo": {"reward_model"}, "grpo": {"engines", "reward_model", "turns"}}
# What a template can have use of; others: everything but these.
WITHOUT_USE = {
    "image_classification": {
        "masked",
        "experts",
        "replicas",
        "sequence",
        "streaming",
        "tensor",
        "vision",
    },
    "text_classification": {"masked", "replicas", "sequence", "streaming", "tars", "vision"},
    "token_classification": {"masked", "replicas", "sequence", "streaming", "tars", "vision"},
    "pretrain": {"tars", "vision"},
    "pretrain_pipeline": {
        "masked",
        "deepspeed",
        "replicas",
        "sequence",
        "streaming",
        "tars",
        "vision",
    },
    "distill": {"masked", "replicas", "tars", "vision"},
    "dpo": {"masked", "replicas", "streaming", "tars"},
    "grpo": {"masked", "replicas", "sequence", "streaming", "tars"},
    "lora_finetune": {"masked", "replicas", "tars"},
    "full_finetune": {"masked", "replicas", "tars"},
}
# Launch configs that come with an extra.
CONFIGS = {
    "deepspeed": "deepspeed",
    "sequence": "sequence_parallel",
    "tensor": "tensor_parallel",
}


def useful(names: Iterable[str]) -> set[str]:
    """The extras that these templates can have use of."""
    return {
        extra
        for name in names
        for extra in EXTRAS.keys()
        - WITHOUT_USE[name]
        - OF_A_TEMPLATE.difference(CANNOT_DO_WITHOUT.get(name, set()), CAN_USE.get(name, set()))
        if extra_files(extra)
    }


def chosen(names: tuple[str, ...], asked: Collection[str]) -> set[str]:
    """The extras of a project: those asked for, or all, and what all projects have or its
    templates cannot do without, unless it was deleted.

    Raises:
        ConfigError: there is no such extra.
    """
    for extra in asked:
        if extra not in EXTRAS and extra != "all":
            raise ConfigError(f"no extra {extra!r}: there is {', '.join(EXTRAS)}, or all")
        if extra != "all" and not extra_files(extra):
            raise ConfigError(f"shared/extras/{extra} is not in this project")
    extras = useful(names) if "all" in asked else {*asked}
    extras |= ALWAYS.union(*(CANNOT_DO_WITHOUT.get(name, set()) for name in names))
    return {extra for extra in extras if extra_files(extra)}


def extra_files(extra: str) -> list[Path]:
    """The files of an extra: a module, or a folder of them; none if it was deleted."""
    folder = SOURCE / "shared/extras" / extra
    return sorted([*folder.glob("*.py"), *folder.parent.glob(f"{extra}.py")])
