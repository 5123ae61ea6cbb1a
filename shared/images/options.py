"""Flags of images. The comment of each field is its --help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared.config.types import Free, PositiveOrZero, PositiveShare, Share
from shared.data.options import DataConfig, Percentage
from shared.process.errors import ConfigError


@dataclass(frozen=True)
class ImageConfig(DataConfig):
    """Images."""

    SOURCES: ClassVar[tuple[str, ...]] = ("train_dir", *DataConfig.SOURCES)

    # Folder of class folders, or with such folders in train/ and val/ (or validation/); with
    # mix_weights, several
    train_dir: Free[tuple[Path, ...]] = ()
    # Class folders to validate on; if not given, part of each class is held out
    validation_dir: Free[Path | None] = None
    # Lists (CSV, TSV, JSON, Parquet) with a label and a path, relative to the list, in each record;
    # or tar files of class folders or in WebDataset's form
    train_file: Free[tuple[str, ...]] = ()
    # Percentage of each class to hold out if no validation data is named
    validation_split_percentage: Percentage = 15.0
    # Split of dataset_name to validate on; if not given, validation, val or valid, if present
    validation_split_name: Free[str | None] = None
    # Column of the image; if not given, image, img, image_path, path, file_name, filename, file,
    # jpg, jpeg, png or webp
    image_column: str | None = None
    # Column of the label; if not given, label, labels, class, fine_label, target or cls
    label_column: str | None = None
    # multi_label: an image has any number of labels, as a list or as text such as cat|dog. If not
    # given, single_label
    problem_type: Literal["single_label", "multi_label"] | None = None
    # Leave out damaged images; else they are an error. All images are read once before training
    skip_bad_images: Free[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_dir and (self.train_file or self.dataset_name):
            raise ConfigError(
                "--train_dir and --train_file or --dataset_name both name "
                "the training data: keep one"
            )
        if self.validation_dir and (
            self.is_demo or self.validation_file or self.validation_split_name
        ):
            raise ConfigError(
                "--validation_dir goes with training data, and without --validation_file and "
                "--validation_split_name"
            )
        if self.is_multi_label and (
            self.validation_dir or not (self.train_file or self.dataset_name)
        ):
            raise ConfigError(
                "--problem_type multi_label needs the labels of each image: "
                "a list, or --dataset_name"
            )
        for folder in filter(None, (*self.train_dir, self.validation_dir)):
            if not folder.is_dir():
                raise ConfigError(f"--train_dir or --validation_dir {folder}: no such folder")

    @property
    def is_multi_label(self) -> bool:
        return self.problem_type == "multi_label"


@dataclass(frozen=True)
class RecipeConfig:
    """Augmentation and regularisation of images."""

    # Least share of the image's area in a training crop; if not given, 0.35; usual in long
    # training: 0.08
    crop_min_scale: PositiveShare | None = None
    # Probability that a training image is mirrored; if not given, 0.5
    horizontal_flip: Share | None = None
    # RandAugment (arXiv 1909.13719) or TrivialAugment (arXiv 2103.10158)
    auto_augment: Literal["none", "randaugment", "trivialaugment"] = "none"
    random_erasing: Share = 0.0  # Probability that a rectangle is erased (arXiv 1708.04896)
    # Blend pairs of images by shares from Beta(alpha, alpha); 0: off; usual: 0.2, for ViTs 0.8
    mixup_alpha: PositiveOrZero = 0.0
    # Paste boxes between pairs of images; 0: off; usual: 1. With mixup, each image gets one of the
    # two
    cutmix_alpha: PositiveOrZero = 0.0
    # Share of each target spread over all classes; if not given, 0.1, or 0 for multi_label
    label_smoothing: Share | None = None
    # balanced: weigh images inversely to the frequency of their class; multi_label: weigh a yes by
    # the ratio of images without the class to those with it
    class_weights: Literal["none", "balanced"] = "none"

    @property
    def mixes(self) -> bool:
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def describe(self, processor: Any, order: str) -> str:
        """A line of the summary: size and order of the pixels, and what is on."""
        on = [f"{name} {x}" for name, x in vars(self).items() if x not in (None, 0, "none")]
        size = processor.crop_size["height"]
        return ", ".join([f"{size} x {size} pixels", order, *on])
