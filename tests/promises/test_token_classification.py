"""token_classification.py, launched for real."""

import csv
import json
import math
import random
from functools import partial

import numpy as np
import pytest
import torch
from seqeval.metrics import classification_report
from seqeval.metrics.sequence_labeling import get_entities
from torch.nn.functional import cross_entropy
from transformers import AutoModelForTokenClassification, AutoTokenizer, BertForTokenClassification, pipeline

from tests.conftest import WORDS, learn_here, refusal, run, slow, write_lines
from tests.plain_loop import losses_of
from tests.same import assert_goes_on, assert_same_learning
from tests.small_models import save_bert

learn = partial(learn_here, "token_classification")
KINDS = ("LINE", "NEXT", "MODEL")
TAGS = ("O", *(f"{mark}-{kind}" for kind in KINDS for mark in "BI"))  # as the data's own, sorted by kind
HERE = ("--preprocessing_num_workers", 1)  # no forks of the process that runs the tests


def bert(folder, dropout=0.0):
    return save_bert(folder, BertForTokenClassification, cut=True, dropout=dropout, id2label=dict(enumerate(TAGS)))


def make_records(count, seed, longest=12):
    """Words whose tags follow from them: one word or two after each that is a kind is of its span."""
    rng, records = random.Random(seed), []
    for _ in range(count):
        words = [rng.choice(WORDS) for _ in range(rng.randint(1, longest))]
        tags = ["O"] * len(words)
        for n, word in enumerate(words):
            if word.upper() in KINDS and tags[n] == "O":
                tags[n] = f"B-{word.upper()}"
                for m in range(n + 1, min(len(words), n + 1 + len(word) % 3)):
                    tags[m] = f"I-{word.upper()}"
        records.append({"tokens": words, "tags": tags})
    return records


def write(folder, counts=(29, 13), longest=12):
    """Flags of train.jsonl and val.jsonl, and their records."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [make_records(count, seed, longest) for seed, count in enumerate(counts)]
    train, val = (write_lines(folder / f"{name}.jsonl", each) for name, each in zip(("train", "val"), made, strict=True))
    return ("--train_file", train, "--validation_file", val), made


@pytest.mark.parametrize("pieces", ["first", "all"])
def test_equals_a_plain_loop_and_seqeval(tmp_path, pieces):
    """A loop with one text at a time, split into words as transformers' example has it; nothing of shared/."""
    flags, (train, val) = write(tmp_path / "data")
    name = bert(tmp_path / "model")
    steps, rate = 4, 3e-3
    theirs = learn(
        *(tmp_path / "run", *flags, "--model_name_or_path", name, "--class_weights", "balanced", "--label_smoothing", 0.1),
        *("--learning_rate", rate, "--weight_decay", 0, "--lr_scheduler_type", "constant", "--warmup_steps", 0),
        *("--max_steps", steps, "--max_grad_norm", 0, "--global_batch_size", len(train), "--seq_length", 64),
        *("--per_device_train_batch_size", len(train), "--metric_for_best_model", "none", "--label_pieces", pieces),
        *("--per_device_eval_batch_size", 4, *HERE),
    )
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForTokenClassification.from_pretrained(name, dtype=torch.float32)
    counts = {tag: sum(record["tags"].count(tag) for record in train) for tag in TAGS}
    weight = torch.tensor([sum(counts.values()) / len(TAGS) / counts[tag] for tag in TAGS])

    def forward(record):
        encoded = tokenizer(record["tokens"], is_split_into_words=True, return_tensors="pt")
        labels, firsts, before = [], [], None
        for place, word in enumerate(encoded.word_ids()):
            tag = "" if word is None else record["tags"][word]
            if word is not None and word != before:
                labels.append(TAGS.index(tag))
                firsts.append(place)
            elif word is not None and pieces == "all":
                labels.append(TAGS.index(tag.replace("B-", "I-")))
            else:
                labels.append(-100)
            before = word
        return model(**encoded).logits[0], torch.tensor(labels), firsts

    def losses(record):
        logits, labels, _ = forward(record)
        each = cross_entropy(logits, labels, label_smoothing=0.1, reduction="none")
        return (each * weight[labels.clamp(min=0)])[labels >= 0]

    plain = losses_of(model, lambda: torch.cat([*map(losses, train)]).mean(), steps, rate)
    assert theirs.each("loss") == pytest.approx([*plain], rel=1e-5)
    with torch.no_grad():
        model.eval()
        found = [forward(record) for record in val]
    each = torch.cat([cross_entropy(logits, labels, reduction="none")[labels >= 0] for logits, labels, _ in found])
    assert theirs.last("eval_loss") == pytest.approx(each.mean().item(), rel=1e-4)

    said = [[TAGS[n] for n in logits.argmax(1)[firsts]] for logits, _, firsts in found]
    real = [record["tags"] for record in val]
    expected = classification_report(real, said, output_dict=True, zero_division=0)
    report = theirs.evaluation
    for figure, theirs_name in (("precision", "precision"), ("recall", "recall"), ("f1", "f1-score")):
        assert report[figure] == pytest.approx(expected["micro avg"][theirs_name], abs=1e-12)
    assert report["macro_f1"] == pytest.approx(expected["macro avg"]["f1-score"], abs=1e-12)
    for kind in KINDS:
        assert report["spans"][kind]["f1"] == pytest.approx(expected[kind]["f1-score"], abs=1e-12)
        assert report["spans"][kind]["support"] == expected[kind]["support"]
    flat = [np.concatenate(side) for side in (real, said)]
    assert report["accuracy"] == pytest.approx((flat[0] == flat[1]).mean()) and report["texts"] == len(val)
    assert sum(figures["support"] for figures in report["tags"].values()) == len(flat[0])
    assert all(mistake["label"] != mistake["predicted"] for mistake in report["mistakes"]) and report["mistakes"]
    assert (theirs.folder / "confusion_matrix.png").exists()
    with (theirs.folder / "predictions.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert sorted(row["text"] for row in rows) == sorted(" ".join(record["tokens"]) for record in val)


@pytest.mark.slow
def test_equals_transformers_trainer(tmp_path):
    """As its example run_ner.py uses it, at equal settings: losses, and F1 to the last digit."""
    from datasets import Dataset
    from transformers import DataCollatorForTokenClassification, Trainer, TrainingArguments

    flags, (train, val) = write(tmp_path / "data")
    name = bert(tmp_path / "model")
    common = ("--learning_rate", 3e-3, "--weight_decay", 0, "--lr_scheduler_type", "linear", "--warmup_steps", 0)
    ours = learn(
        *(tmp_path / "run", *flags, "--model_name_or_path", name, *common, "--max_steps", 60, "--max_grad_norm", 1.0),
        *("--global_batch_size", len(train), "--per_device_train_batch_size", len(train), "--seq_length", 64, *HERE),
        *("--metric_for_best_model", "none", "--eval_steps", 60),
    )
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForTokenClassification.from_pretrained(name, dtype=torch.float32)

    def encoded(records):
        texts = tokenizer([record["tokens"] for record in records], is_split_into_words=True)
        labels = []
        for number, record in enumerate(records):
            words = texts.word_ids(number)
            first = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
            labels.append([TAGS.index(record["tags"][w]) if f else -100 for w, f in zip(words, first, strict=True)])
        return Dataset.from_dict(texts.data | {"labels": labels})

    settings = {"per_device_train_batch_size": len(train), "max_steps": 60, "learning_rate": 3e-3, "logging_steps": 1}
    settings |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path / "trainer"), **settings),
        train_dataset=encoded(train),
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )
    trainer.train()
    theirs = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert ours.each("loss") == pytest.approx(theirs, abs=1e-4)  # which it rounds to four digits
    logits, labels, _ = trainer.predict(encoded(val))
    said = [[TAGS[n] for n in row[mask]] for row, mask in zip(logits.argmax(-1), labels >= 0, strict=True)]
    expected = classification_report([record["tags"] for record in val], said, output_dict=True, zero_division=0)
    assert ours.evaluation["f1"] == pytest.approx(expected["micro avg"]["f1-score"], abs=1e-15) != 0


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Flags of a tiny run with texts of several windows, whose epochs end in a ragged global batch."""
    folder = tmp_path_factory.mktemp("base")
    flags, _ = write(folder / "data", counts=(45, 17), longest=40)
    return (
        *(*flags, "--model_name_or_path", bert(folder / "model"), "--learning_rate", 3e-3, "--seq_length", 24),
        *("--global_batch_size", 8, "--per_device_eval_batch_size", 4, "--max_steps", 12, "--eval_steps", 6),
        *("--save_steps", 4, "--audit_data"),
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return learn(tmp_path_factory.mktemp("one"), *base, *HERE, "--per_device_train_batch_size", 8)


@pytest.mark.parametrize(
    ("per_device", "processes", "config"),
    [(2, 2, "ddp"), (4, 2, "fsdp2"), slow(2, 4, "hsdp"), slow(2, 2, "deepspeed_zero2")],
)
def test_processes_learn_what_one_learns(one_process, base, tmp_path, per_device, processes, config):
    flags = (*base, "--per_device_train_batch_size", per_device)
    other = run("token_classification", tmp_path, *flags, processes=processes, config=config)
    assert_same_learning(one_process, other, atol=None, keys=("eval_f1", "eval_accuracy"), but="key.bias")
    assert other.evaluation["texts"] == 17
    assert all(one_process.evaluation[name] == other.evaluation[name] for name in ("f1", "tags"))


def test_adapters_resume_bit_for_bit_and_serve_as_they_were_measured(base, tmp_path):
    """With dropout. final/ is the base with the adapters merged in. Killed: test_text_classification.py."""
    model = bert(tmp_path / "model", dropout=0.1)
    flags = (*base, *HERE, "--per_device_train_batch_size", 4, "--lora_r", 4, "--model_name_or_path", model)
    whole = learn(tmp_path / "whole", *flags, "--save_total_limit", 9)
    again = learn(tmp_path / "run", *flags, "--resume_from_checkpoint", tmp_path / "whole/checkpoint-000004")
    assert_goes_on(whole, again, 4)
    given = ("--model_name_or_path", again.folder / "final", "--max_steps", 0, "--per_device_train_batch_size", 4)
    merged = learn(tmp_path / "merged", *base, *HERE, *given)
    assert merged.last("eval_loss") == pytest.approx(again.last("eval_loss"), rel=1e-5)
    assert {path.name for path in (again.folder / "adapter").iterdir()} >= {"adapter_model.safetensors"}


def test_a_pipeline_finds_the_spans_of_the_run(tmp_path):
    """It reads each token of a word, so all are learned."""
    flags, (_, val) = write(tmp_path / "data", counts=(300, 40), longest=9)
    done = learn(
        *(tmp_path / "run", *flags, "--model_name_or_path", bert(tmp_path / "model"), "--label_pieces", "all", *HERE),
        *("--learning_rate", 4e-3, "--max_steps", 120, "--eval_steps", 60, "--global_batch_size", 16, "--seq_length", 64),
    )
    assert done.evaluation["f1"] > 0.2
    model = str(done.folder / "final")
    each = pipeline("token-classification", model=model, ignore_labels=[], device="cpu")
    simple = pipeline("token-classification", model=model, aggregation_strategy="simple", device="cpu")
    with (done.folder / "predictions.csv").open(newline="") as file:
        rows = {row["text"]: row["predicted"] for row in csv.DictReader(file)}
    same = []
    for record in val:
        text = " ".join(record["tokens"])
        tag_at = {one["start"]: one["entity"] for one in each(text)}
        starts = np.cumsum([0, *(len(word) + 1 for word in record["tokens"])])[:-1].tolist()
        found = get_entities([tag_at[start] for start in starts])
        said = [f"{kind}: {' '.join(record['tokens'][first : last + 1])}" for kind, first, last in found]
        assert " | ".join(said) == rows[text]  # read at the first token of each word
        said = [f"{one['entity_group']}: {text[one['start'] : one['end']]}" for one in simple(text)]
        same.append(" | ".join(said) == rows[text])
    assert 'aggregation_strategy="simple"' in (done.folder / "final/README.md").read_text()
    assert any(rows.values()) and sum(same) > len(same) / 2  # the tokens of a word may disagree


@pytest.mark.parametrize("how", ["--freeze_backbone", slow("decoder")])
def test_a_frozen_backbone_and_a_decoder(base, tiny_model, tmp_path, how):
    """Of a decoder's words all tokens are learned, unless a flag says otherwise."""
    given = (how,) if how != "decoder" else ("--model_name_or_path", tiny_model)
    done = learn(tmp_path / "run", *base, *HERE, "--per_device_train_batch_size", 8, *given)
    assert done.last("eval_loss") < done.each("eval_loss")[0] and (done.folder / "predictions.csv").exists()
    assert ("all tokens" if how == "decoder" else "the first token") + " of each word" in done.summary
    if how != "decoder":
        before = AutoModelForTokenClassification.from_pretrained(base[base.index("--model_name_or_path") + 1]).state_dict()
        after = AutoModelForTokenClassification.from_pretrained(done.folder / "final").state_dict()
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed == {"classifier.weight", "classifier.bias"}


PLAIN = [{"tokens": ["a", "line"], "tags": ["O", "B-X"]}] * 30


@pytest.mark.parametrize(
    ("records", "flags", "message"),
    [
        ([{"tokens": ["a", "b"], "tags": ["O"]}], (), ":1: 2 words have 1 tags"),
        ([{"tokens": ["a", " "], "tags": ["O", "O"]}], (), ":1: a word is a str, expected text"),
        ([{"tokens": ["a"], "tags": [None]}], (), ":1: the tag of 'a' is null, expected a name or a number"),
        ([{"tokens": ["a"], "tags": [7]}], ("--tag_names", "O", "X"), ":1: the tag 7 has no name among the 2"),
        ([{"tokens": ["a"]}], (), ":1: no column tags or ner_tags or labels: name it by --tags_column"),
        ([{"text": "ab cd", "entities": [[0, 4, "X"], [3, 5, "Y"]]}], (), ":1: X from 0 and Y from 3 overlap"),
        (
            [{"text": "ab cd", "entities": [{"start": 2, "end": 3, "label": "X"}]}],
            (),
            ":1: X from 2 to 3 is no part of the 5 characters",
        ),
        ([{"text": "ab cd", "entities": [{"start": 2, "label": "X"}]}], (), "is no entity, expected start, end and label"),
        ([{"prompt": "a", "completion": "b"}], (), ":1: expected tokens and tags, or text and entities"),
        ([{"tokens": ["a"], "tags": []}, *PLAIN, {"tokens": ["b"], "tags": []}], (), ":1: 1 words have 0 tags (1 more: "),
        (PLAIN[:1], (), "no text to validate on"),
        (["word B-X\nword"], (), ":2: 1 column(s), 2 before; expected tokens and tags"),
        ([{"tokens": ["a"], "tags": ["O"]}] * 30, (), "only one tag to train on, 'O'"),
        (PLAIN, ("--validation_file", "{other}"), ":1: the tag 'B-Y' is none of the training data (O, B-X, I-X)"),
        (PLAIN, ("--seq_length", 200), "longer than the model's context of 96"),
        (PLAIN, ("--freeze_backbone", "--lora_r", 2), "--freeze_backbone and --lora_r say what is trained: drop one"),
        (PLAIN, ("--metric_for_best_model", "map"), "map: an evaluation of this run measures loss, precision, recall, f1"),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, records, flags, message):
    file = tmp_path / ("data.conll" if isinstance(records[0], str) else "data.jsonl")
    file.write_text(records[0]) if file.suffix == ".conll" else write_lines(file, records)
    other = write_lines(tmp_path / "other.jsonl", [{"tokens": ["a"], "tags": ["B-Y"]}])
    model = ("--model_name_or_path", base[base.index("--model_name_or_path") + 1], "--seq_length", 16)
    flags = [str(flag).format(other=other) for flag in flags]
    given = ("--train_file", file, *model, "--output_dir", tmp_path / "run", "--global_batch_size", 4, *flags)
    assert message in refusal("token_classification", *given)


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    done = run("token_classification", tmp_path, "--max_steps", 60)
    assert done.evaluation["f1"] > 0.2
    assert not math.isnan(done.last("eval_loss")) and json.loads((done.folder / "data.json").read_text())
