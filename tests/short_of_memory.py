"""A template on a device whose memory ends where a block gets more than ROWS rows: in its forward, where a library says it
in its own way, or in its backward.

accelerate launch ... tests/short_of_memory.py ROWS forward|backward TEMPLATE [flags]
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

rows, where, template = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sys.argv = [template, *sys.argv[4:]]
forward = LlamaDecoderLayer.forward


def short(self, hidden_states, *args, **kwargs):
    def run_out(*_):
        if where == "forward":
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        raise torch.OutOfMemoryError(f"{hidden_states.shape[0]} rows do not fit")

    result = forward(self, hidden_states, *args, **kwargs)
    if self.training and hidden_states.shape[0] > rows and self.self_attn.layer_idx == 0:
        run_out() if where == "forward" else result.register_hook(run_out)
    return result


LlamaDecoderLayer.forward = short
path = Path(__file__).resolve().parent.parent / "templates" / f"{template}.py"
sys.path[0] = str(path.parent)  # as `accelerate launch` of the template has it: tests/ is no part of it
spec = importlib.util.spec_from_file_location("__main__", path)
assert spec and spec.loader
exec(compile(path.read_text(), path, "exec"), {"__name__": "__main__", "__file__": str(path)})
