"""Flags of images. The comment of each field is its --help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from shared.config.types import Free, PositiveOrZero, PositiveShare, Share
from shared.data.files import refuse_archive
from shared.data.options import DataConfig, Percentage
from shared.process.errors import ConfigError


@dataclass(frozen=True)
class ImageConfig(DataConfig):
    """Images."""

    TARS: ClassVar = True
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
    # Decode every image before training and leave out damaged ones; else only headers and ends are
    # checked, and damage is an error
    skip_bad_images: Free[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if any("://" in file for file in (*self.train_file, *self.validation_file)):
            raise ConfigError(
                "--train_file: a list names images beside it, so it has to be a local file"
            )
        if self.train_dir and (self.train_file or self.dataset_name):
            raise ConfigError(
                "--train_dir and --train_file or --dataset_name both name "
                "the training data: keep one"
            )
        if self.validation_dir and not (self.train_dir or self.train_file):
            raise ConfigError("--validation_dir needs --train_dir or --train_file")
        if self.validation_dir and self.validation_file:
            raise ConfigError(
                "--validation_dir and --validation_file both name what to validate on: keep one"
            )
        if self.is_multi_label and (
            self.validation_dir or not (self.train_file or self.dataset_name)
        ):
            raise ConfigError(
                "--problem_type multi_label needs the labels of each image: "
                "a list, or --dataset_name"
            )
        for flag, folders in {
            "train_dir": self.train_dir,
            "validation_dir": filter(None, [self.validation_dir]),
        }.items():
            for folder in folders:
                if not folder.is_dir():
                    if folder.suffix == ".tar":
                        raise ConfigError(
                            f"--{flag} {folder}: a tar file; give it as "
                            f"--{flag.replace('dir', 'file')}"
                        )
                    refuse_archive(folder, flag=flag)
                    raise ConfigError(f"--{flag} {folder}: no such folder")

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
        """A line of the summary: size, order and scale of the pixels, and what is on."""
        on = {name: value for name, value in vars(self).items() if value not in (None, 0, "none")}
        size = processor.crop_size["height"]
        values = (processor.image_mean, processor.image_std)
        mean, deviation = (" ".join(f"{value:.3g}" for value in some) for some in values)
        pixels = [f"{size} x {size} pixels", order, f"mean {mean}", f"deviation {deviation}"]
        return ", ".join([*pixels, *(f"{name} {value}" for name, value in on.items())])
