"""The report on data: faults that were put in are counted exactly, and named with their places."""

import json
import random
import shutil

import pytest
from PIL import Image

from shared.process.errors import ConfigError
from tests.conftest import learn_here, refusal, run, run_here, sentence, write_lines

TINY = ("--seq_length", 64, "--report_to", "none")


def chat(question, answer, **others):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **others}


def report(template, folder, *flags):
    run_here(template, *map(str, flags), "--preprocess_only", "--output_dir", str(folder))
    folder = folder.with_name(f"{folder.name}-data")
    assert {path.name for path in folder.iterdir()} == {"data.html", "data.json"}
    assert (folder / "data.html").stat().st_size > 1000
    parts = json.loads((folder / "data.json").read_text())["parts"]
    return parts, {name: found["count"] for name, found in [*parts.values()][-1]["found"].items()}


def plain(count, seed):
    rng = random.Random(seed)
    return [chat(f"Question {seed}.{n}?", sentence(rng, rng.randint(2, 9))) for n in range(count)]


def test_faults_of_conversations(tiny_model, tmp_path, capsys):
    long = " ".join(["word"] * 100)
    train = plain(40, 1)
    train[3] = chat("Question 1.5?", train[5]["messages"][1]["content"].upper())  # copies, apart from case and spaces
    train[7] = chat("Question  1.5?\n", train[5]["messages"][1]["content"])
    train[9] = chat("Silence?", "")
    train[11]["messages"].insert(0, {"role": "assistant", "content": "First."})
    train[13]["messages"].insert(1, {"role": "user", "content": "Twice."})
    train[15] = chat("Long?", long)
    train[17] = chat(long, "Never learned.")
    train[19] = chat("Longer?", f"{long} {long}")
    held_out = [*plain(9, 2), train[20]]
    files = [write_lines(tmp_path / f"{name}.jsonl", rows) for name, rows in (("train", train), ("held-out", held_out))]
    flags = ("--model_name_or_path", tiny_model, "--train_file", files[0], "--validation_file", files[1], *TINY)
    flags = (*flags, "--seq_length", 128)
    parts, found = report("lora_finetune", tmp_path / "report", *flags)
    assert found == {"cut": 3, "empty": 1, "dropped": 1, "roles": 2, "duplicates": 2, "overlap": 1}
    one, two, both = parts.values()
    assert (one["records"], one["samples"], two["samples"], both["samples"]) == (40, 39, 10, 49)
    assert both["learned"] == one["learned"] + two["learned"] < both["tokens"] == one["tokens"] + two["tokens"]
    assert one["found"]["cut"]["first"] == [f"{files[0]}:{n}" for n in (16, 18, 20)]
    assert one["found"]["roles"]["first"] == [f"{files[0]}:{n}" for n in (12, 14)]
    assert one["found"]["duplicates"]["first"] == [f"{files[0]}:{n}" for n in (6, 8)]
    assert both["found"]["overlap"] | {"text": ""} == {"count": 1, "share": 0.1, "first": [f"{files[1]}:10"], "text": ""}
    assert str(files[0]) in one["longest"] and one["found"]["cut"]["share"] == 3 / 40
    # what it says is true
    said = one["found"]["cut"]["text"]
    assert said.endswith("cuts none")
    enough = said.split("--seq_length ")[-1].split()[0]
    less = said.split("--seq_length ")[1].split()[0]
    _, longer = report("lora_finetune", tmp_path / "longer", *flags, "--seq_length", enough)
    assert "cut" not in longer and "dropped" not in longer
    _, some = report("lora_finetune", tmp_path / "some", *flags, "--seq_length", less)
    assert some["cut"] <= 0.05 * 50
    page = (tmp_path / "report-data/data.html").read_text()
    assert "<mark>" in page and "<hr" in page and "<script" not in page and "http" not in page
    assert "roles" in capsys.readouterr().err


def test_faults_of_pairs_prompts_and_texts(tiny_model, tmp_path):
    rng = random.Random(3)
    pairs = [{"prompt": f"Question {n}?", "chosen": sentence(rng, 4), "rejected": sentence(rng, 3)} for n in range(30)]
    pairs[4] = pairs[9] | {"rejected": pairs[9]["rejected"].title()}
    pairs[8] |= {"rejected": pairs[8]["chosen"]}
    flags = ("--model_name_or_path", tiny_model, *TINY, "--train_file", write_lines(tmp_path / "pairs.jsonl", pairs))
    parts, found = report("dpo", tmp_path / "pairs", *flags)
    assert {**found, "overlap": 0} == {"joined": 30, "dropped": 1, "same": 1, "duplicates": 1, "overlap": 0}
    (part,) = parts.values()
    assert part["samples"] == 29 and part["found"]["duplicates"]["first"][0].endswith(":10")

    prompts = [{"prompt": f"Say {n}", "answer": str(n)} for n in range(20)] + [{"prompt": "say 7", "answer": "7"}]
    flags = (*flags[:-1], write_lines(tmp_path / "prompts.jsonl", prompts), "--eval_answers", 2)
    _, found = report("grpo", tmp_path / "prompts", *flags)
    assert found["duplicates"] == 1

    texts = [{"text": sentence(rng, 5), "label": "abc"[n % 2]} for n in range(40)]
    texts += [
        {"text": f"  {texts[2]['text']}", "label": "a"},
        {"text": "alone", "label": "c"},
        {"text": "word " * 99, "label": "a"},
    ]
    flags = (*flags[:-3], write_lines(tmp_path / "texts.jsonl", texts))
    parts, found = report("text_classification", tmp_path / "texts", *flags)
    assert {**found, "overlap": 0} == {"cut": 1, "duplicates": 1, "single": 1, "overlap": 0}
    (part,) = parts.values()
    assert part["found"]["single"]["first"] == ["c"] and part["found"]["cut"]["first"][0].endswith(":43")


def test_faults_of_a_corpus_and_of_images(text_file, tmp_path, image_folder):
    lines = [json.loads(line) for line in text_file.read_text().splitlines()]
    file = write_lines(tmp_path / "text.jsonl", [*lines, lines[5], {"text": lines[7]["text"].upper()}])
    other = write_lines(tmp_path / "other.jsonl", lines[9:12] + [{"text": f"A text of its own {n}"} for n in range(20)])
    flags = ("--train_file", file, "--validation_file", other, "--vocab_size", 300, "--seq_length", 32)
    parts, found = report("pretrain", tmp_path / "corpus", *flags)
    assert found == {"duplicates": 2, "overlap": 3} and next(iter(parts.values()))["samples"] == 59
    assert parts["in all"]["found"]["overlap"]["first"] == ["document 1", "document 2", "document 3"]

    shutil.copytree(image_folder, tmp_path / "images")
    cats = tmp_path / "images/train/cat"
    Image.open(cats / "0.png").save(cats / "0.tiff")  # other bytes, the same pixels
    shutil.copy(tmp_path / "images/train/dog/1.png", tmp_path / "images/val/dog/seen.png")
    Image.new("L", (5, 9)).save(cats / "grey.png")
    parts, found = report("image_classification", tmp_path / "report", "--train_dir", tmp_path / "images")
    assert found == {"duplicates": 1, "overlap": 1}
    train, _, both = parts.values()
    assert train["modes"] == {"RGB": 54, "L": 1} and train["shortest"].endswith("train/cat/grey.png")
    assert train["found"]["duplicates"]["first"] == [f"{tmp_path}/images/train/cat/0.tiff"]
    assert both["found"]["overlap"]["first"] == [f"{tmp_path}/images/val/dog/seen.png"] and both["classes"]["cat"] == 20


def test_a_run_has_it_too_and_fail_on_ends_one(tiny_model, tmp_path):
    rows = plain(30, 1)
    file = write_lines(tmp_path / "chats.jsonl", [*rows, rows[2], rows[4]])
    flags = ("--model_name_or_path", tiny_model, "--train_file", file, *TINY, "--global_batch_size", 4, "--max_steps", 1)
    flags += ("--packing", "off", "--show_answers", 0, "--eval_samples", 2)
    learn_here("lora_finetune", tmp_path / "run", *flags, "--fail_on", "duplicates=2,cut", "overlap=90%")
    data = json.loads((tmp_path / "run/data.json").read_text())["parts"][str(file)]
    assert data["found"]["duplicates"]["count"] == 2 and not (tmp_path / "run/data.html").exists()
    for limit in ("duplicates", "duplicates=1", "duplicates=6%"):
        said = refusal("lora_finetune", *flags, "--fail_on", limit, "--output_dir", tmp_path / "other")
        assert said.startswith(f"--fail_on {limit}: 2 samples repeat") and said.endswith(f"first is {file}:31")
    assert "of lost, unlike" in refusal("lora_finetune", *flags, "--fail_on", "copies", "--output_dir", tmp_path / "other")
    done = run("lora_finetune", tmp_path / "two", *flags, "--fail_on", "duplicates", processes=2, check=False)
    assert done.returncode and done.output.count("error: --fail_on duplicates") == 1


def test_what_looks_like_a_secret_is_masked(tiny_model, tmp_path):
    token = "hf_" + "a1B2" * 9
    folder = tmp_path / token
    folder.mkdir()
    file = write_lines(folder / "chats.jsonl", plain(9, 1))
    report("lora_finetune", tmp_path / "secret", "--model_name_or_path", tiny_model, "--train_file", file, *TINY)
    for path in (tmp_path / "secret-data").iterdir():
        assert token not in path.read_text() and "***/chats.jsonl" in path.read_text()


def test_bad_records_are_named_together(tiny_model, tmp_path):
    rows = [chat(n if n % 3 == 0 else "Hm?", "Yes.") for n in range(40)]
    rows[12]["messages"][0]["content"] = None
    file = write_lines(tmp_path / "chats.jsonl", rows)
    with pytest.raises(ConfigError) as caught:
        run_here("lora_finetune", "--model_name_or_path", tiny_model, "--train_file", file, *TINY)
    first, second = str(caught.value).splitlines()
    places = [f"{file}:{n + 1}" for n in range(0, 40, 3)]
    others = ", ".join([*places[1:4], *places[5:12]])
    assert first.startswith(f"{places[0]}: content of message 1 is an int") and first.endswith(f" (12 more: {others}, ...)")
    assert second.startswith(f"{places[4]}: content of message 1 is null")
