"""Pairs of answers to one prompt, one preferred to the other, prepared once and read as samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from shared import demo
from shared.data.loader import Loader, Share
from shared.data.notes import Notes
from shared.data.order import (
    IGNORED,
    Batch,
    EvenSubset,
    GroupedOrder,
    Order,
    Row,
    training_order,
)
from shared.data.records import Source
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.process.printing import indented, note
from shared.text import chat
from shared.text.forms import Messages, read_list, require_columns
from shared.text.images import see_images
from shared.text.loaders import ChatData, choose_packing
from shared.text.packing import collate_packed, collate_padded, joined
from shared.training import defaults

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMS = {  # form: the columns that tell it; the first match counts
    "prompt with chosen and rejected": ("prompt", "chosen", "rejected"),
    "ShareGPT conversations with chosen and rejected": ("conversations", "chosen", "rejected"),
    "conversations in chosen and rejected": ("chosen", "rejected"),
}
DEMO = Source(
    "functions of the Python standard library, with a right and a wrong docstring",
    lambda: [sys.version, demo.python_files()],
    demo.docstring_preferences,
)


def recognise(record: dict[str, Any], where: str) -> str:
    """The form of a record, a key of FORMS. Raises ConfigError if its columns match none."""
    for form, columns in FORMS.items():
        if all(column in record for column in columns):
            return form
    known = "; ".join(f"{form}: {' + '.join(columns)}" for form, columns in FORMS.items())
    raise ConfigError(
        f"{where}: columns {', '.join(map(str, record)) or 'none'} are of no known form ({known})"
    )


def two_records(record: dict[str, Any], form: str, where: str) -> tuple[str, list[dict[str, Any]]]:
    """A pair as two records, chosen and rejected, and their form in `forms`. Only what follows the
    prompt is learned.

    Raises:
        ConfigError: a missing or mistyped column.
    """
    require_columns(record, FORMS[form], form, where)
    others = {name: value for name, value in record.items() if name not in FORMS[form]}
    answers = {name: record[name] for name in ("chosen", "rejected")}
    texts = [name for name, answer in answers.items() if isinstance(answer, str)]
    if form.startswith("ShareGPT"):
        asked = read_list(record["conversations"], "conversations", where)
        asked = [{**turn, "weight": 0} for turn in asked]
        answers |= {name: {"from": "gpt", "value": answers[name]} for name in texts}
        both = [read_list(answer, name, where) for name, answer in answers.items()]
        if any(answer and answer[0].get("from") in ("human", "user", "system") for answer in both):
            raise ConfigError(
                f"{where}: chosen and rejected begin with a question, which 'conversations' has: "
                "give the answers alone"
            )
        return "ShareGPT conversations", [
            {**others, "conversations": asked + answer} for answer in both
        ]
    prompt = record.get("prompt", [])
    if isinstance(prompt, str) and len(texts) == 2:
        both = [*answers.values()]
    else:
        if "prompt" in record:
            answers |= {name: {"role": "assistant", "content": answers[name]} for name in texts}
        both = [read_list(answer, name, where) for name, answer in answers.items()]
        prompt = {"role": "user", "content": prompt} if isinstance(prompt, str) else prompt
        prompt = read_list(prompt, "prompt", where)
        # whole conversations, prompt and all
        if any(answer and answer[0].get("role") != "assistant" for answer in both):
            turns = zip(*both, strict=False)
            common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], turns)]
            both = [answer[len(common) :] for answer in both]
            prompt = _joined(prompt, common, where)
    return "prompt and completion", [
        {**others, "prompt": prompt, "completion": answer} for answer in both
    ]


def _joined(prompt: Messages, common: Messages, where: str) -> Messages:
    """The turns of the column `prompt` and those that both answers begin with, which may repeat
    them.

    Raises:
        ConfigError: a question in the prompt is none of theirs.
    """
    asked, begins = (
        [(turn.get("role"), str(turn.get("content")).strip()) for turn in turns]
        for turns in (prompt, common)
    )
    if all(turn in begins for turn in asked):
        return common
    repeated = next(n for n in range(len(asked), -1, -1) if asked[len(asked) - n :] == begins[:n])
    if not repeated and asked[-1][0] == "user":
        raise ConfigError(
            f"{where}: chosen and rejected begin with other turns than those of 'prompt': drop "
            "that column if they are whole conversations"
        )
    return prompt + common[repeated:]


class ToPairs(chat.ToSamples):
    """Each record makes two samples, chosen and rejected, or none."""

    demo = DEMO
    kind = "preferences"
    code = (*chat.ToSamples.code, "text/preferences.py")
    recognise = staticmethod(recognise)

    def samples(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> list[tuple[list[int], np.ndarray]]:
        form, both = two_records(record, form, where)
        encoded = [self.encode(each, form, where, notes) for each in both]
        most = self.seq_length + 1
        longest = max(len(ids) for ids, _ in encoded)
        if longest > most:
            notes.add_cut(longest - 1, where)
        parts = [(ids[:most], learned[:most]) for ids, learned in encoded]
        if encoded[0][0] == encoded[1][0]:
            notes.add("same", where)
        if parts[0][0] == parts[1][0] or not all(learned[1:].any() for _, learned in parts):
            return []
        prompts = [ids[: int(np.flatnonzero(learned)[0])] for ids, learned in parts]
        if prompts[0] != prompts[1]:
            notes.add("unequal", where)
        return parts


class Pairs:
    """Chosen and rejected answers: `order.Samples`, a pair an index.

    A row holds both, one after the other, as `packing.Packed` holds several conversations, and
    `reference`.

    Args:
        samples: the chosen answer of pair i is its sample 2i, the rejected one 2i + 1.
    """

    def __init__(self, samples: chat.Conversations) -> None:
        if len(samples) % 2:
            raise ConfigError(
                f"{samples.stores[0].source}: a single pair cannot be split; give --validation_file"
            )
        self.samples = samples
        self.end = samples.end
        self.sources = {name: count // 2 for name, count in samples.sources.items()}
        self.lengths = samples.lengths[::2] + samples.lengths[1::2]
        # log-probabilities of both answers, where they are used
        self.reference = np.zeros((len(self), 2), np.float32)

    def __len__(self) -> int:
        return len(self.samples) // 2

    def __getitem__(self, index: int) -> Row:
        both = [self.samples[2 * index + answer] for answer in (0, 1)]
        images = [row.get("images") for row in both]
        return {**joined(both), "reference": self.reference[index], "images": images}

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices)

    def prompt(self, index: int) -> tuple[list[int], list[int], dict[str, Any]]:
        """(ids before the chosen answer, its ids, the columns that are not learned)."""
        return self.samples.prompt(2 * index)

    def images_of(self, chosen: Sequence[int]) -> Any:
        """As of `Conversations`."""
        return self.samples.images_of([2 * index for index in chosen])


def collate_pairs(
    rows: list[Row],
    *,
    packed: bool,
    seq_length: int,
    collate: Callable[..., Batch] = collate_padded,
) -> Batch:
    """Rows of `Pairs` -> a batch for one forward of both answers.

    It is as of `packing.collate_packed` if `packed`, a pair a row; else as of `collate_padded`, an
    answer a row: the chosen answer of each pair, then its rejected one. Also

    - `answers`: [batch, seq] int64, the number of each position's answer: 2i chosen, 2i + 1
      rejected of the pair i;
    - `lengths`: [pairs, 2] int64, target tokens of each answer; 0 where a pair counts for nothing;
    - `reference`: [pairs, 2] fp32.

    Args:
        collate: makes the batch of answers that are not packed.
    """
    cuts = [int(np.flatnonzero(row["position_ids"] == 0)[1]) for row in rows]
    halves: list[Row] = [
        {"input_ids": row["input_ids"][part], "labels": row["labels"][part], "images": images}
        for row, cut in zip(rows, cuts, strict=True)
        for part, images in zip((slice(cut), slice(cut, None)), row["images"], strict=True)
    ]
    if packed:
        batch = collate_packed(rows, multiple_of=64, at_most=2 * seq_length, longest=seq_length)
        place = torch.arange(batch["labels"].shape[1])
        number = torch.arange(len(rows))[:, None]
        batch["answers"] = 2 * number + (place >= torch.tensor(cuts)[:, None])
    else:
        batch = collate(halves, multiple_of=16, at_most=seq_length)
        # a row without an answer may follow
        number = torch.arange(len(batch["labels"])).clamp(max=len(halves) - 1)[:, None]
        batch["answers"] = number.expand_as(batch["labels"]).contiguous()
    batch["lengths"] = torch.tensor(
        [int((half["labels"] != IGNORED).sum()) for half in halves]
    ).view(-1, 2)
    batch["reference"] = torch.from_numpy(np.stack([row["reference"] for row in rows]))
    return batch


def read_pairs(
    config: Any, tokenizer: PreTrainedTokenizerBase, *, demo_samples: int
) -> tuple[Pairs, Pairs]:
    """(pairs to train on, to validate on), tokenised. Notes the first. With images if one of the
    first records of a source to train on has any. Every rank calls this.

    Args:
        config: a template's, with `data`, `vision` and `model_name_or_path`.
        demo_samples: how many pairs of the demo are read, unless --max_train_samples says.

    Raises:
        ConfigError: wrong input, with its place, or no pair with anything to learn.
    """
    kind: Any = ToPairs
    if config.data.margin_column:
        from shared.extras.reward_model.margins import ToPairsWithMargins

        kind = ToPairsWithMargins
    if see_images(config.data):
        if config.loss_type == "reward":
            raise ConfigError("--loss_type reward: a reward model sees no images")
        from shared.extras.vision.conversations import image_samples
        from shared.extras.vision.pairs import ToImagePairs

        kind = image_samples(config, tokenizer, ToImagePairs)
    train, held_out = map(Pairs, chat.open_samples(config.data, tokenizer, kind, demo_samples))
    for number, name in enumerate(("chosen", "rejected")):
        note(
            f"first pair, {name}; the loss counts the tokens between ⟦ and ⟧:",
            *indented(chat.marked(train.samples, tokenizer, number)),
        )
    return train, held_out


def arrange(setup: Any, model: nn.Module, train: Pairs, held_out: Pairs) -> ChatData:
    """Batches of pairs of similar lengths; those to train on with both answers in a row if the
    model keeps them apart. Chooses the global batch and the epochs that fit their number, where
    none are given. Every rank calls this.

    Args:
        setup: a `run.setup.Setup`.
        model: prepared.

    Raises:
        ConfigError: there are fewer pairs than one global batch; see `loaders.choose_packing`.
    """
    packed = choose_packing(setup, model, why_not=train.samples.why_not_packed)
    count = len(train)
    fitting = defaults.batch_and_epochs(
        setup.config.batch, count, count, most=16, least=8, epochs=1
    )
    setup.set_defaults(f"{count:,} pairs", **fitting)
    options, batch = setup.config.data, setup.config.batch
    batch.require_full_batch(count, "pairs")
    share = sharding.share(setup.accelerator)
    workers = batch.dataloader_num_workers
    workers = train.samples.workers if workers is None else workers
    of_rows = train.samples.collate
    collate = partial(collate_pairs, packed=packed, seq_length=options.seq_length, collate=of_rows)
    order = training_order(train, batch, options, is_padded=True)
    loader = Loader(
        train, collate, order, share, per_device=batch.micro_batch()[0], num_workers=workers
    )
    validation = one_pass(held_out, setup.config, share, most=options.eval_samples)
    about = setup.about["data"] = chat.describe(train.samples, options, of_record=2)
    fingerprint = f"{train.samples.fingerprint}, {held_out.samples.fingerprint}"
    return ChatData(loader, validation, held_out, about, fingerprint)


def one_pass(pairs: Pairs, config: Any, share: Share, *, most: int | None = None) -> Loader:
    """Padded batches of pairs once, without gradients.

    Args:
        config: a template's, with `data` and `batch`.
        most: only so many pairs, evenly spaced and in their order; None: all, those of similar
            lengths together.
    """
    read = pairs.samples
    size = config.batch.per_device_eval_batch_size
    rows = size * share.world_size
    samples: Any = pairs
    order: Order = GroupedOrder(len(pairs), rows, 0, lengths=pairs.lengths)
    if most is not None:
        samples = EvenSubset(pairs, most)
        order = Order(len(samples), rows, 0, shuffle=False)
    collate = partial(
        collate_pairs, packed=False, seq_length=config.data.seq_length, collate=read.collate
    )
    workers = config.batch.dataloader_num_workers
    workers = read.workers if workers is None else min(workers, read.workers)
    return Loader(samples, collate, order, share, per_device=size, num_workers=workers)
