"""Prompts with images, which a model answers to learn from its own answers."""

from functools import lru_cache
from typing import Any

from shared.extras.vision.conversations import ImageConversations, ToImageSamples
from shared.extras.vision.pictures import Picture
from shared.rollouts.prompts import ToPrompts


class AskedImages(ImageConversations):
    """Prompts; images are kept for a while, since several answers to one prompt are learned."""

    @lru_cache(maxsize=16)  # noqa: B019
    def _read(self, *pictures: Picture) -> list[Any]:
        return super().images([*pictures])

    def images(self, pictures: list[Picture]) -> list[Any]:
        return self._read(*pictures)


class ToImagePrompts(ToImageSamples, ToPrompts):
    """As `ToPrompts`, with images. The reward function does not get them."""

    kind = "image-prompts"
    code = (*ToImageSamples.code, "rollouts/prompts.py")
    rows = AskedImages
