"""Prompts with images, which a model answers to learn from its own answers."""

from shared.extras.vision.conversations import ToImageSamples
from shared.rollouts.prompts import ToPrompts


class ToImagePrompts(ToImageSamples, ToPrompts):
    """As `ToPrompts`, with images. The reward function does not get them."""

    kind = "image-prompts"
    code = (*ToImageSamples.code, "rollouts/prompts.py")
