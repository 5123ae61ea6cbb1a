"""What a model in training answers to validation prompts, and how good the answers are."""

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from statistics import fmean
from textwrap import fill
from typing import Any

import numpy as np
from accelerate.utils import gather_object
from torch import nn

from shared.answers.numbers import numbers_of
from shared.data.loader import Share
from shared.data.order import EvenSubset
from shared.models.attention import scaled_from
from shared.models.checks import context_of
from shared.models.generation import ends_of, generate, sees_padding
from shared.models.loading import without_adapters
from shared.models.tokenizers import leading_bos
from shared.parallel import sharding
from shared.process.files import keep_json_lines
from shared.process.printing import COLUMNS, collapsed, excerpt, indented, print_main
from shared.process.redaction import redact
from shared.run.run import Run
from shared.run.state import better

Score = Callable[[str, dict[str, Any]], dict[str, float]]
FILE = "answers.jsonl"


def batches(
    lengths: Sequence[int], per_device: int, share: Share, mixed: int = sys.maxsize
) -> np.ndarray:
    """This rank's part of some rows, in batches of similar length: their numbers, [batches, rows],
    the longest first.

    All ranks have equally many batches; -1 where a row is missing.

    Args:
        lengths: tokens of each row.
        per_device: rows of a batch, at most.
        mixed: longer rows share a batch only with rows of the same length.
    """
    of_ranks = math.ceil(len(lengths) / share.world_size)
    count = math.ceil(of_ranks / per_device)
    rows = math.ceil(of_ranks / count)
    order = np.argsort(-np.asarray(lengths), kind="stable")
    groups = [[*group] for _, group in groupby(order, lambda row: max(lengths[row], mixed))]
    parts = [group[at : at + rows] for group in groups for at in range(0, len(group), rows)]
    filled = np.full((math.ceil(len(parts) / share.world_size), share.world_size, rows), -1)
    for row, part in zip(filled.reshape(-1, rows), parts, strict=False):
        row[: len(part)] = part
    return filled[:, share.rank]


def batches_to_answer(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    per_device: int,
    share: Share,
) -> np.ndarray:
    """`batches` of prompts in which no answer depends on the other prompts: on their padding, or on
    what they leave of the model's context. Every rank calls this, with all prompts.
    """
    whole = without_adapters(model)
    most = min(context_of(whole) + 1, scaled_from(whole))
    mixed = 0 if sees_padding(model) else most - max_new_tokens
    return batches([len(ids) for ids in prompts], per_device, share, mixed)


def written(
    tokenizer: Any, prompt: list[int], ids: Sequence[int], ends: Sequence[int]
) -> tuple[str, str]:
    """(a prompt, what continues it), as they are written: with white space and special tokens, but
    for the token that begins texts and the one that ends the answer.
    """
    bos = leading_bos(tokenizer)
    prompt = prompt[len(bos) * (prompt[: len(bos)] == bos) :]
    answered = [*ids[:-1], *(token for token in ids[-1:] if token not in ends)]
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    before = decode(prompt)
    whole = decode(prompt + answered)
    # decoded alone, an answer loses its first space with some tokenizers
    return before, whole[len(before) :] if whole.startswith(before) else decode(answered)


def answer(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    mine: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    ends: Sequence[int],
    draws: np.ndarray | None = None,
    images: Any = None,
) -> Iterator[tuple[int, list[int]]]:
    """Yield (number of a prompt, token ids of its answer) for this rank's part of the prompts.
    Every rank calls this, and goes through it to the end.

    Args:
        prompts: token ids of all.
        mine: this rank's `batches` of their numbers.
        max_new_tokens, ends, draws: see `generation.generate`; `draws` has a row for each prompt.
        images: of the prompts, `vision.prompts.PromptImages`, if they have any.
    """
    for numbers in mine:
        real = [number for number in numbers if number >= 0]
        chosen = real or [0]  # every rank makes the same number of calls
        asked = chosen if images is None else images.with_image(chosen)
        found = generate(
            model,
            [prompts[number] for number in asked],
            max_new_tokens=max_new_tokens,
            ends=ends,
            draws=None if draws is None else draws[asked],
            beside=None if images is None else partial(images.inputs, asked),
        )
        yield from zip(real, found, strict=False)


def log_answers(
    run: Run, model: nn.Module, held_out: Any, tokenizer: Any, score: Score, rollouts: Any = None
) -> dict[str, float]:
    """Let the model answer validation prompts, score the answers and log them: in answers.jsonl, as
    a table in W&B, and the ten worst of the latest evaluation in evaluation.json. Inside of
    `run.evaluating`; every rank calls this, and answers its share.

    --eval_answers prompts at each evaluation, evenly spaced over the samples. --show_answers of
    them, or as many without --eval_answers, are printed before training and at its end.

    Args:
        held_out: the validation samples, with `prompt` and `end`.
        score: (answer, record) -> numbers by name. Texts are as of `written`. The record has the
            columns of the data that are not learned, as they are there, the text `prompt`, and the
            text `reference` if an answer is learned.
        rollouts: `Rollouts` that answer in several turns, or ask a reward model.

    Returns:
        The means of the scores as `eval_NAME`, the same on all ranks; empty without --eval_answers.
    """
    config = run.config
    shown = config.show_answers if run.state.step == 0 or run.is_last else 0
    chosen = EvenSubset(held_out, config.eval_answers or shown).indices.tolist()
    if not chosen:
        return {}
    samples = [held_out.prompt(index) for index in chosen]
    images = held_out.images_of(chosen)
    prompts = [prompt for prompt, *_ in samples]
    ends = ends_of(model, tokenizer, held_out.end)
    share = sharding.share(run.accelerator)
    per_device = config.batch.per_device_eval_batch_size
    mine = batches_to_answer(model, prompts, config.max_new_tokens, per_device, share)
    answers = answer(
        model,
        prompts,
        run.watch(mine.tolist(), len(mine)),
        max_new_tokens=config.max_new_tokens,
        ends=ends,
        images=images,
    )
    if rollouts:
        answers = rollouts.judged(run, model, samples, ends, answers)
    answered: list[Any] = []
    scores: Any
    for number, ids, *scores in answers:
        prompt, reference, others = samples[number]
        before, text = written(tokenizer, prompt, ids, ends)
        record = others | {"prompt": before}
        record.update(*scores)
        if reference:
            record["reference"] = written(tokenizer, prompt, reference, ends)[1]
        row = {
            "step": run.state.step,
            "prompt": collapsed(before),
            "reference": "" if record.get("reference") is None else str(record["reference"]),
            "answer": text,
            "cut": ids[-1] not in ends,
            "scores": numbers_of(score, text, record),
        }
        answered.append((number, row))
    by_number = dict(gather_object(answered))  # a rank without rows answers the first prompt
    rows = [by_number[number] for number in sorted(by_number)]
    for row in rows[:shown]:
        show(row)
    keep_rows(run, FILE, rows)
    picture = run.dir / "answers.png"
    if images is not None and run.is_main and images.draw(picture, rows):
        run.logger.tracker.log_picture("answers", picture)
    names = dict.fromkeys(name for row in rows for name in row["scores"])
    columns = ["step", "prompt", "reference", "answer"]
    table = [
        [*(str(row[name]) for name in columns), *map(row["scores"].get, names)] for row in rows
    ]
    run.logger.tracker.log_table("answers", [*columns, *names], table)
    if not config.eval_answers:
        return {}
    if cut := sum(row["cut"] for row in rows):
        print_main(
            f"{cut} of {len(rows)} answers end at --max_new_tokens {config.max_new_tokens}, and "
            "are scored as they are: raise it if that is too short"
        )
    context = context_of(without_adapters(model))
    if short := sum(len(ids) + config.max_new_tokens > context + 1 for ids in prompts):
        print_main(
            f"the model's context of {context} tokens leaves less than --max_new_tokens "
            f"{config.max_new_tokens} for the answers to {short} of {len(rows)} prompts; prompts "
            f"cut at their beginning: {sum(len(ids) > context for ids in prompts)}"
        )
    means = {
        f"eval_{name}": fmean(row["scores"][name] for row in rows if name in row["scores"])
        for name in names
    }
    if run.is_main and means:
        metric = config.evaluation.metric_for_best_model
        by = metric if metric in names else next(iter(names))
        scored = [row for row in rows if by in row["scores"]]
        scored.sort(key=lambda row: row["scores"][by], reverse=better(by) == "lower")
        report = {"step": run.state.step, **means, f"worst by {by}": scored[:10]}
        text = json.dumps(redact(report), indent=1)
        (run.dir / "evaluation.json").write_text(text, encoding="utf-8")
    return means


def show(row: dict[str, Any]) -> None:
    """Print an answer, beside its prompt and reference; of long ones the beginning and the end."""
    parts = {
        "prompt": row["prompt"],
        "reference": row["reference"],
        f"model at step {row['step']}": row["answer"],
    }
    for title, text in parts.items():
        # whole lines: what was learned may show in the middle
        wrapped = [fill(line, COLUMNS - 2) for line in text.strip().splitlines()]
        print_main(f"--- {title}", *excerpt(indented("\n".join(wrapped)), 8))
    print_main("---")


def keep_rows(run: Run, name: str, rows: list[dict[str, Any]]) -> None:
    """Append rows to a file of the run, in place of what a killed run wrote after its checkpoint.
    The main rank acts.

    Args:
        rows: JSON, with the present `step`.
    """
    if run.is_main:
        file = run.dir / name
        keep_json_lines(file, lambda row: row["step"] < run.state.step)
        with file.open("a", encoding="utf-8") as lines:
            lines.writelines(json.dumps(redact(row)) + "\n" for row in rows)
