"""From prepared conversations to micro-batches: several conversations in a row, or one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from shared.config.options import BatchConfig
from shared.data.loader import Loader
from shared.data.order import EvenSubset, Order
from shared.models.isolation import isolate_documents
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.process.printing import indented, note
from shared.text import chat
from shared.text.options import ChatConfig, SamplesConfig
from shared.text.packing import Packed, collate_packed, rows_order


@dataclass
class ChatData:
    train: Loader  # micro-batches of rows, or of pairs
    validation: Loader
    held_out: Any  # the validation samples, `chat.Conversations` or `preferences.Pairs`
    about: str  # a line for people
    fingerprint: str  # changes when the samples or their rows do


def read_conversations(
    options: ChatConfig,
    tokenizer: Any,
    *,
    demo_samples: int,
    kind: Callable[..., chat.ToSamples] = chat.ToSamples,
) -> tuple[chat.Conversations, chat.Conversations]:
    """(conversations to train on, to validate on), tokenised. Notes the first. Every rank calls
    this.

    Args:
        demo_samples: how many samples of the demo are read, unless --max_train_samples says.
        kind: what turns records into samples.
    """
    if options.is_demo and options.max_train_samples is None:
        options = replace(options, max_train_samples=demo_samples)
    train, held_out = chat.open_samples(options, tokenizer, kind)
    note(
        "first sample; the loss counts the tokens between ⟦ and ⟧:",
        *indented(chat.marked(train, tokenizer)),
    )
    return train, held_out


def choose_packing(
    model: nn.Module,
    tokenizer: Any,
    options: SamplesConfig,
    batch: BatchConfig,
    device: torch.device,
    *,
    why_not: str = "",
) -> tuple[bool, str]:
    """(whether rows hold several conversations, why). Every rank calls this, with the prepared
    model.

    Args:
        why_not: a reason that these samples cannot be packed, if there is one.

    Raises:
        ConfigError: --packing on, and the model or the samples cannot be packed.
    """
    if why_not and options.packing == "on":
        raise ConfigError(f"--packing on: {why_not}")
    if why_not or options.packing == "off":
        return False, ": ".join(["off", why_not] if why_not else ["off"])
    rows = batch.micro_batch()[0] or batch.per_device_train_batch_size
    return isolate_documents(model, device, len(tokenizer), rows, required=options.packing == "on")


def build_loaders(
    rows: chat.Conversations | Packed,
    held_out: chat.Conversations,
    options: ChatConfig,
    batch: BatchConfig,
    accelerator: Accelerator,
) -> ChatData:
    """Batches of conversations: several in a row if they are packed, else one in a row, of similar
    lengths.

    Raises:
        ConfigError: there are fewer rows than one global batch.
    """
    packed = isinstance(rows, Packed)
    train = rows.samples if isinstance(rows, Packed) else rows
    about = chat.describe(train, options)
    # Padded to a multiple: fewer different lengths mean fewer kernels to choose and compile.
    collate = partial(train.collate, multiple_of=16, at_most=options.seq_length)
    if isinstance(rows, Packed):
        collate = partial(collate_packed, multiple_of=64, at_most=options.seq_length)
        about += (
            f"; packed into {len(rows):,} rows of {options.seq_length} tokens, "
            f"{rows.waste:.1%} of them empty"
        )
    what = f"packed rows of {len(train):,} samples" if packed else "rows"
    advice = ", and a shorter --seq_length or --packing off for more rows" * packed
    batch.require_full_batch(len(rows), what, advice)
    order = rows_order(
        rows, batch.global_batch_size, batch.seed, options.mix_weights, packed=packed
    )
    share = sharding.share(accelerator)
    size = batch.per_device_eval_batch_size
    workers = batch.dataloader_num_workers
    workers = train.workers if workers is None else workers
    loader = Loader(
        rows, collate, order, share, per_device=batch.micro_batch()[0], num_workers=workers
    )
    chosen = EvenSubset(held_out, options.eval_samples)
    eval_order = Order(len(chosen), size * share.world_size, 0, shuffle=False)
    padded = partial(held_out.collate, multiple_of=64, at_most=options.seq_length)
    validation = Loader(
        chosen,
        padded,
        eval_order,
        share,
        per_device=size,
        num_workers=min(workers, held_out.workers),
    )
    fingerprint = f"{train.fingerprint}, {held_out.fingerprint}" + ", packed" * packed
    return ChatData(loader, validation, held_out, about, fingerprint)
