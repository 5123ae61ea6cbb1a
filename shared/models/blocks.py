"""The repeated blocks of a model: checkpointing and compiling them."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from shared.process.errors import ConfigError


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: the entries of its largest `ModuleList` of blocks.

    Of a multimodal model, those of its language model.

    Raises:
        ConfigError: the model has none.
    """
    part = model.get_decoder() if hasattr(model, "get_decoder") else model  # type: ignore[operator]
    # what stands for blocks of other ranks has no weights
    lists = [
        [block for block in m if any(True for _ in block.parameters())]
        for m in part.modules()
        if isinstance(m, nn.ModuleList)
    ]
    lists = [
        blocks
        for blocks in lists
        if len({type(b) for b in blocks}) == 1
        or (blocks and all(hasattr(b, "gradient_checkpointing") for b in blocks))
    ]
    if not lists:
        raise ConfigError(
            f"{type(model).__name__} has no list of equal blocks to checkpoint or compile"
        )
    return max(lists, key=lambda found: sum(p.numel() for b in found for p in b.parameters()))


HEADS = (
    "classifier",
    "cls_classifier",
    "distillation_classifier",
    "head",
    "dist_head",
    "head_dist",
    "score",
    "fc",
)


def heads(model: Any) -> list[nn.Module]:
    """The modules that turn an image's features into scores. Raises ConfigError where they have
    none of the usual names.
    """
    if hasattr(model, "timm_model"):
        found = model.timm_model.get_classifier()
        return list(found) if isinstance(found, tuple) else [found]
    found = [module for name, module in model.named_children() if name in HEADS]
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no head named {', '.join(HEADS[:-1])} or {HEADS[-1]}"
        )
    return found


def set_gradient_checkpointing(model: nn.Module, setting: str) -> None:
    """Recompute the activations of all (`full`) or every N-th block in the backward pass; `none`
    changes nothing. `offload` is `full`, with the inputs of blocks in host memory meanwhile.

    Numerically the same as without: non-reentrant checkpointing restores the generator states. Call
    it before the model is prepared. For blocks of transformers' models
    (`GradientCheckpointingLayer`).
    """
    if setting == "none":
        return
    if any(isinstance(m, _BatchNorm) and m.track_running_stats for m in model.modules()):
        raise ConfigError(
            "--gradient_checkpointing would count each batch twice in the statistics of BatchNorm"
        )
    if hasattr(model, "timm_model") and setting == "full":
        try:
            model.timm_model.set_grad_checkpointing(True)  # type: ignore[operator, union-attr]
        except (AssertionError, AttributeError):
            raise ConfigError("this timm model does not support --gradient_checkpointing") from None
        return
    every = int(setting) if setting.isdecimal() else 1
    place: Callable[[], Any] = contextlib.nullcontext
    if setting == "offload":
        place = partial(save_on_cpu, pin_memory=torch.cuda.is_available())

    def recompute(function, *args, **options):
        with place():
            return checkpoint(partial(function, **options), *args, use_reentrant=False)

    chosen = repeated_blocks(model)
    if not all(hasattr(block, "gradient_checkpointing") for block in chosen):
        raise ConfigError(f"{type(model).__name__} does not support --gradient_checkpointing")
    for block in chosen[every - 1 :: every]:
        # `block.gradient_checkpointing` would do nothing in the mode of an evaluation
        block.forward = partial(recompute, block.forward)  # type: ignore[method-assign]


def compile_blocks(model: nn.Module) -> None:
    """Compile each block in place.

    Regional: the compile time does not grow with depth, since equal blocks share the code; and the
    attention mask is chosen outside, so that SDPA keeps `is_causal` and the kernels for it, which
    compiling the whole model loses.
    """
    # DDP would cut each into graphs of its buckets, to reduce one while the next is computed;
    # between blocks it does anyway.
    torch._dynamo.config.optimize_ddp = False
    for block in repeated_blocks(model):
        block.compile()


def compile_images(model: nn.Module) -> None:
    """Compile an image classifier in place: by blocks where all are alike, as in a ViT, else whole.

    Whole, a ViT's attention gets a mask that masks nothing (transformers before 5.23), and twelve
    blocks take twelve times as long to compile.

    Raises:
        ConfigError: it is sharded, and its blocks are not alike.
    """
    shapes: set[tuple[torch.Size, ...]] = set()
    with contextlib.suppress(ConfigError):  # a timm model has no list of blocks
        shapes = {tuple(p.shape for p in block.parameters()) for block in repeated_blocks(model)}
    if len(shapes) == 1:
        compile_blocks(model)
    elif isinstance(model, FSDPModule):
        raise ConfigError("under FSDP, --torch_compile takes models of equal blocks, such as a ViT")
    else:
        model.compile()


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Run without dropout and compiled code; afterwards each module has its mode again.

    An evaluation's varying sizes would be compiled as variables, which are slower, and from then on
    training would use these, too.
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextlib.contextmanager
def as_in_an_evaluation(model: nn.Module) -> Iterator[None]:
    """`in_eval_mode` without fp8, whose scales depend on all tokens of a batch, so that every token
    would affect all others.
    """
    scaled = [
        m
        for m in model.modules()
        if isinstance(m, nn.Linear) and type(m).__name__ == "Float8Linear"
    ]
    for module in scaled:
        module.forward = partial(nn.Linear.forward, module)  # type: ignore[method-assign]
    try:
        with in_eval_mode(model):
            yield
    finally:
        for module in scaled:
            del module.forward
