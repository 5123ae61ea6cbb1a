"""Documents that share a row and cannot see each other, with a mask and without."""

import re
from itertools import chain, pairwise
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask

from shared.data.loader import cu_seqlens_of
from shared.data.order import IGNORED
from shared.models import angles, attention, isolation
from shared.models.blocks import repeated_blocks, set_gradient_checkpointing
from shared.models.hub import from_architecture
from shared.models.loading import class_of
from shared.models.loss import causal_lm_loss
from shared.process.errors import ConfigError
from shared.text.packing import Packed, collate_packed, collate_padded
from tests.small_models import VOCAB, architectures, llama, make, tokens

CPU = torch.device("cpu")
BY_MASK = "documents kept apart by an attention mask"


class Documents:
    """Conversations of given lengths, as chat.Packed reads them."""

    def __init__(self, lengths):
        generator = np.random.default_rng(0)
        self.rows = [generator.integers(0, VOCAB, length + 1) for length in lengths]
        self.lengths = np.array(lengths)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index][:-1], "labels": self.rows[index][1:]}

    def num_targets(self, indices):
        return int(self.lengths[indices].sum())


@pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("qwen2", "eager"), ("gpt2", "sdpa")])
@torch.no_grad()
def test_a_packed_document_has_the_logits_it_has_alone(name, implementation):
    """Which the trial before training sees."""
    subject = make(name, implementation)
    documents = Documents([11, 9, 6, 5, 4, 3, 1])
    packed = Packed(documents, 20)
    assert len(packed) == 2
    batch = collate_packed([packed[0], packed[1]])
    logits = subject(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    for row, bin in enumerate(map(packed.bin, range(len(packed)))):
        start = 0
        for index in bin:
            ids = torch.tensor(documents[index]["input_ids"])[None]
            alone = subject(input_ids=ids, use_cache=False).logits[0]
            torch.testing.assert_close(logits[row, start : start + ids.shape[1]], alone, atol=1e-5, rtol=1e-4)
            start += ids.shape[1]
    _, word = isolation.isolate_documents(subject.train(), CPU)
    assert word == (BY_MASK if implementation == "sdpa" else "documents kept apart by the model's own attention")
    assert subject.training and not subject.row_form.by_kernel


@pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("windows", "eager"), ("gpt2", "sdpa")])
def test_the_padded_loss_is_the_sum_of_the_documents_losses_and_so_are_its_gradients(name, implementation):
    """Without a mask: what fills a row up comes last, and no token looks ahead."""
    subject = make(name, implementation)
    documents = Documents([11, 9, 6, 5])
    expected = sum(causal_lm_loss(subject, collate_padded([documents[i]])) for i in range(4))
    gradients = torch.autograd.grad(expected, subject.parameters())
    together = causal_lm_loss(subject, collate_padded([documents[i] for i in range(4)], multiple_of=16))
    torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(together, subject.parameters()), gradients, atol=1e-4, rtol=1e-4)


class HostReads(TorchDispatchMode):
    """Counts what would have the host wait for a GPU: values that are read, and some shapes that depend on values."""

    count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        aten = torch.ops.aten
        self.count += operation.overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.masked_select)
        return operation(*args, **(kwargs or {}))


def batches():
    """One batch of each kind: rows of one document, packed ones, padded ones, and such that hold no more than one."""
    documents = Documents([11, 9, 6, 5, 20, 20])
    packed = Packed(documents, 20)
    bins = {len(documents_of_row): number for number, documents_of_row in enumerate(map(packed.bin, range(len(packed))))}
    return {
        "plain": {"input_ids": tokens(1, 16), "labels": tokens(1, 16)},
        "packed": collate_packed([packed[bins[2]], packed[bins[1]]]),
        "packed, nothing beside another": collate_packed([packed[bins[1]]]),
        "padded": collate_padded([documents[0], documents[1]]),
        "padded, nothing to pad": collate_padded([documents[4], documents[5]]),
    }


@pytest.mark.parametrize(
    ("name", "kind", "implementation"),
    [
        *((name, kind, "sdpa") for name in ("llama", "gpt2", "windows") for kind in batches()),
        *(("windows", kind, "eager") for kind in batches()),
        *((name, "packed", "eager") for name in ("llama", "gpt2")),
    ],
)
def test_masks_made_without_asking_the_device_are_those_that_transformers_makes(name, kind, implementation):
    """Bit for bit the same losses and gradients, windows of attention included."""
    subject = make(name, implementation)
    batch = batches()[kind]
    inputs = {key: value for key, value in batch.items() if key not in ("labels", "targets", "cu_seqlens", "filled")}
    assert inputs.keys() == ({"input_ids", "position_ids"} if kind == "packed" else {"input_ids"})
    assert ("cu_seqlens" in batch) is (kind == "packed")  # only rows of several documents
    with HostReads() as plain:
        logits = subject(**inputs, use_cache=False).logits
    targets = batch["labels"].flatten()
    plain_loss = F.cross_entropy(logits.flatten(0, 1), targets, ignore_index=IGNORED, reduction="sum")
    plain_loss.backward()
    expected = {n: p.grad.clone() for n, p in subject.named_parameters()}
    subject.zero_grad()
    with HostReads() as told:
        loss = causal_lm_loss(subject, batch)
        loss.backward()
    assert told.count == 0
    if implementation == "sdpa":
        assert plain.count > 0  # so that the counter is seen to count
    assert torch.equal(loss, plain_loss)
    for n, p in subject.named_parameters():
        assert torch.equal(p.grad, expected[n]), n


@pytest.mark.parametrize("mixed", [False, True])
def test_blocks_share_the_mask_of_packed_rows(mixed):
    """Made of bools by each block, that would be kept for backward as often as there are blocks."""
    subject, length = llama(num_hidden_layers=3), 40
    positions = (torch.arange(length) % 10)[None]
    batch = {"input_ids": tokens(1, length), "labels": tokens(1, length), "position_ids": positions}

    def masks_kept(told):
        kept = []

        def keep(tensor):
            if tensor.shape[-2:] == (length, length):
                kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), torch.autocast("cpu", enabled=mixed):
            if told:
                causal_lm_loss(subject, batch)
            else:
                subject(input_ids=batch["input_ids"], position_ids=positions, use_cache=False)
        assert {tensor.dtype for tensor in kept} == {torch.bfloat16 if mixed else torch.float32}
        return len({tensor.untyped_storage().data_ptr() for tensor in kept})

    assert masks_kept(told=False) == 3
    assert masks_kept(told=True) == 1


def test_a_row_mask_is_known_on_the_host_and_without_one_transformers_does_what_it_did():
    """There is no value to read on the meta device."""
    mask = attention.row_mask(torch.empty(2, 8, device="meta"), attention.Rows())
    for same in (mask, mask == 1, mask.bool(), mask.to(torch.float32), mask.view(2, -1)):
        assert torch.all(same) and same.all() and same.rows is mask.rows
    for other in (mask == 0, mask != 1, 1 - mask, mask[:, :4], mask.cumsum(-1), mask.all(-1)):
        assert type(other) is torch.Tensor
    padded = attention.with_rows(mask, attention.Rows(are_padded=True))
    assert not torch.all(padded == 1)
    subject, batch = make("llama"), batches()["packed"]
    with HostReads() as reads:
        mask = create_causal_mask(subject.config, torch.zeros(2, 20, 32), None, None, batch["position_ids"])
    assert (mask.dtype, reads.count) == (torch.bool, 1)


@pytest.mark.parametrize("kind", ["plain", "packed"])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "nemotron_h", "jamba", "lfm2", "qwen3_vl"])
def test_no_forward_reads_from_the_device(family, kind, monkeypatch):
    """Not even of models whose recurrent layers look for padding: values cannot be read on the meta device."""
    monkeypatch.setattr(attention, "computed_in", lambda device, dtype: dtype)
    batch = {key: value.to("meta") for key, value in batches()[kind].items()}
    config = architectures()[family]
    with torch.device("meta"):
        subject = from_architecture(class_of(config), config)
        attention.forward_rows(subject, batch).logits.sum().backward()


class SumsAll(nn.Module):
    """Each position's logits depend on all tokens before it, whatever `position_ids` say."""

    def __init__(self):
        super().__init__()
        self.config = LlamaConfig(vocab_size=VOCAB, attn_implementation="sdpa")
        self.embedding = nn.Embedding(VOCAB, VOCAB)

    def get_decoder(self):
        return self

    def get_output_embeddings(self):
        return nn.Identity()

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        return SimpleNamespace(logits=self.embedding(input_ids).cumsum(1))


class CountsOn(SumsAll):
    """Documents do not see each other, but positions go on from one to the next."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        return SimpleNamespace(logits=self.embedding(input_ids) * self.scale(torch.arange(input_ids.shape[1])[:, None]))

    def scale(self, place):
        return 1 + place


def test_a_model_whose_documents_are_apart_in_short_rows_only_is_not_packed_in_long_ones():
    """As Llama 4, with its temperature: tokens far into a row are scaled, wherever their document begins."""
    subject = CountsOn()
    subject.scale = lambda place: 1 + 0.01 * (place >= 1000)
    assert isolation.isolate_documents(subject, CPU, length=1000)[0]
    apart, why = isolation.isolate_documents(subject, CPU, length=1001)
    assert not apart and why == "off: CountsOn lets documents of one row see each other if it has 1,001 tokens"


@pytest.mark.parametrize("leaky", [SumsAll, CountsOn])
def test_a_model_whose_documents_are_not_apart_is_not_packed_and_keeps_its_mode(leaky):
    subject = leaky().train()
    apart, why = isolation.isolate_documents(subject, CPU)
    assert not apart and why == f"off: {leaky.__name__} lets documents of one row see each other"
    with pytest.raises(ConfigError, match=rf"{leaky.__name__} lets documents of one row see each other: use --packing auto"):
        isolation.isolate_documents(subject, CPU, required=True)
    assert subject.training


class LooksAtTheFirst(SumsAll):
    """The trial's own first document changes nothing, any other does: only the second trial shows it."""

    def __init__(self):
        super().__init__()
        self.usual = torch.randint(0, VOCAB, (1, 16), generator=torch.Generator().manual_seed(0))[0, 0]

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        logits = self.embedding(input_ids)
        if position_ids is not None and input_ids[0, 0] != self.usual:
            logits[:, 8:] += 1
        return SimpleNamespace(logits=logits)


def test_each_document_is_tried_behind_two_others_and_a_reason_is_given_where_it_is_known(monkeypatch):
    apart, why = isolation.isolate_documents(LooksAtTheFirst(), CPU)
    assert not apart and why == "off: LooksAtTheFirst lets documents of one row see each other"
    recurrent = SumsAll()
    recurrent.mixer = nn.Conv1d(1, 1, 1)
    apart, why = isolation.isolate_documents(recurrent, CPU)
    assert not apart and why.endswith(": its recurrent layers carry a state from one to the next")
    scaled = CountsOn()
    scaled.scale = lambda place: 1.0  # apart; scaled from token 100 on, which the trial need not see
    scaled.config.log_scaling_n_floor = 100
    assert isolation.isolate_documents(scaled, CPU, length=99)[0]
    said = ": from token 100 of a row on, its attention is scaled by the place there"
    assert isolation.isolate_documents(scaled, CPU, length=100)[1].endswith(said)
    assert isolation.relative_error(torch.zeros(3), torch.zeros(3)) == 0


class RoundsOtherwise(SumsAll):
    """As 32 blocks in 16 bits do, whose kernel for a mask is another one: measured up to 0.021 from fp32, on either side."""

    precision, shift = torch.bfloat16, 0.0

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None):
        logits = self.embedding(input_ids)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        if position_ids is None:
            logits = logits * (1 + 0.03 * noise)
        else:  # documents but the first are off
            logits = logits * (1 + self.shift * (torch.arange(logits.shape[1]) >= 8)[:, None])
        return SimpleNamespace(logits=logits.to(self.precision))


def test_the_rounding_of_a_deep_model_in_16_bits_does_not_end_packing():
    assert isolation.isolate_documents(RoundsOtherwise(), CPU)[0]
    prepared = RoundsOtherwise()  # as Accelerate does under mixed precision
    prepared.forward = convert_outputs_to_fp32(torch.autocast("cpu", torch.bfloat16)(prepared.forward))
    assert isolation.isolate_documents(prepared, CPU)[0]
    for name, value in (("precision", torch.float32), ("shift", 0.07)):
        subject = RoundsOtherwise()
        setattr(subject, name, value)
        assert not isolation.isolate_documents(subject, CPU)[0]


class LeaksOverSeveralRows(SumsAll):
    """As kernels do that look at the positions of a single row only."""

    def forward(self, input_ids, attention_mask=None, position_ids=None, use_cache=None, cu_seq_lens_q=None, seq_idx=None):
        if len(input_ids) > 1 and position_ids is not None:
            return super().forward(input_ids)
        return SimpleNamespace(logits=self.embedding(input_ids))


def test_rows_of_a_batch_become_one_if_the_model_keeps_documents_apart_only_there():
    subject = LeaksOverSeveralRows()
    for rows, flat in ((1, False), (2, True)):
        assert isolation.isolate_documents(subject, CPU, rows)[0] and subject.row_form.flat == flat
    batch = batches()["packed"]
    logits = subject.embedding(batch["input_ids"]).flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    torch.testing.assert_close(causal_lm_loss(subject, batch), expected)


# Without a mask ------------------------------------------------------------------------------------------------------


def each_alone(query, key, value, cu_seqlens, _cu_seqlens, longest, _longest, *, scale):
    """The kernel's stand-in on a CPU: attention of each document by itself, one after the other."""
    groups = query.shape[1] // key.shape[1]
    done = []
    for start, end in pairwise(cu_seqlens.tolist()):
        assert 0 < end - start <= longest
        states = (query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1))
        parts = (tensor[start:end].transpose(0, 1) for tensor in states)
        done.append(F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale).transpose(0, 1))
    return torch.cat(done)


@pytest.fixture
def kernel(monkeypatch):
    """A device that has a kernel; returns what sets it, and counts its calls."""
    calls = []

    def install(function):
        def counted(*arguments, scale):
            calls.append(arguments[0].shape)
            return function(*arguments, scale=scale)

        monkeypatch.setattr(isolation, "find_kernel", lambda device: counted)
        return calls

    yield install
    attention.use_kernel(None)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_bounds_of_documents_say_what_their_positions_say(rows):
    row_length = max(map(sum, rows))
    rows = [[*row[:-1], row[-1] + row_length - sum(row)] for row in rows]
    positions = np.stack([np.concatenate([np.arange(length) for length in row]) for row in rows])
    bounds = cu_seqlens_of(positions)
    assert bounds.dtype == np.int32 and bounds.tolist() == np.cumsum([0, *chain(*rows)]).tolist()
    mask = attention.mask_of(torch.from_numpy(bounds), *positions.shape)
    number = angles.number_of_document(torch.from_numpy(positions))
    assert torch.equal(mask[:, 0], (number[:, :, None] == number[:, None, :]).tril())


def learned(subject, batch, steps=10):
    """Losses of steps on one batch, and the gradients of the first."""
    optimizer, losses, gradients = torch.optim.AdamW(subject.parameters(), lr=1e-3), [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = causal_lm_loss(subject, batch)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {n: p.grad.clone() for n, p in subject.named_parameters()}
        optimizer.step()
    return losses, gradients


@pytest.mark.parametrize(
    ("name", "layers", "checkpointing"),
    [("gpt2", 2, "none"), ("windows", 1, "none"), ("windows of a row", 2, "full"), ("llama", 2, "full")],
)
def test_without_a_mask_the_same_is_learned(name, layers, checkpointing, kernel):
    """Also where a block is computed again for its gradient, and where some blocks' windows need a mask, or none."""
    batch, outcomes = batches()["packed"], []
    for found in (False, True):
        calls = kernel(each_alone)
        subject = make(name).train()
        for module in subject.modules():
            module.p = 0.0  # of dropout
        for drop in ("attn_pdrop", "resid_pdrop", "embd_pdrop"):
            setattr(subject.config, drop, 0.0)
        set_gradient_checkpointing(subject, checkpointing)
        with torch.autocast("cpu", torch.bfloat16):
            _, word = isolation.isolate_documents(subject, CPU, 2)
        assert word == "documents kept apart by attention of variable lengths, without a mask"
        assert subject.training
        if not found:
            subject.row_form = attention.Form()
        calls.clear()
        outcomes.append(learned(subject, batch))
        assert len(calls) == found * 10 * layers * (1 if checkpointing == "none" else 2)
    (masked, expected), (losses, gradients) = outcomes
    np.testing.assert_allclose(losses, masked, rtol=5e-3)
    assert losses[-1] < 0.97 * losses[0]
    for n in expected:
        assert (gradients[n] - expected[n]).norm() <= 0.03 * expected[n].norm() + 1e-3, n


def test_attention_dropout_takes_the_mask(kernel):
    """Also under a name that is not known, which leaves it to each block."""
    calls = kernel(each_alone)
    subject = llama(attention_dropout=0.5).train()
    with torch.autocast("cpu", torch.bfloat16):
        assert isolation.isolate_documents(subject, CPU)[1].endswith("mask: every block needs one (window, bias, dropout)")
        assert not subject.row_form.by_kernel
        subject.config.attention_dropout = 0.0  # the blocks have their own
        assert isolation.isolate_documents(subject, CPU)[1].endswith("without a mask")
        calls.clear()
        torch.manual_seed(1)
        loss = causal_lm_loss(subject, batches()["packed"])
        assert not calls
        subject.row_form = attention.Form()
        torch.manual_seed(1)
        torch.testing.assert_close(loss, causal_lm_loss(subject, batches()["packed"]), rtol=1e-3, atol=0)


def too_sharp(query, *others, scale):
    return each_alone(query, *others, scale=2 * (scale or query.shape[-1] ** -0.5))


def sees_everything(query, key, value, cu_seqlens, *_others, scale):
    ends = cu_seqlens[[0, -1]]
    return each_alone(query, key, value, ends, ends, len(query), len(query), scale=scale)


def forgets_gradients(query, key, value, *others, scale):
    return each_alone(query, key, value.detach() + 0 * value, *others, scale=scale)


def halved(query, key, value, cu_seqlens, _cu_seqlens, longest, _longest, *, scale):
    """Right for the sizes that it is tried with by itself."""
    found = each_alone(query, key, value, cu_seqlens, cu_seqlens, longest, longest, scale=scale)
    return found if longest > 100 else found / 2


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (Mock(side_effect=RuntimeError("It only supports Ampere GPUs.\nand more")), "It only supports Ampere GPUs."),
        (too_sharp, r"the kernel is off by [0-9.]+"),
        (sees_everything, r"the kernel is off by [0-9.]+"),
        (forgets_gradients, "the kernel is off by 1"),
        (halved, "without one the model's logits differ"),
        (each_alone, "attention in fp32 has no kernel for variable lengths"),
    ],
)
def test_a_kernel_that_is_not_right_on_a_device_or_not_for_the_precision_is_not_used(function, why, kernel):
    calls = kernel(function)
    subject = make("llama").to(torch.float32 if function is each_alone else torch.bfloat16)
    batch = batches()["packed"]
    expected = causal_lm_loss(subject, batch)
    _, word = isolation.isolate_documents(subject, CPU)
    assert re.fullmatch(f"{BY_MASK}: {why}", word) and not subject.row_form.by_kernel
    assert bool(calls) is (function is not each_alone)
    assert torch.equal(causal_lm_loss(subject, batch), expected)


def test_a_bias_of_attention_is_never_lost(kernel, monkeypatch):
    """The model keeps its mask; were it not noticed at the start, each block would make one."""
    from transformers.models.llama import modeling_llama

    distance = torch.arange(64)[:, None] - torch.arange(64)
    bias = 0.1 * torch.randn(2, 127, generator=torch.Generator().manual_seed(0))[:, distance + 63][None]
    inner = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface

    def biased(_self, *names):
        def attend(module, query, *others, **named):
            of_rows = bias[..., : query.shape[2], : query.shape[2]].to(query.dtype)
            return inner(*names)(module, query, *others, position_bias=of_rows, **named)

        return attend

    monkeypatch.setattr(type(modeling_llama.ALL_ATTENTION_FUNCTIONS), "get_interface", biased)
    kernel(each_alone)
    subject, batch = make("llama").to(torch.bfloat16), batches()["packed"]
    expected = causal_lm_loss(subject, batch)
    _, word = isolation.isolate_documents(subject, CPU, length=64)
    assert word == f"{BY_MASK}: every block needs one (window, bias, dropout)"
    assert not subject.row_form.by_kernel
    subject.row_form = attention.Form(by_kernel=True)
    attention.use_kernel(each_alone)
    torch.testing.assert_close(causal_lm_loss(subject, batch), expected, rtol=2e-3, atol=0)


def test_a_lack_of_memory_in_the_trial_is_not_taken_for_a_kernel_that_fails(kernel):
    kernel(Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(torch.OutOfMemoryError):
        isolation.isolate_documents(make("llama").to(torch.bfloat16), CPU)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_blocks_take_documents_for_a_mask_in_one_graph(checkpointing, monkeypatch):
    """A model of tensors without values, with PyTorch's own kernel, as its blocks find it in transformers."""
    monkeypatch.setattr(attention, "computed_in", lambda device, dtype: dtype)
    attention.use_kernel(attention.find_kernel(torch.device("cuda")))
    counter = CompileCounterWithBackend("aot_eager")
    with torch.device("meta"):
        subject = llama(attn_implementation="sdpa").to(torch.bfloat16).train()
    subject.row_form = attention.Form(by_kernel=True)
    set_gradient_checkpointing(subject, checkpointing)
    for block in repeated_blocks(subject):
        block.compile(backend=counter)
    try:
        for number in (5, 9, 3):
            batch = {key: torch.empty(2, 16, dtype=torch.long, device="meta") for key in ("input_ids", "labels")}
            batch["position_ids"] = batch["labels"]
            batch["cu_seqlens"] = torch.empty(number, dtype=torch.int32, device="meta")
            causal_lm_loss(subject, batch).backward()
    finally:
        attention.use_kernel(None)
    assert counter.frame_count == 1
