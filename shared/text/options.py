"""Flags of text."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from shared.config.types import Count, CountOrZero, Free, Positive, within
from shared.data.options import DataConfig, Percentage
from shared.process.errors import ConfigError

Length = Annotated[int, within(at_least=8)]


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Text."""

    eval_samples: Free[Count] = 256  # Validation samples that one evaluation uses, at most
    # Processes that tokenise; if not given, one per processor
    preprocessing_num_workers: Free[CountOrZero | None] = None


@dataclass(frozen=True)
class StreamConfig(TextConfig):
    """Text that may be streamed."""

    # Read and tokenise during training, and keep nothing on disk; see shuffle_window
    streaming: bool = False
    # With streaming: sequences or samples to shuffle at a time; 0: the order of the source
    shuffle_window: CountOrZero = 0

    NEEDS_ALL: ClassVar[tuple[str, ...]] = ("preprocess_only", "fail_on", "mix_weights", "order")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [f"--{name}" for name in self.NEEDS_ALL if getattr(self, name)]
        if self.streaming and wrong:
            raise ConfigError(f"--streaming does not work with {' and '.join(wrong)}: drop one")
        if self.shuffle_window and not self.streaming:
            raise ConfigError(
                "--shuffle_window is for --streaming; without it, all the data are shuffled: "
                "drop it"
            )


@dataclass(frozen=True)
class LabelledTextConfig(DataConfig):
    """Texts with labels."""

    text_column: str | None = None  # Column of the text; if not given, text or sentence
    text_pair_column: str | None = None  # Column of a second text, for pairs of texts
    label_column: str | None = None  # Column of the label; if not given, label or labels
    # One class a text, several, or a number; if not given: lists are multi_label, numbers with
    # fractions are regression, anything else is single_label
    problem_type: Literal["single_label", "multi_label", "regression"] | None = None
    # Tokens of a text or a pair, at most; longer ones are truncated and counted
    seq_length: Length = 256
    # Percentage of each class to hold out if no validation data is named
    validation_split_percentage: Percentage = 10.0
    # Processes that tokenise; if not given, one per processor
    preprocessing_num_workers: Free[CountOrZero | None] = None


@dataclass(frozen=True)
class CorpusConfig(StreamConfig):
    """Text and tokenizer."""

    # Validation samples that one evaluation uses, at most; with streaming, so many are held out
    eval_samples: Count = 256
    text_column: str = "text"  # Column or key of the text
    isolate_documents: bool = False  # Keep documents in one sequence from attending to each other
    # Tokenizer on the Hub or in a folder; if not given, the model's, or a byte-level BPE trained on
    # the text
    tokenizer_name: Free[str | None] = None
    # Tokens of the BPE that is trained if there is no tokenizer, 256 of them bytes
    vocab_size: Annotated[int, within(at_least=300)] = 4096

    NEEDS_ALL = (
        *StreamConfig.NEEDS_ALL,
        "validation_file",
        "validation_split_name",
        "isolate_documents",
    )


@dataclass(frozen=True)
class RecordsConfig(TextConfig):
    """Records of text."""

    # Tokens of one row, at most; longer samples are truncated and counted, plain text is split
    seq_length: Length = 1024
    max_train_samples: Count | None = None  # Use only so many of the first records
    # Columns to ignore although they change what an answer means, such as label or chosen; the run
    # refuses any that you do not name
    allow_unused_columns: Free[tuple[str, ...]] = ()


@dataclass(frozen=True)
class SamplesConfig(RecordsConfig):
    """Samples of text, each at most a row."""

    # Fill rows with several samples that cannot see each other; off: one padded sample a row; auto:
    # on if the model can keep them apart
    packing: Literal["auto", "on", "off"] = "auto"

    @property
    def row_length(self) -> int:
        """Tokens of a packed row, at most."""
        return self.seq_length


@dataclass(frozen=True)
class ChatConfig(SamplesConfig, StreamConfig):
    """Conversations, or prompts with completions, or text."""

    # Tokens that the loss counts: every assistant turn (or the completion), the last one only, or
    # all tokens. Turns with "weight": 0 count only with all
    loss_on: Literal["assistant", "completion", "all"] = "assistant"


@dataclass(frozen=True)
class PreferenceConfig(SamplesConfig):
    """Pairs of answers to one prompt."""

    # Column of a number, by how much the score of the chosen answer should be higher at least
    margin_column: str | None = None

    @property
    def row_length(self) -> int:
        return 2 * self.seq_length


@dataclass(frozen=True)
class VisionConfig:
    """Images in conversations."""

    # Shrink images of more pixels (height x width), for fewer tokens and less memory; if not given,
    # the model's processor decides
    image_max_pixels: Count | None = None
    fetch_images: Free[bool] = False  # Download images that records name by URL
    skip_bad_images: bool = False  # Leave out samples with damaged images; else they are an error


@dataclass(frozen=True)
class FullVisionConfig(VisionConfig):
    """Images in conversations, and what of the model sees them."""

    # Train the projector behind the vision tower; all: the tower, too
    train_vision: Literal["none", "projector", "all"] = "none"
    vision_lr_scale: Positive = 0.1  # Factor on the learning rate of what train_vision trains
    # Train the demo with images: a small model learns to read handwritten digits
    demo_images: bool = False
