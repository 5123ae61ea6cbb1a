"""Answers to validation prompts: shared over ranks, scored, and used to choose the best weights."""

import itertools
import json
import os
import random
import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.answers.answers import answer, batches, batches_to_answer, written
from shared.answers.scores import exact_match, solves, token_f1
from shared.data.loader import Share
from shared.models.generation import generate, sees_padding
from shared.text import chat, preferences
from shared.text.corpus import train_tokenizer
from shared.text.options import ChatConfig, PreferenceConfig
from tests.conftest import LAUNCHER, ROOT, Run, command, put_a_token_before_texts, run, sentence, slow, write_lines
from tests.plain_loop import turn

NAMES = ("red", "green blue", "black")
NEW_TOKENS = 8


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "f1"),
    [
        *[("The  Eiffel Tower!", "eiffel tower", 1, 1), ("no no yes", "no", 0, 0.5), ("", "yes", 0, 0), ("?", "", 0, 0)],
        *[("a cat sat", "the cat sat down", 0, 0.8), ("Option A", "option B", 0, 0.5)],  # 2 of 2 words, and 2 of 3; 1 of 2
        *[("it's well-known", "its wellknown", 1, 1), ("**(A)**", "A.", 1, 1), ("", "", 1, 1)],
    ],
)
def test_scores_are_those_of_squad(answer, reference, exact, f1):
    assert exact_match(answer, reference) == exact
    assert token_f1(answer, reference) == pytest.approx(f1)


ALIKE = (  # answers and references
    *[("A", "A"), ("北京", "北 京"), ("1.0", "1"), ("$0.50", "0.5"), (".5", "0.5"), ("\u22125", "-5"), ("#### -3", "-3")],
    *[("-$5", "-5"), ("1,00,000", "100000"), ("5/0", "5"), ("9" * 6000, "9" * 6000), ("1e-05", 1e-05)],
)
SOLVED = (
    *[("The total is 72 clips, altogether.", "72"), ("It is 25. (See step 2)", "25"), ("12 cm", r"12\text{ cm}")],
    *[("1,2,3", "3"), ("So 7 + 5 = (12)", "12"), ("It is 5 km/h.", "5 km/h"), (r"So \boxed{42}", r"\boxed{42}")],
)
WRONG = (
    *[("", "A"), ("The", "A"), ("B", "A"), ("B2", "A2"), ("1.5", "15"), ("3.14", "314"), ("-5", "5"), (".5", "5")],
    *[("\u22125", "5"), ("3-5", "-5"), ("1/2", "3/2"), ("1 / 2", "3 / 2"), ("(2,5)", "25"), ("1, 5", "2, 5"), ("1e3", "3")],
    *[("1e999999999", "5"), ("10-15", "1015"), ("10:30", "1030"), ("9:30", "10:30"), ("4/6/2024", "5/6/2024")],
    *[("x < 5", "x > 5"), ("a + b", "a - b"), ("x - 5", "x + 5"), ("x-y", "xy"), ("f(x)", "fx"), ("4", r"4\pi")],
    *[(r"\frac{3}{2}", r"\frac{1}{2}"), (r"3\sqrt{2}", r"5\sqrt{2}")],
)


@pytest.mark.parametrize(
    ("pairs", "exact", "solved"), [(ALIKE, 1, 1), (SOLVED, 0, 1), (WRONG, 0, 0), ([("none", None)], 1, 0)]
)
def test_numbers_count_by_their_value_and_formulas_as_they_are(pairs, exact, solved):
    for text, reference in pairs:
        assert (exact_match(text, str(reference)), solves(text, reference)) == (exact, solved), text[:40]


@pytest.mark.parametrize(("prompts", "per_device", "ranks"), [(1, 8, 4), (9, 8, 1), (23, 4, 2), (5, 1, 2)])
def test_ranks_share_the_prompts_in_equally_many_batches_of_similar_length(prompts, per_device, ranks):
    lengths = random.Random(prompts).sample(range(100), prompts)
    parts = [batches(lengths, per_device, Share(rank, ranks, torch.device("cpu"))) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1 and parts[0].shape[1] <= per_device
    assert sum(part.size for part in parts) - prompts < len(parts[0]) * ranks  # hardly any room is empty
    assert sorted(number for part in parts for number in part.flat if number >= 0) == list(range(prompts))
    each = range(len(parts[0]))
    windows = [[lengths[number] for part in parts for number in part[window] if number >= 0] for window in each]
    assert all(min(one) >= max(other) for one, other in itertools.pairwise(windows))


@pytest.mark.parametrize("name", ["gpt2", "bart", "llama4", "inkling"])
def test_an_answer_depends_neither_on_other_prompts_nor_on_its_bound(name):
    """What is left of 64 positions is the answer's: 5 tokens, 1, 24, all. BART's count from the beginning of the row."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32, "vocab_size": 99}
    llama = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "intermediate_size_mlp": 32, "head_dim": 16}
    llama |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    llama |= {"no_rope_layers": [1, 0], "max_position_embeddings": 64, "pad_token_id": 0}
    inkling = {name: llama[name] for name in llama if name not in ("intermediate_size_mlp", "no_rope_layers")}
    inkling |= {"local_layer_ids": [], "mlp_layer_types": ["dense"] * 2, "log_scaling_n_floor": 35, "log_scaling_alpha": 9.0}
    config = {
        "gpt2": transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2, n_positions=64),
        "bart": transformers.BartConfig(**sizes, max_position_embeddings=64),
        "inkling": transformers.InklingTextConfig(**inkling),
        "llama4": transformers.Llama4TextConfig(**llama, floor_scale=35, attn_scale=9.0),
    }[name]
    subject = AutoModelForCausalLM.from_config(config).eval()
    for parameter in subject.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)  # so that answers differ
    assert sees_padding(subject) is (name == "bart")
    prompts = [torch.randint(1, 99, (length,)).tolist() for length in (60, 64, 41, 3, 60, 11, 3)]
    alone = [generate(subject, [prompt], max_new_tokens=30, ends=())[0] for prompt in prompts]
    assert [len(ids) for ids in alone] == [5, 1, 24, 30, 5, 30, 30]
    assert generate(subject, prompts[:1], max_new_tokens=2, ends=())[0] == alone[0][:2]
    found = {}
    for rank in (0, 1):
        mine = batches_to_answer(subject, prompts, 30, 3, Share(rank, 2, torch.device("cpu")))
        found |= dict(answer(subject, prompts, mine.tolist(), max_new_tokens=30, ends=()))
    assert [found[number] for number in range(len(prompts))] == alone


def test_answers_are_given_as_they_are_written():
    """With the white space that code needs, and that some tokenizers drop from what they decode."""
    text = "def f():\n"
    for tokenizer in (put_a_token_before_texts(train_tokenizer([text] * 9, vocab_size=300)), words_with_a_space_before()):
        tokenizer.add_special_tokens({"additional_special_tokens": ["<call>"]})
        prompt = tokenizer(text)["input_ids"]
        for said, rest in (("    return 7\n", []), (" <call> x", [tokenizer.eos_token_id]), ("", [tokenizer.eos_token_id])):
            ids = tokenizer(text + said)["input_ids"][len(prompt) :]
            assert written(tokenizer, prompt, ids + rest, [tokenizer.eos_token_id]) == (text, said)


def words_with_a_space_before():
    """A tokenizer as Llama 2's: a space is a part of the word after it, and the first one is not written."""
    pieces = ["<s>", "</s>", "▁def", "▁f():", "▁▁▁▁return", "▁7", "▁x", "▁", "\n", "def"]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, [], ignore_merges=True)
    tokenizer = Tokenizer(model)
    split = pre_tokenizers.Split(Regex(r"▁*[^▁\n]+|▁+|\n"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="first", split=False), split])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return put_a_token_before_texts(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    """(files to train on and to validate on, records): short answers, which are learned in a few steps; prompts of 1 to 20
    words; a column that is not learned.
    """
    rng = random.Random(4)
    records = []
    for number in range(36):
        asked = f"{'xyz'[number % 3]} {sentence(rng, rng.randint(1, 20))}"
        records.append({"messages": [turn("user", asked), turn("assistant", NAMES[number % 3])], "points": number % 4})
    folder = tmp_path_factory.mktemp("colours")
    for name, part in (("train", records[:24]), ("test", records[13:])):
        write_lines(folder / f"{name}.jsonl", part)
    return folder, records[13:]


@pytest.fixture(scope="module")
def flags(colours, tiny_model):
    folder, _ = colours
    return (
        *("--train_file", folder / "train.jsonl", "--validation_file", folder / "test.jsonl", "--seq_length", 64),
        *("--model_name_or_path", tiny_model, "--learning_rate", 5e-3, "--lr_scheduler_type", "constant"),
        *("--max_steps", 24, "--eval_steps", 8, "--save_steps", 8, "--global_batch_size", 8, "--eval_answers", 9),
        *("--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 2, "--max_new_tokens", NEW_TOKENS),
        *("--metric_for_best_model", "token_f1", "--warmup_steps", 0),
    )


@pytest.fixture(scope="module")
def alone(flags, tmp_path_factory):
    return run("full_finetune", tmp_path_factory.mktemp("alone") / "run", *flags)


def answers(ended: Run) -> list[dict]:
    return [json.loads(line) for line in (ended.folder / "answers.jsonl").read_text().splitlines()]


def test_scores_equal_a_plain_loop_of_generate_and_choose_the_best_weights(alone, colours):
    rows = answers(alone)
    assert [row["step"] for row in rows] == [step for step in (0, 8, 16, 24) for _ in range(9)]
    found = dict(zip((0, 8, 16, 24), alone.each("eval_token_f1"), strict=True))
    best = max((8, 16, 24), key=lambda step: found[step])
    assert found[best] > max(0.3, found[0])  # something to measure
    measured = re.search(r"best by token_f1: step (\d+), ([\d.]+)", alone.output)
    assert measured and float(measured[2]) == pytest.approx(found[best], abs=1e-4)

    model = AutoModelForCausalLM.from_pretrained(alone.folder / "final", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(alone.folder / "final")
    _, records = colours
    plain = []
    for index in torch.linspace(0, len(records) - 1, 9).round().int().tolist():
        asked, answer = records[index]["messages"]
        inputs = tokenizer.apply_chat_template([asked], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        end = tokenizer.eos_token_id
        new = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=end, pad_token_id=0)
        new = new[0, inputs["input_ids"].shape[1] :].tolist()
        text = tokenizer.decode(new, skip_special_tokens=True).strip()
        plain.append((text, answer["content"], end not in new))
    of_best = [row for row in rows if row["step"] == int(measured[1])]
    assert [(row["answer"], row["reference"], row["cut"]) for row in of_best] == plain
    assert found[best] == pytest.approx(sum(token_f1(a, b) for a, b, _ in plain) / 9)
    exact = alone.each("eval_exact_match")[int(measured[1]) // 8]
    assert exact == pytest.approx(sum(exact_match(a, b) for a, b, _ in plain) / 9)
    report = alone.evaluation
    latest = sorted((row for row in rows if row["step"] == 24), key=lambda row: row["scores"]["token_f1"])
    assert (report["step"], report["worst by token_f1"]) == (24, latest)
    assert report["eval_token_f1"] == pytest.approx(found[24])
    cut = sum(row["cut"] for row in rows[:9])
    assert f"{cut} of 9 answers end at --max_new_tokens {NEW_TOKENS}" in alone.output


@pytest.mark.parametrize("config", ["fsdp2", slow("tensor_parallel"), slow("deepspeed_zero3")])
def test_every_launch_gives_the_same_answers(alone, flags, tmp_path, config):
    """DDP: below."""
    other = run("full_finetune", tmp_path / "run", *flags, processes=2, config=config)
    assert answers(other) == answers(alone)
    assert other.losses == pytest.approx(alone.losses, rel=1e-3)
    for name in ("exact_match", "token_f1"):
        assert other.each(f"eval_{name}") == pytest.approx(alone.each(f"eval_{name}"))


@pytest.mark.slow
def test_four_processes_with_an_adapter_and_a_moving_average(flags, tmp_path):
    """5 prompts for 4 ranks; answers are those of the averaged weights."""
    given = (*flags, "--eval_answers", 5, "--ema_decay", 0.9, "--per_device_train_batch_size", 2, "--lora_r", 4)
    one = run("lora_finetune", tmp_path / "one", *given)
    four = run("lora_finetune", tmp_path / "four", *given, processes=4, config="fsdp2")
    assert answers(four) == answers(one) and len(answers(one)) == 20


def test_a_stopped_run_measures_the_same(alone, flags, tmp_path):
    """A signal between two batches of answers, and a kill after answers that no checkpoint knows."""
    batches_of_loss = 12  # 23 records, 2 at a time; then 5 batches of answers
    at = 2 * (batches_of_loss + 5) + batches_of_loss + 3  # in the third evaluation
    stopped = run("full_finetune", tmp_path / "run", *flags, env={"TEMPLATES_FAULT": f"evaluation:term@{at}"}, check=False)
    assert "stopped by SIGTERM at step 16" in stopped.output and stopped.returncode
    assert max(row["step"] for row in answers(stopped)) == 8
    killed = run("full_finetune", tmp_path / "run", *flags, env={"TEMPLATES_FAULT": "save.rename:kill@1"}, check=False)
    assert killed.returncode and max(row["step"] for row in answers(killed)) == 24
    resumed = run("full_finetune", tmp_path / "run", *flags)
    assert "resumed from" in resumed.output
    assert answers(resumed) == answers(alone) and resumed.each("eval_token_f1") == alone.each("eval_token_f1")


def test_a_score_of_one_s_own_sees_the_record_and_chooses_in_its_direction(alone, flags, tmp_path):
    """A number of torch. Lower is better, by its name. Two processes, each of which scores its own answers."""
    template = (ROOT / "templates/full_finetune.py").read_text()
    own = """
def score(answer, record):
    return {"points_error": torch.tensor(abs(len(answer.split()) - record["points"]))}
"""
    assert "\nscore = like_reference\n" in template
    (tmp_path / "train.py").write_text(template.replace("\nscore = like_reference\n", own))
    given = (*flags, "--metric_for_best_model", "points_error")
    argv = command("full_finetune", tmp_path / "run", *given, processes=2)
    argv = [argument.replace(str(ROOT / "templates/full_finetune.py"), str(tmp_path / "train.py")) for argument in argv]
    code, output = LAUNCHER.run(argv, dict(os.environ) | {"PYTHONPATH": str(ROOT)})
    assert code == 0, output
    ended = Run(tmp_path / "run", code, output)
    rows = answers(ended)
    assert ended.manifest(24)["strategy"] == "DDP x 2 on cpu, fp32"
    assert [row["answer"] for row in rows] == [row["answer"] for row in answers(alone)]
    assert ended.losses == pytest.approx(alone.losses, rel=1e-3)
    means = [sum(row["scores"]["points_error"] for row in rows if row["step"] == step) / 9 for step in (0, 8, 16, 24)]
    assert ended.each("eval_points_error") == pytest.approx(means)
    assert len({row["scores"]["points_error"] for row in rows}) > 2
    best = re.search(r"best by points_error: step \d+, ([\d.]+)", output)
    assert best and float(best[1]) == pytest.approx(min(means[1:]), abs=1e-4)


def test_prompts_and_references_of_conversations_and_pairs(colours, tokenizer, tmp_path):
    folder, records = colours
    files = {"train_file": (str(folder / "train.jsonl"),), "validation_file": (str(folder / "test.jsonl"),)}
    data = ChatConfig(**files, seq_length=64)
    _, held_out = chat.open_samples(data, tokenizer)
    for index in (0, 5):
        prompt, reference, others = held_out.prompt(index)
        assert tokenizer.decode(prompt).endswith("### Assistant:\n")
        assert tokenizer.decode(reference, skip_special_tokens=True).strip() == records[index]["messages"][1]["content"]
        assert others == {"points": records[index]["points"]}
    pairs = [{"prompt": f"Say {n}:", "chosen": f" {n}", "rejected": " no", "points": n} for n in range(1, 5)]
    file = write_lines(tmp_path / "pairs.jsonl", pairs)
    options = PreferenceConfig(train_file=(str(file),), validation_file=(str(file),), seq_length=64)
    _, tuned = preferences.read_pairs(SimpleNamespace(data=options), tokenizer, demo_samples=1)
    _, reference, others = tuned.prompt(2)
    assert tokenizer.decode(reference, skip_special_tokens=True) == " 3" and others == {"points": 3}
