"""Conversations of a template that also takes images."""

from dataclasses import replace
from functools import partial
from typing import Any

from shared.data import records
from shared.process import ranks
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.text import chat, loaders
from shared.text.options import ChatConfig
from shared.vision.forms import COLUMNS, has_images


def read_conversations(
    config: Any, tokenizer: Any, *, demo_samples: int
) -> tuple[chat.Conversations, chat.Conversations]:
    """As `text.loaders.read_conversations`, with images if one of the first records of a source to
    train on has any. Every rank calls this.

    Args:
        config: a template's, with `data`, `vision` and `model_name_or_path`.
    """
    kind: Any = chat.ToSamples
    if see_images(config.data):
        if ranks.sequence_ranks() > 1:
            raise ConfigError("ranks cannot share rows with images: launch without sp_size")
        from shared.vision.conversations import ToImageSamples
        from shared.vision.processing import ImageProcessor

        processor = ImageProcessor(config.model_name_or_path, tokenizer)
        kind = partial(ToImageSamples, processor=processor, vision=config.vision)
    return loaders.read_conversations(config.data, tokenizer, demo_samples=demo_samples, kind=kind)


def see_images(options: ChatConfig) -> bool:
    """Whether images are learned. Every rank calls this."""
    if options.is_demo or set(COLUMNS) & set(options.allow_unused_columns):
        return False
    trained = [replace(of, validation_file=()) for of in options.sources().values()]
    sources = [records.open_sources(of, demo=chat.DEMO)[0] for of in trained]
    return on_main(lambda: any(has_images(source.read()) for source in sources))
