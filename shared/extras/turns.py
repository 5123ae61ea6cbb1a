"""Conversations of several answers, between which a function of the user writes: results of tools,
or what an environment says.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from accelerate.utils import gather_object

from shared.answers.answers import answer, batches_to_answer, written
from shared.answers.numbers import called
from shared.data.notes import Notes
from shared.parallel import sharding
from shared.process.errors import ConfigError
from shared.rollouts.prompts import ToPrompts
from shared.rollouts.rollouts import divided, plain
from shared.run.run import Run
from shared.text.encoder import Encoder
from shared.text.forms import Example, Messages

# (conversation, record) -> messages that follow its last answer; None where it ends
Turn = Callable[[Messages, dict[str, Any]], Messages | None]
# (prompts, tokens of each answer at most, draws) -> (place among the prompts, token ids of the
# answer, log-probabilities if the engine gives any), this rank's
Ask = Callable[..., Iterator[Any]]
MARK = "<<the answer>>"  # in place of one
SETTINGS = "conversation_settings"  # in a record: tools and options of the chat template


@dataclass
class _Talk:
    number: int  # of its prompt
    ids: list[int]  # after the prompt, as of `Turns.answers`
    messages: Messages
    values: list[float]  # log-probabilities of another engine, if it gives any


class ToTalks(ToPrompts):
    """Like `ToPrompts`, but a record keeps its messages as `conversation`."""

    def identity(self) -> Any:
        return super().identity() | {"keeps": "conversation"}

    def encode(
        self, record: dict[str, Any], form: str, where: str, notes: Notes
    ) -> tuple[list[int], np.ndarray]:
        encoded = super().encode(record, form, where, notes)
        example = self._example(record, form, where, Notes())
        if not example.messages:
            raise ConfigError(
                f"{where}: --max_turns needs messages, or a model with a chat template"
            )
        record["conversation"] = example.messages
        notes.add("unused conversation")
        if example.tools or example.template_options:
            options = {"tools": example.tools, "template_options": example.template_options}
            record[SETTINGS] = options
            notes.add(f"unused {SETTINGS}")
        return encoded


class Turns:
    """Answers to prompts, to what the user's function writes after them, and so on.

    Args:
        turn: called by the rank that has sampled the answer.
        tokenizer: with a chat template.
        most: answers in a conversation.
    """

    def __init__(self, turn: Turn, tokenizer: Any, most: int) -> None:
        self.turn = turn
        self.encoder = Encoder(tokenizer, "assistant")
        self.most = most

    def answers(
        self,
        ask: Ask,
        samples: Sequence[Any],
        max_new_tokens: int,
        ends: Sequence[int],
        draws: np.ndarray | None = None,
    ) -> Iterator[Any]:
        """Yield (number of a prompt, what follows it) for this rank's part: token ids of the
        answers, and between them, as -2 - id, those of messages that `turn` wrote. Every rank calls
        this, and goes through it to the end.

        Args:
            samples: all `Conversations.prompt`s, whose records have the messages as `conversation`.
            max_new_tokens: of all that follows a prompt.
            ends, draws: see `generation.generate`; token n after a prompt has its draw n.

        Raises:
            ConfigError: `turn` returns no messages, or the chat template refuses them.
        """
        talks = [
            _Talk(n, [], [*record["conversation"]], []) for n, (*_, record) in enumerate(samples)
        ]
        for count in range(1, self.most + 1):
            left = [max_new_tokens - len(talk.ids) for talk in talks]
            drawn = None
            if draws is not None:
                drawn = np.zeros((len(talks), max(left)))
                for row, talk, room in zip(drawn, talks, left, strict=True):
                    row[:room] = draws[talk.number, -room:]
            asked = [samples[talk.number][0] + plain(talk.ids) for talk in talks]
            going = []
            for place, ids, *values in ask(asked, left, drawn):
                talk = talks[place]
                talk.ids += ids[: left[place]]
                for given in values:
                    talk.values += given[: left[place]]
                more = None
                if talk.ids[-1] in ends and count < self.most:
                    _, text = written(
                        self.encoder.tokenizer, asked[place], ids[: left[place]], ends
                    )
                    talk.messages.append({"role": "assistant", "content": text})
                    more = self._after(talk, samples[talk.number][-1])
                if more and len(more) < max_new_tokens - len(talk.ids):  # leaves room for an answer
                    talk.ids += [-2 - token for token in more]
                    talk.values += [0.0] * len(more) * bool(values)
                    going.append(talk)
                else:
                    yield (talk.number, talk.ids, *([talk.values] if values else []))
            # ranks that share rows have the same
            by_number = {talk.number: talk for talk in gather_object(going)}
            talks = [by_number[number] for number in sorted(by_number)]
            if not talks:
                return

    def last_answers(
        self,
        run: Run,
        model: Any,
        samples: list[Any],
        ends: Sequence[int],
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (number of a sample, token ids of the last answer), decoded greedily, for this
        rank's part of `Conversations.prompt`s. The sample's prompt becomes all that was before.
        Every rank calls this.
        """

        config = run.config

        def ask(prompts: Any, limits: list[int], draws: Any) -> Iterator[tuple[int, list[int]]]:
            count = max(limits)
            of_rank = (config.batch.per_device_eval_batch_size, sharding.share(run.accelerator))
            mine = batches_to_answer(model, prompts, count, *of_rank)
            watched = run.watch(mine.tolist(), len(mine))
            return answer(model, prompts, watched, max_new_tokens=count, ends=ends)

        for number, ids in [*self.answers(ask, samples, config.max_new_tokens, ends)]:
            prompt, *others = samples[number]
            before, last = divided(prompt, ids)
            samples[number] = (before, *others)
            yield number, last

    def _after(self, talk: _Talk, record: dict[str, Any]) -> list[int] | None:
        """Token ids between the last answer and the next; None if the conversation ends."""
        said = talk.messages[-1]["content"]
        more = called(self.turn, said, [*talk.messages], record)
        if not more:
            return None
        if not (isinstance(more, list) and all(isinstance(m, dict) and "role" in m for m in more)):
            raise ConfigError(f"turn returns {more!r}, expected a list of messages, or None")
        talk.messages += more
        return self.following(talk.messages, len(more), record.get(SETTINGS) or {})

    def following(self, messages: Messages, count: int, settings: dict[str, Any]) -> list[int]:
        """Token ids that the chat template writes after an answer: the last `count` messages, and
        where the next answer begins. Without what ends the answer.

        Args:
            settings: tools and options of the template, as of `Example`.
        """
        at = len(messages) - count
        shown = [*messages[: at - 1], {"role": "assistant", "content": MARK}, *messages[at:]]
        tokenizer = self.encoder.tokenizer
        ids = self.encoder.prompt(Example(shown, **settings), "what turn returns", Notes())
        text = str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        _, found, after = text.rpartition(MARK)
        if not found:
            raise ConfigError("--max_turns: the chat template does not write the answer before")
        end = next(
            (
                end
                for end in map(str, map(tokenizer.decode, self.encoder.end_tokens))
                if after.lstrip().startswith(end)
            ),
            "",
        )
        # with its end: some tokenizers begin a text differently
        ids = tokenizer(after.lstrip() if end else after, add_special_tokens=False)["input_ids"]
        return list(ids[bool(end) :])
