"""From prepared conversations to micro-batches: several conversations in a row, or one."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerate import Accelerator
from torch import nn

from shared.data.loader import Loader, Share
from shared.data.order import EvenSubset, Order, training_order
from shared.models import attention
from shared.models.isolation import isolate_documents
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.text import chat
from shared.text.images import see_images
from shared.text.packing import Packed, collate_packed
from shared.training import defaults


@dataclass
class ChatData:
    train: Loader  # micro-batches of rows, or of pairs
    validation: Loader
    held_out: Any  # the validation samples, `chat.Conversations` or `preferences.Pairs`
    about: str  # a line for people
    fingerprint: str  # changes when the samples or their rows do


def read_conversations(
    config: Any, tokenizer: Any, *, demo_samples: int
) -> tuple[chat.Conversations, chat.Conversations]:
    """(conversations to train on, to validate on), tokenised; shows some of them. With images if
    one of the first records of a source to train on has any. Every rank calls this.

    Args:
        config: a template's, with `data`, `vision` and `model_name_or_path`.
        demo_samples: how many samples of the demo are read, unless --max_train_samples says.
    """
    if config.data.streaming:
        from shared.extras.streaming.chats import read_stream

        return read_stream(config, tokenizer)
    kind: Any = chat.ToSamples
    if see_images(config.data):
        if not hasattr(config, "vision"):
            raise ConfigError("images are not learned here: --allow_unused_columns images")
        from shared.extras.vision.conversations import image_samples

        kind = image_samples(config, tokenizer)
    train, held_out = chat.open_samples(config.data, tokenizer, kind, demo_samples)
    chat.show_samples(train, tokenizer, config.data)
    return train, held_out


def choose_packing(setup: Any, model: nn.Module, *, why_not: str = "") -> bool:
    """Whether rows hold several samples. Every rank calls this, with the prepared model.

    Args:
        setup: a `run.setup.Setup`; its summary gets the reason.
        why_not: a reason that these samples cannot be packed, if there is one.

    Raises:
        ConfigError: --packing on, and the model or the samples cannot be packed.
    """
    config = setup.config
    asked = config.data.packing
    if why_not and asked == "on":
        raise ConfigError(f"--packing on: {why_not}")
    if why_not or asked == "off":
        packed, why = False, ": ".join(["off", why_not] if why_not else ["off"])
    else:
        packed, why = isolate_documents(
            model,
            setup.device,
            config.batch.micro_batch()[0],
            length=config.data.row_length,
            required=asked == "on",
        )
    setup.details |= {"attention": attention.describe(model), "packing": why}
    return packed


def arrange(
    setup: Any, model: nn.Module, train: chat.Conversations, held_out: chat.Conversations
) -> ChatData:
    """Batches of conversations: several in a row if the model keeps them apart, else one in a row,
    of similar lengths. Chooses the global batch and the epochs that fit their number, where none
    are given. Every rank calls this.

    Args:
        setup: a `run.setup.Setup`.
        model: prepared.

    Raises:
        ConfigError: there are fewer rows than one global batch; see `choose_packing`.
    """
    if setup.config.data.streaming:
        from shared.extras.streaming import chats

        return chats.arrange_stream(setup, model, train, held_out)  # type: ignore[arg-type]
    order = setup.config.data.order
    why_not = f"--order {order} takes a sample a row" if order in ("file", "length") else ""
    packed = choose_packing(setup, model, why_not=train.why_not_packed or why_not)
    rows = Packed(train, setup.config.data.seq_length) if packed else train
    fitting = defaults.for_conversations(setup.config.batch, len(train), len(rows))
    setup.set_defaults(f"{len(train):,} samples in {len(rows):,} rows", **fitting)
    data = build_loaders(rows, held_out, setup.config, setup.accelerator)
    setup.about["data"] = data.about
    return data


def build_loaders(
    rows: chat.Conversations | Packed,
    held_out: chat.Conversations,
    config: Any,
    accelerator: Accelerator,
) -> ChatData:
    """Batches of conversations: several in a row if they are packed, else one in a row, of similar
    lengths.

    Args:
        config: the template's, with `data` and `batch`.

    Raises:
        ConfigError: there are fewer rows than one global batch.
    """
    options = config.data
    batch = config.batch
    train = rows.samples if isinstance(rows, Packed) else rows
    about = chat.describe(train, options)
    # Padded to a multiple: fewer different lengths mean fewer kernels to choose and compile.
    collate = partial(train.collate, multiple_of=16, at_most=options.seq_length)
    what = f"rows of {len(train):,} samples"
    advice = f"choose {max(1, len(rows) // 10)} for ten steps an epoch"
    fingerprint = f"{train.fingerprint}, {held_out.fingerprint}"
    if isinstance(rows, Packed):
        collate = partial(collate_packed, multiple_of=64, at_most=options.seq_length)
        what = f"packed {what}"
        advice += ", and a shorter --seq_length or --packing off for more rows"
        fingerprint += ", packed"
        about += (
            f"; packed into {len(rows):,} rows of {options.seq_length} tokens, "
            f"{rows.waste:.1%} of them empty"
        )
    batch.require_full_batch(len(rows), what, advice)
    is_packed = isinstance(rows, Packed)
    order = training_order(rows, batch, options, is_padded=not is_packed)
    share = sharding.share(accelerator)
    workers = batch.dataloader_num_workers
    workers = train.workers if workers is None else workers
    loader = Loader(
        rows,
        collate,
        order,
        share,
        per_device=batch.micro_batch()[0],
        one_shape=is_packed,
        num_workers=workers,
    )
    validation = validation_loader(held_out, config, share, min(workers, held_out.workers))
    return ChatData(loader, validation, held_out, about, fingerprint)


def validation_loader(
    held_out: chat.Conversations, config: Any, share: Share, workers: int
) -> Loader:
    """Padded batches of the conversations that an evaluation uses."""
    options = config.data
    chosen = EvenSubset(held_out, options.eval_samples)
    size = config.batch.per_device_eval_batch_size
    return Loader(
        chosen,
        partial(held_out.collate, multiple_of=64, at_most=options.seq_length),
        Order(len(chosen), size * share.world_size, 0, shuffle=False),
        share,
        per_device=size,
        num_workers=workers,
    )
