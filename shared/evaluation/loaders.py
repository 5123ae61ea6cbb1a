"""Micro-batches of labelled samples, to train on and to validate on."""

from collections.abc import Callable
from functools import partial
from typing import Any

from shared.data.labels import LabelledData
from shared.data.loader import Loader
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
        setup: a `run.setup.Setup`.
        order: of the training samples.
        transform, eval_transform: see `Loader`; of training and of validation samples.

    Raises:
        ConfigError: there are fewer training samples than one global batch.
    """
    batch = setup.config.batch
    batch.require_full_batch(len(data.train), "training samples")
    setup.about["data"] = data.about
    share = sharding.share(setup.accelerator)
    size = batch.per_device_eval_batch_size
    eval_order = Order(len(data.validation), size * share.world_size, 0, shuffle=False)
    workers = batch.dataloader_num_workers or 0
    loader = partial(Loader, collate=collate, share=share, num_workers=workers)
    rows = batch.micro_batch()[0]
    return (
        loader(data.train, order=order, per_device=rows, transform=transform),
        loader(data.validation, order=eval_order, per_device=size, transform=eval_transform),
    )
