"""Conversations with images: prepared once, and read as samples."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch

from shared.data.order import IGNORED, Batch, Row
from shared.data.store import Encoded, Notes
from shared.images.decoding import BadImage
from shared.process.errors import ConfigError
from shared.text.chat import Conversations, ToSamples
from shared.text.encoder import Encoder, Span
from shared.text.forms import IMAGE, Example, Messages
from shared.text.options import ChatConfig
from shared.text.packing import collate_padded
from shared.vision.forms import in_parts, take_images
from shared.vision.options import VisionConfig
from shared.vision.pictures import Picture, find, open_picture, shrunk
from shared.vision.processing import SMALL, ImageProcessor
from shared.vision.prompts import PromptImages


class ImageEncoder(Encoder):
    """An `Encoder` of texts with IMAGE in them. The loss does not count tokens of images.

    Attributes:
        sizes: width and height of each image of the next conversation.
    """

    def __init__(self, tokenizer: Any, loss_on: str, processor: ImageProcessor) -> None:
        super().__init__(tokenizer, loss_on)
        if not self.has_own_template:
            raise ConfigError(
                f"{processor.name}: has no chat template, and the default one takes no images: "
                "choose a model that was tuned on conversations"
            )
        self.processor = processor
        self.sizes: list[tuple[int, int]] = []
        self._mark = re.compile(f"{IMAGE}|{re.escape(processor.mark)}")

    def __call__(
        self, example: Example, where: str, notes: Notes | None = None
    ) -> tuple[list[int], np.ndarray]:
        try:
            ids, learned = super().__call__(example, where, notes)
        except _OtherCount as error:
            raise ConfigError(f"{where}: {error}") from None
        around = self.special.intersection(chain(*self.processor.ids_of(tuple(self.sizes))))
        return ids, learned & ~np.isin(ids, [*self.processor.ids, *around])

    def _render(self, messages: Messages, **options: Any) -> str:
        return super()._render(in_parts(messages), **options)

    def _render_marked(self, messages: Messages, **options: Any) -> tuple[str, list[Span]]:
        return super()._render_marked(in_parts(messages), **options)

    def _tokens(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """As of `Encoder`, with the tokens of each image in place of its mark. Places count in
        `text`.
        """
        marks = [mark.span() for mark in self._mark.finditer(text)]
        if len(marks) != len(self.sizes):
            raise _OtherCount(
                f"has {len(self.sizes)} image(s), but {len(marks)} mark(s) {self.processor.mark} "
                "in what the chat template writes: it may not take images there, or a text has "
                "the mark in it"
            )
        pieces = []
        starts = [0]  # of each mark, and of its tokens
        ends = [0]
        grown = [0]  # characters, up to the end of each image
        last = 0
        of_images = self.processor.tokens_of(tuple(self.sizes)) if marks else []
        for (start, stop), tokens in zip(marks, of_images, strict=True):
            pieces += [text[last:start], tokens]
            starts.append(start)
            ends.append(start + grown[-1] + len(tokens))
            grown.append(grown[-1] + len(tokens) - (stop - start))
            last = stop
        shift = np.array(grown)
        olds = np.array([stop for _, stop in marks])
        shifted = [
            (first + int(shift[np.searchsorted(olds, first, side="right")]),
             stop + int(shift[np.searchsorted(olds, stop, side="right")]))
            for first, stop in spans
        ]  # fmt: skip
        ids, inside, places = super()._tokens("".join([*pieces, text[last:]]), shifted)
        before = np.searchsorted(np.array(ends[1:]), places, side="right")  # images, wholly
        following = np.array([*starts[1:], len(text)])[before]
        return ids, inside, np.minimum(places - shift[before], following)


class _OtherCount(ValueError):
    pass


class ToImageSamples(ToSamples):
    """Records with and without images to samples, see `store.Encode`. A sample that is too long is
    left out: an image cannot be cut.
    """

    kind = "image-chat"
    code = (*ToSamples.code, "vision")

    def __init__(
        self, tokenizer: Any, config: ChatConfig, processor: ImageProcessor, vision: VisionConfig
    ) -> None:
        super().__init__(tokenizer, config)
        encoder = ImageEncoder(tokenizer, config.loss_on, processor)
        self.encoder = encoder
        self.sizes = encoder.sizes
        self.processor = processor
        self.vision = vision
        self.pictures: list[list[Picture]] = []  # of the samples of this batch
        if len(self.stand_in) > config.seq_length:
            raise ConfigError(
                f"--seq_length {config.seq_length}: a single image of {SMALL[0]} x {SMALL[1]} "
                f"pixels takes {len(self.stand_in)} tokens"
            )

    @cached_property
    def stand_in(self) -> np.ndarray:
        """[tokens] int64 of one small image."""
        return np.array(self.processor.ids_of((SMALL,))[0])

    def identity(self) -> Any:
        vision = [self.vision.image_max_pixels, self.vision.skip_bad_images]
        return [super().identity(), self.processor.identity(), vision]

    def __call__(self, items: list[Any], notes: Notes) -> Encoded:
        self.pictures = []
        encoded = super().__call__(items, notes)
        contents = [[picture[1:] for picture in pictures] for pictures in self.pictures]
        sums = [zlib.crc32(json.dumps(content).encode()) for content in contents]
        checksums = encoded.table["checksum"] ^ np.array(sums, np.int64)
        return replace(
            encoded,
            table=encoded.table | {"checksum": checksums},
            lines={**encoded.lines, "pictures": self.pictures},
        )

    def samples(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> list[tuple[list[int], np.ndarray]]:
        record, references = take_images(record, form, where)
        if references and (form == "plain text" or isinstance(record.get("prompt"), str)):
            raise ConfigError(f"{where}: images need messages, not texts that are joined")
        pictures: list[Picture] = []
        for number, reference in enumerate(references, 1):
            try:
                pictures.append(find(reference, where, self.vision))
            except BadImage as error:
                if not self.vision.skip_bad_images:
                    raise ConfigError(
                        f"{where}: image {number}: {error}: repair it, or leave such samples out "
                        "with --skip_bad_images"
                    ) from None
                notes.add("bad", f"{where}: image {number}: {error}")
                return []
        max_pixels = self.vision.image_max_pixels
        self.sizes[:] = [shrunk(picture.width, picture.height, max_pixels) for picture in pictures]
        if not pictures:
            samples = super().samples(record, form, where, notes)
        else:
            ids, learned = self.encode(record, form, where, notes)
            if len(ids) > self.seq_length + 1:
                notes.add("long", f"{where}: {len(ids):,} tokens")
            fits = len(ids) <= self.seq_length + 1 and learned[1:].any()
            samples = [(ids, learned)] * bool(fits)
            # what follows the last answer may be left out
            pictures = pictures[: self.processor.count_in(ids, self.sizes)]
        self.pictures += [pictures] * len(samples)
        return samples

    def opened(self, *arguments: Any, **named: Any) -> ImageConversations:
        return ImageConversations(
            *arguments,
            **named,
            own_template=self.encoder.has_own_template,
            processor=self.processor,
            max_pixels=self.vision.image_max_pixels,
            stand_in=self.stand_in,
        )


class ImageConversations(Conversations):
    """Prepared samples, one conversation with its images a row.

    Args:
        processor: makes what the model gets.
        max_pixels: pixels of an image, see `VisionConfig`.
        stand_in: [tokens], of one small image.
    """

    workers = 2  # decoding and resizing take longer than a step of a small model
    why_not_packed = "conversations with images are not packed"

    def __init__(
        self,
        *arguments: Any,
        processor: ImageProcessor,
        max_pixels: int | None,
        stand_in: np.ndarray,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self.processor = processor
        self.max_pixels = max_pixels
        self.stand_in = stand_in

    def first_ids(self, count: int = 100_000) -> np.ndarray:
        """As of `Conversations`, without tokens of images, whose embeddings are never used."""
        ids = super().first_ids(count)
        return ids[~np.isin(ids, self.processor.ids)]

    def pictures(self, index: int) -> list[Picture]:
        return [Picture(*picture) for picture in self.line("pictures", index)]

    def images(self, pictures: list[Picture]) -> list[Any]:
        """Images as `open_picture` gives them.

        Raises:
            ConfigError: one cannot be read.
        """
        images = []
        for picture in pictures:
            try:
                images.append(open_picture(picture, self.max_pixels))
            except BadImage as error:
                raise ConfigError(f"{picture.path}: {error}") from None
        return images

    def prompt_images(self, index: int) -> list[Picture]:
        """Those that stand before the last learned turn."""
        pictures = self.pictures(index)
        sizes = [shrunk(picture.width, picture.height, self.max_pixels) for picture in pictures]
        return pictures[: self.processor.count_in(self.prompt(index)[0], sizes)]

    def images_of(self, chosen: Sequence[int]) -> PromptImages:
        """The images of the prompts of some samples, for `answers.answer`."""
        return PromptImages(self, chosen)

    def __getitem__(self, index: int) -> Row:
        return {**super().__getitem__(index), "images": self.images(self.pictures(index))}

    def collate(self, rows: list[Row], **padding: Any) -> Batch:
        """As `collate_padded`, with what the model gets of the images, as `image.NAME`.

        A batch without an image gets a row with a small one, without targets: ranks that compute
        the vision tower would wait for those that do not.
        """
        if not any(row["images"] for row in rows):
            no_targets = np.full(len(self.stand_in), IGNORED)
            blank = [self.processor.blank()]
            row = {"input_ids": self.stand_in, "labels": no_targets, "images": blank}
            rows = [*rows, row]
        batch = collate_padded(rows, **padding)
        return batch | self.inputs(batch["input_ids"], [row["images"] for row in rows])

    def inputs(self, input_ids: torch.Tensor, images: list[list[Any]]) -> Batch:
        """What a model gets beside the tokens, as `image.NAME`.

        Args:
            input_ids: [batch, seq].
            images: of each row.
        """
        inputs = self.processor.inputs([row for row in images if row])
        inputs |= self.processor.types(input_ids.numpy())
        return {f"image.{name}": value for name, value in inputs.items()}
