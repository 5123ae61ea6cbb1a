"""Flags of texts with a tag for each word."""

from dataclasses import dataclass
from typing import Annotated

from shared.config.types import CountOrZero, Free, within
from shared.data.options import DataConfig, Percentage
from shared.text.options import Length


@dataclass(frozen=True)
class TaggedTextConfig(DataConfig):
    """Texts with a tag for each word."""

    tokens_column: str | None = None  # Column of the words; if not given, tokens or words
    tags_column: str | None = None  # Column of their tags; if not given, tags, ner_tags or labels
    # Names of the tags 0, 1, ..., where the data have numbers; or tags that some data may lack
    tag_names: tuple[str, ...] = ()
    # Tokens of a window, at most; a longer text becomes several windows
    seq_length: Length = 256
    # Share of a window that the next one repeats, as context: each word is learned, and read, in
    # the window that shows most around it
    window_overlap: Annotated[float, within(at_least=0, at_most=0.5)] = 0.25
    # Percentage of the texts to hold out if no validation data is named
    validation_split_percentage: Percentage = 10.0
    # Processes that tokenise; if not given, one per processor
    preprocessing_num_workers: Free[CountOrZero | None] = None
