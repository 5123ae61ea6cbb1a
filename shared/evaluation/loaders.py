"""Micro-batches of labelled samples, to train on and to validate on."""

from collections.abc import Callable
from typing import Any

from shared.data.labels import LabelledData
from shared.data.loader import Loader, evaluation_loader
from shared.data.order import Batch, Order, Row
from shared.parallel import sharding


def labelled_loaders(
    setup: Any,
    data: LabelledData,
    order: Order,
    collate: Callable[[list[Row]], Batch],
    transform: Callable[[Row], Row] | None = None,
    eval_transform: Callable[[Row], Row] | None = None,
) -> tuple[Loader, Loader]:
    """(training, validation) micro-batches. The validation samples come in their order.

    Args:
        setup: has the template's config and the accelerator.
        order: of the training samples.
        transform, eval_transform: see `Loader`; of training and of validation samples.

    Raises:
        ConfigError: there are fewer training samples than one global batch.
    """
    batch = setup.config.batch
    batch.require_filled(len(data.train), "training samples")
    share = sharding.share(setup.accelerator)
    workers = batch.dataloader_num_workers or 0
    train = Loader(
        data.train,
        collate,
        order,
        share,
        per_device=batch.micro_batch()[0],
        num_workers=workers,
        transform=transform,
    )
    validation = evaluation_loader(
        data.validation,
        len(data.validation),
        collate,
        share,
        batch.per_device_eval_batch_size,
        num_workers=workers,
        transform=eval_transform,
    )
    return train, validation
