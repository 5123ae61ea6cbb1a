"""The trial before training: whether packed documents see each other, and the fastest attention
that keeps them apart."""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import nn
from transformers.modeling_utils import AttentionInterface

from shared.data.order import Batch
from shared.models import attention
from shared.models.attention import Form, Kernel, find_kernel, forward_rows, scaled_from
from shared.models.blocks import as_in_an_evaluation
from shared.models.cudnn import as_before, avoid_cudnn
from shared.models.loading import parts_that_choose, without_adapters
from shared.parallel.gradients import end_step
from shared.process.errors import ConfigError, reason_of

# Relative, of the kernel's results in 16 bits, against fp32. Of logits, errors of many blocks: 4
# times.
MAX_ERROR = 0.02
# Relative, of logits in fp32: the same to the last digits if positions restart with a document.
FP32_ERROR = 0.002
LONGEST_TRIED = 2**14  # tokens: a mask takes the square

# Packages that transformers imports with the models that they are for
RECURRENT_KERNELS = ("causal_conv1d", "fla", "mamba_ssm")

# query heads, key and value heads, query size, value size, compute dtype
Heads = tuple[int, int, int, int, torch.dtype]


@torch.no_grad()
def isolate_documents(
    model: Any,
    device: torch.device,
    rows: int = 1,
    *,
    length: int = 128,
    required: bool = False,
) -> tuple[bool, str]:
    """Check that packed documents do not see each other, and use the fastest attention.

    A document must have the logits that it has alone, wherever it lies in a row and whatever lies
    before it. The rows are tried in each `Form` that the model may take; the one that works becomes
    `model.row_form`. At last, it lies in a row as long as those of training: attention may depend
    on places beyond thousands of tokens. Layers that choose tokens for sparse attention are not
    packed.

    On a GPU, PyTorch's variable-length attention replaces SDPA's mask, because the mask's cost
    grows with the square of the row length. It must give the same as the mask: results, gradients
    and the model's logits are compared on this device. Otherwise the mask stays.

    Every rank calls this, after the model is prepared: a sharded model's forward is a collective.

    Args:
        rows: the number of rows in training: some attention kernels look at positions only if the
            batch is a single row.
        length: tokens of a row in training.
        required: raise an error if documents see each other.

    Returns:
        Whether documents are apart, and a line for the summary.

    Raises:
        ConfigError: see `required`.
    """
    with as_before():
        are_apart, why = _decide(_Trial(model, device, rows, length), required)
    if are_apart:
        avoid_cudnn()  # each number of documents would cost it a new plan
    return are_apart, why


def _decide(trial: "_Trial", required: bool) -> tuple[bool, str]:
    model = trial.model
    if not trial.finds_form():
        why = f"{type(trial.whole).__name__} lets documents of one row see each other{trial.hint}"
        if required:
            raise ConfigError(
                f"{why}: use --packing auto or off (in pretraining, drop --isolate_documents)"
            )
        return False, f"off: {why}"
    apart = "documents kept apart by "
    if model.row_form.bounds:
        kernels = [name for name in RECURRENT_KERNELS if name in sys.modules]
        apart += f"{', '.join(kernels)} in recurrent layers, in others by "
    if not trial.heads:
        return True, f"{apart}the model's own attention"
    kernel = find_kernel(trial.device)
    if kernel is None:
        return True, f"{apart}an attention mask"
    # The kernel has to work on all ranks, because they run the forward together.
    reasons = gather_object([_why_not(kernel, trial.heads, trial.device)])
    if why := next(filter(None, reasons), "") or trial.why_not_by(kernel):
        return True, f"{apart}an attention mask: {why}"
    return True, f"{apart}attention of variable lengths, without a mask"


class _Trial:
    """Two documents of 8 tokens in each row, and the model's logits for them.

    Attributes:
        whole: the model without wrappers.
        masked: the packed rows' logits, with a mask.
        heads: of the calls of SDPA in that forward.
        length: tokens of a row in training.
        hint: why documents are not apart, if it is known.
    """

    def __init__(self, model: Any, device: torch.device, rows: int, length: int) -> None:
        self.model = model
        self.whole: Any = without_adapters(model)
        self.device = device
        vocab_size = self.whole.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocab_size, (rows, 16), generator=generator).to(device)
        position_ids = (torch.arange(16, device=device) % 8).expand(rows, -1)
        bounds = torch.arange(0, 16 * rows + 1, 8, dtype=torch.int32, device=device)
        # Another document before the second
        other = torch.cat([(tokens[:, :8] + 1) % vocab_size, tokens[:, 8:]], 1)
        self.packed = {"input_ids": tokens, "position_ids": position_ids, "cu_seqlens": bounds}
        self.changed = self.packed | {"input_ids": other}
        self.alone = [{"input_ids": document} for document in tokens.split(8, 1)]
        self.masked: torch.Tensor
        self.heads: set[Heads] = set()
        self.length = length
        self.hint = ""
        self.autocasts = False

    def finds_form(self) -> bool:
        """Whether documents are apart in one of the forms, which becomes `model.row_form`."""
        if parts_that_choose(self.whole):
            self.hint = ": it chooses the tokens that it sees from the whole row"
            return False
        settings = self.whole.config.get_text_config()
        is_flat = str(settings._attn_implementation).startswith("flash")
        # Recurrent layers take the bounds by the name that attention has for them; Kimi's pass all
        # names on to their kernel, which has another.
        for form in (Form(is_flat), Form(True, "cu_seq_lens_q"), Form(True, "cu_seqlens")):
            self.model.row_form = form
            try:
                if self._is_apart():
                    self.hint = self._why_not_in_long_rows()
                    if not self.hint:
                        return True
            except Exception as error:  # a model may raise anything if it does not take this form
                end_step(self.model)
                why = reason_of(error)
                if isinstance(error, ValueError):  # transformers names the package that is missing
                    self.hint = f": {why}"
        if not self.hint and any(
            isinstance(module, nn.Conv1d) for module in self.whole.get_decoder().modules()
        ):
            self.hint = ": its recurrent layers carry a state from one to the next"
        return False

    def _is_apart(self) -> bool:
        with _watched(None) as calls:
            self.masked, changed, *alone = self._logits(self.packed, self.changed, *self.alone)
        self.heads = {heads for heads, _ in calls}
        pairs = zip(self.masked.split(8, 1), alone, strict=True)
        errors = [relative_error(*pair) for pair in pairs]
        # What 16 bits do to the first document's logits, they may do to the second one's.
        # Accelerate's logits are fp32
        in_16_bits = self.masked.dtype.itemsize == 2 or self.autocasts
        allowed = FP32_ERROR
        if in_16_bits:
            allowed = max(MAX_ERROR, min(2 * errors[0], 4 * MAX_ERROR))
        self.own = alone[1][:1], allowed
        return _see_the_same(self.masked, changed) and max(errors) < allowed

    def _why_not_in_long_rows(self) -> str:
        """Why a document has other logits at the end of a row of so many; "" if it does not."""
        # too little to be seen in 16 bits
        if (first := scaled_from(self.whole)) <= self.length:
            return f": from token {first:,} of a row on, its attention is scaled by the place there"
        length = min(self.length, LONGEST_TRIED)
        first, second = self.packed["input_ids"][:1].split(8, 1)
        tokens = torch.cat([*[first] * ((length - 1) // 8), second], 1)
        places = torch.arange(tokens.shape[1] + 1, device=self.device)
        row = {"input_ids": tokens, "position_ids": places[None, :-1] % 8}
        row["cu_seqlens"] = places[::8].int()
        # logits of few tokens: of a whole row they may not fit
        head = self.whole.get_output_embeddings()
        with head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -8:],)):
            (found,) = self._logits(row)
        alone, allowed = self.own
        is_apart = relative_error(found[:, -8:], alone) < allowed
        return "" if is_apart else f" if it has {length:,} tokens"

    def why_not_by(self, kernel: Kernel) -> str:
        """Why the model's blocks cannot use the kernel; "" if they do from now on."""
        form = self.model.row_form
        self.model.row_form = form._replace(by_kernel=True)
        try:
            with _watched(kernel) as calls:
                found, changed = self._logits(self.packed, self.changed)
            if not any(by_kernel for _, by_kernel in calls):
                why = "every block needs one (window, bias, dropout)"
            elif (
                not _see_the_same(found, changed)
                or relative_error(found, self.masked) > 4 * MAX_ERROR
            ):
                why = "without one the model's logits differ"
            else:
                attention.use_kernel(kernel)
                return ""
        except Exception as error:  # a model may raise anything if it gets `cu_seqlens` as the mask
            end_step(self.model)
            why = reason_of(error)
        self.model.row_form = form
        return why

    def _logits(self, *batches: Batch) -> list[torch.Tensor]:
        """Of each batch, [rows, tokens, vocab]."""

        def look(*_: Any) -> None:
            self.autocasts = torch.is_autocast_enabled(self.device.type)

        hook = self.whole.get_decoder().register_forward_pre_hook(look)
        with hook, as_in_an_evaluation(self.model):
            found = [forward_rows(self.model, batch).logits for batch in batches]
        return [
            logits.reshape(len(batch["input_ids"]), -1, logits.shape[-1])
            for batch, logits in zip(batches, found, strict=True)
        ]


def _see_the_same(before: torch.Tensor, changed: torch.Tensor) -> bool:
    return torch.allclose(before[:, 8:].float(), changed[:, 8:].float(), atol=1e-3, rtol=1e-3)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(
        (found.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)
    )


@contextlib.contextmanager
def _watched(kernel: Kernel | None) -> Iterator[list[tuple[Heads, bool]]]:
    """(heads, whether it goes to the kernel) of each call of SDPA in this block."""
    calls: list[tuple[Heads, bool]] = []
    attention.understand_row_masks()  # not within the block, where it would undo this

    def attend(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
    ) -> Any:
        dtype = attention.computed_in(query.device, value.dtype)
        heads = (query.shape[1], key.shape[1], query.shape[3], value.shape[3], dtype)
        calls.append((heads, attention.takes_kernel(attention_mask, **options)))
        return attention.attend(kernel, module, query, key, value, attention_mask, **options)

    AttentionInterface.register("sdpa", attend)
    try:
        yield calls
    finally:
        attention.use_kernel(None)


@torch.enable_grad()
def error_of(kernel: Kernel, heads: Heads, device: torch.device) -> float:
    """The largest relative error of the kernel's result and gradients, against attention with a
    mask in fp32."""
    rows = 2
    length = 192
    cu_seqlens = torch.tensor([0, 60, 61, length, rows * length], dtype=torch.int32, device=device)
    of_queries, of_keys, size, value_size, dtype = heads
    module = SimpleNamespace(num_key_value_groups=of_queries // of_keys)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator).to(device, dtype)

    inputs = [
        random(of_queries, length, size),
        random(of_keys, length, size),
        random(of_keys, length, value_size),
    ]
    gradient = random(length, of_queries, value_size)

    def results(kernel: Kernel | None, dtype: torch.dtype) -> list[torch.Tensor]:
        states = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        query, key, value = states
        output, _ = attention.attend(kernel, module, query, key, value, cu_seqlens)
        return [output.detach(), *torch.autograd.grad(output, states, gradient.to(dtype))]

    with torch.autocast(device.type, enabled=False):
        pairs = zip(results(kernel, dtype), results(None, torch.float32), strict=True)
    # unlike max(), NaN if one is
    return float(torch.tensor([relative_error(*pair) for pair in pairs]).max())


def _why_not(kernel: Kernel, kinds: set[Heads], device: torch.device) -> str:
    """Why blocks with these heads cannot use the kernel on this device; "" if they can."""
    kinds = {heads for heads in kinds if heads[-1].itemsize == 2}
    if not kinds:
        return "attention in fp32 has no kernel for variable lengths"
    try:
        worst = max(error_of(kernel, heads, device) for heads in kinds)
    except Exception as error:  # a kernel may raise anything on a device that it does not support
        return reason_of(error)
    return "" if worst <= MAX_ERROR else f"the kernel is off by {worst:.2g}"
