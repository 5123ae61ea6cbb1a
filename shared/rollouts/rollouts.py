"""Answers that the present model samples, and what is learned from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn

from shared.answers.answers import answer, batches, batches_to_answer, keep_rows, written
from shared.answers.numbers import numbers_of
from shared.data.loader import Share, Window
from shared.data.order import IGNORED, Batch, Row, micro_batches, training_order
from shared.models.generation import ends_of
from shared.models.loss import target_log_probabilities
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.run.run import Run
from shared.run.setup import Setup
from shared.text.chat import Conversations
from shared.training import defaults

# (answer, record) -> numbers by name, whose sum is the reward
Reward = Callable[[str, dict[str, Any]], dict[str, float]]
# row -> (token ids after its prompt, numbers by name, another engine's log-probabilities or none)
Rewarded = dict[int, Any]


def plain(ids: Iterable[int]) -> list[int]:
    """Token ids of a conversation, without marks: -2 - id stands for a token between answers."""
    return [max(token, -2 - token) for token in ids]


def divided(prompt: list[int], ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """(what is before the last answer, that answer) of what follows a prompt, as of `plain`."""
    begin = max((place for place, token in enumerate(ids, 1) if token < 0), default=0)
    return prompt + plain(ids[:begin]), [*ids[begin:]]


class Rollouts:
    """The data of a run that learns from its own answers: takes the place of a `Loader`.

    A rollout is `group_size` answers to each prompt of a global batch, and is learned in
    `updates_per_rollout` optimizer steps. Its tensors are the same on all ranks, and fixed in size,
    so that a checkpoint can hold them.

    Args:
        config: of a template, with `group_size`, `updates_per_rollout`, `dynamic_sampling`,
            `max_new_tokens` and `batch`: a device learns per_device_train_batch_size answers at
            once, and samples per_device_eval_batch_size.
        prompts: to train on.
        share: what this process reads.
        turns: `turns.Turns`, for several answers in a conversation.

    Attributes:
        tensors: on the CPU, by row; row i answers prompt i // group_size of the
            global batch.
            answers: [rows, max_new_tokens] int64, -1 after an answer's end. Between the answers of
            a conversation, -2 - id is a token that was not sampled, and is not learned.
            advantages: [rows] fp32.
            old: [rows, max_new_tokens] fp32, the tokens' log-probabilities before the first of
            several updates.
            sampled: [rows, max_new_tokens] fp32, those of another engine than the model itself.
            prompts: [prompts] int64, with dynamic sampling: those that were answered at last.
    """

    def __init__(
        self,
        config: Any,
        prompts: Conversations,
        tokenizer: Any,
        share: Share,
        turns: Any = None,
    ) -> None:
        from shared.extras import refill

        self.engine = refill
        batch = config.batch
        batch.require_full_batch(len(prompts), "prompts")
        self.prompts = prompts
        self.tokenizer = tokenizer
        self.order = training_order(prompts, batch, config.data, drop_last=True)
        self.share = share
        self.turns = turns
        self.sampler: Any = None  # of `engines`
        self.group = config.group_size
        self.updates = config.updates_per_rollout
        self.max_new_tokens = config.max_new_tokens
        self.per_device = batch.per_device_train_batch_size
        self.at_once = batch.per_device_eval_batch_size
        rows = batch.size * self.group
        self.tensors = {
            "answers": torch.full((rows, self.max_new_tokens), -1),
            "advantages": torch.zeros(rows),
            "old": torch.zeros(rows, self.max_new_tokens),
        }
        self.reward_model: Any = None
        self.attempts = config.dynamic_sampling
        if self.attempts:
            self.tensors["prompts"] = torch.zeros(batch.size, dtype=torch.int64)

    def describe(self) -> str:
        """How a global batch is made up, for the summary."""
        return (
            f"{self.order.global_batch_size} prompts x {self.group} answers; each process "
            f"({self.share.world_size} in all) samples {self.at_once} and learns "
            f"{self.per_device} at once"
        )

    # In place of a Loader -------------------------------------------------------------------------

    one_shape = False
    multiple = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch * self.updates

    def windows(self, start: int, stop: int) -> Iterator[Window]:
        """A window for each optimizer step in range(start, stop), without micro-batches: see
        `micro_batches`.
        """
        for step in range(start, stop):
            number = step // self.updates
            # later updates read no new prompts
            prompts = self.order.indices(number)[: None if self.needs_answers(step + 1) else 0]
            yield Window(
                micro_batches=[],
                num_targets=0,
                num_samples=len(prompts),
                epoch=self.order.position(number)[0],
                epoch_samples=self.order.samples_per_epoch,
                sources=self.order.used(number + 1),
                indices=micro_batches(
                    prompts, self.share.rank, self.share.world_size, self.per_device
                ),
            )

    def longest(self, rows: int) -> Batch:
        """The batch that takes the most memory, on the device: the longest prompt, with answers of
        full length.
        """
        index = int(self.prompts.lengths.argmax())
        answered = self._row(index, np.zeros(self.max_new_tokens, np.int64))
        batch = self.prompts.collate([answered] * rows, multiple_of=16)
        for name in ("advantages", "weights", "old"):
            batch[name] = torch.zeros(len(batch["targets"]))
        return {name: value.to(self.share.device) for name, value in batch.items()}

    # Sampling -------------------------------------------------------------------------------------

    def needs_answers(self, step: int) -> bool:
        """Whether optimizer step `step`, from 1, needs new answers."""
        return (step - 1) % self.updates == 0

    def sample(
        self, run: Run, model: nn.Module, reward: Reward
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Sample the answers for the present optimizer step, and reward them. Every rank calls
        this, and answers its share. rollouts.jsonl gets those to the first prompt.

        Which tokens an answer has depends on (seed, rollout, row) and the weights, not on the
        number of processes, but for rounding.

        Args:
            model: as prepared.
            reward: (answer, record) -> numbers by name, whose sum is the reward. Texts are as of
                `answers.written`. The record has the text `prompt`, the other columns of the data,
                and the score `reward_model` if one is asked.

        Returns:
            Rewards, [prompts, group] fp32, and means for the log by name: those of the reward's
            parts, tokens of an answer, the share of answers that were cut, and seconds.

        Raises:
            ConfigError: a reward is no finite number.
        """
        start = time.perf_counter()
        number = (run.state.step - 1) // self.updates
        indices = self.order.indices(number).copy()
        key: tuple[int, ...] = (self.order.seed, number)
        ends = ends_of(model, self.tokenizer, self.prompts.end)
        if self.sampler:
            self.sampler.renew(run, model)
        ask = partial(self._answers, model, ends)
        by_row: Rewarded = {}
        equal = np.arange(len(indices))  # groups that teach nothing
        resampled = 0
        for attempt in range(1 + self.attempts):
            if attempt:  # other prompts, and other draws
                key = (self.order.seed, number, attempt)
                draw = np.random.default_rng(key)
                indices[equal] = draw.integers(len(self.prompts), size=len(equal))
                resampled += len(equal)
            rows = [n * self.group + k for n in equal.tolist() for k in range(self.group)]
            of_rows = [int(indices[row // self.group]) for row in rows]
            samples = [self.prompts.prompt(index) for index in of_rows]
            asked = [ids for ids, *_ in samples]
            draws = np.stack(
                [np.random.default_rng((*key, row)).random(self.max_new_tokens) for row in rows]
            )
            if self.turns is None:
                images = self.prompts.images_of(of_rows)
                answered = ask(asked, [self.max_new_tokens] * len(asked), draws, images)
            else:
                answered = self.turns.answers(ask, samples, self.max_new_tokens, ends, draws)
            rewarded: Rewarded = {}
            found = [*answered]
            scores = self._scores([asked[place] + plain(ids) for place, ids, *_ in found])
            for (place, ids, *values), score in zip(found, scores, strict=True):
                prompt, _, columns = samples[place]
                before, text = written(self.tokenizer, *divided(prompt, ids), ends)
                record = columns | {"prompt": before} | score
                rewarded[rows[place]] = (ids, numbers_of(reward, text, record), *(values or [[]]))
            by_row |= dict(gather_object(list(rewarded.items())))
            answers, rewards, values = zip(
                *(by_row[row] for row in range(len(by_row))), strict=True
            )
            sums = torch.tensor([float(sum(parts.values())) for parts in rewards]).view(
                -1, self.group
            )
            equal = np.flatnonzero(sums.amax(1) == sums.amin(1))
            if not len(equal):
                break
        self.tensors["answers"].fill_(-1)
        for row, ids in enumerate(answers):
            self.tensors["answers"][row, : len(ids)] = torch.tensor(ids)
            if self.sampler:
                self.tensors["sampled"][row, : len(ids)] = torch.tensor(values[row])
        shown = [
            {
                "step": run.state.step,
                "prompt": self.tokenizer.decode(self.prompts.prompt(int(indices[0]))[0]),
                "answer": self.tokenizer.decode(plain(ids)),
                "rewards": parts,
            }
            for ids, parts in zip(answers[: self.group], rewards, strict=False)
        ]
        keep_rows(run, "rollouts.jsonl", shown)
        means = {"reward": sums.mean().item()}
        for name in dict.fromkeys(name for parts in rewards for name in parts):
            means[f"reward/{name}"] = fmean(parts.get(name, 0.0) for parts in rewards)
        means |= {
            "answer_tokens": (self.tensors["answers"] >= 0).sum(1).float().mean().item(),
            "cut_answers": fmean(ids[-1] not in ends for ids in answers),
            "rollout_seconds": time.perf_counter() - start,
        }
        if self.attempts:
            self.tensors["prompts"].copy_(torch.from_numpy(indices))
            means["resampled_groups"] = resampled
        return sums, means

    def _answers(
        self,
        model: nn.Module,
        ends: list[int],
        prompts: list[list[int]],
        limits: list[int],
        draws: np.ndarray,
        images: Any = None,
    ) -> Iterator[Any]:
        """Yield (number of a prompt, token ids of its answer) for this rank's part: as many as
        `limits` say for each, or more.
        """
        if self.sampler:
            return self.sampler.answers(model, ends, prompts, limits, draws)
        max_new_tokens = max(limits)
        settings: Any = {"max_new_tokens": max_new_tokens, "ends": ends, "draws": draws}
        if images is None and self.engine.can_refill(model):
            longest_first = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
            mine = longest_first[self.share.rank :: self.share.world_size]
            return self.engine.Refill(model, prompts, **settings).answers(mine, self.at_once)
        batches = batches_to_answer(model, prompts, max_new_tokens, self.at_once, self.share)
        return answer(model, prompts, batches.tolist(), images=images, **settings)

    def _scores(self, texts: list[list[int]]) -> list[dict[str, float]]:
        """What a record gets: for each text of token ids its score, if a model gives any."""
        if not self.reward_model:
            return [{}] * len(texts)
        return [{"reward_model": score} for score in self.reward_model(texts)]

    def judged(
        self, run: Run, model: nn.Module, samples: list[Any], ends: list[int], answers: Any
    ) -> Any:
        """A list of (number of a sample, token ids of its last answer, what its record gets) for
        this rank's part of `Conversations.prompt`s to validate on. Every rank calls this. After
        several turns, a sample's prompt is all that was before.

        Args:
            answers: to the prompts, where there is one turn.
        """
        if self.turns:
            answers = self.turns.last_answers(run, model, samples, ends)
        answered = [*answers]
        scores = self._scores([samples[number][0] + ids for number, ids in answered])
        return [(*found, score) for found, score in zip(answered, scores, strict=True)]

    # Learning -------------------------------------------------------------------------------------

    def micro_batches(self, step: int, normalise: str) -> tuple[list[Batch], int, list[list[int]]]:
        """(this rank's micro-batches of answers, the number of their tokens over all ranks, the
        prompts that each batch is of) for optimizer step `step`, from 1. Groups whose advantages
        are all 0 are left out, unless there are no others.

        A batch is as of `packing.collate_padded`, and has for each of its targets, [targets] fp32:
        `advantages`; `old`; and `weights`, factors of the tokens' losses. Divided by the number of
        tokens, the weighted sum is:

        - token: the mean over all tokens (DAPO);
        - answer: the mean over answers of the mean over their tokens (GRPO);
        - constant: the sum divided by (answers x max_new_tokens) (Dr. GRPO).

        Args:
            normalise: token, answer or constant.
        """
        indices = self.order.indices((step - 1) // self.updates)
        if self.attempts:
            indices = self.tensors["prompts"].numpy()
        prompts = [self.prompts.prompt(int(index))[0] for index in indices]
        answers = self.tensors["answers"].numpy()
        advantages = self.tensors["advantages"].numpy()
        counts = (answers >= 0).sum(1)
        differ = advantages.reshape(-1, self.group).any(1)
        # all of them, if none differ
        kept = np.flatnonzero(np.repeat(differ | ~differ.any(), self.group))
        after = (answers != -1).sum(1)
        lengths = after[kept] + [len(prompts[row // self.group]) for row in kept]
        tokens = int(counts[kept].sum())
        weights = {
            "token": np.ones(len(answers)),
            "answer": tokens / (len(kept) * np.maximum(counts, 1)),
            "constant": np.full(len(answers), tokens / (len(kept) * self.max_new_tokens)),
        }[normalise]
        made = []
        prompts_of = []
        for numbers in batches(lengths.tolist(), self.per_device, self.share):
            rows = kept[numbers[numbers >= 0]]
            of_rows = indices[rows // self.group].tolist()
            answered = [self._row(n, answers[row]) for n, row in zip(of_rows, rows, strict=True)]
            # where this rank has none
            answered = answered or [self._row(int(indices[0]), np.full(1, -1))]
            batch = self.prompts.collate(answered, multiple_of=16)
            tokens_of_rows = counts[rows]
            of_targets = {
                "advantages": np.repeat(advantages[rows], tokens_of_rows),
                "weights": np.repeat(weights[rows], tokens_of_rows),
            }
            batch |= {name: torch.from_numpy(value).float() for name, value in of_targets.items()}
            for name in self.tensors.keys() & {"old", "sampled"}:
                batch[name] = self.tensors[name][rows][answers[rows] >= 0]
            batch["rows"] = torch.tensor(np.repeat(rows, tokens_of_rows), dtype=torch.int64)
            prompts_of.append(of_rows)
            # pixels of all batches would take much memory
            moved = [name for name in batch if not name.startswith("image.")]
            made.append(batch | {name: batch[name].to(self.share.device) for name in moved})
        return made, tokens, prompts_of

    @torch.no_grad()
    def note_old(self, model: nn.Module, made: list[Batch]) -> None:
        """Compute the tokens' log-probabilities before the first of several updates, for all ranks.
        Every rank calls this.

        Args:
            made: this rank's `micro_batches`, whose `old` are set.
        """
        mine: dict[int, list[float]] = {}
        for batch in made:
            batch["old"] = target_log_probabilities(model, batch)
            rows = batch["rows"].tolist()
            for row, value in zip(rows, batch["old"].tolist(), strict=True):
                mine.setdefault(row, []).append(value)
        for row, values in gather_object(list(mine.items())):
            sampled = self.tensors["answers"][row] >= 0
            self.tensors["old"][row, sampled] = torch.tensor(values)

    def _row(self, index: int, answer: np.ndarray) -> Row:
        """A prompt with what follows it, whose sampled tokens alone are targets."""
        prompt = self.prompts.prompt(index)[0]
        after = answer[answer != -1]
        ids = np.append(prompt, plain(after)).astype(np.int64)
        labels = np.full(len(ids), IGNORED)
        labels[len(prompt) - 1 : len(ids) - 1] = np.where(after >= 0, after, IGNORED)
        # each token predicts the next one
        last = max(1, len(ids) - 1)
        return {**self.prompts[index], "input_ids": ids[:last], "labels": labels[:last]}


def prepare_rollouts(
    setup: Setup, prompts: Conversations, tokenizer: Any, turn: Any = None
) -> Rollouts:
    """`Rollouts` of a global batch that fits the number of prompts, where none is given; with
    several updates, their tensors are in the checkpoints.

    Args:
        turn: with --max_turns, see `turns.Turns`.

    Raises:
        ConfigError: there are fewer prompts than one global batch.
    """
    fitting = defaults.for_prompts(setup.config.batch, len(prompts))
    config = setup.set_defaults(f"{len(prompts):,} prompts", **fitting)
    turns = None
    if config.data.max_turns > 1:
        from shared.extras.turns import Turns

        turns = Turns(turn, tokenizer, config.data.max_turns)
    rollouts = Rollouts(config, prompts, tokenizer, sharding.share(setup.accelerator), turns)
    setup.about["batch"] = rollouts.describe()
    if config.rollout_engine != "transformers":
        from shared.extras import engines

        rollouts.sampler = engines.of(setup, tokenizer)
        rollouts.tensors["sampled"] = torch.zeros_like(rollouts.tensors["old"])
    if config.reward_model:
        from shared.extras.reward_model.rewards import RewardModel

        longest = int(prompts.lengths.max()) + 1 + config.max_new_tokens
        rollouts.reward_model = RewardModel(setup, tokenizer, longest)
    if prompts.images_of([0]) and (turns or rollouts.sampler or rollouts.reward_model):
        raise ConfigError(
            "images do not go with --max_turns, --reward_model and --rollout_engine: drop these"
        )
    if config.updates_per_rollout > 1:  # a run that is killed between two of them goes on
        setup.strategy.require("--updates_per_rollout")
        setup.keep("rollout", rollouts.tensors)
    return rollouts
