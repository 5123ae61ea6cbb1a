"""Answers whose rows leave and enter the batch: those that each prompt has alone."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from shared.extras import refill
from shared.extras.refill import Refill, can_refill, joined
from shared.models.generation import generate
from tests.model_families import make

# Rows of keys and values alone; what keeps a state of another shape, or sees padding, is answered as before.
FAMILIES = "llama qwen3 qwen3_moe gemma2 gemma3_text phi3 gpt2 gpt_neox olmo2 mistral gpt_oss".split()  # noqa: SIM905
OTHERS = ("mamba2", "qwen3_next", "falcon_h1")


def loaded(family, folder):
    make(family, folder)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_each_prompt_alone(family, tmp_path, monkeypatch):
    """Greedy and sampled, of many lengths, in a batch of three of eight rows."""
    monkeypatch.setattr(refill, "SEGMENT", 3)
    model = loaded(family, tmp_path)
    assert can_refill(model)
    rng = np.random.default_rng(1)
    tokens = model.get_input_embeddings().num_embeddings
    prompts = [rng.integers(1, tokens, rng.integers(1, 30)).tolist() for _ in range(8)]
    draws = rng.random((8, 14))

    def answer(n, given, most, ends=()):
        own = None if given is None else given[[n], :most]
        return generate(model, [prompts[n]], max_new_tokens=most, ends=ends, draws=own)[0]

    for given in (None, draws):
        first = [answer(n, given, 6) for n in range(6)]
        asked = {"max_new_tokens": 14, "ends": tuple({ids[at] for at, ids in enumerate(first)})}  # soon and late
        alone = [answer(n, given, 14, asked["ends"]) for n in range(8)]
        assert len({len(ids) for ids in alone}) > 2
        calls = []
        monkeypatch.setattr(refill, "generate", lambda *a, to=calls, **k: to.append(len(a[1])) or generate(*a, **k))
        found = dict(Refill(model, prompts, **asked, draws=given).answers([*range(7, -1, -1)], 3))
        monkeypatch.setattr(refill, "generate", generate)
        assert max(calls) == 3 and [found[n] for n in range(8)] == alone


@pytest.mark.parametrize("family", OTHERS)
def test_what_keeps_more_than_keys_and_values_is_answered_as_before(family, tmp_path):
    model = loaded(family, tmp_path)
    model.generation_config.eos_token_id = [7, 8]
    assert not can_refill(model) and model.generation_config.eos_token_id == [7, 8]


def test_rows_that_differ_by_rounding_are_refilled_and_others_are_not(tmp_path, monkeypatch):
    model = loaded("llama", tmp_path).bfloat16()
    assert can_refill(model)
    del model.can_refill
    monkeypatch.setattr(refill, "joined", lambda one, other: joined(other, one))  # rows get others' keys
    assert not can_refill(model)


def test_no_row_is_computed_after_its_end_but_for_its_segment(tmp_path, monkeypatch):
    """Lengths as they occur: log-normal, a tenth at the limit."""
    model = loaded("llama", tmp_path)
    rng = np.random.default_rng(0)
    limit, tokens = 96, model.get_input_embeddings().num_embeddings
    lengths = np.minimum(np.exp(rng.normal(np.log(12), 0.8, 40)).astype(int) + 1, limit)
    lengths[rng.permutation(40)[:4]] = limit
    draws = rng.random((40, limit)) * 0.9
    draws[np.arange(40), np.minimum(lengths, limit) - 1] = 1 - 1e-15  # chooses the last token
    draws[lengths == limit, limit - 1] = 0.5
    prompts = [rng.integers(1, tokens - 1, rng.integers(1, 9)).tolist() for _ in range(40)]
    computed = []

    def counted(model, texts, *, max_new_tokens, **named):
        found = generate(model, texts, max_new_tokens=max_new_tokens, **named)
        computed.append(len(texts) * max(map(len, found)))
        return found

    monkeypatch.setattr(refill, "generate", counted)
    answers = dict(Refill(model, prompts, max_new_tokens=limit, ends=(tokens - 1,), draws=draws).answers([*range(40)], 8))
    assert [len(answers[n]) for n in range(40)] == lengths.tolist()
    in_batches = sum(8 * lengths[at : at + 8].max() for at in range(0, 40, 8))
    assert sum(computed) < 0.75 * in_batches and sum(computed) <= lengths.sum() + 40 * refill.SEGMENT


def test_the_context_limits_each_row_by_itself(tmp_path):
    model = loaded("gpt2", tmp_path)  # whose positions end there
    context = model.config.n_positions
    prompts = [[5] * (context + 7), [5] * (context - 3), [7, 8]]
    found = dict(Refill(model, prompts, max_new_tokens=30, ends=()).answers([0, 1, 2], 3))
    assert [len(found[n]) for n in range(3)] == [1, 4, 30]
    assert found[2] == generate(model, [[7, 8]], max_new_tokens=30, ends=())[0]
