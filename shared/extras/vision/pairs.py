"""Pairs of answers to prompts with images."""

from functools import cached_property
from typing import Any

from shared.data import prepared
from shared.extras.vision.conversations import ImageConversations, ToImageSamples
from shared.extras.vision.pictures import Picture
from shared.text.preferences import ToPairs


class ImageAnswers(ImageConversations):
    """The answers of pairs. Both mostly have the same images, which are decoded once."""

    latest: tuple[list[Picture], list[Any]] = ([], [])

    @cached_property
    def fingerprint(self) -> str:
        """As of `Split`; also changes when the model sees the images otherwise, as what the
        reference says does."""
        seen = [self.processor.identity(), self.max_pixels]
        return prepared.fingerprint(samples=super().fingerprint, seen=seen)

    def images(self, pictures: list[Picture]) -> list[Any]:
        if pictures != self.latest[0]:
            self.latest = pictures, super().images(pictures)
        return self.latest[1]


class ToImagePairs(ToImageSamples, ToPairs):
    """As `ToPairs`, with images. A pair of which an answer is too long is left out."""

    kind = "image-preferences"
    code = (*ToImageSamples.code, "text/preferences.py")
    rows = ImageAnswers
    latest: tuple[Any, list[Picture]] = (None, [])

    def find(self, references: list[Any], where: str) -> list[Picture]:
        """As there, once for both answers."""
        if (references, where) != self.latest[0]:
            self.latest = (references, where), super().find(references, where)
        return self.latest[1]
