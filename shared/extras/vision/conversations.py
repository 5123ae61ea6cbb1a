"""Conversations with images: prepared once, and read as samples."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from shared.data.notes import Notes
from shared.data.order import IGNORED, Batch, Row
from shared.data.store import Encoded
from shared.extras.vision.forms import in_parts, take_images
from shared.extras.vision.pictures import Picture, find, open_picture, shrunk
from shared.extras.vision.processing import ImageProcessor
from shared.extras.vision.prompts import PromptImages
from shared.images.decoding import BadImage
from shared.process import ranks
from shared.process.errors import ConfigError
from shared.text.chat import Conversations, ToSamples
from shared.text.encoder import Encoder, Span
from shared.text.forms import IMAGE, Example, Messages
from shared.text.options import RecordsConfig, VisionConfig
from shared.text.packing import collate_padded


class ImageEncoder(Encoder):
    """An `Encoder` of texts with IMAGE in them. The loss does not count tokens of images.

    Attributes:
        sizes: width and height of each image of the next conversation, in pixels. Whoever calls
            this sets them before, in place: a text with IMAGE does not say them. The call removes
            those of images that it leaves out, the last ones.
        where: its file and line, for errors; set before, too.
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
        self.where = ""
        self._mark = re.compile(f"{IMAGE}|{re.escape(processor.mark)}")

    def __call__(
        self, example: Example, where: str, notes: Notes | None = None
    ) -> tuple[list[int], np.ndarray]:
        ids, learned = super().__call__(example, where, notes)
        # special tokens that the processor writes around images, such as <|vision_start|>
        borders = self.special.intersection(chain(*self.processor.ids_of(tuple(self.sizes))))
        return ids, learned & ~np.isin(ids, [*self.processor.ids, *borders])

    def _chat(self, example: Example, where: str, notes: Notes) -> tuple[list[int], np.ndarray]:
        """Like `Encoder`, but images after the last learned turn are left out, with all turns after
        it. A prompt does not have them, and beside others, some models divide an image differently.
        """
        messages = example.messages or []
        wanted = self._wanted(messages)
        if wanted and self.loss_on != "all":
            kept = messages[: wanted[-1] + 1]
            count = sum(str(turn.get("content")).count(IMAGE) for turn in kept)
            if count < len(self.sizes):
                del self.sizes[count:]
                example = replace(example, messages=kept)
        return super()._chat(example, where, notes)

    def _turns(self, messages: Messages) -> Any:
        return super()._turns(in_parts(messages))

    def _tokens(self, text: str, spans: Sequence[Span]) -> tuple[list[int], np.ndarray, np.ndarray]:
        """As of `Encoder`, with the tokens of each image in place of its mark. Places count in
        `text`.
        """
        marks = [mark.span() for mark in self._mark.finditer(text)]
        if len(marks) != len(self.sizes):
            raise ConfigError(
                f"{self.where}: has {len(self.sizes)} image(s), but {len(marks)} mark(s) "
                f"{self.processor.mark} in what the chat template writes: it may not take images "
                "there, or a text has the mark in it"
            )
        of_images = self.processor.tokens_of(tuple(self.sizes)) if marks else []
        tokens = iter(of_images)
        longer = self._mark.sub(lambda _: next(tokens), text)
        new = np.arange(len(text) + 1)  # where each place of `text` is in `longer`
        for (start, stop), of_image in zip(marks, of_images, strict=True):
            new[stop:] += len(of_image) - (stop - start)
            new[start + 1 : stop] = new[stop]
        moved = [(int(new[first]), int(new[stop])) for first, stop in spans]
        ids, inside, places = super()._tokens(longer, moved)
        return ids, inside, np.searchsorted(new, places, side="right") - 1


class ImageConversations(Conversations):
    """Prepared samples, one conversation with its images a row.

    Args:
        processor: makes what the model gets.
        max_pixels: pixels of an image, see `VisionConfig`.
    """

    workers = 2  # decoding and resizing take longer than a step of a small model
    why_not_packed = "conversations with images are not packed"

    def __init__(
        self,
        *arguments: Any,
        processor: ImageProcessor,
        max_pixels: int | None,
    ) -> None:
        super().__init__(*arguments)
        self.processor = processor
        self.max_pixels = max_pixels

    def first_ids(self) -> np.ndarray:
        """As of `Conversations`, without tokens of images, whose embeddings are never used."""
        ids = super().first_ids()
        return ids[~np.isin(ids, self.processor.ids)]

    def pictures(self, index: int) -> list[Picture]:
        return [Picture(*picture) for picture in self.line("pictures", index)]

    def images(self, pictures: list[Picture]) -> list[Any]:
        """Images as `open_picture` gives them."""
        return [open_picture(picture, self.max_pixels) for picture in pictures]

    def images_of(self, chosen: Sequence[int]) -> PromptImages:
        """As of `Conversations`."""
        return PromptImages(self, chosen)

    def __getitem__(self, index: int) -> Row:
        return {**super().__getitem__(index), "images": self.images(self.pictures(index))}

    def collate(self, rows: list[Row], **padding: Any) -> Batch:
        """As `collate_padded`, with what the model gets of the images, as `image.NAME`.

        A batch without an image gets a row with a small one, without targets: ranks that compute
        the vision tower would wait for those that do not.
        """
        if not any(row["images"] for row in rows):
            ids = self.processor.stand_in
            blank = [self.processor.blank()]
            row = {"input_ids": ids, "labels": np.full(len(ids), IGNORED), "images": blank}
            rows = [*rows, row]
        batch = collate_padded(rows, **padding)
        inputs = self.inputs(batch["input_ids"], [row["images"] for row in rows])
        return batch | {f"image.{name}": value for name, value in inputs.items()}

    def inputs(self, input_ids: torch.Tensor, images: list[list[Any]]) -> Batch:
        """What a model gets beside the tokens.

        Args:
            input_ids: [batch, seq].
            images: of each row.
        """
        pixels = self.processor.inputs([row for row in images if row])
        return pixels | self.processor.types(input_ids.numpy())


class LeftOut(Exception):
    """A record is not learned: what of the notes that is, and its place."""


class ToImageSamples(ToSamples):
    """Records with and without images to samples, see `store.Encode`. A sample with images that is
    too long is left out: an image cannot be cut.
    """

    kind = "image-chat"
    rows = ImageConversations
    code = (*ToSamples.code, "extras/vision", "images/decoding.py")

    def __init__(
        self, tokenizer: Any, config: RecordsConfig, processor: ImageProcessor, vision: VisionConfig
    ) -> None:
        super().__init__(tokenizer, config)
        self.encoder = self.of_images = ImageEncoder(tokenizer, self.encoder.loss_on, processor)
        self.processor = processor
        self.vision = vision
        self.opened = partial(self.rows, processor=processor, max_pixels=vision.image_max_pixels)
        self.encoded: list[list[Picture]] = []  # of the texts of a record
        self.pictures: list[list[Picture]] = []  # of the samples that a call makes

    def identity(self) -> Any:
        vision = [self.vision.image_max_pixels, self.vision.skip_bad_images]
        return [super().identity(), self.processor.identity(), vision]

    def __call__(self, items: list[Any], notes: Notes) -> Encoded:
        self.pictures = []
        encoded = super().__call__(items, notes)
        # without paths: images that were moved are the same data
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
        self.encoded = []
        try:
            samples = super().samples(record, form, where, notes)
        except LeftOut as left_out:
            notes.add(*left_out.args)
            return []
        # a long text without images makes several samples
        self.pictures += (self.encoded * len(samples))[: len(samples)]
        return samples

    def encode(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> tuple[list[int], np.ndarray]:
        """As of `ToSamples`, with the tokens of images, which are noted as `encoded`.

        Raises:
            LeftOut: an image is bad, and such samples are left out, or the text is too long.
        """
        record, references = take_images(record, form, where)
        is_joined = form == "prompt and completion" and isinstance(record.get("prompt"), str)
        if references and (form == "plain text" or is_joined):
            raise ConfigError(f"{where}: images need messages, not texts that are joined")
        pictures = self.find(references, where)
        self.of_images.sizes[:] = map(self.size_of, pictures)
        self.of_images.where = where
        ids, learned = super().encode(record, form, where, notes)
        if pictures and len(ids) > self.seq_length + 1:
            raise LeftOut("long", f"{where}: {len(ids):,} tokens")
        self.encoded.append(pictures[: len(self.of_images.sizes)])
        return ids, learned

    def size_of(self, picture: Picture) -> tuple[int, int]:
        """Width and height of an image as it is learned."""
        return shrunk(picture.width, picture.height, self.vision.image_max_pixels)

    def find(self, references: list[Any], where: str) -> list[Picture]:
        """The images that a record names.

        Raises:
            ConfigError: an image may not be read, or is bad.
            LeftOut: it is bad, and such samples are left out.
        """
        pictures = []
        for number, reference in enumerate(references, 1):
            try:
                pictures.append(find(reference, where, self.vision))
                self.processor.require(self.size_of(pictures[-1]))
            except BadImage as error:
                said = f"{where}: image {number}: {error}"
                if self.vision.skip_bad_images:
                    raise LeftOut("bad", said) from None
                raise ConfigError(
                    f"{said}: repair it, or leave such samples out with --skip_bad_images"
                ) from None
        return pictures


def image_samples(
    config: Any, tokenizer: Any, kind: type[ToImageSamples] = ToImageSamples
) -> Callable[..., ToImageSamples]:
    """What turns records into samples, with the model's own processor.

    Args:
        config: a template's, with `vision` and `model_name_or_path`.
        kind: of records, and of samples.

    Raises:
        ConfigError: this launch or this model cannot train with images.
    """
    if ranks.sequence_ranks() > 1:
        raise ConfigError("ranks cannot share rows with images: launch without sp_size")
    processor = ImageProcessor(config.model_name_or_path, tokenizer)
    return partial(kind, processor=processor, vision=config.vision)
