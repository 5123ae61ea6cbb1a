"""Flags of the data, whatever it is."""

from dataclasses import dataclass
from typing import ClassVar

from shared.data.files import find_files
from shared.process.errors import ConfigError


@dataclass(frozen=True)
class DataConfig:
    """Data."""

    FREE: ClassVar = frozenset(
        {
            *("train_file", "validation_file", "dataset_name", "dataset_config_name"),
            *("train_split_name", "validation_split_name"),
        }
    )

    # Files, folders, globs or URLs to train on: JSON lines, JSON, CSV, TSV, Parquet; any other file is one text.
    train_file: tuple[str, ...] = ()
    validation_file: tuple[str, ...] = ()  # The same, to validate on; if not given, a part of the training data is held out.
    dataset_name: str | None = None  # Data set on the Hub, or a folder that `datasets` loads, in place of train_file.
    dataset_config_name: str | None = None  # Configuration of dataset_name.
    train_split_name: str = "train"  # Split of dataset_name to train on.
    # Split of dataset_name to validate on; if not given, a part of the training split is held out.
    validation_split_name: str | None = None
    # Per cent of the data held out to validate on: of records by their numbers alone, of few long texts their end.
    validation_split_percentage: float = 5.0

    def __post_init__(self) -> None:
        if self.train_file and self.dataset_name:
            raise ConfigError("--train_file and --dataset_name both name the training data: drop one of them")
        if self.validation_file and not self.train_file:
            raise ConfigError("--validation_file needs --train_file")
        for name in ("dataset_config_name", "train_split_name", "validation_split_name"):
            if self.dataset_name is None and getattr(self, name) != getattr(type(self), name):
                raise ConfigError(f"--{name} needs --dataset_name")
        if not 0 < (percent := self.validation_split_percentage) < 100:
            raise ConfigError(f"--validation_split_percentage must be above 0 and below 100, not {percent:g}")
        for flag in ("train_file", "validation_file"):
            if getattr(self, flag):
                find_files(getattr(self, flag), flag=flag)

    @property
    def is_demo(self) -> bool:
        return not self.train_file and self.dataset_name is None
