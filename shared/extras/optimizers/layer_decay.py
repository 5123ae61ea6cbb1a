"""Learning rates that fall from the head down: `--layer_decay`."""

from torch import nn

from shared.training.optim import head_parameters


def layer_scales(model: nn.Module, decay: float) -> dict[nn.Parameter, float]:
    """The factor on each parameter's learning rate: 1 for the head, `decay` for the last block, and
    so on down.

    Blocks are the entries of lists of equal modules, and of such lists inside those (stages of
    blocks); what stands between two blocks, or between the last and the head, goes with the one
    before it (BEiT, arXiv 2106.08254; ELECTRA, arXiv 2003.10555).
    """
    lists = {
        name: len({type(block) for block in module}) == 1
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }

    def block_of(name: str) -> str:
        parts = name.split(".")
        found = [
            ".".join(parts[: i + 1])
            for i, part in enumerate(parts)
            if part.isdecimal() and lists.get(".".join(parts[:i]))
        ]
        return found[min(1, len(found) - 1)] if found else ""

    inside = {name: block_of(name) for name, _ in model.named_parameters()}
    # A stage's own parameters (its downsampling) come before its blocks and are not a block.
    named = set(inside.values()) - {""}
    blocks = {b for b in named if not any(other.startswith(f"{b}.") for other in named)}
    seen: list[str] = []
    depth = {}
    for name, parameter in model.named_parameters():
        block = inside[name]
        if block in blocks and block not in seen:
            seen.append(block)
        depth[parameter] = len(seen)
    last = max((i for i, block in enumerate(inside.values()) if block), default=-1)
    head = head_parameters(model)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        # tied embeddings come first
        if i > last and (parameter in head if head else "norm" not in name):
            depth[parameter] = len(seen) + 1
    return {parameter: decay ** (len(seen) + 1 - d) for parameter, d in depth.items()}
