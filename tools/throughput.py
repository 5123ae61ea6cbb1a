"""How long one optimizer step takes on one GPU, on paper: from shapes and data sheets. An estimate;
nothing is measured.

The model runs forward and backward with one block of each kind and with one more, and AdamW steps,
on fake tensors. Each operator's FLOPs (as PyTorch counts them, half of attention's where it is
causal) and bytes are recorded. Deeper models are extrapolated linearly.
An operator takes as long as its FLOPs at the assumed rate or its bytes at the assumed bandwidth,
whichever is longer.

Eager, each operator reads its inputs and writes its outputs. Compiled, the operators between matrix
products and attention become one kernel, as late as possible: it reads what is made elsewhere and
writes what is used elsewhere, each tensor once. In-place operators (sums of gradients) and look-ups
of embeddings stay alone. This is a little too good where the compiler cannot see the next block,
and a little too bad where it recomputes in the backward pass what is stored here.

Left out: gaps between kernels, the L2 cache, falling clocks, data, logging and communication.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from shared.models import loss as lm_loss
from shared.models.blocks import set_gradient_checkpointing
from shared.models.counts import flops_per_token
from tools import memory
from tools.gpus import GPU

# Assumed shares of the data sheet's figures. The best of many matrix products reaches 80 % on an
# H100, 71 % in fp8, and 87 % on an A100 (github.com/stas00/ml-engineering,
# compute/accelerator/README.md, "Maximum Achievable Matmul FLOPS"): a model's own shapes get
# somewhat less. FlashAttention-2 reaches 35 % on an H100 (huggingface.co/papers/2407.08608).
SHARES = {"product": 0.72, "product in fp8": 0.60, "attention": 0.35, "bandwidth": 0.90}
# bytes moved to cast an operand to fp8, for each of its own: read at 2 bytes a number, written at 1
FP8_TRAFFIC = 1.5
KINDS = ("product", "attention", "weights", "other")
PARTS = (
    "matrix products of the blocks",
    "attention",
    "casts of weights, sums of gradients",
    "norms, activations, other",
    "embedding, head and loss",
    "clipping and AdamW",
)
FIGURES = ("flops", "bytes", "by_flops", "by_bytes", "seconds", "kernels")


@dataclass(frozen=True)
class Setting:
    """How a step is run."""

    compiled: bool = False
    checkpointing: str = "none"  # one of memory.CHECKPOINTING
    fused: bool = True  # head and loss in chunks, not whole logits
    fp8: bool = False  # matrix products of the blocks
    micro_batches: int = 1

    def __str__(self) -> str:
        words = "compiled" if self.compiled else "eager"
        words += ", fp8" * self.fp8 + ", whole logits" * (not self.fused)
        return words + f", checkpointing {self.checkpointing}" * (self.checkpointing != "none")


@dataclass(frozen=True)
class Operator:
    """What one kernel computes and moves."""

    # of KINDS; "weights": casts of weight matrices and of their gradients, and sums of these
    kind: str
    fusible: bool
    flops: float
    reads: dict[int, float]  # bytes, by storage
    writes: dict[int, float]


class Recorder(TorchDispatchMode):
    """Lists the operators of a model that move bytes: no views, no empty tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.matrices = {p.shape for p in model.parameters() if p.ndim == 2}
        self.numbers = WeakIdKeyDictionary()
        self.next = count()

    def _sizes(self, tree: Any) -> dict[int, float]:
        found: dict[int, float] = {}
        for tensor in tree_leaves(tree):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self.numbers:
                    self.numbers[storage] = next(self.next)
                # expanded tensors have fewer bytes
                size = min(tensor.numel() * tensor.element_size(), storage.nbytes())
                found[self.numbers[storage]] = max(size, found.get(self.numbers[storage], 0))
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {
            a.name: kwargs.get(a.name, args[i] if i < len(args) else None)
            for i, a in enumerate(func._schema.arguments)
        }
        changed = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        # which fused AdamW writes only if it scales them
        changed -= {"grads"} if given.get("grad_scale") is None else set()
        reads = self._sizes([v for name, v in given.items() if name != "out"])
        writes = {k: v for k, v in self._sizes(result).items() if k not in reads} | self._sizes(
            [given[n] for n in changed]
        )
        name = func._overloadpacket.__name__
        if not writes or name.startswith(("empty", "new_empty")):
            return result
        # touch no more than the second largest
        if name in ("embedding", "gather", "scatter_add_", "nll_loss_forward"):
            limit = sorted((reads | writes).values())[-2]
            reads, writes = (
                {k: min(v, limit) for k, v in sizes.items()} for sizes in (reads, writes)
            )
        flops = 0.0
        kind = "other"
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            flops = formula(*args, **kwargs, out_val=result) / (2 if given.get("is_causal") else 1)
            kind = "attention" if "attention" in name else "product"
        elif any(
            t.shape in self.matrices for t in tree_leaves(result) if isinstance(t, torch.Tensor)
        ):
            kind = "weights"
        fusible = not (flops or changed or name in ("embedding", "embedding_dense_backward"))
        self.operators.append(Operator(kind, fusible, flops, reads, writes))
        return result


def fuse(operators: list[Operator]) -> Iterator[Operator]:
    """The operators as compiled: see the module's docstring."""
    due: dict[int, int] = {}  # storage -> the stage that first needs it, counted back from the end
    groups: dict[tuple[int, str], list[Operator]] = {}
    readers: dict[int, set[object]] = {}  # of a storage: groups and single operators
    for operator in reversed(operators):
        stage = min((due.get(storage, 0) for storage in operator.writes), default=0)
        reader: Any = (stage, operator.kind) if operator.fusible else id(operator)
        if operator.fusible:
            groups.setdefault(reader, []).append(operator)
        else:
            stage -= 1
            yield operator
        for storage in operator.reads:
            due[storage] = min(due.get(storage, 0), stage)
            readers.setdefault(storage, set()).add(reader)
    for group, members in groups.items():
        made = {storage: size for member in members for storage, size in member.writes.items()}
        reads = {
            storage: size
            for member in members
            for storage, size in member.reads.items()
            if storage not in made
        }
        writes = {
            storage: size for storage, size in made.items() if readers.get(storage) != {group}
        }
        yield Operator(group[1], True, 0.0, reads, writes)


def record_step(
    model: nn.Module, forward: Callable[[], torch.Tensor]
) -> tuple[list[Operator], ...]:
    """The operators of a step's first micro-batch, of each later one (adding to gradients), and of
    its update with AdamW.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # allocates its state
    optimizer.zero_grad()
    with Recorder(model) as recorder:
        ends = [0]
        for _ in range(2):
            loss = forward()
            loss.backward(torch.ones_like(loss))
            ends.append(len(recorder.operators))
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    return (*(recorder.operators[a:b] for a, b in zip(ends, [*ends[1:], None], strict=True)),)


@cache
def record(
    job: memory.Job, chosen: tuple[int, ...], setting: Setting
) -> tuple[list[Operator], ...]:
    """`record_step` of the model with these of its blocks only."""
    with FakeTensorMode(), torch.compiler.set_stance("force_eager"):
        model = memory._build(job, chosen, gathered=False)
        if setting.fused:
            memory.fuse_head(model, compiled=setting.compiled)
        set_gradient_checkpointing(model, setting.checkpointing)
        tokens = torch.zeros(job.batch, job.length, dtype=torch.int64)
        batch = {"input_ids": tokens, "labels": tokens} | (
            {"position_ids": tokens} if job.packed else {}
        )

        def forward() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return lm_loss.causal_lm_loss(model, batch)

        return record_step(model, forward)


def costs(operators: Iterable[Operator], gpu: GPU, *, fp8: bool = False) -> np.ndarray:
    """FIGURES by KINDS: [kinds, figures]."""
    table = np.zeros((len(KINDS), len(FIGURES)))
    for op in operators:
        share = "product in fp8" if fp8 and op.kind == "product" else op.kind
        moved = sum(op.reads.values()) + sum(op.writes.values())
        by_flops = op.flops / (
            gpu.flops * SHARES.get(share, 1) * (gpu.fp8 if share != op.kind else 1)
        )
        by_bytes = moved / (gpu.bandwidth * SHARES["bandwidth"])
        casts = FP8_TRAFFIC * sum(op.reads.values()) if share != op.kind else 0.0
        seconds = max(by_flops, by_bytes) + casts / (gpu.bandwidth * SHARES["bandwidth"])
        table[KINDS.index(op.kind)] += op.flops, moved + casts, by_flops, by_bytes, seconds, 1
    return table


def estimate(job: memory.Job, setting: Setting, gpu: GPU) -> np.ndarray:
    """What one optimizer step costs: [PARTS, FIGURES]."""
    if setting.checkpointing == "2":
        none, full = (
            estimate(job, replace(setting, checkpointing=c), gpu) for c in ("none", "full")
        )
        return (none + full) / 2

    def step(chosen: tuple[int, ...], compiled: bool, fp8: bool) -> np.ndarray:
        first, later, update = record(job, chosen, replace(setting, fp8=False, micro_batches=1))
        one, more = (costs(fuse(ops) if compiled else ops, gpu, fp8=fp8) for ops in (first, later))
        return np.stack([one + (setting.micro_batches - 1) * more, costs(update, gpu)])

    numbers = memory.count(job)

    def split(compiled: bool, fp8: bool) -> tuple[np.ndarray, np.ndarray]:
        """What all blocks cost, and the rest: [micro-batches and update, kinds, figures]."""
        one = step(numbers.last, compiled, fp8)
        each = [step((block, *numbers.last), compiled, fp8) - one for block in numbers.last]
        counts = [numbers.kinds.count(numbers.kinds[block]) for block in numbers.last]
        return sum(n * cost for n, cost in zip(counts, each, strict=True)), one - sum(each)

    blocks, rest = split(setting.compiled, setting.fp8)
    _, ends = split(setting.compiled and setting.fused, False)
    return np.vstack([blocks[0], ends[0].sum(0), (blocks[1] + rest[1]).sum(0)])


def mfu(job: memory.Job, tokens_per_second: float, gpu: GPU) -> float:
    """As a run logs it: without recomputation, attention as if it were not causal, over the dense
    bf16 peak.
    """
    return (
        (flops_per_token(memory._on_meta(job), job.length) or 0.0) * tokens_per_second / gpu.flops
    )
