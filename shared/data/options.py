"""Flags of the data, whatever it is."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from shared.config.types import Free, Positive, within
from shared.data.files import is_url, matching
from shared.process.errors import ConfigError
from shared.process.printing import label

Percentage = Annotated[float, within(above=0, below=100)]


@dataclass(frozen=True)
class DataConfig:
    """Data."""

    # Files, folders, globs or URLs to train on: JSON lines, JSON, CSV, TSV, Parquet; any other file
    # is one text
    train_file: Free[tuple[str, ...]] = ()
    # Validation data, given like train_file; if not given, part of the training data is held out
    validation_file: Free[tuple[str, ...]] = ()
    # Dataset on the Hub, or a folder that `datasets` loads, in place of train_file; with
    # mix_weights, several
    dataset_name: Free[tuple[str, ...]] = ()
    # Shares of a mixture's sources in the training samples, in any unit: one for each value of
    # train_file, dataset_name or train_dir
    mix_weights: tuple[Positive, ...] = ()
    dataset_config_name: Free[str | None] = None  # Configuration of dataset_name
    train_split_name: Free[str] = "train"  # Split of dataset_name to train on
    # Split of dataset_name to validate on; if not given, part of the training split is held out
    validation_split_name: Free[str | None] = None
    # Percentage of the training data to hold out if no validation data is named
    validation_split_percentage: Percentage = 5.0
    # Order of the samples: file, as they stand; shuffled; length, in batches of similar lengths; if
    # not given: length where rows are padded, else shuffled
    order: Literal["file", "shuffled", "length"] | None = None
    preprocess_only: Free[bool] = False  # Prepare the data, report on them, then exit
    # End with code 2 if the report has more of these, as counts or shares: duplicates, overlap,
    # cut=5%, empty=10, ...
    fail_on: Free[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        if self.train_file and self.dataset_name:
            raise ConfigError(
                "--train_file and --dataset_name both name the training data: drop one of them"
            )
        if self.validation_file and (self.is_demo or self.validation_split_name):
            raise ConfigError(
                "--validation_file needs --train_file or --dataset_name, and no "
                "--validation_split_name"
            )
        for name in ("dataset_config_name", "train_split_name", "validation_split_name"):
            if not self.dataset_name and getattr(self, name) != getattr(type(self), name):
                raise ConfigError(f"--{name} needs --dataset_name")
        source = self._source_flag
        named = getattr(self, source)
        needs_weights = self.mix_weights or (len(named) > 1 and source != "train_file")
        if needs_weights and len(self.mix_weights) != len(named):
            raise ConfigError(
                f"--mix_weights has {len(self.mix_weights)} value(s), --{source} {len(named)}: "
                "give one for each"
            )
        if self.mix_weights and len(self.sources()) < len(named):
            raise ConfigError(f"--{source} names one twice: give it once, with a larger weight")
        if any(map(is_url, self.dataset_name)):  # `datasets` would not tell of a change
            raise ConfigError("--dataset_name takes a name on the Hub or a folder, not a URL")
        for flag in ("train_file", "validation_file"):
            for name in getattr(self, flag):
                if not is_url(name):
                    matching(name, flag=flag)

    # the flags that may name the training data
    SOURCES: ClassVar[tuple[str, ...]] = ("train_file", "dataset_name")

    def sources(self) -> dict[str, Self]:
        """A config for each source of a mixture, by a short name for the logs. One alone where
        nothing is mixed.
        """
        if not self.mix_weights:
            return {"": self}
        flag = self._source_flag
        values = getattr(self, flag)
        names = [Path(value).name for value in values]
        if len(set(names)) < len(names):
            names = list(map(str, values))
        changes: list[dict[str, Any]] = [{flag: (value,), "mix_weights": ()} for value in values]
        return {
            label(name): replace(self, **change)
            for name, change in zip(names, changes, strict=True)
        }

    @property
    def _source_flag(self) -> str:
        """The flag that names the training data; the first of them if none does."""
        return next((flag for flag in self.SOURCES if getattr(self, flag)), self.SOURCES[0])

    @property
    def is_demo(self) -> bool:
        return not getattr(self, self._source_flag)
