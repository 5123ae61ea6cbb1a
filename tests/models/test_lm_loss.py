"""The loss in chunks is the loss from whole logits, and so are its gradients."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import transformers
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from shared.data.order import IGNORED
from shared.models import fused_head
from shared.models.fused_head import FusedHead, fuse_head
from shared.models.loss import causal_lm_loss, log_probabilities
from tests.conftest import slow

VOCAB = 96
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": VOCAB}


def llama(tied=False, **options):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, tie_word_embeddings=tied, **options))


def batch(rows=3, length=17):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED
    return {"input_ids": tokens[:, :-1], "labels": labels}


class OnlyHead(nn.Module):
    """A language model of given hidden states, [tokens, width], which computes the loss in its head."""

    def __init__(self, hidden, weight):
        super().__init__()
        self.hidden, self.head = hidden, nn.Linear(*weight.T.shape, bias=False, device="meta")
        self.head.weight = nn.Parameter(weight) if not isinstance(weight, nn.Parameter) else weight
        self.fused_head = FusedHead(self, None)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids, **_):
        return SimpleNamespace(logits=self.head(self.hidden[None]))


def in_chunks(hidden, weight, labels, size=1024, ask=causal_lm_loss):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "MAX_LOGITS", size * len(weight))
        patch.setattr(fused_head, "MIN_TOKENS", 1)
        return ask(OnlyHead(hidden, weight), {"input_ids": labels[None], "labels": labels[None]})


def log_probs_of(model):
    """Of every second row's tokens three times as much."""
    rows, length = batch()["input_ids"].shape
    groups = (torch.arange(rows) % 2).repeat_interleave(length)
    return (log_probabilities(model, batch(), groups, 2) * torch.tensor([1.0, 3.0])).sum()


def gradients(model, mixed=False, loss_of=lambda model: causal_lm_loss(model, batch())):
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        loss = loss_of(model)
    (loss * 0.37).backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


FEW, MANY = 5 * VOCAB, 2**26


@pytest.mark.parametrize(
    ("tied", "frozen", "at_once", "compiled"),
    [
        *((*case, False) for case in itertools.product((False, True), (False, True), (FEW, MANY))),
        *(slow(*case, True) for case in ((False, False, FEW), (True, True, FEW), (True, False, MANY), (False, True, MANY))),
    ],
)
def test_loss_and_gradients_are_those_of_whole_logits(monkeypatch, tied, frozen, at_once, compiled):
    """In fp32 to rounding, with chunks of five tokens (ten), of all; with a head that is trained or not."""
    monkeypatch.setattr(fused_head, "MAX_LOGITS", at_once)
    monkeypatch.setattr(fused_head, "MIN_TOKENS", 1)
    model = llama(tied)
    if frozen:
        model.get_output_embeddings().weight.requires_grad_(False)
    loss, expected = gradients(model)
    whole = model(batch()["input_ids"]).logits
    said = fuse_head(Accelerator(cpu=True), model, compiled=compiled)
    assert said.startswith("fused") and said.endswith("compiled") == compiled
    assert torch.equal(model(batch()["input_ids"]).logits, whole)  # for whoever does not ask for the loss
    fused, found = gradients(model)
    torch.testing.assert_close(fused, loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_told_where_the_targets_are_the_loss_is_the_same(fused, share):
    """With few, most or no targets; none at all gives zeros, and not no gradients, for which DDP would wait."""
    model = llama()
    if fused:
        assert "fused" in fuse_head(Accelerator(cpu=True), model)
    told = batch()
    told["labels"][torch.rand(told["labels"].shape, generator=torch.Generator().manual_seed(2)) >= share] = IGNORED
    untold = dict(told)
    told["targets"] = (told["labels"].flatten() != IGNORED).nonzero().flatten()
    losses = [causal_lm_loss(model, asked) for asked in (told, untold)]
    assert (losses[1] == 0) == (share == 0)
    found, expected = ([loss, *torch.autograd.grad(loss, model.parameters())] for loss in losses)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_logits_are_computed_of_targets_only():
    model = llama()
    fuse_head(Accelerator(cpu=True), model)
    whole = batch(rows=3, length=17)
    whole["labels"] = whole["input_ids"]
    few = whole | {"labels": torch.full_like(whole["labels"], IGNORED), "targets": torch.arange(5)}
    few["labels"][0, :5] = 1
    spent = []
    for asked in (whole, few):
        with FlopCounterMode(display=False) as counter:
            causal_lm_loss(model, asked).backward()
        spent.append(counter.get_total_flops())
    assert spent[0] - spent[1] == (3 * 17 - 5) * 3 * 2 * 32 * VOCAB


@pytest.mark.parametrize("compiled", [False, slow(True)])
def test_in_bf16_it_is_as_far_from_fp32_as_whole_logits_are(compiled):
    model = llama()
    exact, exact_gradients = gradients(model)
    plain, plain_gradients = gradients(model, mixed=True)
    fuse_head(Accelerator(cpu=True), model, compiled=compiled)
    fused, fused_gradients = gradients(model, mixed=True)
    assert abs(fused - exact) <= 2 * abs(plain - exact) + 1e-3 * exact
    for name, gradient in exact_gradients.items():
        error, allowed = ((g[name] - gradient).norm() for g in (fused_gradients, plain_gradients))
        assert error <= 1.5 * allowed + 1e-6, name


def test_compiled_it_is_one_graph_for_any_number_of_tokens_and_evaluations_leave_it_alone(monkeypatch):
    counter = CompileCounterWithBackend("aot_eager")  # inductor: where `compiled` is slow
    compiled = torch.compile(fused_head._loss_and_gradient, backend=counter)
    monkeypatch.setattr(fused_head, "_compiled", lambda: compiled)
    monkeypatch.setattr(fused_head, "MAX_LOGITS", 7 * VOCAB)
    monkeypatch.setattr(fused_head, "MIN_TOKENS", 1)
    model = llama()
    expected = [causal_lm_loss(model, batch(*shape)) for shape in ((3, 17), (2, 9), (1, 1))]
    fuse_head(Accelerator(cpu=True), model)
    causal_lm_loss(model, batch()).backward()
    model = llama()
    fuse_head(Accelerator(cpu=True), model, compiled=True)
    with torch.no_grad():
        causal_lm_loss(model, batch())
    assert counter.frame_count == 0
    for shape, plain in zip(((3, 17), (2, 9), (1, 1)), expected, strict=True):
        loss = causal_lm_loss(model, batch(*shape))
        loss.backward()
        torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)
    assert counter.frame_count == 1


@given(st.integers(1, 40), st.integers(2, 50), st.integers(1, 2000), st.floats(0, 1), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_every_size_and_every_share_of_ignored_labels(tokens, vocab, chunk, share, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
    weight = nn.Parameter(torch.randn(vocab, 8, generator=generator))
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[torch.rand(tokens, generator=generator) < share] = IGNORED
    expected = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")
    wanted = torch.autograd.grad(expected, (hidden, weight))
    loss = in_chunks(hidden, weight, labels, max(1, chunk // vocab))
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), wanted, rtol=1e-4, atol=1e-5)


def test_a_logit_that_is_not_finite_counts_only_where_there_is_a_label():
    hidden, weight = torch.ones(3, 4), torch.ones(5, 4)
    hidden[1] = float("nan")
    labels = torch.tensor([1, IGNORED, 2])
    total = in_chunks(hidden, weight, labels)
    torch.testing.assert_close(total, 2 * torch.log(torch.tensor(5.0)))
    spoiled = in_chunks(hidden, weight, torch.tensor([1, 1, 2]))
    assert spoiled.isnan()


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("count", [23, 0])
def test_log_probabilities_of_each_token_and_their_gradients(trained, count):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, 16, generator=generator).requires_grad_()
    weight = nn.Parameter(torch.randn(50, 16, generator=generator), requires_grad=trained)
    labels = torch.randint(0, 50, (count,), generator=generator)
    labels[3:4] = IGNORED
    factors = torch.randn(count, generator=generator)
    ours = in_chunks(hidden, weight, labels, 7, lambda *given: log_probabilities(*given, torch.arange(count), count))
    plain = -F.cross_entropy(hidden @ weight.T, labels, reduction="none")
    torch.testing.assert_close(ours, plain)
    inputs = [hidden, weight] if trained else [hidden]
    torch.testing.assert_close(*(torch.autograd.grad((v * factors).sum(), inputs) for v in (ours, plain)))


def test_in_fp16_the_gradient_of_the_logits_is_scaled_before_it_is_rounded():
    """fp16 has no number for the probability of an unlikely token, but one for 1024 times it."""
    torch.manual_seed(0)
    hidden, weight = torch.rand(20, 16) + 0.5, nn.Parameter(0.2 * torch.randn(50, 16))
    with torch.no_grad():
        weight[25:] -= 1.0
    labels = torch.arange(20)
    exact = torch.autograd.grad(in_chunks(hidden, weight, labels, 7), weight)[0]
    with torch.autocast("cpu", torch.float16):
        loss = in_chunks(hidden, weight, labels, 7)
    scaled = torch.autograd.grad(1024 * loss, weight)[0] / 1024
    assert 0 < exact[25:].abs().max() < 1e-5
    assert (scaled - exact)[25:].norm() < 0.05 * exact[25:].norm()


def test_logits_are_never_held_whole():
    """The largest tensor that is saved for the backward is far smaller than the logits."""
    model = llama()
    sizes = []
    inside = torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t)
    model_batch = batch(rows=4, length=64)
    with inside:
        causal_lm_loss(model, model_batch)
    assert max(sizes) >= 4 * 64 * VOCAB
    sizes.clear()
    fuse_head(Accelerator(cpu=True), model)
    with inside:
        causal_lm_loss(model, model_batch)
    assert max(sizes) < 4 * 64 * VOCAB


ONE, TWO, BF16 = {}, {"function": torch.tanh}, {"compiled": True, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("vocab", "trained", "options", "size"),
    [
        *[(2**17, False, ONE, 512), (2**17, False, TWO, 256), (2**17, False, BF16, 1024)],
        *[(2**17, False, {"compiled": True}, 512), (2**17, False, {"dtype": torch.bfloat16}, 512)],
        *[(2**17, True, ONE, 1024), (2**17, True, TWO, 512), (2**17, True, {"by_target": True}, 512)],
        *[(2**26 // 100, False, ONE, 100), (2**26 // 129, False, ONE, 128), (2**26 + 1, False, ONE, 1)],
    ],
)
def test_chunks_have_the_tokens_that_memory_allows(monkeypatch, vocab, trained, options, size):
    """2**26 logits in all copies, at least 1024 tokens with a trained head, in multiples of a tile's."""
    sizes = []
    in_one_pass = SimpleNamespace(apply=lambda *given: sizes.append(given[4]) or given[1] * 0.0)
    monkeypatch.setattr(fused_head, "_InOnePass", in_one_pass)
    monkeypatch.setattr(fused_head, "log_probabilities_in_chunks", lambda *given: sizes.append(given[3]) or given[1] * 0.0)
    dtype = options.get("dtype", torch.float32)
    hidden = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    model = OnlyHead(hidden, nn.Parameter(torch.ones(1, 1, dtype=dtype).expand(vocab, 1), requires_grad=trained))
    model.fused_head = FusedHead(model, options.get("function"), options.get("compiled"))
    model.fused_head.asked = torch.ones(1, dtype=torch.long), None, options.get("by_target", False)
    model(None)
    assert sizes == [size]


CAPPED = transformers.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5)
SAVED = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
HEADS = {
    "tied": (transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=VOCAB), None),
    "a cap": (CAPPED, None),
    "a scale": (transformers.CohereConfig(**SMALL, logit_scale=0.3), None),
    "a bias": (transformers.PhiConfig(**SMALL, tie_word_embeddings=False), None),
    "modules_to_save": (LlamaConfig(**SMALL), SAVED),
    "modules_to_save, capped": (CAPPED, SAVED),
    "an adapter": (LlamaConfig(**SMALL), {"r": 2, "target_modules": ["lm_head"], "init_lora_weights": False}),
}


@pytest.mark.parametrize("ask", [lambda model: causal_lm_loss(model, batch()), log_probs_of])
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_all_kinds_compute_the_loss_of_whole_logits(monkeypatch, name, ask):
    """With the model's own caps and scales, in chunks of at most five tokens; the loss and all gradients."""
    monkeypatch.setattr(fused_head, "MAX_LOGITS", 5 * VOCAB)
    monkeypatch.setattr(fused_head, "MIN_TOKENS", 5)
    config, adapter = HEADS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)  # where a cap shows
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    if adapter:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **adapter))
    expected, wanted = gradients(model, loss_of=ask)
    assert fuse_head(Accelerator(cpu=True), model).startswith("fused")
    loss, found = gradients(model, loss_of=ask)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Changed(LlamaForCausalLM):
    """Does something to its head's logits."""

    def __init__(self, change):
        super().__init__(LlamaConfig(**SMALL))
        self.change, self.heat = change, nn.Parameter(torch.tensor(2.0))

    def forward(self, *args, **kwargs):
        outputs = super().forward(*args, **kwargs)
        outputs.logits = self.change(outputs.logits, self)
        return outputs


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        (lambda logits, _: 3 * torch.tanh(0.7 * logits.float() / 3), True),
        (lambda logits, _: -0.3 * logits, True),
        (lambda logits, _: logits.mul_(0.1), False),  # the loss would be changed, too
        (lambda logits, _: 3 * torch.erf(logits / 3), False),
        (lambda logits, _: logits + 1e-3, False),
        (lambda logits, _: logits[..., :-8], False),
        (lambda logits, _: logits.masked_fill(torch.arange(VOCAB) == 90, -1e9), False),
        (lambda logits, _: logits * torch.linspace(0.9, 1, logits.shape[1])[:, None], False),
        (lambda logits, model: logits * model.heat, False),
    ],
)
@torch.no_grad()
def test_what_a_model_does_to_its_logits_is_measured(change, fused):
    """What is more than a cap and a factor, or has a trained weight in it, leaves the logits whole."""
    torch.manual_seed(0)
    model = Changed(change).eval()
    model.lm_head.weight.mul_(30)
    few = batch(1, 16)
    few["labels"].clamp_(max=VOCAB - 9)
    plain = causal_lm_loss(model, few)
    summary = fuse_head(Accelerator(cpu=True), model)
    why = "Changed changes what its head returns" if model(few["input_ids"]).logits.shape[-1] == VOCAB else "Target "
    assert summary.startswith("fused" if fused else f"not fused: {why}")
    torch.testing.assert_close(causal_lm_loss(model, few), plain)
    assert model(few["input_ids"]).logits.shape == change(torch.zeros(1, 16, VOCAB), model).shape


def test_the_head_s_gradient_is_added_up_in_fp32_over_chunks():
    torch.manual_seed(0)
    hidden, weight = torch.randn(2048, 8), nn.Parameter(torch.randn(16, 8))
    labels, found = torch.randint(0, 16, (2048,)), []
    for size in (2048, 64):
        with torch.autocast("cpu", torch.bfloat16):
            loss = in_chunks(hidden, weight, labels, size)
        found.append(torch.autograd.grad(loss, weight)[0])
    assert (found[0] - found[1]).norm() < 4e-3 * found[0].norm()
