"""text_classification.py, launched for real."""

import itertools
import json
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import average_precision_score, f1_score, matthews_corrcoef
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertForSequenceClassification, pipeline

from tests.conftest import continued, learn_here, refusal, run, sentence, write_lines
from tests.plain_loop import losses_of
from tests.same import assert_same_bits, assert_same_learning
from tests.small_models import save_bert

learn = partial(learn_here, "text_classification")

CLASSES = {"single_label": ("bad", "fair", "good"), "multi_label": ("line", "model", "text"), "regression": ("LABEL_0",)}
HERE = ("--preprocessing_num_workers", 1)  # no forks of the process that runs the tests
PAIR = ("--text_column", "premise", "--text_pair_column", "hypothesis", "--label_column", "grade")


def bert(folder, problem="single_label", dropout=0.0):
    return save_bert(folder, BertForSequenceClassification, dropout=dropout, id2label=dict(enumerate(CLASSES[problem])))


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
    train, val = (write_lines(folder / f"{name}.jsonl", each) for name, each in zip(("train", "val"), made, strict=True))
    return ("--train_file", train, "--validation_file", val), made


def scores_of(folder, records, pairs):
    """What a pipeline with final/ says: [texts, labels], in the order of the model's classes."""
    classify = pipeline("text-classification", model=str(folder / "final"), device="cpu", truncation=True, top_k=None)
    texts = [{"text": r["premise"], "text_pair": r["hypothesis"]} if pairs else r["premise"] for r in records]
    names = [*classify.model.config.id2label.values()]
    answers = [{answer["label"]: answer["score"] for answer in of_one} for of_one in classify(texts)]
    return np.array([[answer[name] for name in names] for answer in answers])


@pytest.mark.parametrize("problem", CLASSES)
def test_equals_a_plain_loop_and_the_pipeline(tiny_model, tmp_path, problem):
    """A loop with one text or pair at a time, without any padding, and transformers' own loss; nothing of shared/."""
    flags, (train, val) = write(tmp_path / "data", problem)
    name, pairs = tmp_path / "model", problem != "multi_label"
    bert(name, problem) if pairs else save_llama(tiny_model, name, problem)
    steps, rate = 4, 3e-3
    weighted = ("--class_weights", "balanced", "--label_smoothing", 0.1) if problem != "regression" else ()
    columns = PAIR if pairs else (*PAIR[:2], *PAIR[4:])
    theirs = learn(
        *(tmp_path / "run", *flags, *columns, *weighted, "--model_name_or_path", name),
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

    def loss_of_one(record):
        output, target = forward(record)
        if problem == "single_label":
            weight = len(train) / len(classes) / counts[record["grade"]]
            return weight * cross_entropy(output.logits, target, label_smoothing=0.1, reduction="sum")
        if problem == "multi_label":  # a yes weighs as all noes of its class to all yeses
            weight = torch.tensor([len(train) / counts[name] - 1 for name in classes])
            smooth = target * 0.9 + 0.05
            return binary_cross_entropy_with_logits(output.logits, smooth, torch.where(target == 1, weight, 1.0))
        return output.loss

    grades = [record["grade"] for record in train]
    counts = Counter(itertools.chain(*grades) if problem == "multi_label" else grades)
    losses = losses_of(model, lambda: torch.stack([*map(loss_of_one, train)]).mean(), steps, rate)
    assert theirs.each("loss") == pytest.approx([*losses], rel=1e-5)
    with torch.no_grad():
        model.eval()
        found = [forward(record) for record in val]
    logits, targets = torch.cat([output.logits for output, _ in found]), torch.cat([target for _, target in found])
    expected = torch.stack([output.loss for output, _ in found]).mean().item()
    assert theirs.last("eval_loss") == pytest.approx(expected, rel=1e-4)

    report, config = theirs.evaluation, json.loads((theirs.folder / "final/config.json").read_text())
    assert (report["texts"], config["problem_type"]) == (len(val), kind)
    served, labels = scores_of(theirs.folder, val, pairs), targets.numpy()
    if problem == "single_label":
        assert served == pytest.approx(logits.softmax(1).numpy(), abs=1e-4)
        predicted = logits.argmax(1).numpy()
        f1 = f1_score(labels, predicted, average=None, labels=range(3), zero_division=0)
        assert report["accuracy"] == pytest.approx((predicted == labels).mean())
        assert report["matthews"] == pytest.approx(matthews_corrcoef(labels, predicted))
        assert [report["classes"][name]["f1"] for name in classes] == pytest.approx(f1.tolist())
        assert [*config["label2id"]] == [*classes]
        assert (theirs.folder / "confusion_matrix.png").exists() and len(report["mistakes"]) == (predicted != labels).sum()
        for mistake in report["mistakes"]:
            number = int(mistake["where"].rpartition(":")[2]) - 1
            assert mistake["label"] == val[number]["grade"]
            assert mistake["confidence"] == pytest.approx(served[number].max(), abs=1e-3)
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
        *(*flags, *PAIR, "--model_name_or_path", bert(folder / "model"), "--learning_rate", 3e-3, "--seq_length", 64),
        *("--global_batch_size", 8, "--per_device_eval_batch_size", 4, "--max_steps", 12, "--eval_steps", 6),
        *("--save_steps", 4, "--ema_decay", 0.5, "--audit_data"),
    )


@pytest.fixture(scope="module")
def one_process(base, tmp_path_factory):
    return learn(tmp_path_factory.mktemp("one"), *base, *HERE, "--per_device_train_batch_size", 8)


@pytest.mark.parametrize(("per_device", "config"), [(2, "ddp"), (4, "fsdp2")])
def test_two_processes_learn_what_one_learns(one_process, base, tmp_path, per_device, config):
    """FSDP2 also recomputes blocks."""
    flags = (*base, "--per_device_train_batch_size", per_device)
    flags += ("--gradient_checkpointing", "full") if config == "fsdp2" else ()
    other = run("text_classification", tmp_path, *flags, processes=2, config=config)
    scores = ("eval_accuracy", "eval_macro_f1", "eval_matthews")
    assert_same_learning(one_process, other, atol=None, keys=scores, but="key.bias")
    assert {*np.diff([0, *one_process.each("texts")]).tolist()} == {8, 5}  # a ragged batch, filled up to the others' size
    assert other.evaluation["texts"] == 17


@pytest.mark.slow
def test_a_decoder_is_cut_by_tensor_parallelism(base, tiny_model, tmp_path):
    flags = (*base, "--model_name_or_path", tiny_model, "--per_device_train_batch_size", 8)
    one = learn(tmp_path / "one", *flags, *HERE)
    other = run("text_classification", tmp_path / "cut", *flags, processes=2, config="tensor_parallel")
    assert_same_learning(one, other, atol=None)
    assert other.evaluation["texts"] == one.evaluation["texts"] == 17


def test_adapters_are_killed_and_resumed_bit_for_bit_and_serve_as_they_were_measured(base, tmp_path):
    """With dropout. final/ is the base with the adapters merged in; what they do not reach is as it was."""
    model = bert(tmp_path / "model", dropout=0.1)
    flags = (*base, "--per_device_train_batch_size", 4, "--lora_r", 4, "--lora_alpha", 8, "--model_name_or_path", model)
    flags = (*flags, "--ema_decay", 0)
    whole = run("text_classification", tmp_path / "whole", *flags)
    again = continued("text_classification", tmp_path / "run", "update:kill@7", *flags)
    assert_same_bits(whole, again)

    val = make_records(17, 1, "single_label")
    served = scores_of(again.folder, val, pairs=True)
    labels = [CLASSES["single_label"].index(record["grade"]) for record in val]
    assert -np.log(served[range(17), labels]).mean() == pytest.approx(again.evaluation["loss"], rel=1e-4)
    folders = (model, again.folder / "final")
    before, after = (AutoModelForSequenceClassification.from_pretrained(folder).state_dict() for folder in folders)
    changed = {name.rpartition(".")[0] for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {"classifier", "bert.pooler.dense", "bert.encoder.layer.1.attention.self.query"} <= changed
    assert not any("embeddings" in name or "LayerNorm" in name for name in changed)
    assert {path.name for path in (again.folder / "adapter").iterdir()} >= {"adapter_model.safetensors"}


def test_columns_files_and_heads(base, tmp_path, capsys):
    """Names are found, unused columns told, class numbers put in order, heads of other classes replaced."""
    rows = "".join(f'"the model, line {n}",{n % 2 * 10},x\n' for n in range(40))
    (tmp_path / "data.csv").write_text("sentence,label,extra\n" + rows)
    flags = ("--train_file", tmp_path / "data.csv", "--model_name_or_path", base[base.index("--model_name_or_path") + 1])
    flags = (*flags, "--max_steps", 2, "--global_batch_size", 4, "--seq_length", 8)
    learn(tmp_path / "run", *flags, *HERE)
    said = " ".join((capsys.readouterr().err + (tmp_path / "run/summary.txt").read_text()).split())
    assert "single_label; 36 texts to train on (0: 18, 10: 18), " in said
    assert "4 to validate on, 10% of each class held out; not used: extra" in said and "a new head for 2 classes" in said
    assert json.loads((tmp_path / "run/final/config.json").read_text())["id2label"] == {"0": "0", "1": "10"}


CLASSED = [{"text": "a", "label": n % 2} for n in range(40)]


@pytest.mark.parametrize(
    ("records", "flags", "message"),
    [
        ([{"text": "a", "label": "x"}], (), ":1 and after: only one class, 'x'"),
        ([{"text": "", "label": "x"}], (), ":1: 'text' is empty, expected text"),
        ([{"words": "a", "label": "x"}], (), ":1: no column text or sentence (has: words, label); name it"),
        ([{"text": "a", "label": "x|y"}], (), "for several labels add --problem_type multi_label"),
        (CLASSED, ("--seq_length", 200), "longer than the model's context of 96"),
        (CLASSED[:4], ("--global_batch_size", 16), "2 training samples are fewer than one --global_batch_size"),
        (CLASSED, ("--metric_for_best_model", "spearman"), "spearman: an evaluation of this run measures loss, accuracy"),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, records, flags, message):
    file = write_lines(tmp_path / "data.jsonl", records)
    model = ("--model_name_or_path", base[base.index("--model_name_or_path") + 1], "--seq_length", 16)
    given = ("--train_file", file, *model, "--output_dir", tmp_path / "run", *flags)
    assert message in refusal("text_classification", *given)


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    done = run("text_classification", tmp_path, "--max_steps", 150)
    assert done.evaluation["accuracy"] > 0.4  # of 8 classes
