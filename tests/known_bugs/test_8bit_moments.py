"""8-bit moments: no update is much larger than AdamW's, also of weights that seldom have a gradient."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shared.extras.optimizers.low_memory import adamw_8bit
from shared.training.optim import fill_state, state_tensors

RATE = 1e-3
OPTIONS: dict[str, Any] = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


def gradients(shape: tuple[int, ...]) -> Callable[[int], torch.Tensor]:
    """Gradients of a table whose rows are used in every 12th step, with values of a row over seven powers of ten."""
    sizes = 10 ** torch.empty(shape).uniform_(-7, 0, generator=torch.Generator().manual_seed(0))

    def gradient(step: int) -> torch.Tensor:
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(step + 1))
        is_used = torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) % 12 == step % 12
        return noise * sizes * is_used

    return gradient


def updates(make: Callable[..., torch.optim.Optimizer], shape: tuple[int, ...]) -> torch.Tensor:
    """The largest updates of each of 60 steps, and the largest move of a weight, in multiples of the rate."""
    weight = nn.Parameter(torch.zeros(shape))
    optimizer, gradient = make([weight], **OPTIONS), gradients(shape)
    largest = []
    for step in range(60):
        before, weight.grad = weight.detach().clone(), gradient(step)
        with torch.compiler.set_stance("force_eager"):  # torchao's own, on a CPU
            optimizer.step()
        largest.append((weight.detach() - before).abs().max() / RATE)
    return torch.stack([*largest, weight.detach().abs().max() / RATE])


# An embedding, and experts of which a step uses one in twelve.
@pytest.mark.parametrize("shape", [(256, 128), (24, 32, 64)], ids=["embedding", "experts"])
def test_rare_rows_are_not_updated_by_far_more_than_the_rate(shape):
    """unsloth-zoo#962 (2026): the second moment is rounded to 0, the first is not, and is divided by epsilon."""
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit

    plain, ours, theirs = (updates(make, shape) for make in (torch.optim.AdamW, adamw_8bit, AdamW8bit))
    assert ours[:-1].max() < 1.5 * plain[:-1].max() < 10
    assert ours[-1] < 1.5 * plain[-1]
    assert theirs[:-1].max() > 50  # else torchao needs no other table any more


def test_rare_rows_continue_bit_for_bit():
    """unsloth-zoo#962 (2026): the floor of the second moment is that of the run that goes on."""
    pytest.importorskip("torchao")
    gradient = gradients((256, 128))
    weights = [nn.Parameter(torch.zeros(256, 128)) for _ in range(2)]
    first, second = (adamw_8bit([weight], **OPTIONS) for weight in weights)
    for step in range(20):
        if step == 13:
            weights[1].data.copy_(weights[0].data)
            fill_state(second)
            for (_, key, saved), (_, same, loaded) in zip(state_tensors(first), state_tensors(second), strict=True):
                assert key == same
                loaded.copy_(saved)
        for weight, optimizer in list(zip(weights, (first, second), strict=True))[: 1 + (step >= 13)]:
            weight.grad = gradient(step)
            optimizer.step()
    assert torch.equal(*weights)
