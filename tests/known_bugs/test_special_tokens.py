"""Strings of special tokens in texts: they are text, or it is said that they are tokens."""

from itertools import islice

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shared.config.options import BatchConfig
from shared.data.loader import Share
from shared.data.store import prepare_sources
from shared.extras.streaming.sources import StreamSource
from shared.extras.streaming.stream import Stream
from shared.text import chat, corpus, labelled, preferences
from shared.text.options import ChatConfig, CorpusConfig, LabelledTextConfig, PreferenceConfig
from shared.text.special import Special
from tests.conftest import WORDS, run_here, write_lines

NAMES = ("<s>", "<pad>", "</s>", "<unk>")
PLAIN = ["the model reads a line", "says what comes next", "a text", "the next line of text"]
CHARACTERS = sorted({*"".join(WORDS), *"<>/[]s"})


def wrap(backend, begin="<s>", end="</s>", **names):
    """A fast tokenizer that puts two of its special tokens around a text, and a further one between two texts."""
    ends = [(begin, backend.token_to_id(begin)), (end, backend.token_to_id(end))]
    pair = f"{begin} $A {end} {end} $B {end}"
    backend.post_processor = processors.TemplateProcessing(f"{begin} $A {end}", pair, ends)
    usual = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), NAMES, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **(usual | names))


def bpe():
    """As of BART: byte-level, in which no special token is made of other tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[*NAMES], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 2, trainer)
    return wrap(backend, cls_token="<s>", sep_token="</s>")


def unigram():
    """As of XLM-R: its special tokens are pieces, so a text's `</s>` is one in any case."""
    pieces = [*((name, 0.0) for name in NAMES), ("▁", -3.0), *(("▁" + word, -4.0) for word in sorted({*WORDS}))]
    backend = Tokenizer(models.Unigram([*pieces, *((c, -6.0) for c in CHARACTERS)], unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return wrap(backend)


def word_piece():
    """As of BERT, but split at spaces alone: `[SEP]` is a word of the vocabulary."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*names, *sorted({*WORDS}), *CHARACTERS, *("##" + c for c in CHARACTERS)]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(words))}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "eos_token": "[SEP]"}
    return wrap(backend, "[CLS]", "[SEP]", **special, bos_token="[CLS]")


@pytest.fixture(params=[bpe, unigram, word_piece])
def tokenizer(request, tmp_path, own_cache):
    return request.param()


def write(path, records):
    return (str(write_lines(path, records)),)


def tokens_of(tokenizer, texts, tmp_path, name):
    """What pretraining makes of documents: a list of ids for each."""
    files = write(tmp_path / f"{name}.jsonl", [{"text": text} for text in texts])
    config = CorpusConfig(train_file=files, preprocessing_num_workers=2)
    source = prepare_sources(config, corpus.EncodeDocuments(tokenizer, "text"))[0][""]
    return [part.tolist() for part in np.split(source["tokens"], source["ends"][:-1])]


def rows_of(tokenizer, texts, tmp_path, name, others=None):
    """What text classification makes of texts, in their order."""
    records = [{"text": text, "label": n % 2} for n, text in enumerate(texts)]
    for record, other in zip(records, others or (), strict=False):
        record["other"] = other
    files = write(tmp_path / f"{name}.jsonl", records)
    column = "other" if others else None
    config = LabelledTextConfig(train_file=files, validation_file=files, text_pair_column=column, seq_length=64)
    data = labelled.open_texts(config, tokenizer)
    return [data.train[n]["input_ids"].tolist() for n in range(len(texts))]


def test_the_string_of_a_special_token_is_text(tokenizer, tmp_path):
    """tokenizers#787 (2021): control symbols in a text were the tokens. A scraped `<|endoftext|>` ended its document amidst.

    The strings are tokenised as text. A vocabulary that has one as a word gives the unknown token.
    """
    end = str(tokenizer.eos_token)
    texts = [*PLAIN, f"the model {end} reads", f"{end} a text"]
    rows = rows_of(tokenizer, texts, tmp_path, "rows")
    documents = tokens_of(tokenizer, texts, tmp_path, "documents")
    bare = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    special = Special(tokenizer)
    by_vocabulary = [[special.unknown if i in special.ids else i for i in ids] for ids in bare]
    assert (by_vocabulary == bare) == (tokenizer.backend_tokenizer.model.__class__.__name__ == "BPE")
    begin, end_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert rows == documents == [[begin, *ids, end_id] for ids in by_vocabulary]
    assert rows[:4] == tokenizer(PLAIN)["input_ids"]
    pairs = rows_of(tokenizer, texts, tmp_path, "pairs", texts[::-1])
    expected = [[begin, *a, end_id, end_id, *b, end_id] for a, b in zip(by_vocabulary, by_vocabulary[::-1], strict=True)]
    assert pairs == expected and pairs[2:4] == tokenizer(PLAIN[2:], PLAIN[:1:-1])["input_ids"]


def test_streams_tokenise_as_prepared_data_do(tmp_path, own_cache):
    """The tokenizer goes to another process without its setting."""
    tokenizer, texts = bpe(), [f"a </s> {text}" for text in PLAIN * 5]
    documents = tokens_of(tokenizer, texts, tmp_path, "documents")
    source = StreamSource("here", lambda: ["here"], lambda: ((f"here:{n}", {"text": text}) for n, text in enumerate(texts)))
    for processes in (1, 2):
        options = CorpusConfig(validation_split_percentage=1e-9, preprocessing_num_workers=processes)
        batch = BatchConfig(global_batch_size=2, per_device_train_batch_size=2)
        stream = Stream(source, tokenizer, 8, options, batch, Share(0, 1, torch.device("cpu")))
        found = np.concatenate([row["input_ids"] for row in islice(stream.sequences(validation=False), 20)])
        assert found.tolist() == [i for ids in documents for i in ids][: len(found)]
        assert len(found) == 160


def test_a_bart_classifier_trains_on_a_text_with_its_end_token(tmp_path, own_cache):
    """PiPPy#308 (2022), KoBART#21 (2022): All examples must have the same number of <eos> tokens. Here one text ended a run.

    The trained model scores such a text, too, in a pipeline.
    """
    torch.manual_seed(0)
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    shape = {"layers": 1, "attention_heads": 2, "ffn_dim": 48}
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in shape.items()}
    sizes |= {"vocab_size": 300, "d_model": 32, "max_position_embeddings": 64}
    config = transformers.BartConfig(id2label={0: "bad", 1: "good"}, **ids, **sizes)
    transformers.BartForSequenceClassification(config).save_pretrained(tmp_path / "model")
    bpe().save_pretrained(tmp_path / "model")
    broken = "a line</s> of <s>text</s>"
    records = [{"text": text, "label": ("bad", "good")[n % 2]} for n, text in enumerate([broken, *PLAIN, *PLAIN[:3]])]
    (file,) = write(tmp_path / "texts.jsonl", records)
    flags = ("--train_file", file, "--validation_file", file, "--model_name_or_path", tmp_path / "model")
    flags += ("--seq_length", 32, "--global_batch_size", 8, "--max_steps", 2, "--preprocessing_num_workers", 1)
    run_here("text_classification", *flags, "--output_dir", tmp_path / "run")
    classify = transformers.pipeline("text-classification", model=str(tmp_path / "run/final"), device="cpu", top_k=None)
    scores = {answer["label"]: answer["score"] for answer in classify([broken, PLAIN[0]])[0]}
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run/final")
    whole = [0, *bpe()(broken, add_special_tokens=False, split_special_tokens=True)["input_ids"], 2]
    expected = model(torch.tensor([whole])).logits[0].softmax(-1).tolist()
    assert whole.count(2) == 1
    assert [scores["bad"], scores["good"]] == pytest.approx(expected, abs=1e-6)


def test_messages_with_special_tokens_are_counted(tiny_model, tmp_path, own_cache, capsys):
    """tokenizers#787 (2021): a message that quotes `<|endoftext|>` has that token in it. Here nothing said so."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    quoting, fine = ({"role": "user", "content": text} for text in ("what is <|endoftext|>", "what is a line"))
    answers = [{"role": "assistant", "content": text} for text in ("<|endoftext|> or <|pad|>", "a text")]
    talks = [[fine, answers[1]], [quoting, answers[0]], [fine, answers[1], quoting, answers[1]]]
    line = "warning: {} texts contain the string of a special token, which is read as that token; the first is {}"

    def said():
        return [line for line in capsys.readouterr().err.splitlines() if "special token" in line]

    files = write(tmp_path / "talks.jsonl", [{"messages": talk} for talk in talks])
    train, _ = chat.open_samples(ChatConfig(train_file=files, seq_length=128), tokenizer)
    assert said() == [line.format(3, f"{files[0]}:2, message 1: '<|endoftext|>'")]
    ids = train.stores[0]["ids"].tolist()
    assert ids.count(tokenizer.pad_token_id) == 1  # learned as before
    files = write(tmp_path / "texts.jsonl", [{"prompt": "a ", "completion": text} for text in ("line", "<|pad|>")])
    chat.open_samples(ChatConfig(train_file=files, seq_length=128), tokenizer)
    assert said() == [line.format(1, f"{files[0]}:2: '<|pad|>'")]
    pairs = [{"prompt": [quoting], "chosen": answers[1:], "rejected": [{**fine, "role": "assistant"}]}] * 3
    files = write(tmp_path / "pairs.jsonl", pairs)
    chat.open_samples(PreferenceConfig(train_file=files, seq_length=128), tokenizer, preferences.ToPairs)
    assert said() == [line.format(3, f"{files[0]}:1, message 1: '<|endoftext|>'")]
