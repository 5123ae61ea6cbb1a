"""AdamW that keeps bf16 weights and moments, in place of fp32."""

from typing import Any

import torch
from torch.optim.adamw import adamw

from shared.parallel.gradients import local_part


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
    Computes in fp32.

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
                round_stochastically(into, values, generator)
