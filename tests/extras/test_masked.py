"""pretrain.py --objective mlm: masks are a function of (seed, epoch, sample), and encoders learn them."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import DistributedType
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    pipeline,
)

from shared.data.loader import Loader, Share
from shared.data.order import IGNORED, Order
from shared.extras.masked import masking
from shared.extras.masked.masking import MaskedRows, Masking, mask
from shared.models.attention import forward_rows
from shared.models.isolation import isolate_documents
from shared.models.options import ModelConfig
from shared.process.errors import ConfigError
from shared.text import pretraining
from tests.conftest import WORDS, continued, learn_here, refusal, run, slow, write_lines
from tests.plain_loop import losses_of
from tests.same import assert_same_bits, assert_same_learning
from tests.small_models import save_bert

LENGTH = 32


class Rows:
    """Rows of random words in pieces, with a special token now and then."""

    def __init__(self, tokenizer, count=24):
        draw = np.random.default_rng(0)
        self.ids = draw.integers(4, len(tokenizer), (count, LENGTH))
        self.ids[:, ::9] = tokenizer.sep_token_id

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": np.roll(self.ids[index], -1)}

    def num_targets(self, indices):
        return len(indices) * LENGTH


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_bert(tmp_path_factory.mktemp("bert"), BertForMaskedLM, cut=True)


@pytest.fixture(scope="module")
def tokenizer(bert):
    return AutoTokenizer.from_pretrained(bert)


def test_as_many_tokens_as_asked_are_hidden_none_of_them_special(tokenizer):
    rows = Rows(tokenizer, 400)
    masked = MaskedRows(rows, Masking(tokenizer, 0.3, 0.2, False))
    shown = [masked[n] for n in range(len(rows))]
    labels = np.stack([row["labels"] for row in shown])
    read = np.stack([row["input_ids"] for row in shown])
    chosen = labels != IGNORED
    assert {*chosen.sum(1).tolist()} == {10} and masked.num_targets(np.arange(7)) == 70
    assert not (chosen & (rows.ids == tokenizer.sep_token_id)).any()
    assert (labels[chosen] == rows.ids[chosen]).all() and (read[~chosen] == rows.ids[~chosen]).all()
    assert (read[chosen] == tokenizer.mask_token_id).mean() == pytest.approx(0.8, abs=0.02)
    assert (read[chosen] == rows.ids[chosen]).mean() == pytest.approx(0.1, abs=0.02)
    assert not np.isin(read[chosen], [*{*tokenizer.all_special_ids} - {tokenizer.mask_token_id}]).any()
    places = chosen[:, rows.ids[0] != tokenizer.sep_token_id].mean(0)
    assert places.min() > 0.2 and places.max() < 0.5  # each place is as likely
    again = [MaskedRows(rows, Masking(tokenizer, 0.3, 0.2, False))[n] for n in range(len(rows))]
    assert all((one["input_ids"] == two["input_ids"]).all() for one, two in zip(shown, again, strict=True))


def test_words_are_hidden_whole(tokenizer):
    rows = Rows(tokenizer, 50)
    names = tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    masked = MaskedRows(rows, Masking(tokenizer, 0.3, 0.0, True))
    parted = 0
    for n in range(len(rows)):
        chosen = masked[n]["labels"] != IGNORED
        for place in range(1, LENGTH):
            if names[rows.ids[n, place]].startswith("##") and rows.ids[n, place - 1] != tokenizer.sep_token_id:
                parted += chosen[place] != chosen[place - 1]
    assert parted <= len(rows)  # the last word of a row's count may be cut
    spaced = SimpleNamespace(
        get_vocab=lambda: {"Ġa": 0, "b": 1, "Ġc": 2, "<m>": 3, "": 4}, all_special_ids=[3], mask_token_id=3
    )
    assert Masking(spaced, 0.3, 0.0, True).goes_on.tolist() == [False, True, False, True, True]


def test_masks_are_the_same_on_any_number_of_ranks_and_after_a_resume_and_new_in_each_epoch(tokenizer):
    def read(ranks, start=0, stop=9):
        found = {}
        for rank in range(ranks):
            share = Share(rank, ranks, torch.device("cpu"))
            data = SimpleNamespace(tokenizer=tokenizer)
            for name in ("train", "validation"):
                loader = Loader(
                    Rows(tokenizer), default_collate, Order(24, 8, 5), share, per_device=2, num_workers=ranks % 2
                )
                setattr(data, name, loader)
            mask(data, 0.3, 0.2, False)
            for step, window in enumerate(data.train.windows(start, stop), start):
                assert window.num_targets == 80
                for batch, indices in zip(window.micro_batches, window.indices.tolist(), strict=True):
                    for row, index in enumerate(indices):
                        found[step, index] = (batch["input_ids"][row].tolist(), batch["labels"][row].tolist())
        return found

    one = read(1)
    assert one == read(2) == read(4) and {key: one[key] for key in one if key[0] >= 5} == read(2, start=5)
    for index in range(24):  # three epochs
        masks = [rows for (_, number), rows in one.items() if number == index]
        assert len(masks) == 3 and masks[0] != masks[1] != masks[2]
        texts = [[label if label >= 0 else read for read, label in zip(*rows, strict=True)] for rows in masks]
        assert texts[0] == texts[1] == texts[2]


@pytest.fixture(scope="module")
def flags(tmp_path_factory, bert):
    rng = random.Random(0)
    texts = [{"text": " ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60)))} for _ in range(60)]
    data = write_lines(tmp_path_factory.mktemp("texts") / "texts.jsonl", texts)
    common = ("--train_file", data, "--model_name_or_path", bert, "--objective", "mlm", "--seq_length", LENGTH)
    common += ("--mlm_unmasked", 0.2, "--whole_words", "--learning_rate", 3e-3, "--max_grad_norm", 0.5)
    return (*common, "--eval_samples", 9, "--global_batch_size", 8, "--max_steps", 12, "--save_steps", 4, "--eval_steps", 6)


@pytest.fixture(scope="module")
def one_process(flags, tmp_path_factory):
    return learn_here("pretrain", tmp_path_factory.mktemp("one"), *flags, "--per_device_train_batch_size", 8, "--audit_data")


def test_learns_what_a_plain_loop_learns(flags, bert, tmp_path, monkeypatch):
    """Of transformers' model, on the batches of the first steps."""
    batches = []
    forward = BertForMaskedLM.forward

    def seen(self, *args, **inputs):
        if self.training:
            batches.append(inputs["input_ids"].clone())
        return forward(self, *args, **inputs)

    monkeypatch.setattr(BertForMaskedLM, "forward", seen)
    plain = ("--weight_decay", 0, "--lr_scheduler_type", "constant", "--warmup_steps", 0, "--max_grad_norm", 0)
    plain += ("--adam_beta2", 0.999, "--per_device_train_batch_size", 8, "--max_steps", 4, "--optim", "adamw")
    rest = [flag for flag in flags if flag not in ("--max_grad_norm", 0.5, "--max_steps", 12)]
    done = learn_here("pretrain", tmp_path / "run", *rest, *plain, "--audit_data")
    monkeypatch.undo()
    assert len(batches) == 4 and done.each("eval_perplexity")[0] == pytest.approx(np.exp(done.each("eval_loss")[0]))

    labels = []
    original = pretraining.open_data

    def opened(setup, **named):
        data = original(setup, **named)
        opened.data = data
        return data

    monkeypatch.setattr(pretraining, "open_data", opened)  # which a template loaded anew imports
    learn_here("pretrain", tmp_path / "again", *rest, *plain)
    for window in opened.data.train.windows(0, 4):
        labels += [batch["labels"] for batch in window.micro_batches]
    model = AutoModelForMaskedLM.from_pretrained(bert, dtype=torch.float32)
    steps = iter(zip(batches, labels, strict=True))

    def loss():
        ids, targets = next(steps)
        return cross_entropy(model(ids).logits.flatten(0, 1), targets.flatten())

    assert done.each("loss") == pytest.approx([*losses_of(model, loss, 4, 3e-3)], rel=1e-5)


@pytest.mark.parametrize(("per_device", "processes", "config"), [(2, 2, "ddp"), slow(4, 2, "deepspeed_zero2")])
def test_processes_learn_what_one_learns(one_process, flags, tmp_path, per_device, processes, config):
    more = ("--per_device_train_batch_size", per_device, "--audit_data")
    other = run("pretrain", tmp_path, *flags, *more, processes=processes, config=config)
    assert_same_learning(one_process, other, atol=None, keys=("eval_loss",), but="key.bias")


SHAPE = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,intermediate_size=48"


@pytest.mark.parametrize(("processes", "config"), [(2, "fsdp2"), slow(4, "hsdp")])
def test_encoders_are_sharded_and_learn_the_same(one_process, flags, tmp_path, processes, config):
    """A ModernBERT; and a BERT, whose head's bias has two names."""
    given = (*flags[:2], *flags[4:], "--vocab_size", 300, "--config_overrides", SHAPE, "--audit_data", "--optim", "muon")
    one = run("pretrain", tmp_path / "one", *given, "--per_device_train_batch_size", 8)
    other = run("pretrain", tmp_path / "other", *given, processes=processes, config=config)
    assert_same_learning(one, other, atol=None, keys=("eval_loss",))
    bert = run("pretrain", tmp_path / "bert", *flags, "--audit_data", processes=processes, config=config)
    assert_same_learning(one_process, bert, atol=None, keys=("eval_loss",), but="key.bias")


def test_what_is_tied_beside_the_embeddings_is_not_sharded(bert, monkeypatch):
    model = BertForMaskedLM.from_pretrained(bert)
    first, second, *_ = model.bert.encoder.layer
    first.output.dense.weight = second.output.dense.weight
    monkeypatch.setattr(masking, "from_hub", lambda *_, **__: (model, {"missing_keys": ()}))
    monkeypatch.setattr(masking, "use_launch_precision", lambda _: None)
    sharded = SimpleNamespace(distributed_type=DistributedType.FSDP)
    monkeypatch.setattr(masking, "AcceleratorState", lambda: sharded)
    with pytest.raises(ConfigError, match="BertForMaskedLM ties more than its embeddings"):
        masking.build_masked_lm(ModelConfig(model_name_or_path=str(bert)), AutoTokenizer.from_pretrained(bert), LENGTH, None)


def modernbert():
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 48}
    shape |= {"vocab_size": 300, "local_attention": 8, "pad_token_id": 0, "initializer_range": 0.2}
    return ModernBertForMaskedLM(ModernBertConfig(**shape))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_documents_of_a_row_see_as_little_of_each_other_as_alone(bert, family):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_pretrained(bert) if family == "bert" else modernbert()
    model.eval()
    assert isolate_documents(model, torch.device("cpu"), 2)[0]
    ids = torch.randint(5, model.config.vocab_size, (2, 24))
    places = torch.tensor([[*range(10), *range(14)], [*range(24)]])
    with torch.no_grad():
        logits = forward_rows(model, {"input_ids": ids, "position_ids": places}).logits
        for row, begin, end in ((0, 0, 10), (0, 10, 24), (1, 0, 24)):
            alone = model(ids[row : row + 1, begin:end]).logits[0]
            torch.testing.assert_close(logits[row, begin:end], alone, rtol=1e-4, atol=1e-4)


def test_a_stream_has_the_same_masks_on_any_launch_and_killed_it_goes_on_bit_for_bit(flags, tmp_path):
    given = (*flags, "--streaming", "--eval_samples", 4, "--validation_split_percentage", 20, "--audit_data")
    one = learn_here("pretrain", tmp_path / "one", *given, "--per_device_train_batch_size", 8)
    more = ("--per_device_train_batch_size", 2)
    whole = run("pretrain", tmp_path / "whole", *given, *more, processes=2, config="ddp")
    assert_same_learning(one, whole, atol=None, keys=("eval_loss",), but="key.bias")
    assert one.last("eval_loss") < one.each("eval_loss")[0]
    assert_same_bits(whole, continued("pretrain", tmp_path / "run", "update:kill@7", *given, *more, processes=2))


def test_killed_and_resumed_bit_for_bit_and_it_fills_in_masks(flags, tmp_path):
    """With dropout, on two processes."""
    model = save_bert(tmp_path / "model", BertForMaskedLM, cut=True, dropout=0.1)
    given = (*(flag if flag != flags[3] else model for flag in flags), "--per_device_train_batch_size", 2, "--audit_data")
    whole = run("pretrain", tmp_path / "whole", *given, processes=2, config="ddp")
    again = continued("pretrain", tmp_path / "run", "update:kill@7", *given, processes=2)
    assert_same_bits(whole, again)
    assert again.last("eval_loss") < again.each("eval_loss")[0]
    fill = pipeline("fill-mask", model=str(again.folder / "final"), device="cpu")
    assert len(fill("the [MASK] of text")) == 5


@pytest.mark.parametrize("how", ["preset", slow("architecture")])
def test_from_scratch(flags, tmp_path, how):
    """The tokenizer is trained, and gets a mask token; the model is a ModernBERT, or of any architecture."""
    given = [*flags[:2], *flags[4:], "--vocab_size", 300, "--config_overrides", SHAPE, "--per_device_train_batch_size", 8]
    if how != "preset":
        BertConfig().save_pretrained(tmp_path / "architecture")
        given += ["--config_name", tmp_path / "architecture"]
    done = learn_here("pretrain", tmp_path / "run", *given)
    assert done.last("eval_loss") < done.each("eval_loss")[0]
    model, tokenizer = (kind.from_pretrained(done.folder / "final") for kind in (AutoModelForMaskedLM, AutoTokenizer))
    assert type(model).__name__ == ("ModernBertForMaskedLM" if how == "preset" else "BertForMaskedLM")
    assert tokenizer.mask_token == "[MASK]" and model.config.vocab_size == len(tokenizer)


def test_an_encoder_without_a_head_gets_a_new_one(flags, bert, tmp_path, capsys):
    """Such as one that makes embeddings of sentences."""
    BertModel.from_pretrained(bert).save_pretrained(tmp_path / "backbone")
    AutoTokenizer.from_pretrained(bert).save_pretrained(tmp_path / "backbone")
    given = (*(flag if flag != bert else tmp_path / "backbone" for flag in flags), "--per_device_train_batch_size", 8)
    done = learn_here("pretrain", tmp_path / "run", *given)
    assert "backbone: a new head" in capsys.readouterr().err
    assert done.last("eval_loss") < done.each("eval_loss")[0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--model_name_or_path", "{llama}"), "LlamaConfig"),
        (("--config_overrides", "hidden_size=16"), "--config_overrides cannot change a model whose weights are loaded"),
        (("--seq_length", 128), "--seq_length 128 is longer than the model's context of 96"),
    ],
)
def test_what_cannot_be_is_one_line(flags, tiny_model, tmp_path, more, message):
    more = [str(flag).format(llama=tiny_model) for flag in more]
    given = [*flags[:2], *flags[4:8], *flags[2:4]] if "--model_name_or_path" not in more else [*flags[:2], *flags[4:8]]
    assert message in refusal("pretrain", *given, *more, "--output_dir", tmp_path / "run")
