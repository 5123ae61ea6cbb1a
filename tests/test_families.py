"""The templates on checkpoints of many model families: what they train and write is what plain transformers and PEFT load.

Each family is a small random checkpoint, see model_families.py. One family of each kind is in the first tier.
"""

import json
import random
import re
from pathlib import Path

import pytest
import torch
import transformers
from accelerate import Accelerator
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from shared.answers.answers import answer, batches_to_answer
from shared.config.options import SpeedConfig
from shared.data.loader import Share
from shared.models.adapters import load_base
from shared.models.generation import generate, sees_padding
from shared.models.loading import load_causal_lm
from shared.models.options import AdapterConfig
from shared.text import chat
from shared.text.options import ChatConfig
from shared.text.packing import Packed
from tests.conftest import compare_families, learn_here, run, sentence, slow, write_lines
from tests.model_families import FAMILIES

LENGTH = 96  # tokens of a row
SAMPLES = 8
OUTER = re.compile(r"vision|visual|image|audio|multi_modal|projector|connector|mtp|eh_proj")  # in names of weights
FIRST_TIER = ("gemma2", "gpt_oss", "nemotron_h", "qwen3_5")
CASES = [name if name in FIRST_TIER else slow(name) for name in FAMILIES]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> Path:
    """Rows of the Alpaca form, to train and to validate on."""
    rng = random.Random(3)
    made = [{"instruction": sentence(rng, rng.randint(1, 6)), "output": sentence(rng, 4 * (i + 1))} for i in range(SAMPLES)]
    return write_lines(tmp_path_factory.mktemp("alpaca") / "rows.jsonl", made)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """All weights in a folder's safetensors files."""
    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


@torch.no_grad()
def plain_loss(model: torch.nn.Module, samples: list[dict]) -> float:
    """The mean loss over the targets of all samples, one at a time, by transformers alone."""
    total, targets = 0.0, 0
    for row in samples:
        ids, labels = torch.tensor(row["input_ids"])[None], torch.tensor(row["labels"])
        total += cross_entropy(model.eval()(input_ids=ids, use_cache=False).logits[0], labels, reduction="sum").item()
        targets += int((labels != -100).sum())
    return total / targets


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.arange(5, 45)[None] * 7
    return model.eval()(input_ids=ids, use_cache=False).logits


def load_whole(model_class: type, folder: Path) -> torch.nn.Module:
    """The model in a folder, loaded by transformers alone, which finds each weight and leaves none."""
    model, info = model_class.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize("family", CASES)
def test_adapters_are_what_transformers_and_peft_load(tmp_path, rows, capsys, checkpoint, family):
    """Also: packed rows give what plain transformers gives for one sample at a time."""
    (base, model_class), tuned = checkpoint(family), tmp_path / "tuned"
    config = ChatConfig(train_file=(str(rows),), validation_file=(str(rows),), seq_length=LENGTH)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    conversations = chat.open_samples(config, tokenizer)[0]
    samples = [conversations[i] for i in range(SAMPLES)]
    packed_rows = len(Packed(conversations, LENGTH))

    data = ("--train_file", rows, "--validation_file", rows, "--seq_length", LENGTH, "--max_new_tokens", 4)
    flags = ("--max_steps", 2, "--global_batch_size", packed_rows, "--per_device_train_batch_size", 2, "--merge_adapter")
    more = ("--metric_for_best_model", "none", "--model_name_or_path", base)
    tuning = learn_here("lora_finetune", tuned, *data, *flags, *more)
    is_packed = "packed into" in capsys.readouterr().out

    # The loss before training is that of plain transformers, also of packed rows; one step sees all samples.
    plain = load_whole(model_class, base)
    before, untouched = plain_loss(plain, samples), logits(plain)
    assert tuning.each("eval_loss")[0] == pytest.approx(before, rel=1e-4)
    if is_packed:
        assert tuning.losses[1] == pytest.approx(before, rel=1e-4)

    # The adapter, on the class that the checkpoint names.
    adapted = PeftModel.from_pretrained(plain, tuned / "final")
    adapter = load_file(tuned / "final" / "adapter_model.safetensors")
    loaded = {name: p for name, p in adapted.named_parameters() if "lora_" in name}
    assert sorted(adapter) == sorted(name.replace(".default", "") for name in loaded)
    assert not [name for name, p in adapter.items() if "lora_B" in name and not p.any()], "they had no gradient"
    by_peft = logits(adapted)
    assert (by_peft - untouched).abs().max() > 1e-3

    # The merged model, by the same class.
    merged = load_whole(model_class, tuned / "merged")
    torch.testing.assert_close(logits(merged), by_peft, rtol=1e-4, atol=1e-4)
    assert tuning.last("eval_loss") == pytest.approx(plain_loss(merged, samples), rel=1e-4)
    assert tuning.last("eval_loss") < before and merged.generation_config.temperature == 0.7
    old, new = read(base), read(tuned / "merged")
    old.pop(FAMILIES[family][2], None)  # which no class loads
    assert sorted(old) == sorted(new)
    assert all(torch.equal(old[name], new[name]) for name in old if OUTER.search(name))
    assert json.loads((tuned / "merged" / "config.json").read_text())["architectures"] == [model_class.__name__]
    for file in base.glob("*processor*"):
        assert (tuned / "merged" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.parametrize("family", [*(case for case in CASES if case != slow("deepseek_v4")), "deepseek_v4"])
def test_an_answer_is_the_same_alone_and_in_a_batch(checkpoint, family):
    model = load_causal_lm(str(checkpoint(family)[0]), attn_implementation="auto", whole=True, dtype=torch.float32).eval()
    assert sees_padding(model) is (family == "deepseek_v4")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 4000, (length,), generator=generator).tolist() for length in (3, 30, 11, 19, 30)]
    alone = [generate(model, [prompt], max_new_tokens=12, ends=())[0] for prompt in prompts]
    mine = batches_to_answer(model, prompts, 12, 5, Share(0, 1, torch.device("cpu")))
    found = dict(answer(model, prompts, mine.tolist(), max_new_tokens=12, ends=()))
    assert [found[number] for number in range(5)] == alone


@pytest.mark.parametrize("family", CASES)
def test_continued_pretraining(tmp_path, text_file, checkpoint, family):
    (base, model_class), folder = checkpoint(family), tmp_path / "run"
    data = ("--train_file", text_file, "--seq_length", 64, "--max_steps", 2, "--global_batch_size", 4)
    learn_here("pretrain", folder, "--model_name_or_path", base, *data)
    load_whole(model_class, folder / "final")
    old, new = read(base), read(folder / "final")
    old.pop(FAMILIES[family][2], None)  # which no class loads
    assert sorted(old) == sorted(new)
    changed = {name for name in new if not torch.equal(old[name], new[name])}
    assert changed
    assert not any(OUTER.search(name) for name in changed)
    for file in base.glob("*processor*"):
        assert (folder / "final" / file.name).read_bytes() == file.read_bytes()
    assert json.loads((folder / "final" / "config.json").read_text())["architectures"] == [model_class.__name__]


FINE_TUNED = ("lora_finetune", "--show_answers", 0, "--seq_length", LENGTH)
QLORA = (*FINE_TUNED, "--load_in_4bit", "--merge_adapter")
PRETRAINED = ("pretrain", "--seq_length", 64)


@pytest.mark.parametrize(
    ("family", "flags", "config"),
    [
        ("qwen3_moe", QLORA, "fsdp2"),
        slow("glm4_moe", QLORA, "fsdp2"),  # with layers that PEFT takes for experts
        slow("gpt_oss", QLORA, "ddp"),
        slow("gemma2", PRETRAINED, "fsdp2"),
        slow("gemma3", PRETRAINED, "fsdp2"),
        slow("gemma3", PRETRAINED, "ddp"),  # which would wait for gradients of its eyes
        slow("nemotron_h", FINE_TUNED, "fsdp2"),  # several kinds of blocks, and experts
        slow("qwen3_5", FINE_TUNED, "fsdp2"),
    ],
)
def test_two_processes_learn_what_one_does_and_go_on_bit_for_bit(
    tmp_path, rows, text_file, capsys, checkpoint, family, flags, config
):
    (base, _), (template, *flags) = checkpoint(family), flags
    data = ("--train_file", text_file) if template == "pretrain" else ("--train_file", rows, "--validation_file", rows)
    steps = ("--max_steps", 4, "--save_steps", 2, "--global_batch_size", 4, "--metric_for_best_model", "none")
    flags += ["--model_name_or_path", base, *data, *steps, "--per_device_train_batch_size"]
    one = learn_here(template, tmp_path / "one", *flags, 4)
    two = run(template, tmp_path / "two", *flags, 2, processes=2, config=config)
    assert two.manifest(4)["strategy"].startswith(f"{config.upper()} x 2")
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert two.last("eval_loss") == pytest.approx(one.last("eval_loss"), rel=1e-4)

    start = ("--resume_from_checkpoint", two.folder / "checkpoint-000002")
    again = run(template, tmp_path / "again", *flags, 2, *start, processes=2, config=config)
    assert again.losses == {step: loss for step, loss in two.losses.items() if step > 2}
    folders = ("final", "merged") if "--merge_adapter" in flags else ("final",)
    for ours, theirs in ((read(again.folder / name), read(two.folder / name)) for name in folders):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)

    if "--load_in_4bit" in flags:
        assert "gate_up_proj" in one.summary and "stay in 16 bits" not in "".join(capsys.readouterr())
        whole = load_base(str(base), AdapterConfig(load_in_4bit=True), SpeedConfig(), Accelerator(cpu=True))
        adapted = logits(PeftModel.from_pretrained(whole.dequantize(), two.folder / "final"))
        merged = logits(type(whole).from_pretrained(two.folder / "merged", dtype=torch.float32))
        torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("families", [FIRST_TIER, slow(tuple(FAMILIES))], ids=["some", "all"])
def test_read_in_shards_each_rank_keeps_half_of_what_one_process_has(tmp_path, families):
    """FSDP2 on two processes. Weights, buffers and ties are the same bit for bit."""
    for found in compare_families("shards", "fsdp2", tmp_path, families):
        held = {name: re.fullmatch(r"equal, (0.\d\d) held", said) for name, said in found.items()}
        # all but vectors, and rows of odd numbers
        assert not {name: found[name] for name, half in held.items() if not half or float(half[1]) >= 0.6}
