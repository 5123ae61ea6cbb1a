"""Ranks that share the tokens of rows (sequence_parallel.yaml) learn what one process learns; what cannot is one line.

What both launch configs learn beside one process, and what they resume: test_strategies.py. DPO: test_dpo.py.
"""

import pytest
import torch

from shared.extras.sequence import sequence
from shared.process import ranks
from shared.process.errors import ConfigError
from tests.conftest import ROOT, compare_families, continued, learn_here, make_model, run, slow
from tests.model_families import FAMILIES
from tests.same import assert_same_bits, assert_same_learning

# Windows; recurrent layers, whose first rank sees no difference
FIRST_TIER = ("mistral", "qwen3_5")
CHOOSING = "deepseek_v4 hy_v4 qwen4_exp mistral_large4 glm5_next"
REFUSED = {
    **dict.fromkeys(("gemma2", "gpt_oss", "mimo_v2_flash", "mamba", "mamba2"), "its attention is eager"),
    **dict.fromkeys(CHOOSING.split(), "it chooses the tokens that it sees"),
    "llama4": "its attention is scaled by a token's place",
    "falcon": "The size of tensor a",
}
RECURRENT = "lfm2 lfm2_moe lfm3 lfm3_vl qwen3_next nemotron_h falcon_h1 bamba granitemoehybrid jamba kimi_linear olmo_hybrid"
REFUSED |= dict.fromkeys((*RECURRENT.split(), "qwen3_5", "qwen3_5_moe"), "its logits differ from those of whole rows")


@pytest.mark.parametrize("families", [FIRST_TIER, slow(tuple(FAMILIES))], ids=["some", "all"])
def test_families_learn_what_one_rank_learns_or_are_refused(tmp_path, families):
    """Loss and all gradients, of rows of one document and of several."""
    reason = "does not work with sp_size in the launch config: "
    for found in compare_families("sequences", "sequence_parallel", tmp_path, families):
        refused = {family: said for family, said in found.items() if not said.startswith("equal to")}
        assert not {name: said for name, said in refused.items() if reason + REFUSED.get(name, "?") not in said}
        assert refused.keys() == REFUSED.keys() & found.keys()
        assert all(float(said.split()[-1]) < 1e-5 for name, said in found.items() if name not in refused)


@pytest.mark.parametrize(("count", "heads"), [(2, 3), (8, 12)])
def test_heads_that_do_not_divide_are_refused(monkeypatch, count, heads):
    monkeypatch.setattr(ranks, "sequence_ranks", lambda: count)
    states = [torch.zeros(1, heads, 4, 8)] * 3
    with pytest.raises(RuntimeError, match="unflatten"):
        sequence.attend_to_whole_rows(lambda *_: None, None, *states, torch.empty(1, 0))


@pytest.fixture(scope="module")
def flags(chat_file):
    common = ("--max_steps", 8, "--save_steps", 4, "--global_batch_size", 8, "--eval_samples", 9, "--train_file", chat_file)
    return (*common, "--seq_length", 64, "--show_answers", 0, "--max_grad_norm", 0.5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("usual", "here", "rows"),
    [("sp_size: 2", "sp_size: 4", 4), ("dp_replicate_size: 1", "dp_replicate_size: 2", 2)],
    ids=["one group", "two groups"],
)
def test_four_ranks_with_windows_and_two_heads_of_keys(flags, tmp_path, usual, here, rows):
    """Four ranks repeat each head of keys. Windows are shorter than a rank's part of a row, and documents are packed."""
    from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM

    name = make_model(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(name)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 128, "sliding_window": 12, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    MistralForCausalLM(MistralConfig(**shape, vocab_size=len(tokenizer))).save_pretrained(name)
    given = (*flags, "--model_name_or_path", name, "--gradient_checkpointing", "offload", "--learning_rate", 3e-4)
    one = learn_here("full_finetune", tmp_path / "one", *given, "--per_device_train_batch_size", 4)
    text = (ROOT / "accelerate_configs/sequence_parallel.yaml").read_text()
    (tmp_path / "launch.yaml").write_text(text.replace(usual, here))
    at_once = ("--per_device_train_batch_size", rows)
    other = run("full_finetune", tmp_path / "four", *given, *at_once, processes=4, config=tmp_path / "launch")
    assert "documents kept apart by an attention mask" in other.summary
    assert_same_learning(one, other, atol=1e-5, keys=("grad_norm", "tokens"))


@pytest.mark.slow
def test_a_killed_run_continues_bit_for_bit(flags, tiny_model, tmp_path):
    """With dropout, of which each rank draws its own."""
    given = (*flags, "--model_name_or_path", tiny_model, "--lora_dropout", 0.2, "--audit_data")
    launch = {"processes": 2, "config": "sequence_parallel"}
    straight = run("lora_finetune", tmp_path / "straight", *given, **launch)
    assert_same_bits(straight, continued("lora_finetune", tmp_path / "run", "update:kill@5", *given, **launch))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "extra", "message"),
    [
        ("full_finetune", ("--attn_implementation", "eager"), "its attention is eager, not sdpa; use fsdp2.yaml"),
        ("pretrain", ("--sync_every", 2), "--sync_every works in bf16 or fp32 with ddp.yaml and hsdp.yaml"),
        ("text_classification", (), "this template cannot divide rows over GPUs"),
    ],
)
def test_what_cannot_share_rows_is_one_line(tmp_path, template, extra, message):
    done = run(template, tmp_path, *extra, processes=2, config="sequence_parallel", check=False)
    assert done.returncode != 0 and done.output.count(message) == 1, done.output


def test_sizes_that_do_not_go_together_are_refused(monkeypatch):
    sizes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "WORLD_SIZE": "4", "PARALLELISM_CONFIG_SP_SIZE": "2"}
    for name, value in (sizes | {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert (ranks.data_parallel_size(), ranks.sequence_ranks()) == (2, 2)
    for name, size in (("DP_REPLICATE", "1"), ("TP", "2")):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", size)
    with pytest.raises(ConfigError, match="sp_size with tp_size or DeepSpeed, do not work"):
        ranks.data_parallel_size()
