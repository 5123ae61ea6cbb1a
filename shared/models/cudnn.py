"""cuDNN's attention, PyTorch's first choice on Hopper: fast without a mask, wrong with one.

Its backward may give NaN then, for row lengths like 64 and 192
(github.com/pytorch/pytorch/issues/196678).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Take back at the end what a trial in this block has turned off."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def avoid_cudnn() -> None:
    """Turn it off for good. Compiled code cannot: what runs before it has met the same masks."""
    if not torch.compiler.is_compiling():
        torch.backends.cuda.enable_cudnn_sdp(False)


class MasksAvoidCudnn(TorchFunctionMode):
    """In this block, attention with a mask turns it off."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        named = named or {}
        if function is F.scaled_dot_product_attention:
            mask = arguments[3] if len(arguments) > 3 else named.get("attn_mask")
            if mask is not None:
                avoid_cudnn()
        return function(*arguments, **named)
