"""Micro-batches of sequences to pretrain on: cut from a prepared corpus, or from a stream."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import default_collate

from shared.data import records
from shared.data.loader import Loader
from shared.data.order import EvenSubset, Order, Samples, training_order
from shared.models.counts import count_parameters
from shared.models.tokenizers import load_tokenizer
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.text import corpus
from shared.text.packing import collate_packed
from shared.training import defaults


@dataclass
class CorpusData:
    train: Any  # micro-batches of sequences: a `Loader` or `Stream`
    validation: Loader
    tokenizer: Any
    fingerprint: str  # changes when the samples do
    bytes_per_token: float | None  # of the validation text; None for a stream


def open_data(setup: Any, *, as_in_training: bool = False) -> CorpusData:
    """Tokenizer, and sequences of `seq_length` tokens to train and to validate on. Every rank calls
    this.

    Args:
        setup: a `run.setup.Setup`; its config has `seq_length`, and the groups model, data (a
            `CorpusConfig`) and batch.
        as_in_training: evaluate global batches and micro-batches of the size of training's.

    Raises:
        ConfigError: wrong input, with its place, or fewer sequences than one global batch.
    """
    config = setup.config
    options = config.data
    batch = config.batch
    share = sharding.share(setup.accelerator)
    rows_at_once = batch.micro_batch()[0]
    name = options.tokenizer_name or config.model.model_name_or_path
    tokenizer = load_tokenizer(name) if name else None
    if tokenizer and tokenizer.eos_token is None:  # as of BERT
        tokenizer.bos_token, tokenizer.eos_token = tokenizer.cls_token, tokenizer.sep_token
    collate = collate_packed if options.isolate_documents else default_collate
    held_out: Samples
    train: Any
    if options.streaming:
        if tokenizer is None:
            raise ConfigError("--streaming needs a tokenizer: give --tokenizer_name")
        from shared.extras.streaming.sources import open_stream
        from shared.extras.streaming.stream import Stream

        source = open_stream(options, corpus.DEMO)
        train = Stream(source, tokenizer, config.seq_length, options, batch, share)
        held_out = train.held_out(options.eval_samples)
        about = (
            f"{source.name}, streamed; {len(held_out)} sequences of held-out documents to "
            "validate on"
        )
        about += records.not_used(train.notes.named("unused "))
        fingerprint = train.identity()
        bytes_per_token = None
    else:
        text = corpus.open_corpus(
            options, tokenizer, config.seq_length, isolate=options.isolate_documents
        )
        batch.require_full_batch(len(text.train), f"sequences of --seq_length {config.seq_length}")
        order = training_order(text.train, batch, options)
        train = Loader(
            text.train,
            collate,
            order,
            share,
            per_device=rows_at_once,
            one_shape=True,
            num_workers=batch.dataloader_num_workers or 0,
        )
        held_out = text.validation
        tokenizer = text.tokenizer
        about = text.about
        fingerprint = text.fingerprint
        bytes_per_token = text.bytes_per_token
        setup.describe_data(text.train, held_out, tokenizer)
    setup.about["data"] = about
    chosen = EvenSubset(held_out, options.eval_samples)
    at_once = batch.per_device_eval_batch_size
    together = at_once * share.world_size
    if as_in_training:
        at_once, together = rows_at_once, batch.size
    order = Order(len(chosen), together, 0, shuffle=False)
    validation = Loader(chosen, collate, order, share, per_device=at_once)
    return CorpusData(train, validation, tokenizer, fingerprint, bytes_per_token)


def total_steps(setup: Any, data: CorpusData) -> int:
    """Optimizer steps of the whole run, whose budget may be in --max_tokens."""
    config = setup.config
    tokens = config.batch.size * config.seq_length  # of a step
    if config.max_tokens:
        steps = max(1, config.max_tokens // tokens)
    else:
        steps = config.batch.total_steps(data.train.steps_per_epoch)
    setup.about["tokens"] = f"{config.seq_length} a sequence, at most {steps * tokens:,} in all"
    return steps


def choose_optimizer(setup: Any, model: nn.Module) -> None:
    """Choose the optimizer and its rate by the model's size, where none are given.

    Args:
        setup: a `run.setup.Setup`.
        model: whole.
    """
    _, parameters = count_parameters(model)
    trained = setup.config.model.model_name_or_path is not None
    setup.set_defaults(
        f"{parameters:,} parameters, {'trained' if trained else 'random'}",
        learning_rate=defaults.pretraining_rate(parameters, trained=trained),
        optim=defaults.pretraining_optimizer(setup.strategy, trained=trained),
    )
