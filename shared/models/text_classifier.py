"""Text classifiers: encoders and decoders with a head."""

from typing import Any

from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification

from shared.experts.products import use_launch_precision
from shared.models.classifier import load_classifier
from shared.models.hub import from_hub


def text_heads(model: Any) -> dict[str, nn.Module]:
    """The modules of a classifier of texts that are not in its backbone, by name."""
    backbone = model.base_model
    return {
        name: module
        for name, module in model.named_children()
        if module is not backbone and [*module.parameters()]
    }


def load_text_classifier(
    name: str, classes: tuple[str, ...], problem_type: str, pad_token_id: int, **options: Any
) -> tuple[Any, tuple[str, ...]]:
    """A classifier of these classes with the weights of `name`, fp32, and the order in which it
    scores them.

    Decoders take the scores of a text's last token, which they find by the id of the padding token.

    Args:
        classes: their names; of a regression, one.
        problem_type: as transformers names it.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing. A pooler may be.
    """
    config = from_hub(AutoConfig, name)
    config.problem_type = problem_type
    config.get_text_config().pad_token_id = pad_token_id
    model, classes = load_classifier(
        AutoModelForSequenceClassification,
        name,
        config,
        classes,
        lambda model: [*text_heads(model).values()],
        may_be_new="pooler",
        **options,
    )
    use_launch_precision(model)
    return model, classes
