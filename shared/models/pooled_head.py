"""Image classifiers of vision models that transformers has none of: a linear layer on their pooled
features.

A saved model has a copy of this file beside its weights, so this file imports nothing from the
project.
"""

import shutil
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

SUFFIX = "ForImageClassification"


class PooledHead:
    """Goes before a model's class: `class DINOv3ViTForImageClassification(PooledHead,
    DINOv3ViTModel)`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        width = config.hidden_sizes[-1] if hasattr(config, "hidden_sizes") else config.hidden_size
        self.classifier = nn.Linear(width, config.num_labels)
        self.post_init()  # type: ignore[attr-defined]

    def forward(self, pixel_values: torch.Tensor, **options: Any) -> ImageClassifierOutput:
        """pixel_values [batch, 3, height, width] -> logits [batch, num_labels]."""
        features = super().forward(pixel_values, **options).pooler_output  # type: ignore[misc]
        return ImageClassifierOutput(logits=self.classifier(features))

    def save_pretrained(self, folder: Any, **options: Any) -> None:
        """As transformers', with a copy of this file, in which the class is found."""
        name = type(self).__name__.removeprefix("FSDP")  # transformers would copy FSDP's file
        self.config.auto_map = {f"AutoModel{SUFFIX}": f"pooled_head.{name}"}  # type: ignore[attr-defined]
        super().save_pretrained(folder, **options)  # type: ignore[misc]
        shutil.copy(__file__, folder)


def __getattr__(name: str) -> Any:
    """DINOv3ViTForImageClassification of transformers' DINOv3ViTModel, and so on: transformers asks
    for it by its name.
    """
    if not name.endswith(SUFFIX):
        raise AttributeError(name)
    base = getattr(transformers, name.removesuffix(SUFFIX) + "Model")
    made = globals()[name] = type(name, (PooledHead, base), {"__module__": __name__})
    return made
