"""Documents that share a sequence of pretraining can be kept apart."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from shared.models import attention
from shared.models.loss import causal_lm_loss
from shared.process.errors import ConfigError
from shared.text import corpus
from shared.text.options import CorpusConfig
from shared.text.packing import collate_packed
from tests.conftest import learn_here


@pytest.mark.parametrize("flat", [False, True])
def test_a_token_does_not_see_other_documents_of_its_sequence(flat, text_file, tiny_model, tokenizer, tmp_path, monkeypatch):
    """Llama 3 (arXiv 2407.21783, 2024), section 3.2, masks attention between documents. Here there was no such option.

    The loss of sequences is that of their documents alone, and still counts the first token of the next document.
    """
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path))
    config = CorpusConfig(train_file=(str(text_file),), validation_split_percentage=5.0)
    train, validation, *_ = corpus.open_corpus(config, tokenizer, 64, isolate=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    model.row_form = attention.Form(flat=flat)
    for (split,) in (train.datasets, validation.datasets):
        rows = [split[i] for i in range(3)]
        expected, parts, ends = torch.zeros(()), 0, {*split._ends(0, split.num_tokens)}
        for number, row in enumerate(rows):
            tokens = torch.from_numpy(np.append(row["input_ids"], row["labels"][-1]))
            bounds = [0, *(i for i in range(1, 64) if number * 64 + i in ends), 64]
            for start, end in pairwise(bounds):
                logits = model(tokens[None, start:end]).logits[0]
                expected = expected + F.cross_entropy(logits, tokens[start + 1 : end + 1], reduction="sum")
            parts += len(bounds) - 1
        assert parts > 3
        torch.testing.assert_close(causal_lm_loss(model, collate_packed(rows)), expected)


def test_pretraining_says_whether_documents_see_each_other(text_file, tiny_model, tmp_path):
    """The template said nothing about it."""
    flags = ("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", 1)
    together = learn_here("pretrain", tmp_path / "together", *flags, "--eval_samples", 2)
    assert "those of one sequence attend to each other (--isolate_documents keeps" in together.summary
    more = ("--eval_samples", 2, "--isolate_documents", "--dataloader_num_workers", 1)
    apart = learn_here("pretrain", tmp_path / "apart", *flags, *more)
    assert "documents kept apart by an attention mask" in apart.summary
    assert together.losses[1] != apart.losses[1]
    with pytest.raises(ConfigError, match="--streaming does not work with --isolate_documents"):
        CorpusConfig(streaming=True, isolate_documents=True)
