r"""Predict the peak memory of one GPU under each launch config, on any machine and without weights.

python -m shared plan --model_name_or_path meta-llama/Llama-3.1-8B --seq_length 2048 \
    --gpus 8 --gpu_memory 80

python -m shared plan --config recipes/qwen3_8b_qlora_24gb.yaml --gpus 1 --gpu_memory 24

python -m shared plan --model_name_or_path meta-llama/Llama-3.2-1B --per_device_train_batch_size 4 \
    --throughput --gpu H100
"""

import contextlib
import os
import sys
from dataclasses import dataclass, replace
from typing import Literal

from shared import demo
from shared.config import parse as configs
from shared.config.types import Count, Positive
from shared.models.options import ModelConfig
from shared.process.errors import ConfigError, first_line
from tools import support

RESERVED = 0.08  # of a GPU, for the CUDA context, NCCL's buffers and fragmentation


@dataclass(frozen=True)
class PlanConfig:
    """The training that is planned."""

    model_name_or_path: str = str(demo.MODEL)
    """Model, or architecture only, on the Hub or in a folder; its weights are not read."""
    model_preset: str | None = None
    """Plan pretrain.py's --model_preset instead."""
    config_name: str | None = None
    """Plan pretrain.py's --config_name instead."""
    config_overrides: str | None = None
    """Changes to the architecture: hidden_size=256,num_hidden_layers=4."""
    seq_length: Count = 2048
    """Tokens of one row."""
    per_device_train_batch_size: Count = 1
    """Samples of one micro-batch."""
    gpus: Count = 1
    """GPUs there are."""
    gpu_memory: Positive = 80.0
    """Memory of one, GB (10^9 bytes)."""
    mixed_precision: Literal["bf16", "no"] = "bf16"
    """As the launch config says."""
    lora_r: int = 0
    """Rank of LoRA adapters on all linear layers, rows being packed; 0: all weights are trained."""
    lora_experts: bool = True
    """Adapters on experts, too, as lora_finetune.py has them."""
    load_in_4bit: bool = False
    """Quantise the frozen base to 4 bits (with lora_r)."""
    weights_dtype: Literal["fp32", "bf16"] = "fp32"
    """Of trained weights, as full_finetune.py has it."""
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    """As the templates have it."""
    loss_type: Literal["sigmoid", "robust", "ipo", "simpo", "orpo"] | None = None
    """Plan dpo.py, whose loss this is: a sample is a pair of answers, two rows that go forward together."""
    group_size: int = 0
    """Plan grpo.py, which has groups of answers: a row is a prompt of seq_length and an answer of max_new_tokens."""
    teacher_name_or_path: str | None = None
    """Plan distill.py, with this model in memory, too."""
    teacher_load_in_4bit: bool = False
    """Quantise it to 4 bits."""
    max_new_tokens: Count = 512
    """Of an answer of grpo.py."""
    template: str | None = None
    """Refuse what docs/support.md says this template cannot do."""
    launch: str | None = None
    """Refuse what it says this launch config cannot do, and plan it alone."""
    ema_decay: float = 0
    """As the templates have it: launches without it are left out, as they are for the next three."""
    streaming: bool = False
    """As the templates have it."""
    torch_compile: bool | None = None
    """As the templates have it."""
    mix_weights: tuple[float, ...] = ()
    """As the templates have it."""
    throughput: bool = False
    """Instead estimate where the time of an optimizer step goes on one GPU, on paper."""
    gpu: str = "H100"
    """The GPU of that estimate, part of its name: H100, A100, L40S, RTX 4090; a wrong one lists all."""
    gradient_accumulation_steps: Count = 1
    """Micro-batches of a step in that estimate."""
    train_tokens: float = 0
    """Tokens to train on, of all epochs, such as 20e9: the hours that they take in that estimate."""

    def __post_init__(self) -> None:
        if self.model_preset:
            ModelConfig(self.model_preset)  # refuses an unknown one
        named = (
            self.model_preset
            or self.config_name
            or self.model_name_or_path != PlanConfig.model_name_or_path
        )
        if self.config_overrides and not named:
            raise ConfigError(
                "--config_overrides changes a model: name it by "
                "--model_name_or_path or --model_preset"
            )
        if self.load_in_4bit and not self.lora_r:
            raise ConfigError("--load_in_4bit needs --lora_r: quantised weights are not trained")
        if self.weights_dtype == "bf16" and (self.lora_r or self.loss_type):
            raise ConfigError(
                "--weights_dtype bf16 is for full fine-tuning with AdamW: drop the others"
            )
        if self.throughput and self.mixed_precision == "no":
            raise ConfigError("--throughput estimates bf16: drop --mixed_precision no")
        if self.train_tokens and not self.throughput:
            raise ConfigError("--train_tokens is for --throughput")

        for name, known in (("template", support.TEMPLATES), ("launch", support.LAUNCHES)):
            value = getattr(self, name)
            if value and value not in known and value != "single_gpu":
                raise ConfigError(f"--{name} is one of {', '.join(known)}, not {value!r}")
        if self.template == "image_classification":
            raise ConfigError("plan is for language models; of images: docs/recipes.md")
        line = support.refusal(self.template or "", self.launch or "", self.features)
        if line:
            raise ConfigError(f"{line} (docs/support.md)")

    @property
    def features(self) -> list[str]:
        """The features of docs/support.md that are asked for."""
        asked = {
            "4 bits": self.load_in_4bit,
            "EMA": self.ema_decay,
            "streaming": self.streaming,
            "compile": self.torch_compile,
            "mixtures": self.mix_weights,
        }
        return [feature for feature, wanted in asked.items() if wanted]

    @property
    def usable(self) -> float:
        """GB of a GPU that a training may take."""
        return self.gpu_memory * (1 - RESERVED)


def main() -> None:
    config = configs.parse(PlanConfig, description=__doc__, only_known=True)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from shared.models.hub import override
    from shared.run import launch
    from tools import memory, reports

    launch.quieten_libraries()
    architecture = reports.architecture_of(config)
    override(architecture, config.config_overrides)
    job = memory.Job(
        architecture,
        config.per_device_train_batch_size * (2 if config.loss_type else 1),
        config.seq_length + (config.max_new_tokens if config.group_size else 0),
        config.mixed_precision == "bf16",
        config.lora_r,
        config.load_in_4bit,
        # as lora_finetune.py does
        packed=config.lora_r > 0 and not config.loss_type and not config.group_size,
        bf16_weights=config.weights_dtype == "bf16",
        eight_bits=config.optim == "adamw_8bit",
        lora_experts=config.lora_experts,
    )
    if config.teacher_name_or_path:
        teacher = reports.architecture_of(config, config.teacher_name_or_path)
        alone = memory.Job(teacher, 1, 16, job.mixed, four_bits=config.teacher_load_in_4bit)
        job = replace(job, beside=memory.frozen(alone))
    print("measuring a few blocks on fake tensors, about a minute ...", file=sys.stderr, flush=True)
    with contextlib.redirect_stdout(sys.stderr):
        try:
            report = (
                reports.of_throughput(job, config)
                if config.throughput
                else reports.of_memory(job, config)
            )
        # a forward that looks at the values of its tensors
        except (AssertionError, RuntimeError) as error:
            raise ConfigError(
                f"{type(architecture).__name__} cannot be measured: {first_line(error)}"
            ) from None
    print(report)
