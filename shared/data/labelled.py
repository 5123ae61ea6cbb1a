"""Micro-batches of labelled samples, to train on and to validate on."""

from collections.abc import Callable

from shared.config.options import BatchConfig
from shared.data.labels import LabelledData
from shared.data.loader import Loader, Share
from shared.data.order import Batch, Order, Row
from shared.process.errors import ConfigError


def labelled_loaders(
    data: LabelledData,
    collate: Callable[[list[Row]], Batch],
    order: Order,
    batch: BatchConfig,
    share: Share,
    transform: Callable[[Row], Row] | None = None,
    eval_transform: Callable[[Row], Row] | None = None,
) -> tuple[Loader, Loader]:
    """(training, validation) micro-batches. The validation samples come in their order.

    Args:
        order: of the training samples.
        transform, eval_transform: see `Loader`; of training and of validation samples.

    Raises:
        ConfigError: there are fewer training samples than one global batch.
    """
    if len(data.train) < batch.global_batch_size:
        raise ConfigError(
            f"{len(data.train)} training samples are fewer than one --global_batch_size: choose a "
            "smaller one"
        )
    size = batch.per_device_eval_batch_size
    eval_order = Order(len(data.validation), size * share.world_size, 0, shuffle=False)
    workers = batch.dataloader_num_workers or 0
    return (
        Loader(
            data.train,
            collate,
            order,
            share,
            per_device=batch.micro_batch()[0],
            num_workers=workers,
            transform=transform,
        ),
        Loader(
            data.validation,
            collate,
            eval_order,
            share,
            per_device=size,
            num_workers=workers,
            transform=eval_transform,
        ),
    )
