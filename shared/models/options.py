"""Flags of language models and their adapters. Stays clear of torch, so that --help and a mistyped
flag answer at once.
"""

from dataclasses import dataclass, fields

from shared.config.types import BelowOne, Count, Free
from shared.process.errors import ConfigError

PRESETS = {  # hidden size, blocks, attention heads, key-value heads, feed-forward size
    "3M": (192, 6, 6, 6, 512),
    "30M": (512, 8, 8, 8, 1408),
    "125M": (768, 12, 12, 12, 2048),
    "350M": (1024, 24, 16, 16, 2816),
    "1B": (2048, 16, 32, 8, 8192),
}


@dataclass(frozen=True)
class ModelConfig:
    """Model."""

    # Llama-style model of about this many parameters: 3M, 30M, 125M, 350M or 1B
    model_preset: str = "3M"
    # Architecture on the Hub or in a folder, with random weights, in place of model_preset
    config_name: str | None = None
    # Model on the Hub or in a folder to continue from, in place of model_preset
    model_name_or_path: str | None = None
    # Changes to the architecture, such as hidden_size=256,num_hidden_layers=4
    config_overrides: str | None = None

    def __post_init__(self) -> None:
        if self.model_preset not in PRESETS:
            raise ConfigError(
                f"--model_preset {self.model_preset}: expected one of {', '.join(PRESETS)}"
            )
        if self.config_name and self.model_name_or_path:
            raise ConfigError(
                "--config_name and --model_name_or_path both name the model: drop one of them"
            )


@dataclass(frozen=True)
class AdapterConfig:
    """LoRA adapters."""

    lora_r: Count = 16  # Rank of the adapters
    # Scale of the adapters: updates are multiplied by alpha / r, with use_rslora by alpha / sqrt(r)
    lora_alpha: Count = 32
    lora_dropout: BelowOne = 0.0  # Dropout on the adapters' inputs
    # Layers that get adapters, by names or ends of names; all-linear: every linear layer for text
    # except the head and the routers of experts
    lora_target_modules: tuple[str, ...] = ("all-linear",)
    lora_experts: bool = True  # Let all-linear include experts, also fused ones
    modules_to_save: tuple[str, ...] = ()  # Modules to train and save whole, such as lm_head
    use_rslora: bool = False  # Scale by alpha / sqrt(r), which keeps high ranks stable
    use_dora: bool = False  # Train magnitude and direction separately (DoRA)
    # Adapter to continue from; it keeps its rank, alpha, dropout and target modules
    adapter_name_or_path: str | None = None
    # Also write merged/, the base (dequantised) with the adapter merged in
    merge_adapter: Free[bool] = False
    # Quantise the frozen base to 4 bits (nf4, double quantisation): QLoRA
    load_in_4bit: bool = False

    def refuse_dropout(self) -> None:
        """For the `__post_init__` of a template that compares probabilities of answers."""
        if self.lora_dropout:
            raise ConfigError(
                f"--lora_dropout {self.lora_dropout:g}: probabilities of answers are compared, "
                "which dropout would change: drop the flag"
            )

    def refuse_changes_to_a_given_adapter(self, defaults: "AdapterConfig") -> None:
        """For a template's `__post_init__`: with adapter_name_or_path, refuse flags that only new
        adapters have.

        Args:
            defaults: the template's own.

        Raises:
            ConfigError: names the flags.
        """
        of_both = {"adapter_name_or_path", "merge_adapter", "load_in_4bit"}
        given = [
            f"--{field.name}"
            for field in fields(self)
            if field.name not in of_both
            and getattr(self, field.name) != getattr(defaults, field.name)
        ]
        if given and self.adapter_name_or_path:
            raise ConfigError(
                "--adapter_name_or_path continues from that adapter as it was made: drop "
                f"{', '.join(given)} (from the "
                "command line, or from the --config file)"
            )
