"""text_classification.py, launched for real."""

import json
import random
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score, f1_score, matthews_corrcoef
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from shared.commands.verify_resume import compare
from shared.process.errors import ConfigError
from tests.conftest import WORDS, Run, run, run_here, sentence, slow

CLASSES = {"single_label": ("bad", "fair", "good"), "multi_label": ("line", "model", "text"), "regression": ("LABEL_0",)}
HERE = ("--preprocessing_num_workers", 1)  # no forks of the process that runs the tests
PAIR = ("--text_column", "premise", "--text_pair_column", "hypothesis", "--label_column", "grade")


def save_bert(folder, problem="single_label", dropout=0.0):
    """A tiny BERT classifier and a tokenizer that makes token types."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *sorted({*WORDS})])}
    words = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    words.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ends)
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    PreTrainedTokenizerFast(tokenizer_object=words, model_input_names=inputs, **names).save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=96,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        initializer_range=0.2,
        id2label=dict(enumerate(CLASSES[problem])),
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def save_llama(tiny_model, folder, problem):
    """A tiny Llama classifier, whose tokenizer has no padding token."""
    torch.manual_seed(1)
    names = dict(enumerate(CLASSES[problem]))
    AutoModelForSequenceClassification.from_pretrained(tiny_model, id2label=names, pad_token_id=None).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return folder


def make_records(count, seed, problem):
    """Texts of 1 to 40 words whose labels follow from their words, some of them wrong."""
    rng, records = random.Random(seed), []
    for number in range(count):
        text, other = (sentence(rng, rng.choice([1, 3, 12, 40])) for _ in range(2))
        share = sum(word in ("model", "line", "text", "next") for word in text.split()) / len(text.split())
        label = {
            "single_label": CLASSES["single_label"][min(2, int(8 * share))],
            "multi_label": [name for name in CLASSES["multi_label"] if (name in text.split()) != (number % 11 == 0)],
            "regression": round(4 * share, 2) + number % 3,
        }[problem]
        records.append({"premise": text, "hypothesis": other, "grade": label, "note": "not used"})
    return records


def write(folder, problem="single_label", counts=(29, 13)):
    """Flags of train.jsonl and val.jsonl, and their records."""
    folder.mkdir(parents=True, exist_ok=True)
    made = [make_records(count, seed, problem) for seed, count in enumerate(counts)]
    for name, records in zip(("train", "val"), made, strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ("--train_file", folder / "train.jsonl", "--validation_file", folder / "val.jsonl"), made


def evaluation(folder) -> dict:
    return json.loads((folder / "evaluation.json").read_text())


def scores_of(folder, records, pairs):
    """What a pipeline with final/ says: [texts, labels], in the order of the model's classes."""
    classify = pipeline("text-classification", model=str(folder / "final"), device="cpu", truncation=True, top_k=None)
    texts = [{"text": r["premise"], "text_pair": r["hypothesis"]} if pairs else r["premise"] for r in records]
    names = [*classify.model.config.id2label.values()]
    answers = [{answer["label"]: answer["score"] for answer in of_one} for of_one in classify(texts)]
    return np.array([[answer[name] for name in names] for answer in answers])


@pytest.mark.parametrize(
    ("architecture", "problem", "pairs"),
    [
        ("bert", "single_label", True),
        ("llama", "multi_label", False),
        ("bert", "regression", True),
        slow("llama", "single_label", True),
        slow("llama", "regression", False),
        slow("bert", "multi_label", False),
    ],
)
def test_equals_a_plain_loop_and_the_pipeline(tiny_model, tmp_path, architecture, problem, pairs):
    """A loop with one text at a time, without any padding, and transformers' own loss; nothing of shared/."""
    flags, (train, val) = write(tmp_path / "data", problem)
    name = tmp_path / "model"
    save_bert(name, problem) if architecture == "bert" else save_llama(tiny_model, name, problem)
    steps, rate, folder = 4, 3e-3, tmp_path / "run"
    weighted = ("--class_weights", "balanced", "--label_smoothing", 0.1) if problem == "single_label" else ()
    columns = PAIR if pairs else (*PAIR[:2], *PAIR[4:])
    run_here(
        *("text_classification", *flags, *columns, *weighted, "--model_name_or_path", name, "--output_dir", folder),
        *("--learning_rate", rate, "--weight_decay", 0, "--lr_scheduler_type", "constant", "--warmup_steps", 0),
        *("--max_steps", steps, "--max_grad_norm", 0, "--global_batch_size", len(train), "--seq_length", 90),
        *("--per_device_train_batch_size", len(train), "--metric_for_best_model", "none"),
        *("--per_device_eval_batch_size", 4, *HERE),
    )

    tokenizer = AutoTokenizer.from_pretrained(name)
    kind = "regression" if problem == "regression" else f"{problem}_classification"
    model = AutoModelForSequenceClassification.from_pretrained(name, problem_type=kind, dtype=torch.float32)
    classes = CLASSES[problem]

    def forward(record):
        encoded = tokenizer(record["premise"], record["hypothesis"] if pairs else None, return_tensors="pt")
        label = record["grade"]
        if problem == "single_label":
            target = torch.tensor([classes.index(label)])
        elif problem == "multi_label":
            target = torch.tensor([[float(name in label) for name in classes]])
        else:
            target = torch.tensor([label])
        return model(**encoded, labels=target), target

    def loss_of(record):
        output, target = forward(record)
        if not weighted:
            return output.loss
        weight = len(train) / len(classes) / counts[record["grade"]]
        return weight * cross_entropy(output.logits, target, label_smoothing=0.1, reduction="sum")

    counts = Counter(record["grade"] for record in train) if weighted else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
    losses = []
    for _ in range(steps):
        loss = torch.stack([loss_of(record) for record in train]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    theirs = Run(folder, 0, "")
    assert [*theirs.losses.values()] == pytest.approx(losses, rel=1e-5)
    with torch.no_grad():
        model.eval()
        found = [forward(record) for record in val]
    logits, targets = torch.cat([output.logits for output, _ in found]), torch.cat([target for _, target in found])
    expected = torch.stack([output.loss for output, _ in found]).mean().item()
    assert theirs.last("eval_loss") == pytest.approx(expected, rel=1e-4)

    report, config = evaluation(folder), json.loads((folder / "final/config.json").read_text())
    assert (report["texts"], config["problem_type"]) == (len(val), kind)
    served, labels = scores_of(folder, val, pairs), targets.numpy()
    if problem == "single_label":
        assert served == pytest.approx(logits.softmax(1).numpy(), abs=1e-4)
        predicted = logits.argmax(1).numpy()
        f1 = f1_score(labels, predicted, average=None, labels=range(3), zero_division=0)
        assert report["accuracy"] == pytest.approx((predicted == labels).mean())
        assert report["matthews"] == pytest.approx(matthews_corrcoef(labels, predicted))
        assert [report["classes"][name]["f1"] for name in classes] == pytest.approx(f1.tolist())
        assert [*config["label2id"]] == [*classes]
        assert (folder / "confusion_matrix.png").exists() and len(report["mistakes"]) == (predicted != labels).sum()
        for mistake in report["mistakes"]:
            number = int(mistake["where"].rpartition(":")[2]) - 1
            assert mistake["label"] == val[number]["grade"] and mistake["confidence"] == pytest.approx(
                served[number].max(), abs=1e-3
            )
            assert mistake["premise"] == val[number]["premise"] and "grade" not in mistake
    elif problem == "multi_label":
        assert served == pytest.approx(logits.sigmoid().numpy(), abs=1e-4)
        assert report["map"] == pytest.approx(average_precision_score(labels, logits.numpy(), average="macro"), abs=1e-5)
        predicted = served >= np.array([config["thresholds"][name] for name in classes])
        assert report["macro_f1"] == pytest.approx(f1_score(labels, predicted, average="macro"), abs=1e-5)
    else:
        assert served == pytest.approx(logits.numpy(), abs=1e-4)
        assert report["pearson"] == pytest.approx(pearsonr(labels, logits[:, 0]).statistic, abs=1e-4)
        assert report["spearman"] == pytest.approx(spearmanr(labels, logits[:, 0]).statistic, abs=1e-3)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Flags of a tiny run whose epochs end in a ragged global batch, with adapters."""
    folder = tmp_path_factory.mktemp("base")
    flags, _ = write(folder / "data", counts=(53, 17))
    return (
        *(*flags, *PAIR, "--model_name_or_path", save_bert(folder / "model"), "--learning_rate", 3e-3, "--seq_length", 64),
        *("--global_batch_size", 8, "--per_device_eval_batch_size", 4, "--max_steps", 12, "--eval_steps", 6),
        *("--save_steps", 4, "--ema_decay", 0.5, "--audit_data"),
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return run("text_classification", tmp_path_factory.mktemp("one"), *base, "--per_device_train_batch_size", 8)


@pytest.mark.parametrize(
    ("per_device", "config", "strategy"),
    [
        (2, "ddp", "DDP x 2 on cpu, fp32"),
        (4, "fsdp2", "FSDP2 x 2 on cpu, fp32"),
        slow(4, "deepspeed_zero2", "ZeRO-2 x 2 on cpu, fp32"),
    ],
)
def test_two_processes_learn_what_one_learns(one_process, base, tmp_path, per_device, config, strategy):
    flags = (*base, "--per_device_train_batch_size", per_device)
    flags = (*flags, "--ema_decay", 0) if "zero" in config else flags
    other = run("text_classification", tmp_path, *flags, processes=2, config=config)
    assert other.manifest(12)["strategy"] == strategy
    assert [*other.losses.values()] == pytest.approx([*one_process.losses.values()], rel=1e-5)
    if "zero" not in config:
        for key in ("eval_loss", "eval_accuracy", "eval_macro_f1", "eval_matthews"):
            assert other.last(key) == pytest.approx(one_process.last(key), rel=1e-4)
    counts = [row["texts"] for row in one_process.rows if "texts" in row]
    assert set(np.diff([0, *counts]).tolist()) == {8, 5}  # a ragged batch, filled up to the size of the others
    assert evaluation(other.folder)["texts"] == 17


@pytest.mark.slow
def test_a_decoder_is_cut_by_tensor_parallelism(base, tiny_model, tmp_path):
    flags = (*base, "--model_name_or_path", tiny_model, "--per_device_train_batch_size", 8)
    one = run("text_classification", tmp_path / "one", *flags)
    other = run("text_classification", tmp_path / "cut", *flags, processes=2, config="tensor_parallel")
    assert other.manifest(12)["strategy"] == "TP 2 on cpu, fp32"
    assert other.losses == pytest.approx(one.losses, rel=1e-5)
    assert other.last("eval_loss") == pytest.approx(one.last("eval_loss"), rel=1e-5)
    assert evaluation(other.folder)["texts"] == evaluation(one.folder)["texts"] == 17


def test_adapters_are_killed_and_resumed_bit_for_bit_and_serve_as_they_were_measured(base, tmp_path):
    """With dropout. final/ is the base with the adapters merged in; what they do not reach is as it was."""
    model = save_bert(tmp_path / "model", dropout=0.1)
    flags = (*base, "--per_device_train_batch_size", 4, "--lora_r", 4, "--lora_alpha", 8, "--model_name_or_path", model)
    flags = (*flags, "--ema_decay", 0)
    whole = run("text_classification", tmp_path / "whole", *flags)
    for fault in ("update:kill@7", "evaluation:kill@1", "finish:kill"):
        killed = run("text_classification", tmp_path / "run", *flags, env={"TEMPLATES_FAULT": fault}, check=False)
        assert killed.returncode != 0 and not (tmp_path / "run/final").exists()
    again = run("text_classification", tmp_path / "run", *flags)
    assert compare(whole.folder, again.folder) == dict.fromkeys(compare(whole.folder, again.folder), "")
    assert all(torch.equal(weight, whole.weights()[name]) for name, weight in again.weights().items())

    val = make_records(17, 1, "single_label")
    served, report = scores_of(again.folder, val, pairs=True), evaluation(again.folder)
    labels = [CLASSES["single_label"].index(record["grade"]) for record in val]
    assert -np.log(served[range(17), labels]).mean() == pytest.approx(report["loss"], rel=1e-4)
    before, after = (
        AutoModelForSequenceClassification.from_pretrained(f).state_dict() for f in (model, again.folder / "final")
    )
    changed = {name.rpartition(".")[0] for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {"classifier", "bert.pooler.dense", "bert.encoder.layer.1.attention.self.query"} <= changed
    assert not any("embeddings" in name or "LayerNorm" in name for name in changed)
    assert {path.name for path in (again.folder / "adapter").iterdir()} >= {"adapter_model.safetensors"}


@pytest.mark.parametrize("flags", [("--gradient_checkpointing", "full"), slow(("--torch_compile",))])
def test_speed_and_memory_flags_do_not_change_what_is_learned(one_process, base, tmp_path, flags):
    run_here("text_classification", *base, *HERE, "--per_device_train_batch_size", 4, "--output_dir", tmp_path, *flags)
    other = Run(tmp_path, 0, "")
    assert [*other.losses.values()] == pytest.approx([*one_process.losses.values()], rel=1e-4)


def test_columns_files_and_heads(base, tmp_path, capsys):
    """Names are found, unused columns told, class numbers put in order, heads of other classes replaced."""
    rows = "".join(f'"the model, line {n}",{n % 2 * 10},x\n' for n in range(40))
    (tmp_path / "data.csv").write_text("sentence,label,extra\n" + rows)
    flags = ("--train_file", tmp_path / "data.csv", "--model_name_or_path", base[base.index("--model_name_or_path") + 1])
    flags = (*flags, "--max_steps", 2, "--global_batch_size", 4, "--seq_length", 8)
    run_here("text_classification", *flags, *HERE, "--output_dir", tmp_path / "run")
    said = " ".join((capsys.readouterr().err + (tmp_path / "run/summary.txt").read_text()).split())
    assert "single_label; 36 texts to train on (0: 18, 10: 18), " in said
    assert "4 to validate on, 10% of each class held out; not used: extra" in said and "a new head for 2 classes" in said
    assert json.loads((tmp_path / "run/final/config.json").read_text())["id2label"] == {"0": "0", "1": "10"}
    again = ("--model_name_or_path", tmp_path / "run/final", "--metric_for_best_model", "matthews")
    run_here("text_classification", *flags, *HERE, *again, "--output_dir", tmp_path / "again")
    assert "its head is kept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "flags", "message"),
    [
        ([{"text": "a", "label": "x"}], (), ":1 and after: only one class, 'x'"),
        ([{"text": "", "label": "x"}], (), ":1: 'text' is empty, expected text"),
        (
            [{"words": "a", "label": "x"}],
            (),
            ":1: no column text or sentence (has: words, label); name it",
        ),
        (
            [{"text": "a", "label": 0.5}, {"text": "a", "label": "x"}],
            ("--problem_type", "regression"),
            ":2: the label is 'x'",
        ),
        ([{"text": "a", "label": "x|y"}], (), "for several labels add --problem_type multi_label"),
        ([{"text": "a", "label": n % 2} for n in range(40)], ("--seq_length", 200), "longer than the model's context of 96"),
        (
            [{"text": "a", "label": n % 2} for n in range(4)],
            ("--global_batch_size", 16),
            "2 training samples are fewer than one --global_batch_size",
        ),
        (
            [{"text": "a", "label": n % 2} for n in range(40)],
            ("--metric_for_best_model", "spearman"),
            "spearman: an evaluation of this run measures loss, accuracy, macro_f1, balanced_accuracy, matthews",
        ),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, records, flags, message):
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    model = ("--model_name_or_path", base[base.index("--model_name_or_path") + 1], "--seq_length", 16)
    with pytest.raises(ConfigError) as caught:
        run_here(
            "text_classification", "--train_file", tmp_path / "data.jsonl", *model, "--output_dir", tmp_path / "run", *flags
        )
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_unknown_label_to_validate_on_is_named(base, tmp_path):
    val = tmp_path / "val.jsonl"
    val.write_text(json.dumps({"premise": "a", "hypothesis": "b", "grade": "excellent"}) + "\n")
    flags = [val if str(flag).endswith("val.jsonl") else flag for flag in base]
    with pytest.raises(ConfigError, match=r"val.jsonl:1: the label 'excellent' is none of .* \(bad, fair, good\)"):
        run_here("text_classification", *flags, *HERE, "--output_dir", tmp_path / "run")


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    run("text_classification", tmp_path, "--num_train_epochs", 1)
    assert evaluation(tmp_path)["accuracy"] > 0.4  # of 8 classes
