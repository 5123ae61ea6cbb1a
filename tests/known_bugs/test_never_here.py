"""Known bugs of other trainers, each with a reference computed plainly: see docs/internals/known_bugs.md.

Only the last of the section on weights ever was here.
"""

import contextlib
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator, DistributedType
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shared.answers import evaluation
from shared.config.options import OptimConfig, SpeedConfig
from shared.data.order import IGNORED
from shared.data.store import Notes
from shared.evaluation.kinds import SampleLosses
from shared.images import files
from shared.images.options import ImageConfig, RecipeConfig
from shared.models import adapters, pretraining
from shared.models.blocks import compile_blocks, set_gradient_checkpointing
from shared.models.loss import causal_lm_loss
from shared.models.options import AdapterConfig, ModelConfig
from shared.models.weights import evaluation_weights
from shared.parallel.strategy import Strategy
from shared.run import launch
from shared.run.run import Run
from shared.text import chat
from shared.text.encoder import Encoder
from shared.text.forms import Example
from shared.text.options import ChatConfig
from shared.training import optim
from tests.conftest import load_template, paint
from tests.run.test_checkpoint import make as checkpointer
from tests.small_models import VOCAB, llama, tokens, words

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": VOCAB}
FP32_LAUNCH, BF16_LAUNCH = (SimpleNamespace(mixed_precision=p, distributed_type=DistributedType.NO) for p in ("no", "bf16"))


def saved(folder, dtype=torch.bfloat16, **changes) -> str:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, **changes)).to(dtype).save_pretrained(folder)
    return str(folder)


def to_pretrain(name):
    options = {"seq_length": 8, "attn_implementation": "sdpa", "tie_word_embeddings": False}
    return pretraining.build_causal_lm(ModelConfig(model_name_or_path=name), words(VOCAB), **options)


def to_fine_tune(name, launched=FP32_LAUNCH, **options):
    adapter = AdapterConfig(**options)
    return adapters.add_adapters(adapters.load_base(name, adapter, SpeedConfig(), launched), adapter)


# The loss --------------------------------------------------------------------------------------------------------------


def test_class_weights_are_not_normalised_by_a_micro_batch():
    """pytorch#72047 (2022): a weighted mean divides by the weights of its own rows, so accumulated means differ."""
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 3), torch.tensor([0, 0, 0, 1, 2, 2])
    weight, smoothing = torch.tensor([0.5, 4.0, 1.0]), 0.1
    losses = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="none")
    expected = (weight[labels] * losses).sum()  # each image by the weight of its class, and by no other

    data = SimpleNamespace(problem_type="single_label", classes=("a", "b", "c"), class_weights=lambda _: weight)
    setup = SimpleNamespace(config=SimpleNamespace(data=SimpleNamespace(mix_weights=())), device="cpu")
    sample_losses = SampleLosses(setup, data, RecipeConfig(class_weights="balanced", label_smoothing=smoothing))

    def loss_of(rows, fill=0):
        def model(pixel_values):
            return SimpleNamespace(logits=pixel_values)

        batch = {
            "pixel_values": F.pad(logits[rows], (0, 0, 0, fill)),
            "labels": F.pad(labels[rows], (0, fill), value=IGNORED),
        }
        return load_template("image_classification").ImageLoss(model, lambda images: images, sample_losses)(batch)

    for parts in ([slice(0, 6)], [slice(0, 3), slice(3, 6)], [slice(0, 2), slice(2, 6)]):
        torch.testing.assert_close(sum(map(loss_of, parts)), expected)
    torch.testing.assert_close(loss_of(slice(0, 4), fill=2) + loss_of(slice(4, 6), fill=1), expected)


def test_perplexity_is_that_of_all_tokens_and_no_mean_of_means(monkeypatch):
    """A common report: the mean over batches of each batch's perplexity weighs tokens by how short their batch is."""
    logged = {}
    sums = iter(torch.tensor(value) for value in (10.0, 1.0))  # of 5 targets, and of 1
    monkeypatch.setattr(evaluation, "TokenLoss", lambda _: lambda _: next(sums))
    config = SimpleNamespace(show_answers=0, eval_answers=0)
    run = SimpleNamespace(device="cpu", sum=lambda v: v, log_evaluation=logged.update, is_last=False, config=config)
    run.mean_loss = partial(Run.mean_loss, run)
    run.state, run.evaluating = SimpleNamespace(step=1), lambda _: torch.no_grad()
    run.read = lambda windows: [SimpleNamespace(micro_batches=[{}], num_targets=count) for count in windows]
    evaluation.evaluate(run, None, SimpleNamespace(validation=[5, 1], held_out=[]), None, None)
    assert logged == {"eval_loss": pytest.approx(11 / 6), "eval_perplexity": pytest.approx(math.exp(11 / 6))}


# Text ------------------------------------------------------------------------------------------------------------------


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


# Weights ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["pretrain", "modules_to_save"])
def test_small_updates_of_weights_that_were_saved_in_bf16_are_not_rounded_away(tmp_path, way):
    """torchao#1124 (2024): a step of 1e-5 on a weight of 1 leaves bf16 as it was, and training stands still."""
    name = saved(tmp_path)
    model = to_pretrain(name) if way == "pretrain" else to_fine_tune(name, BF16_LAUNCH, modules_to_save=("lm_head", "norm"))
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
    model = to_fine_tune(saved(tmp_path), BF16_LAUNCH)
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


# Gradients -------------------------------------------------------------------------------------------------------------


def test_recomputed_blocks_behind_a_frozen_embedding_have_gradients():
    """transformers#21598 (2023): reentrant checkpointing gives none where no input needs one, as before adapters."""
    found = []
    for setting in ("none", "full"):
        torch.manual_seed(0)
        model = llama().train()
        model.get_input_embeddings().requires_grad_(False)
        set_gradient_checkpointing(model, setting)
        causal_lm_loss(model, {"input_ids": tokens(2, 8), "labels": tokens(2, 8, seed=1)}).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient)


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


# Images ----------------------------------------------------------------------------------------------------------------


def test_a_validation_folder_without_the_first_class_has_the_class_numbers_of_training(tmp_path, monkeypatch):
    """A common report: two ImageFolders number their classes on their own, so a class that one lacks shifts the others."""
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
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


def test_an_evaluation_leaves_a_frozen_backbone_at_rest():
    """A common report: `model.train()` after an evaluation also wakes frozen BatchNorm, whose statistics then move."""
    model = nn.Sequential(nn.BatchNorm1d(2).eval(), nn.Linear(2, 2), nn.Dropout(0.5))
    nothing = contextlib.nullcontext
    run = SimpleNamespace(logger=SimpleNamespace(pause=nothing), _complete_step=lambda: None, average=None)
    run._stop_if_asked, run.accelerator, run.unwrap = lambda now: None, Accelerator(cpu=True), lambda model: model
    with Run.evaluating(run, model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True, True]
