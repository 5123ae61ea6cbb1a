"""Images of validation prompts: what a model gets beside the tokens, and what people see."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from shared.images.tiles import draw_tiles
from shared.process.redaction import redact


class PromptImages:
    """The images of some prompts.

    Args:
        samples: `ImageConversations`.
        chosen: the numbers of the samples whose prompts they are.
    """

    def __init__(self, samples: Any, chosen: Sequence[int]) -> None:
        self.samples = samples
        self.pictures = [samples.pictures(index) for index in chosen]

    def with_image(self, numbers: list[int]) -> list[int]:
        """The numbers of prompts, and one more if none of them has an image and another one has:
        ranks that compute the vision tower would wait for those that do not.
        """
        if any(self.pictures[number] for number in numbers):
            return numbers
        return numbers + [n for n, pictures in enumerate(self.pictures) if pictures][:1]

    def inputs(self, numbers: Sequence[int], input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the model gets beside the rows of token ids, [batch, seq], of these prompts."""
        images = [self.samples.images(self.pictures[number]) for number in numbers]
        if not any(images):
            return {}
        inputs = self.samples.inputs(input_ids.cpu(), images)
        return {name: value.to(input_ids.device) for name, value in inputs.items()}

    def draw(self, file: Path, rows: list[dict[str, Any]]) -> bool:
        """Draw the first image of each row of answers below reference and answer. Returns whether
        there is any.
        """
        tiles = []
        for number, row in enumerate(rows):
            if self.pictures[number]:
                (image,) = self.samples.images(self.pictures[number][:1])
                texts = (f"reference: {row['reference']}", f"step {row['step']}: {row['answer']}")
                lines = [fill(redact(text)[:160], 36).replace("$", r"\$") for text in texts]
                tiles.append((image, "\n".join(lines)))
        if tiles:
            draw_tiles(file, "", tiles[:12])
        return bool(tiles)
