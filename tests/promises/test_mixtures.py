"""Mixtures in each template."""

import json
import random
import re
from collections import Counter

import pytest
import yaml

from shared.data.store import Store
from shared.models.tokenizers import load_tokenizer
from shared.text import corpus
from tests.conftest import SHAPE, continued, learn_here, paint, refusal, run, run_here, sentence, with_fault, write_lines
from tools import audit


def samples_by_source(folder, first: int) -> list[Counter]:
    """Of each step, how many samples are of the first source (`first` samples) and how many of the second."""
    return [Counter(sample < first for sample in samples) for _, _, samples in audit.records_of_steps(folder).values()]


@pytest.mark.slow
def test_chats_that_were_killed_continue_on_another_number_of_processes(tiny_model, chat_file, tmp_path):
    row = {"messages": [{"role": "user", "content": "say"}, {"role": "assistant", "content": "line"}]}
    few_chats = write_lines(tmp_path / "few.jsonl", 9 * [row])
    settings = {"train_file": [str(chat_file), str(few_chats)], "mix_weights": [0.75, 0.25]}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(settings))
    flags = (
        *("--config", tmp_path / "mix.yaml", "--model_name_or_path", tiny_model, "--seq_length", 96, "--packing", "on"),
        *("--lora_r", 4, "--learning_rate", 1e-2, "--global_batch_size", 4, "--max_steps", 8, "--eval_steps", 4),
        *("--save_steps", 2, "--show_answers", 0, "--audit_data"),
    )
    whole = learn_here("lora_finetune", tmp_path / "whole", *flags)
    folder = tmp_path / "run"
    killed = with_fault("lora_finetune", folder, "update:kill@5", *flags, processes=2)
    assert killed.returncode != 0 and sorted(killed.losses) == [1, 2, 3, 4]
    again = run("lora_finetune", folder, *flags, processes=1)
    assert "at step 4" in again.output
    assert again.losses == pytest.approx(whole.losses, rel=1e-5)
    assert audit.records_of_steps(folder) == audit.records_of_steps(tmp_path / "whole")
    rows = audit.records_of_steps(folder)[1][1]  # rows that were packed from each source
    assert list(rows) == ["chats.jsonl", "few.jsonl"] and f"packed into {sum(rows.values())} rows" in whole.summary
    assert samples_by_source(folder, rows["chats.jsonl"]) == 8 * [Counter({True: 3, False: 1})]
    assert audit.check(folder).sources["few.jsonl"] == (8, few := rows["few.jsonl"])
    assert again.last("epochs/few.jsonl") == 8 / few and again.last("epochs/chats.jsonl") == 24 / rows["chats.jsonl"]
    assert "epochs/chats.jsonl" in again.output and "75.0% chats.jsonl" in again.summary
    path = folder / "audit" / "rank-00000.jsonl"  # one sample comes again too soon
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[-1]["samples"] = 4 * lines[-1]["samples"][:1]
    write_lines(path, lines)
    assert "chats.jsonl: used more than once in an epoch" in audit.check(folder).problems[0]


def test_text_is_prepared_once_for_each_source(text_file, tiny_model, tmp_path, own_cache):
    rng = random.Random(3)
    others = [tmp_path / name for name in ("b.txt", "c.txt")]
    for other in others:
        other.write_text(sentence(rng, 2000))
    flags = (
        *("--config_overrides", SHAPE, "--seq_length", 32, "--global_batch_size", 10, "--max_steps", 6, "--eval_samples", 8),
        *("--preprocessing_num_workers", 1, "--audit_data", "--train_file", text_file, others[0], "--mix_weights", 3, 7),
    )
    two = learn_here("pretrain", tmp_path / "two", *flags, "--tokenizer_name", tiny_model)
    folders = [*(tmp_path / "cache" / "corpus").iterdir()]
    assert len(folders) == 2
    tokens = {s.source: corpus.open_splits(s, None, 32, 5, 8).train for s in map(Store, folders)}
    of_text = len(tokens[str(text_file)])
    assert samples_by_source(tmp_path / "two", of_text) == 6 * [Counter({True: 3, False: 7})]
    assert audit.check(tmp_path / "two").problems == []
    assert two.last("epochs/text.jsonl") == 18 / of_text

    more = (*flags[:-6], "--train_file", text_file, *others, "--mix_weights", 3, 6, 1, "--tokenizer_name", tiny_model)
    run_here("pretrain", *more, "--preprocess_only")
    assert {*folders} < {*(tmp_path / "cache" / "corpus").iterdir()} and len([*(tmp_path / "cache/corpus").iterdir()]) == 3

    run_here("pretrain", *flags, "--vocab_size", 320, "--output_dir", tmp_path / "trained", "--max_steps", 1)
    (trained,) = (tmp_path / "cache" / "tokenizers").iterdir()  # one, on the text of both
    assert len(load_tokenizer(trained / "tokenizer")) == 320
    (final,) = (tmp_path / "trained" / "final").glob("tokenizer.json")
    assert json.loads(final.read_text())["model"] == json.loads((trained / "tokenizer/tokenizer.json").read_text())["model"]


def test_pairs_are_mixed_alike_on_every_launch_and_after_a_kill(tiny_model, tmp_path):
    rng = random.Random(5)
    pairs = [{"prompt": f"Say {n}", "chosen": sentence(rng, 3 + n % 9), "rejected": sentence(rng, 4)} for n in range(50)]
    files = [write_lines(tmp_path / f"{name}.jsonl", rows) for name, rows in (("a", pairs[:40]), ("b", pairs[40:]))]
    flags = ("--model_name_or_path", tiny_model, "--train_file", *files, "--mix_weights", 3, 1, "--seq_length", 64)
    flags += ("--global_batch_size", 4, "--max_steps", 6, "--save_steps", 2, "--show_answers", 0, "--audit_data")
    whole = learn_here("dpo", tmp_path / "whole", *flags)
    again = continued("dpo", tmp_path / "run", "update:kill@4", *flags, processes=2)
    assert again.losses == pytest.approx(whole.losses, rel=1e-5)
    assert audit.records_of_steps(tmp_path / "run") == audit.records_of_steps(tmp_path / "whole")
    count = audit.records_of_steps(tmp_path / "run")[1][1]["a.jsonl"]
    assert samples_by_source(tmp_path / "run", count) == 6 * [Counter({True: 3, False: 1})]
    assert re.search(r"^  extras +.*\bmixture\b", again.summary, re.M)
    assert "75.0% a.jsonl" in again.summary and again.last("epochs/a.jsonl") == 18 / count


def test_prompts_are_mixed(tiny_model, tmp_path):
    files = [
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {n}", "answer": str(n)} for n in range(20)])
        for name in ("a", "b")
    ]
    flags = ("--model_name_or_path", tiny_model, "--train_file", *files, "--mix_weights", 1, 3, "--max_new_tokens", 3)
    flags += ("--global_batch_size", 4, "--group_size", 2, "--max_steps", 3, "--eval_answers", 2, "--audit_data")
    learned = learn_here("grpo", tmp_path / "run", *flags, "--show_answers", 0)
    assert samples_by_source(tmp_path / "run", 19) == 3 * [Counter({True: 1, False: 3})]
    assert learned.last("epochs/b.jsonl") == 9 / 19


def test_folders_of_images_are_mixed(image_folder, architectures, tmp_path):
    for number in range(10):  # a class of its own, and one that the other has too
        for kind, name in ((1, "dog"), (2, "emu")):
            paint(tmp_path / "birds" / name / f"{number}.png", kind, number, (20, 20))
    flags = (
        *("--train_dir", image_folder, tmp_path / "birds", "--mix_weights", 1, 3, "--image_size", 16, "--audit_data"),
        *("--config_name", architectures / "resnet", "--global_batch_size", 8, "--num_train_epochs", 1),
    )
    found = learn_here("image_classification", tmp_path / "run", *flags).evaluation
    assert {"cat", "dog", "owl", "emu"} <= set(map(str, found["classes"]))
    steps = samples_by_source(tmp_path / "run", 53)
    assert len(steps) == (53 + 16) // 8 and set(map(str, steps)) == {str(Counter({False: 6, True: 2}))}
    findings = audit.check(tmp_path / "run")
    assert findings.problems == [] and findings.sources[image_folder.name] == (16, 53)
    assert findings.sources["birds"] == (48, 16)  # 20 % of 20 are held out


@pytest.mark.parametrize(
    ("template", "flags", "message"),
    [
        ("pretrain", ("--train_file", "A", "B", "--mix_weights", 1), "--mix_weights has 1 value(s), --train_file 2"),
        ("pretrain", ("--mix_weights", 1), "--mix_weights has 1 value(s), --train_file 0"),
        ("pretrain", ("--train_file", "A", "B", "--mix_weights", 1, 0), "--mix_weights must be above 0, not 0"),
        ("pretrain", ("--train_file", "A", "B", "--mix_weights", 1, 2, "--streaming"), "--streaming does not work with"),
        ("pretrain", ("--train_file", "EMPTY", "A", "--mix_weights", 1, 2), "EMPTY: no text in it"),
        ("lora_finetune", ("--train_file", "A", "EMPTY", "--mix_weights", 1, 2), "EMPTY: no records in it"),
        ("image_classification", ("--train_dir", "D", "E"), "--mix_weights has 0 value(s), --train_dir 2: give one for"),
    ],
)
def test_bad_mixtures_are_one_line(template, flags, message, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("A", "B"):
        write_lines(tmp_path / f"{name}.jsonl", 20 * [{"text": 20 * "the model reads "}])
    (tmp_path / "EMPTY.jsonl").write_text("\n")
    for name in ("D", "E"):
        (tmp_path / name).mkdir()
    flags = [f"{flag}.jsonl" if flag in ("A", "B", "EMPTY") else flag for flag in flags]
    model = {"pretrain": ("--tokenizer_name", tiny_model), "lora_finetune": ("--model_name_or_path", tiny_model)}
    refused = refusal(template, *flags, *model.get(template, ()), "--output_dir", tmp_path / "run")
    assert message in refused.replace(".jsonl", "")
