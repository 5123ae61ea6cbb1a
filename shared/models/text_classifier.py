"""Text classifiers: encoders and decoders with a head."""

from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from shared.models import adapters
from shared.models.classifier import load_classifier
from shared.models.hub import from_hub
from shared.models.loading import use_launch_precision
from shared.models.options import AdapterConfig

# By --problem_type: transformers' name of it.
PROBLEM_TYPES = {
    "single_label": "single_label_classification",
    "multi_label": "multi_label_classification",
    "regression": "regression",
}


def text_heads(model: Any) -> dict[str, nn.Module]:
    """The modules of a classifier of texts that are not in its backbone, by name."""
    backbone = model.base_model
    return {
        name: module
        for name, module in model.named_children()
        if module is not backbone and [*module.parameters()]
    }


def with_adapters(model: Any, r: int, alpha: int, task: str = "SEQ_CLS") -> nn.Module:
    """A classifier of texts with LoRA adapters of rank `r`, trained beside its head and pooler.

    Args:
        task: PEFT's name of it.
    """
    poolers = [name for name, _ in model.named_modules() if name.endswith("pooler")]
    whole = (*text_heads(model), *poolers)
    adapter = AdapterConfig(lora_r=r, lora_alpha=alpha, modules_to_save=whole)
    return adapters.add_adapters(model, adapter, task)


def load_text_classifier(
    name: str,
    classes: tuple[str, ...],
    problem_type: str,
    pad_token_id: int,
    auto_class: Any = AutoModelForSequenceClassification,
    **options: Any,
) -> tuple[Any, tuple[str, ...]]:
    """A classifier of these classes with the weights of `name`, fp32, and the order in which it
    scores them.

    Decoders take the scores of a text's last token, which they find by the id of the padding token.

    Args:
        classes: their names; of a regression, one.
        problem_type: see PROBLEM_TYPES.
        auto_class: of texts, or of their tokens.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing. A pooler may be.
    """
    config = from_hub(AutoConfig, name)
    config.problem_type = PROBLEM_TYPES[problem_type]
    config.get_text_config().pad_token_id = pad_token_id
    model, classes = load_classifier(
        auto_class,
        name,
        config,
        classes,
        lambda model: [*text_heads(model).values()],
        may_be_new="pooler",
        **options,
    )
    use_launch_precision(model)
    return model, classes
