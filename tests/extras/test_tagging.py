"""Texts with a tag for each word: the forms of data, windows, spans."""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import IOBES, Entities

from shared.data.order import IGNORED
from shared.extras.tagging import spans
from shared.extras.tagging.options import TaggedTextConfig
from shared.extras.tagging.tagged import open_texts, windows
from shared.models.tokenizers import load_tokenizer
from tests.conftest import write_lines

TEXT = "Ada Lovelace met Charles Babbage in London ."
IOB2 = "B-PER I-PER O B-PER I-PER O B-LOC O".split()  # noqa: SIM905
WORDS = TEXT.split()
OTHER = {  # the same spans
    "IOB1": "I-PER I-PER O I-PER I-PER O I-LOC O",
    "BIOES": "B-PER E-PER O B-PER E-PER O S-LOC O",
    "BILOU": "B-PER L-PER O B-PER L-PER O U-LOC O",
}
SPANS = [
    {"start": 0, "end": 12, "label": "PER"},
    {"start": 17, "end": 32, "label": "PER"},
    {"start": 36, "end": 42, "label": "LOC"},
]
LISTS = [[span["start"], span["end"], span["label"]] for span in SPANS]
STUDIO = [{"value": {"start": a, "end": b, "text": TEXT[a:b], "labels": [k]}, "type": "labels"} for a, b, k in LISTS]


def conll(tags, sep="\t", columns=2):
    lines = [sep.join([word, *["X"] * (columns - 2), tag]) for word, tag in zip(WORDS, tags, strict=True)]
    return "-DOCSTART- -X- O O\n\n" * (columns == 4) + "\n".join(lines) + "\n\n"


def conll_u():
    """With comments, a token of several words, and an empty node."""
    lines = [f"{n}\t{word}\t_\t{tag}" + "\t_" * 6 for n, (word, tag) in enumerate(zip(WORDS, IOB2, strict=True), 1)]
    lines[3:3] = ["3-4\tmetCharles" + "\t_" * 8, "3.1\tthere\t_\tADV" + "\t_" * 6]
    return "\n".join(["# newdoc", f"# text = {TEXT}", *lines]) + "\n\n"


FORMS = {
    "tokens": {"tokens": WORDS, "tags": IOB2},
    "ner_tags": {"id": "1", "words": WORDS, "ner_tags": IOB2},
    "numbers": {"tokens": WORDS, "ner_tags": [["O", "B-PER", "I-PER", "B-LOC"].index(tag) for tag in IOB2]},
    **{name: {"tokens": WORDS, "tags": tags.split()} for name, tags in OTHER.items()},
    "spans": {"text": TEXT, "entities": SPANS},
    "lists": {"text": TEXT, "label": LISTS},
    "studio": {"id": 1, "data": {"text": TEXT}, "annotations": [{"was_cancelled": True}, {"result": STUDIO}]},
    "studio's short form": {"text": TEXT, "label": [one["value"] for one in STUDIO], "annotator": 1},
    "conll": conll(IOB2),
    "conll of four columns": conll(IOB2, " ", 4),
    "conll-u": conll_u(),
}


def opened(folder, record, tokenizer, copies=20, **options):
    """The data of a file with this record many times."""
    if isinstance(record, str):
        file = folder / "data.conll"
        file.write_text(record * copies)
    else:
        file = write_lines(folder / "data.jsonl", [record] * copies)
    config = TaggedTextConfig(train_file=(str(file),), preprocessing_num_workers=1, **options)
    return open_texts(config, load_tokenizer(str(tokenizer), split_special_tokens=True))


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_data_has_the_same_words_and_spans(form, tiny_model, tmp_path):
    options = {"tag_names": ("O", "B-PER", "I-PER", "B-LOC")} if form == "numbers" else {}
    data = opened(tmp_path, FORMS[form], tiny_model, **options)
    assert (len(data.train), len(data.validation)) == (18, 2)
    assert data.classes == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert data.train.line("words", 0) == WORDS
    assert [data.classes[n] for n in data.train.tags(0)] == IOB2
    scheme = {"IOB1": "IOB1", "BIOES": "BIOES", "BILOU": "BIOES"}.get(form, "IOB2")
    assert f": {scheme}; " in data.about
    row = data.train[0]
    counted = row["labels"] != IGNORED
    assert [data.classes[n] for n in row["labels"][counted]] == IOB2
    assert counted.sum() == data.train.num_targets(np.arange(1)) == 8


def test_a_tagged_part_of_a_token_is_said(tiny_model, tmp_path, capsys):
    """It has no token of its own to be read at."""
    opened(tmp_path, {"text": "the model", "entities": [[0, 1, "PER"], [1, 3, "LOC"]]}, tiny_model)
    assert "warning: 20 texts have a tagged word without a token of its own" in capsys.readouterr().err


def test_parquet_and_a_data_set_with_named_classes(tiny_model, tmp_path):
    import datasets

    names = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    rows = {"tokens": [WORDS] * 20, "ner_tags": [[names.index(tag) for tag in IOB2]] * 20}
    of_class = datasets.ClassLabel(names=names)
    features = datasets.Features({"tokens": [datasets.Value("string")], "ner_tags": [of_class]})
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_dict(rows, features).to_parquet(tmp_path / "hub/train.parquet")
    pq.write_table(pa.table(rows | {"ner_tags": [IOB2] * 20}), tmp_path / "plain.parquet")
    tokenizer = load_tokenizer(str(tiny_model))
    for options in ({"dataset_name": (str(tmp_path / "hub"),)}, {"train_file": (str(tmp_path / "plain.parquet"),)}):
        data = open_texts(TaggedTextConfig(**options, preprocessing_num_workers=1), tokenizer)
        assert [data.classes[n] for n in data.train.tags(0)] == IOB2


def test_spans_are_those_of_seqeval():
    rng = random.Random(0)
    for _ in range(2000):
        tags = [rng.choice(["O", "B-X", "I-X", "B-Y", "I-Y"]) for _ in range(rng.randint(1, 9))]
        expected = {(first, last + 1, kind) for kind, first, last in get_entities(tags)}
        assert spans.spans_of(tags, marked=True) == expected == spans.spans_of(spans.as_iob2(tags), marked=True)
    for _ in range(200):  # only what BIOES allows
        tags, wanted = [], set()
        while len(tags) < 9:
            size, kind = rng.randint(0, 3), rng.choice("XY")
            if size:
                wanted.add((len(tags), len(tags) + size, kind))
            tags += {0: ["O"], 1: [f"S-{kind}"]}.get(size, [f"B-{kind}", *[f"I-{kind}"] * (size - 2), f"E-{kind}"])
        found = {(one.start, one.end, one.tag) for one in Entities([tags], IOBES).entities[0]}
        assert spans.spans_of(tags, marked=True) == wanted == found
    assert spans.spans_of(["NOUN", "O", "VERB", "VERB"], marked=False) == {(0, 1, "NOUN"), (2, 3, "VERB"), (3, 4, "VERB")}


def test_windows_hold_each_token_once_as_their_own_and_begin_with_words():
    rng = np.random.default_rng(0)
    for _ in range(3000):
        room = int(rng.integers(6, 40))
        overlap = int(room * rng.uniform(0, 0.5))
        sizes = rng.integers(1, max(1, (room - overlap) // 4) + 1, int(rng.integers(1, 60)))
        words = np.repeat(np.arange(len(sizes)), sizes)
        begins = {*np.flatnonzero(np.diff(words, prepend=-1)).tolist(), len(words)}
        before = 0
        for first, end, own, own_end in windows(words, room, overlap):
            assert first <= own == before < own_end <= end <= first + room
            assert {first, end, own, own_end} <= begins
            before = own_end
        assert before == len(words)


@pytest.mark.parametrize("every", [False, True])
def test_a_long_text_is_learned_and_read_whole_whatever_its_windows(tiny_model, tmp_path, every):
    """Each word once, with its tag, also in windows of eight tokens; white space and long words included."""
    rng = random.Random(1)
    words = [rng.choice(["a", "model", "unbelievably", "x" * 40, "é"]) for _ in range(300)]
    tags = [rng.choice(["O", "B-X", "I-X"]) for _ in words]
    text = "".join(word + rng.choice([" ", "\n\n   ", " "]) for word in words)
    starts, place = [], 0
    for word in words:
        place = text.index(word, place)
        starts.append(place)
        place += len(word)
    entities = [
        {"start": starts[a], "end": starts[b - 1] + len(words[b - 1]), "label": kind}
        for a, b, kind in spans.spans_of(tags, marked=True)
    ]
    record = {
        "text": "  \n" + text,
        "entities": [one | {"start": one["start"] + 3, "end": one["end"] + 3} for one in entities],
    }
    expected = spans.as_iob2(tags)
    for seq_length in (8, 13, 64, 4096):
        data = opened(tmp_path, record, tiny_model, copies=2, seq_length=seq_length)
        texts = data.train
        texts.every = every
        (windows_of_text,) = texts.texts()
        assert (len(windows_of_text) > 20) is (seq_length < 4096)
        assert [word for n in windows_of_text for word in texts.line("words", n)] == words
        assert [data.classes[number] for n in windows_of_text for number in texts.tags(n)] == expected
        read = []
        for n in windows_of_text:
            row = texts[n]
            assert len(row["input_ids"]) <= seq_length
            read += row["labels"][texts.read_at(n)].tolist()
            counted = (row["labels"] != IGNORED).sum()
            assert counted == texts.num_targets(np.array([n])) >= len(texts.read_at(n))
        assert [data.classes[number] for number in read] == expected
        both = [data.train.line("place", 0), data.validation.line("place", 0)]
        assert len({where.split(",")[0] for where in both}) == 2  # no text is in both


@pytest.mark.parametrize(
    ("text", "end", "words", "tags"),
    [
        ("Berliners", 6, ["Berlin", "ers"], ["B-X", "O"]),  # an entity that ends inside of a word cuts it
        ("李白 was born in 碎葉城。 2x", 2, [*"李白", "was", "born", "in", *"碎葉城。", "2x"], ["B-X", "I-X"]),
        ("a ((( b", 1, ["a", "(", "(", "(", "b"], ["B-X"]),
    ],
)
def test_words_have_their_tags_and_those_without_a_token_are_counted(tiny_model, tmp_path, text, end, words, tags):
    data = opened(tmp_path, {"text": text, "entities": [{"start": 0, "end": end, "label": "X"}]}, tiny_model)
    found = data.train.line("words", 0)
    if lost := len(words) - len(found):  # if the tokens do not end there
        assert f"{20 * lost} words have no token of their own, and are left out" in data.about
    assert found == words[: len(found)] if text[0] != "a" else found[0] == "a"
    tags = [*tags, *["O"] * len(words)][: len(found)]
    assert [data.classes[n] for n in data.train.tags(0)] == tags


def test_numbers_without_names_are_warned_of(tiny_model, tmp_path, capsys):
    opened(tmp_path, {"tokens": ["a", "b"], "tags": [0, 1]}, tiny_model)
    assert "the tags are numbers: --tag_names names them" in capsys.readouterr().err


def test_class_weights_are_inverse_to_words_also_in_a_mixture(tiny_model, tmp_path):
    one = write_lines(tmp_path / "one.jsonl", [{"tokens": ["a", "b"], "tags": ["O", "B-X"]}] * 10)
    two = write_lines(tmp_path / "two.jsonl", [{"tokens": ["a"] * 4, "tags": ["O"] * 4}] * 10)
    held = write_lines(tmp_path / "held.jsonl", [{"tokens": ["a", "c"], "tags": ["O", "O"]}])
    options = {"train_file": (str(one), str(two)), "validation_file": (str(held),), "preprocessing_num_workers": 1}
    data = open_texts(TaggedTextConfig(**options, mix_weights=(1, 1)), load_tokenizer(str(tiny_model)))
    weights = dict(zip(data.classes, data.class_weights((1, 1)).tolist(), strict=True))
    # half of the words are of either source: 3/4 O, 1/4 B-X; of three classes
    assert weights["O"] == pytest.approx(4 / 9) and weights["B-X"] == pytest.approx(4 / 3)
    assert weights["I-X"] == 0  # which no word has, and so no loss may be multiplied by
    assert json.dumps(data.train.sources) == '{"one.jsonl": 10, "two.jsonl": 10}'
