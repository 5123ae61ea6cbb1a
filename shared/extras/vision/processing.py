"""What a model's own processor makes of images: tokens in the text, and pixels for the model."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from shared.data.loader import use_tokenizer_threads
from shared.data.order import Batch
from shared.images.decoding import BadImage
from shared.models.hub import from_hub
from shared.process.errors import ConfigError, first_line

# What a processor makes of the text.
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
SMALL = (64, 64)  # width and height of the image that stands in where a batch has none


class ImageProcessor:
    """The processor of the model `name`.

    Its chat template becomes the tokenizer's, which may be that of the text model alone.

    Raises:
        ConfigError: there is none that this project can use, with the reason.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        from transformers import AutoProcessor

        self.name = name
        # Processors tokenise in the workers, too, where the threads of a tokenizer would be missing
        use_tokenizer_threads(False)
        self.processor = from_hub(AutoProcessor, name)
        self.tokenizer = tokenizer
        self.mark = str(getattr(self.processor, "image_token", ""))  # of an image in a text
        if not self.mark or not hasattr(self.processor, "image_processor"):
            raise ConfigError(
                f"{name} does not see images, and the data have some: choose a model that does "
                "(where they are in a column, --allow_unused_columns image images leaves them out)"
            )
        tokenizer.chat_template = self.processor.chat_template or tokenizer.chat_template
        try:
            self.inputs([[self.blank()]])
            # the name of the input that says which tokens are of images, if the model needs one
            encoded = self.processor(images=[[self.blank()]], text=[self.mark])
            self.of_tokens = next((name for name in OF_TEXT[2:] if name in encoded), None)
            types = self.types(np.array(encoded["input_ids"]))
            if any(values.tolist() != encoded[name] for name, values in types.items()):
                raise ValueError(f"it gives {self.of_tokens} another meaning")  # as PaliGemma's
        except Exception as error:  # processors raise nearly anything
            raise ConfigError(
                f"{name}: images cannot be trained through {type(self.processor).__name__} "
                f"({first_line(error)})"
            ) from None

    def blank(self, size: tuple[int, int] = SMALL) -> Image.Image:
        return Image.new("RGB", size)

    def identity(self) -> Any:
        """JSON-like: changes when the tokens of an image do."""
        return [type(self.processor).__name__, self.processor.to_dict()]

    @lru_cache(maxsize=4096)  # noqa: B019
    def tokens_of(self, sizes: tuple[tuple[int, int], ...]) -> list[str]:
        """What stands in a text in place of the mark of each of its images.

        Args:
            sizes: width and height of all of its images: some models divide a single one further.
        """
        encoded = self.processor(
            images=[[self.blank(size) for size in sizes]],
            text=[self.mark * len(sizes)],
            return_text_replacement_offsets=True,
        )
        return [place["replacement"] for place in encoded["text_replacement_offsets"][0]]

    def require(self, size: tuple[int, int]) -> None:
        """Raise BadImage if it takes no image of this width and height, such as a thin one."""
        try:
            self.tokens_of((size,))
        except Exception as error:  # processors raise nearly anything
            reason = f"the model's processor refuses {size[0]} x {size[1]} pixels"
            raise BadImage(f"{reason} ({first_line(error)})") from None

    @lru_cache(maxsize=4096)  # noqa: B019
    def ids_of(self, sizes: tuple[tuple[int, int], ...]) -> list[list[int]]:
        """`tokens_of` as ids."""
        texts = self.tokens_of(sizes) if sizes else []
        return [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]

    @cached_property
    def ids(self) -> list[int]:
        """Of the tokens that stand for parts of an image."""
        return [token for token in self.processor.image_token_ids if token is not None]

    @cached_property
    def stand_in(self) -> np.ndarray:
        """[tokens] int64 of one small image."""
        return np.array(self.ids_of((SMALL,))[0])

    def types(self, input_ids: np.ndarray) -> Batch:
        """Which of the tokens are of images, [batch, seq] int64, if the model asks for that."""
        if self.of_tokens is None:
            return {}
        values = self.processor.create_mm_token_type_ids(input_ids.tolist())
        return {self.of_tokens: torch.tensor(values)}

    def inputs(self, images: Sequence[Sequence[Image.Image]]) -> Batch:
        """What the model gets of the images of some rows, each with one at least."""
        encoded = self.processor(
            images=[list(row) for row in images],
            text=[self.mark * len(row) for row in images],
            return_tensors="pt",
            padding=True,
        )
        pixels = {name: value for name, value in encoded.items() if name not in OF_TEXT}
        # some processors return bf16, whatever the model computes in
        return {name: v.float() if v.is_floating_point() else v for name, v in pixels.items()}
