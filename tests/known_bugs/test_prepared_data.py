"""Prepared tokens are those of this text, this tokenizer and this code."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shared.data import prepared
from shared.data.store import prepare_sources
from shared.models import tokenizers
from shared.text import chat, corpus
from shared.text.options import ChatConfig, CorpusConfig
from tests.conftest import ROOT, python


def test_ids_above_65535_in_a_vocabulary_with_gaps_do_not_wrap(tmp_path, own_cache):
    """open-instruct#1862 (2026): the width was chosen by the number of tokens, and 70000 became 4464."""
    plain = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "a": 1, "b": 70000}, unk_token="a"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|endoftext|>")
    assert len(tokenizer) == 3
    (tmp_path / "text.txt").write_text("a b " * 50)
    config = CorpusConfig(train_file=(str(tmp_path / "text.txt"),), validation_split_percentage=20.0)
    train = corpus.open_corpus(config, tokenizer, 8).train
    assert train[0]["input_ids"].tolist() == [1, 70000] * 4


def test_data_that_other_code_prepared_are_not_used(tmp_path, monkeypatch, own_cache, chat_file, text_file, tiny_model):
    """datasets#3297 (2021): a cache outlived the code that filled it, so an edited template learned from old samples."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_model)

    def folders() -> list[Path]:
        chats, _ = chat.open_samples(ChatConfig(train_file=(str(chat_file),)), tokenizer)
        text = prepare_sources(CorpusConfig(train_file=(str(text_file),)), corpus.EncodeDocuments(tokenizer, "text"))
        return [chats.stores[0].folder, text[0][""].folder]

    first = folders()
    assert folders() == first
    shutil.copytree(ROOT / "shared", tmp_path / "shared")
    monkeypatch.setattr(prepared, "__file__", str(tmp_path / "shared/data/prepared.py"))
    assert folders() == first
    edited = tmp_path / "shared/text/encoder.py"
    edited.write_text(edited.read_text() + "# edited\n")
    chats, text = folders()
    assert chats != first[0] and text == first[1]  # no chat template is in it
    edited = tmp_path / "shared/text/corpus.py"
    edited.write_text(edited.read_text() + "# edited\n")
    assert folders()[1] != text


def test_another_beginning_of_text_token_is_other_data(tmp_path, monkeypatch, own_cache, text_file, tiny_model):
    """The token before each text may be set outside of the tokenizer's own file, which alone was looked at."""
    config, tokenizer = CorpusConfig(train_file=(str(text_file),)), PreTrainedTokenizerFast.from_pretrained(tiny_model)
    first = prepare_sources(config, corpus.EncodeDocuments(tokenizer, "text"))[0][""]
    for module in (corpus, tokenizers):
        monkeypatch.setattr(module, "leading_bos", lambda _: [5])
    second = prepare_sources(config, corpus.EncodeDocuments(tokenizer, "text"))[0][""]
    assert first.folder != second.folder and first["tokens"][0] != 5 and second["tokens"][0] == 5


def test_another_checkouts_shared_is_not_run_unsaid(tmp_path):
    """The `shared/` beside a template of a second checkout comes before one on the path."""
    for name in ("templates", "shared"):
        shutil.copytree(ROOT / name, tmp_path / name)
    with (tmp_path / "shared/config/parse.py").open("a") as file:
        file.write("print('the second checkout')\n")
    script = tmp_path / "templates/pretrain.py"
    done = python(script, "--help", env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "the second checkout" in done.stdout, done.stderr
