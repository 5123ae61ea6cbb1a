"""Known bugs of other trainers, each with a reference computed plainly: see docs/internals/known_bugs.md.

Only the names of compiled weights ever were wrong here.
"""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shared.config.options import OptimConfig, SpeedConfig
from shared.data.notes import Notes
from shared.images import files
from shared.images.options import ImageConfig
from shared.models import adapters, pretraining
from shared.models.blocks import compile_blocks
from shared.models.options import AdapterConfig, ModelConfig
from shared.models.weights import evaluation_weights
from shared.parallel.strategy import Strategy
from shared.run import launch
from shared.text import chat
from shared.text.encoder import Encoder
from shared.text.forms import Example
from shared.text.options import ChatConfig
from shared.training import optim
from tests.conftest import paint
from tests.run.test_checkpoint import make as checkpointer
from tests.small_models import VOCAB, llama, words

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": VOCAB}


def saved(folder) -> str:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).bfloat16().save_pretrained(folder)
    return str(folder)


def to_pretrain(name):
    options = {"seq_length": 8, "attn_implementation": "sdpa", "tie_word_embeddings": False}
    return pretraining.build_causal_lm(ModelConfig(model_name_or_path=name), words(VOCAB), **options)


def to_fine_tune(name, **options):
    adapter, in_bf16 = AdapterConfig(**options), SimpleNamespace(mixed_precision="bf16", distributed_type=DistributedType.NO)
    return adapters.add_adapters(adapters.load_base(name, adapter, SpeedConfig(), in_bf16), adapter)


def test_a_prompt_whose_tokens_are_no_prefix_leaves_no_answer_out():
    """trl#598 (2023): SentencePiece writes a prompt otherwise if the answer follows; its length then masks the answer."""
    scores = {"<eos>": 0, "▁a": -2, "▁an": -1, "s": -4, "wer": -3, "swer": -2, "▁answer": -1, "▁": -5, "▁it": -2, "n": -9}
    plain = Tokenizer(models.Unigram([*scores.items()], unk_id=0))
    plain.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>")
    prompt, completion = "it an", "swer it"
    alone = tokenizer.tokenize(prompt)
    ids, learned = Encoder(tokenizer, "assistant")(Example(prompt=prompt, completion=completion), "here")
    assert tokenizer.convert_ids_to_tokens(ids) == ["▁it", "▁answer", "▁it", "<eos>"]  # as the model meets it
    assert alone == ["▁it", "▁an"] and learned.tolist() == [False, True, True, True]


def test_an_answer_that_is_cut_is_counted_and_does_not_end(tiny_model):
    """A common report: an end put behind what was cut off teaches to stop in the middle of a sentence."""
    encoder = Encoder(AutoTokenizer.from_pretrained(tiny_model), "assistant")
    record = {"prompt": "the model ", "completion": "reads a line of text and says what comes next"}
    whole, learned = encoder(Example(**record), "here")
    end = encoder.tokenizer.eos_token_id
    for length, cut in ((len(whole) - 1, 0), (8, 1)):
        work = chat.ToSamples(encoder.tokenizer, ChatConfig(seq_length=length))
        notes = Notes()
        found = work([("prompt and completion", "here", record)], notes).values
        ids = found["ids"].tolist()
        assert ids == whole[: length + 1] and found["learned"].tolist() == learned[: length + 1].tolist()
        assert (ids[-1] == end) == (not cut) and notes.counts["cut"] == cut


@pytest.mark.parametrize("way", ["pretrain", "modules_to_save"])
def test_small_updates_of_weights_that_were_saved_in_bf16_are_not_rounded_away(tmp_path, way):
    """torchao#1124 (2024): a step of 1e-5 on a weight of 1 leaves bf16 as it was, and training stands still."""
    name = saved(tmp_path)
    model = to_pretrain(name) if way == "pretrain" else to_fine_tune(name, modules_to_save=("lm_head", "norm"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert any("norm" in name for name in trained)
    before = {name: p.detach().clone() for name, p in trained.items()}
    (optimizer,) = optim.build(model, OptimConfig(learning_rate=1e-5, weight_decay=0.0))
    for p in trained.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in trained.items():
        torch.testing.assert_close(before[name] - p.detach(), torch.full_like(p, 1e-5), rtol=0.02, atol=0)


def test_positions_of_a_16_bit_base_are_computed_in_fp32(tmp_path):
    """transformers#29285 (2024): angles of rotary embeddings in bf16 cannot tell the position 2049 from 2048."""
    model = to_fine_tune(saved(tmp_path))
    rotary = model.get_base_model().model.rotary_emb
    positions, width = torch.tensor([[1, 2048, 2049]]), SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
    angles = positions[0, :, None].double() / 10000 ** (torch.arange(0, width, 2).double() / width)
    cos, _ = rotary(torch.zeros(1), positions)
    torch.testing.assert_close(cos[0, :, : width // 2].double(), angles.cos(), rtol=0, atol=2e-3)


def test_compiled_blocks_keep_the_names_of_their_weights():
    """nanoGPT#325 (2023): `_orig_mod.` in front of each saved name, which nothing else can load."""
    model = llama()
    before = [*model.state_dict()]
    compile_blocks(model)
    assert [*model.state_dict()] == before


def test_gradients_of_fp16_are_clipped_without_the_loss_scale(monkeypatch):
    """PyTorch's notes on mixed precision: clipping what is still multiplied by the scale shrinks every step."""
    accelerator = launch.start(0)
    layer = nn.Linear(3, 2)
    monkeypatch.setattr(Accelerator, "mixed_precision", "fp16")
    monkeypatch.setattr(accelerator, "native_amp", True)
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=1024.0))
    monkeypatch.setattr(accelerator, "_optimizers", optim.build(layer, OptimConfig(learning_rate=3e-4)))
    inputs = torch.ones(1, 3)
    strategy = Strategy(accelerator)
    strategy.backward(layer(inputs).sum(), 1.0)  # a gradient of 1 for each of 6 weights and 2 biases
    norm = strategy.clip([layer], 1.0)
    assert norm.item() == pytest.approx(8**0.5)
    assert layer.weight.grad.flatten().tolist() == pytest.approx([8**-0.5] * 6)


def test_a_validation_folder_without_the_first_class_has_the_class_numbers_of_training(tmp_path, own_cache):
    """A common report: two ImageFolders number their classes on their own, so a class that one lacks shifts the others."""
    for split, names in (("train", ("cat", "dog", "owl")), ("val", ("dog", "owl"))):
        for kind, name in enumerate(names):
            paint(tmp_path / "data" / split / name / "0.png", kind, 0, (8, 8))
    data = files.prepare(ImageConfig(train_dir=(tmp_path / "data",)))
    found = [(data.validation.where(i).split("/")[-2], int(data.validation[i]["labels"])) for i in range(2)]
    assert data.classes == ("cat", "dog", "owl") and found == [("dog", 1), ("owl", 2)]


def test_neither_a_save_nor_an_evaluation_changes_statistics_of_batch_norm(tmp_path, monkeypatch):
    """A common report: what is averaged over ranks for a checkpoint goes on into training, which then depends on saves."""
    model, _, saver = checkpointer(tmp_path / "run")
    accelerator = saver.accelerator
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    monkeypatch.setattr(Accelerator, "reduce", lambda _, value, how: (value + 3) / 2)  # the other rank's are all 3
    before = {name: value.clone() for name, value in model.named_buffers()}
    mean = {f"model.{name}": (value + 3) / 2 for name, value in before.items() if value.is_floating_point()}
    written = saver._to_save(1)
    during = {}
    with evaluation_weights(accelerator, model, None):
        during = {f"model.{name}": value.clone() for name, value in model.named_buffers()}
    for name, value in mean.items():
        torch.testing.assert_close(written[name], value)
        torch.testing.assert_close(during[name], value)
    assert before and all(torch.equal(value, before[name]) for name, value in model.named_buffers())
