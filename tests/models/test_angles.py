"""Rotary angles that depend on a document's length: in any batch, a document has those that it has alone."""

import copy

import numpy as np
import pytest
import torch
import transformers
from torch.nn import functional as F

from shared.models import generation
from shared.models.attention import forward_rows
from shared.models.isolation import isolate_documents
from shared.models.loss import causal_lm_loss
from shared.text.packing import collate_packed, collate_padded, joined
from shared.text.preferences import collate_pairs
from tests.conftest import slow

BOUND = 32
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
LONGROPE |= {"rope_theta": 10_000.0, "original_max_position_embeddings": BOUND}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}


def make(name: str, task: str = "ForCausalLM", **more):
    """A model whose angles change beyond `BOUND` tokens."""
    rope: dict = LONGROPE
    more |= {"max_position_embeddings": 512}
    if name in ("Phi3", "Phimoe", "Phi4Multimodal"):
        more["original_max_position_embeddings"] = BOUND
    if name == "Phimoe":
        rope = rope | {"short_mscale": 1.1, "long_mscale": 1.3}
    if name == "MiniCPM3":
        more |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16, "kv_lora_rank": 16}
    if name == "Llama":
        rope = DYNAMIC
        more["max_position_embeddings"] = BOUND
    if name == "Gemma3":
        rope = {"full_attention": {**LONGROPE}, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
        more |= {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
    torch.manual_seed(0)
    config_class = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    if name == "Phi4Multimodal":
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        more |= {"vision_config": sizes | {"num_hidden_layers": 2}, "audio_config": sizes | {"num_blocks": 1}}
        more["audio_config"] |= {"nemo_conv_channels": 16, "ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16}
    config = config_class(**SHAPE | more, rope_parameters=rope)
    return getattr(transformers, name + task)(config).eval()


def rows_of(*lengths: int):
    generator = np.random.default_rng(0)
    ids = [generator.integers(3, 64, length + 1) for length in lengths]
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]


@pytest.mark.parametrize("name", ["Phi3", "Phimoe", "Gemma3", "Llama", slow("MiniCPM3"), slow("Phi4Multimodal")])
@torch.no_grad()
def test_a_short_conversation_has_the_loss_it_has_alone_whatever_is_beside_it(name):
    model = make(name)
    rows = rows_of(20, 31, 100, 32, 33)

    def alone(row):
        plain = copy.deepcopy(model)  # transformers' own angles may be those of the longest forward so far
        logits = plain(input_ids=torch.tensor(row["input_ids"])[None], use_cache=False).logits[0]
        return F.cross_entropy(logits, torch.tensor(row["labels"]), reduction="sum")

    expected = torch.stack([alone(row) for row in rows])
    together = causal_lm_loss(model, collate_padded(rows, multiple_of=64))
    torch.testing.assert_close(together, expected.sum(), rtol=1e-5, atol=1e-3)
    first = causal_lm_loss(model, collate_padded(rows[:1], multiple_of=64))
    torch.testing.assert_close(first, expected[0], rtol=1e-5, atol=1e-3)
    assert isolate_documents(model, torch.device("cpu"))[0]
    packed = collate_packed([joined(rows[:3]), joined(rows[3:])], multiple_of=64)
    torch.testing.assert_close(causal_lm_loss(model, packed), expected.sum(), rtol=1e-5, atol=1e-3)
    # and it matters: all with the angles of the longest one
    batch = collate_padded(rows)
    plain = model(input_ids=batch["input_ids"], use_cache=False).logits
    assert (plain - forward_rows(model, batch).logits).abs().max() > 0.01


@pytest.mark.parametrize("name", ["Phi3", "Gemma3", slow("MiniCPM3")])
@torch.no_grad()
def test_an_answer_is_the_one_of_its_prompt_alone(name):
    """Some answers become long ones on the way, each at another token."""
    model = make(name)
    prompts = [row["input_ids"].tolist() for row in rows_of(10, 25, 27, 31, 60)]
    together = generation.generate(model, prompts, max_new_tokens=16, ends=[2])
    for prompt, answer in zip(prompts, together, strict=True):
        ids = list(prompt)
        for _ in answer:  # without a cache
            ids.append(int(copy.deepcopy(model)(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert ids[len(prompt) :] == answer
    lengths = [(len(prompt), len(prompt) + len(answer)) for prompt, answer in zip(prompts, together, strict=True)]
    assert sum(before <= BOUND < after for before, after in lengths) >= 2
    assert "prepare_inputs_for_generation" not in vars(model)


@torch.no_grad()
def test_a_padded_text_has_the_scores_it_has_alone():
    model = make("Phi3", "ForSequenceClassification", num_labels=3)
    rows = [torch.from_numpy(row["input_ids"]) for row in rows_of(20, 100, 31)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    scores = forward_rows(model, {"input_ids": ids, "attention_mask": (ids > 0).long()}).logits
    for row, found in zip(rows, scores, strict=True):
        torch.testing.assert_close(found, model(input_ids=row[None], use_cache=False).logits[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_pair_of_full_length_beside_a_short_one_fits_a_table_of_positions():
    """The short row was filled up with positions beyond the table: an index error, on a GPU a stop of the device."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SHAPE, n_positions=64)).eval()
    answers = rows_of(60, 64, 10, 50)
    others = {"reference": np.zeros(2, np.float32), "images": [None, None]}
    pairs = [joined(answers[start : start + 2]) | others for start in (0, 2)]
    batch = collate_pairs(pairs, packed=True, seq_length=64)
    together = causal_lm_loss(model, batch)
    torch.testing.assert_close(together, sum(causal_lm_loss(model, collate_padded([answer])) for answer in answers))
