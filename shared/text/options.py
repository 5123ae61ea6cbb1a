"""Flags of text."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from shared.config import parse as configs
from shared.data.options import DataConfig
from shared.process.errors import ConfigError


@dataclass(frozen=True)
class TextConfig(DataConfig):
    """Text."""

    FREE: ClassVar = DataConfig.FREE | {"preprocessing_num_workers", "eval_samples"}

    eval_samples: int = 256  # Validation samples that one evaluation uses, at most
    # Processes that tokenise; if not given, one a processor.
    preprocessing_num_workers: int | None = None


@dataclass(frozen=True)
class LabelledTextConfig(DataConfig):
    """Texts with labels."""

    FREE: ClassVar = DataConfig.FREE | {"preprocessing_num_workers"}

    text_column: str | None = None  # Column of the text; if not given, text or sentence
    text_pair_column: str | None = None  # Column of a second text, for sentence pairs
    label_column: str | None = None  # Column of the label; if not given, label or labels
    # One class a text, several or none, or a number; if not given: lists are multi_label, numbers
    # with fractions are regression, anything else is single_label
    problem_type: Literal["single_label", "multi_label", "regression"] | None = None
    # Tokens of a text, or of both of a pair, at most; longer ones are cut, and counted
    seq_length: int = 256
    # Per cent of each class held out, where no validation data is named
    validation_split_percentage: float = 10.0
    # Processes that tokenise; if not given, one a processor
    preprocessing_num_workers: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        configs.require(self, "at least 8", "seq_length")


@dataclass(frozen=True)
class CorpusConfig(TextConfig):
    """Text and tokenizer."""

    # the split depends on it
    FREE: ClassVar = TextConfig.FREE - {"eval_samples"} | {"tokenizer_name", "preprocess_only"}

    text_column: str = "text"  # Column or key that holds the text.
    # Documents of one sequence do not attend to each other; off: each token sees all before it,
    # also of other documents.
    isolate_documents: bool = False
    # Read and tokenise as training goes, and keep nothing on disk; see shuffle_window.
    streaming: bool = False
    # With --streaming: shuffle the sequences within windows of so many. 0 keeps the order of the
    # source.
    shuffle_window: int = 0
    # Tokenizer on the Hub or in a folder; if not given, the model's, or a byte-level BPE trained on
    # the text.
    tokenizer_name: str | None = None
    vocab_size: int = 4096  # Tokens of the BPE that is trained when there is no tokenizer.
    preprocess_only: bool = False  # Prepare tokenizer and tokens, then exit.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming and (
            self.preprocess_only or self.validation_file or self.validation_split_name
        ):
            raise ConfigError(
                "--streaming works with none of --preprocess_only, --validation_file and "
                "--validation_split_name"
            )
        if self.streaming and self.mix_weights:
            raise ConfigError("--mix_weights does not work with --streaming: drop one of them")
        if self.streaming and self.isolate_documents:
            raise ConfigError(
                "--isolate_documents needs the ends of documents, which --streaming does not keep: "
                "drop one"
            )
        configs.require(self, "at least 0", "shuffle_window")
        if self.shuffle_window and not self.streaming:
            raise ConfigError(
                "--shuffle_window is for --streaming; without it, the whole corpus is shuffled: "
                "drop it"
            )
        if self.vocab_size < 300:
            raise ConfigError("--vocab_size must be at least 300: 256 bytes and the special tokens")


@dataclass(frozen=True)
class SamplesConfig(TextConfig):
    """Samples of text, each at most a row."""

    FREE: ClassVar = TextConfig.FREE | {"allow_unused_columns"}

    # Tokens of one row at most; longer samples are cut, and counted; plain text makes as many
    # samples as it takes.
    seq_length: int = 1024
    # Fill rows with several samples, which cannot see each other; off: one a row, padded, grouped
    # by length; auto: on if the model can keep them apart.
    packing: Literal["auto", "on", "off"] = "auto"
    max_train_samples: int | None = None  # Use the first records only.
    # Columns to ignore although they change what an answer means: images, label, chosen, ...; else
    # they are refused.
    allow_unused_columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_length < 8:
            raise ConfigError(f"--seq_length must be at least 8, not {self.seq_length}")
        configs.require(self, "at least 1", "max_train_samples")


@dataclass(frozen=True)
class ChatConfig(SamplesConfig):
    """Conversations, or prompts with completions, or text."""

    # Tokens that the loss counts: every assistant turn (or the completion), the last assistant turn
    # only, or all. The first two leave out turns with "weight": 0.
    loss_on: Literal["assistant", "completion", "all"] = "assistant"


@dataclass(frozen=True)
class PreferenceConfig(SamplesConfig):
    """Pairs of answers to one prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mix_weights:
            raise ConfigError(
                "--mix_weights does not work with pairs of answers: put them into one data set"
            )
