"""Optimizers that keep less than AdamW's 12 bytes a parameter: bf16 weights and moments, or 8-bit
moments.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from shared.parallel.gradients import local_part

MIN_BLOCK = 64
MAX_BLOCK = 256  # values that share a scale
MIN_VALUES = 4096  # of a matrix whose moments are quantised, as in bitsandbytes


def round_stochastically(
    into: torch.Tensor, values: torch.Tensor, generator: torch.Generator
) -> None:
    """Write fp32 `values` into a bf16 tensor, up or down at random, so that the mean is exact.

    To nearest, an update below 1/512 of a weight would always be lost ("Revisiting BFloat16
    Training", arXiv 2010.06192).
    """
    bits = values.view(torch.int32)
    noise = torch.randint(
        0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    # its lower half is 0: exact in bf16
    into.copy_(bits.add(noise).bitwise_and_(-(2**16)).view(torch.float32))


class StochasticAdamW(torch.optim.Optimizer):
    """AdamW on bf16 weights with bf16 moments: 8 bytes a parameter with the gradient, not 16.
    Computes in fp32. A weight that its model keeps in fp32 gets plain AdamW.

    The noise depends on the step and the parameter alone, so all copies of a weight stay equal, and
    a resumed run repeats.
    """

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float], eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        generators: dict[torch.device, torch.Generator] = {}
        parameters = (
            (group, parameter) for group in self.param_groups for parameter in group["params"]
        )
        for number, (group, parameter) in enumerate(parameters):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            stored = [*map(local_part, (state["exp_avg"], state["exp_avg_sq"], parameter))]
            mean, square, weight = exact = [value.float() for value in stored]
            beta1, beta2 = group["betas"]
            gradient = local_part(parameter.grad).float()
            adamw(
                [weight],
                [gradient],
                [mean],
                [square],
                [],  # of AMSGrad
                [state["step"]],
                foreach=False,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            generator = generators.setdefault(weight.device, torch.Generator(weight.device))
            generator.manual_seed((1_000_003 * int(state["step"]) + number) % 2**32)
            for into, values in zip(stored, exact, strict=True):
                if into.dtype == torch.bfloat16:  # fp32 is updated in place
                    round_stochastically(into, values, generator)


def adamw_8bit(params: Any, **options: Any) -> torch.optim.Optimizer:
    """torchao's AdamW with moments in blocks of 8 bits (arXiv 2110.02861).

    Which values share a scale depends on the matrix, not on the shards: moments are the same on any
    number of ranks, and resume on another. torchao decides by a shard's size.

    No second moment is rounded to 0, but to the smallest code above it: then no update is much
    larger than AdamW's (unsloth-zoo#962; "Memory Efficient Optimizers with 4-bit States", arXiv
    2309.01507).

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.optim import AdamW8bit
    from torchao.optim.subclass_8bit import OptimState8bit

    class BlockedAdamW8bit(AdamW8bit):
        def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
            block = (
                math.gcd(p.shape[-1], MAX_BLOCK) if p.ndim > 1 and p.numel() >= MIN_VALUES else 0
            )
            if block < MIN_BLOCK:
                return torch.zeros_like(p)
            own = local_part(p)
            state = OptimState8bit.zeros(own.shape, signed, block, own.device, dtype=p.dtype)
            # a second moment of 0 beside a first one that is not divides it by epsilon alone
            if not signed:
                state.qmap[0] = state.qmap[1]
            return _as_sharded(state, p, p.shape)

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            on_cpu = any(
                p.device.type == "cpu" for group in self.param_groups for p in group["params"][:1]
            )
            # torchao compiles each update: on a CPU that takes a C compiler, and longer than a
            # small run.
            with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
                super().step()

    return BlockedAdamW8bit(params, **options)


def _as_sharded(local: torch.Tensor, like: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A DTensor of this rank's piece, spread as `like`; the piece itself where that is whole."""
    if not isinstance(like, DTensor):
        return local
    assert all(p.is_replicate() or p.is_shard(0) for p in like.placements)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def moments(key: str, value: Any, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A moment in 8 bits as two plain tensors: codes and scales."""
    inner: Any = local_part(value)
    shape = torch.Size([*parameter.shape[:-1], parameter.shape[-1] // inner.block_size])
    scale = inner.scale.view(*inner.codes.shape[:-1], shape[-1])
    yield f"{key}.codes", _as_sharded(inner.codes, value, parameter.shape)
    yield f"{key}.scale", _as_sharded(scale, value, shape)
