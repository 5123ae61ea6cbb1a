"""CUDA devices made of host memory: every operator on them is computed by PyTorch's kernel for the CPU.

cudart.c stands in for the CUDA runtime, so devices, the caching allocator, pinned memory, streams, events and generators are
PyTorch's own. What would launch a kernel comes here instead, through a dispatch mode, which also notes what would cost time
or fail on a GPU: reads that make the host wait, copies from memory that is not pinned, tensors on two devices, and
collectives of NCCL on CPU tensors.
"""

import atexit
import collections
import functools
import json
import os
import sys
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten
ROOT = Path(__file__).resolve().parents[2]
# Runs are forked from a process that has counted the devices. Real ones would not survive that; see `install`.
torch.cuda._is_in_bad_fork = lambda: False

# Reads of values: the host waits for all that was queued.
READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default),
    *(aten.masked_select.default, aten.unique_consecutive.default, aten._unique2.default, aten.bincount.default),
}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# Operators without kernels, or whose kernel is a call of the runtime.
NATIVE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "resize_", "record_stream"),
    *("is_pinned", "_pin_memory", "detach", "_fused_sdp_choice", "_reshape_alias", "_unsafe_view", "_use_cudnn_ctc_loss"),
}


def _rank():
    return int(os.environ.get("RANK", "0"))


class Log:
    """What happened on the devices, by the line of the project that asked for it."""

    def __init__(self):
        self.rows = collections.Counter()  # by (optimizer steps done, what and where)
        self.counts = collections.Counter()
        self.operators = 0

    def add(self, what):
        frame, place = sys._getframe(2), "elsewhere"
        while frame is not None:
            file = frame.f_code.co_filename
            if file.startswith(str(ROOT)) and "pretend_cuda" not in file and "site-packages" not in file:  # of a .venv here
                place = f"{Path(file).name}:{frame.f_lineno}"
                break
            frame = frame.f_back
        exits = sys.modules.get("shared.run.exits")
        self.rows[exits._step if exits else 0, f"{what} {place}"] += 1


LOG = Log()


@functools.cache
def is_native(func):
    """Views and allocations."""
    if func._schema.name.startswith("aten::") and func._schema.name[6:] in NATIVE:
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def alias(tensor):
    """The same memory as a tensor of the CPU."""
    storage = tensor.untyped_storage()
    size = storage.nbytes()
    if not size:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), size)
    found = torch.empty(0, dtype=tensor.dtype).set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_conj():
        found = found.conj()
    return found.neg() if tensor.is_neg() else found


def on_device(tensor, device):
    """A copy of a CPU tensor in the device's memory."""
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if tensor.numel():
        alias(result).copy_(tensor)
    return result


@functools.cache
def variable_lengths():
    """The Python code of PyTorch's variable-length attention, by operator."""
    from torch.nn.attention import varlen

    return {op._qualname: op._init_fn for op in (varlen._varlen_attn, varlen._varlen_attn_backward)}


# Operators that only CUDA has ------------------------------------------------------------------------------------------


def _weights(query, key, bias, causal, scale):
    """[batch, heads, queries, keys] in fp32, and the keys by query head."""
    key = key.float().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.float() @ key.transpose(-1, -2) * scale
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.float()
    if causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return scores.softmax(-1), key, scale


def attend(query, key, value, bias=None, causal=False, scale=None):
    """[batch, heads, seq, head_dim], the output as a transposed [batch, seq, heads, head_dim], as the kernels give it."""
    weights = _weights(query, key, bias, causal, scale)[0]
    out = weights @ value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)
    return out.transpose(1, 2).to(query.dtype).contiguous().transpose(1, 2)


def gradients(grad, query, key, value, bias=None, causal=False, scale=None):
    weights, keys, scale = _weights(query, key, bias, causal, scale)
    grad, values = grad.float(), value.float().repeat_interleave(query.shape[1] // value.shape[1], 1)
    of_weights = grad @ values.transpose(-1, -2)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    of_values, of_keys = weights.transpose(-1, -2) @ grad, of_scores.transpose(-1, -2) @ query.float()
    found = [of_scores @ keys]
    for each, given in ((of_keys, key), (of_values, value)):
        found.append(each.unflatten(1, (given.shape[1], -1)).sum(2))
    return tuple(g.to(t.dtype) for g, t in zip(found, (query, key, value), strict=True))


def _seed():
    return torch.zeros((), dtype=torch.int64)


def sdpa_flash(query, key, value, dropout=0.0, causal=False, debug=False, *, scale=None):
    LOG.counts["kernel flash"] += 1
    out = attend(query, key, value, None, causal, scale)
    lse, none = torch.zeros(query.shape[:3]), torch.empty(0)
    return out, lse, none, none, query.shape[2], key.shape[2], torch.zeros(2, dtype=torch.int64), none, none


def sdpa_flash_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout, causal, seed, offset, *, scale=None):
    return gradients(grad, q, k, v, None, causal, scale)


def sdpa_efficient(query, key, value, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    LOG.counts["kernel efficient" + (" with a mask" if bias is not None else "")] += 1
    return attend(query, key, value, bias, causal, scale), torch.zeros(query.shape[:3]), _seed(), _seed()


def sdpa_efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    return (*gradients(grad, q, k, v, bias, causal, scale), torch.empty(0))


def sdpa_cudnn(query, key, value, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
    LOG.counts["kernel cudnn" + (" with a mask" if bias is not None else "")] += 1
    none = torch.empty(0)
    out = attend(query, key, value, bias, causal, scale)
    return out, torch.zeros(query.shape[:3]), none, none, query.shape[2], key.shape[2], _seed(), _seed(), none


def sdpa_cudnn_backward(grad, q, k, v, out, lse, seed, offset, bias, cq, ck, mq, mk, dropout, causal, *, scale=None):
    bias = bias if bias is not None and bias.numel() else None
    return gradients(grad, q, k, v, bias, causal, scale)


def _documents(bounds, *states):
    """The mask within documents, and states as one row: [tokens, heads, head_dim] -> [1, heads, tokens, head_dim]."""
    number = torch.bucketize(torch.arange(len(states[0])), bounds.long(), right=True)
    return (number[:, None] == number).tril(), *(t.transpose(0, 1)[None] for t in states)


def varlen(q, k, v, cq, ck, mq, mk, dropout, causal, debug, *, scale=None, **_):
    LOG.counts["kernel variable lengths"] += 1
    mask, *states = _documents(cq, q, k, v)
    out, none = attend(*states, mask, False, scale)[0].transpose(0, 1), torch.empty(0)
    return out, torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.int64), none, none


def varlen_backward(grad, q, k, v, out, lse, cq, ck, mq, mk, dropout, causal, state, unused, *, scale=None, **_):
    mask, *states = _documents(cq, grad, q, k, v)
    return tuple(g[0].transpose(0, 1) for g in gradients(*states, mask, False, scale))


def batch_norm(x, weight, bias, mean, var, training, momentum, eps):
    return (*aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps), torch.empty(0))


def batch_norm_backward(x, grad, weight, mean, var, save_mean, save_var, eps, reserve):
    return aten.native_batch_norm_backward(grad, x, weight, mean, var, save_mean, save_var, True, eps, [True] * 3)


OURS = {
    aten._scaled_dot_product_flash_attention.default: sdpa_flash,
    aten._scaled_dot_product_flash_attention_backward.default: sdpa_flash_backward,
    aten._scaled_dot_product_efficient_attention.default: sdpa_efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: sdpa_efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: sdpa_cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: sdpa_cudnn_backward,
    aten._flash_attention_forward.default: varlen,
    aten._flash_attention_backward.default: varlen_backward,
    aten.cudnn_batch_norm.default: batch_norm,
    aten.cudnn_batch_norm_backward.default: batch_norm_backward,
}


# The mode --------------------------------------------------------------------------------------------------------------


class Device(TorchDispatchMode):
    """Computes on the CPU what is meant for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if FakeTensor in types:  # shapes alone
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for kind in types):
            # A tensor of another kind (DTensor, a quantised one): its own operators come here afterwards.
            return NotImplemented
        flat, spec = tree_flatten((args, kwargs))
        if func.namespace in ("c10d", "_c10d_functional"):
            return collective(func, flat, spec)
        tensors = [t for t in flat if isinstance(t, torch.Tensor)]
        device = next((t.device for t in tensors if t.is_cuda), None)
        target = kwargs.get("device")
        to = torch.device(target).type if target is not None else None
        if device is None and to != "cuda":
            return func(*args, **kwargs)
        return self.compute(func, flat, spec, device, args, kwargs)

    def compute(self, func, flat, spec, device, args, kwargs):
        LOG.operators += 1
        if func in (aten._to_copy.default, aten.copy_.default):
            return copy(func, args, kwargs)
        if func.namespace == "torch_attn":  # operators written in Python, whose operators come here
            with self:
                return variable_lengths()[func._schema.name](*args, **kwargs)
        if is_native(func):
            return func(*args, **kwargs)
        raise_out_of_memory(func)
        if func in READS:
            LOG.add("read")
        into = torch.device(kwargs["device"]) if kwargs.get("device") is not None else device
        given = {}
        for i, value in enumerate(flat):
            if isinstance(value, torch.Tensor):
                if value.is_cuda:
                    if func in INDEXING and value.dtype in (torch.bool, torch.uint8) and i:
                        LOG.add("read")
                    flat[i] = alias(value)
                    given[id(flat[i])] = value
                elif value.dim() and device is not None:
                    if func not in INDEXING:
                        raise RuntimeError(
                            f"Expected all tensors to be on the same device, but found {device} and cpu: {func} of "
                            f"{tuple(value.shape)}"
                        )
                    LOG.add("index from the host")
            elif isinstance(value, torch.device):
                flat[i] = torch.device("cpu")
        cpu_args, cpu_kwargs = tree_unflatten(flat, spec)
        cpu_kwargs.pop("pin_memory", None)
        call = OURS.get(func, func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            result = draw(call, cpu_args, cpu_kwargs, into)
        else:
            result = call(*cpu_args, **cpu_kwargs)
        results, shape = tree_flatten(result)
        for i, value in enumerate(results):
            if isinstance(value, torch.Tensor):
                results[i] = given[id(value)] if id(value) in given else on_device(value, into)
        return tree_unflatten(results, shape)


def copy(func, args, kwargs):
    """Between devices, or of another type."""
    if func is aten.copy_.default:
        into, source, *more = args
        note(source, into.device, more[0] if more else kwargs.get("non_blocking", False))
        on_host(into).copy_(on_host(source))
        return into
    (source,) = args
    target, non_blocking = torch.device(kwargs.get("device") or source.device), kwargs.get("non_blocking", False)
    note(source, target, non_blocking)
    kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"} | {"device": torch.device("cpu")}
    result = func(on_host(source), **kwargs)
    if target.type == "cuda":
        return on_device(result, target)
    return result.pin_memory() if non_blocking else result


def on_host(tensor):
    return alias(tensor) if tensor.is_cuda else tensor


def note(source, target, non_blocking):
    if source.is_cuda and target.type == "cpu" and not non_blocking:
        LOG.add("read")
    if source.is_cpu and target.type == "cuda":
        LOG.add("copy" if source.is_pinned() and non_blocking else "copy that waits")


def draw(call, args, kwargs, device):
    """A random operator, by the device's own generator: its seed and offset are PyTorch's."""
    generator = kwargs.pop("generator", None) or torch.cuda.default_generators[device.index or 0]
    host = torch.default_generator
    if generator.device.type == "cpu":
        return call(*args, generator=generator, **kwargs)
    state, offset = host.get_state(), generator.get_offset()
    host.manual_seed((generator.initial_seed() * 1_000_003 + offset) % 2**63)
    try:
        return call(*args, **kwargs)
    finally:
        host.set_state(state)
        generator.set_offset(offset + 4)


_calls = collections.Counter()


def raise_out_of_memory(func):
    """PRETEND_OUT_OF_MEMORY='1 aten.mm 20': on rank 1 at the 20th call."""
    if wanted := os.environ.get("PRETEND_OUT_OF_MEMORY"):
        rank, name, number = wanted.split()
        if int(rank) == _rank() and str(func).startswith(name):
            _calls[name] += 1
            if _calls[name] == int(number):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


# NCCL ------------------------------------------------------------------------------------------------------------------

_under_way = collections.deque(maxlen=1000)  # keeps memory that is sent or received
NCCL = set()  # names of groups that were asked for as NCCL's; gloo does their work


def collective(func, flat, spec):
    """On the aliases; done when it returns."""
    given = {}
    for i, value in enumerate(flat):
        if isinstance(value, torch.Tensor) and value.is_cuda:
            flat[i] = alias(value)
            given[id(flat[i])] = value
    args, kwargs = tree_unflatten(flat, spec)
    LOG.add(f"{'device' if given else 'host'} collective {func._schema.name}")
    if not given:
        objects = [value for value in flat if isinstance(value, torch.ScriptObject)]
        groups = [dist.ProcessGroup.unbox(o) for o in objects if "ProcessGroup" in str(o._type())]
        if any(group.group_name in NCCL for group in groups):
            raise RuntimeError("No backend type associated with device type cpu")
        return func(*args, **kwargs)
    device = next(iter(given.values())).device
    result = func(*args, **kwargs)
    if func._schema.name in ("c10d::send", "c10d::recv_"):  # waited for by the caller, when both sides are under way
        _under_way.append(list(given.values()))
        return result
    results, shape = tree_flatten(result)
    for i, value in enumerate(results):
        if isinstance(value, torch.Tensor):
            if func.namespace == "_c10d_functional":
                value = torch.ops._c10d_functional.wait_tensor(value)
            results[i] = given[id(value)] if id(value) in given else on_device(value, device)
        elif isinstance(value, torch.ScriptObject):
            dist.Work.unbox(value).wait()
            done = torch.futures.Future(devices=[device])
            done.set_result(list(given.values()))
            results[i] = _create_work_from_future(done).boxed()
    return tree_unflatten(results, shape)


def install():
    """Make this process one with devices, from here to its end."""
    os.register_at_fork(after_in_child=lambda: setattr(torch.cuda, "_is_in_bad_fork", lambda: True))
    pretend_nccl()
    for kind, name in ((torch.cuda.Stream, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda, "synchronize")):
        setattr(kind, name, noted(f"wait for {kind.__name__.split('.')[-1].lower()}", getattr(kind, name)))
    Device().__enter__()
    work = threading.Thread.run

    def in_a_thread(self):  # a mode holds for one thread, and libraries load weights in others
        with Device():
            work(self)

    threading.Thread.run = in_a_thread
    if folder := os.environ.get("PRETEND_LOG"):
        atexit.register(write, Path(folder))
        leave = os._exit

        def end(code):
            write(Path(folder))
            leave(code)

        os._exit = end


def noted(what, function):
    @functools.wraps(function)
    def wrapper(*args, **named):
        LOG.add(what)
        return function(*args, **named)

    return wrapper


def write(folder):
    rows = [[step, what, n] for (step, what), n in sorted(LOG.rows.items())]
    content = {"operators": LOG.operators, "counts": dict(LOG.counts.most_common()), "rows": rows}
    (folder / f"rank{_rank()}.json").write_text(json.dumps(content, indent=1))


def pretend_nccl():
    """Groups of NCCL whose work gloo does. They refuse CPU tensors, as NCCL does."""
    c10d = dist.distributed_c10d
    make = c10d._new_process_group_helper

    def helper(size, rank, ranks, backend, *args, **named):
        asked = str(backend or "undefined").lower()
        is_nccl = asked == "undefined" or "nccl" in asked
        named.pop("device_id", None)
        made = make(size, rank, ranks, "cpu:gloo,cuda:gloo" if is_nccl else backend, *args, **named)
        group = made[0] if isinstance(made, tuple) else made
        if is_nccl and "gloo" not in asked:
            NCCL.add(group.group_name)
        return made

    chosen = c10d._get_object_coll_device

    def for_objects(group=None):
        return "cuda" if (group or c10d._get_default_group()).group_name in NCCL else chosen(group)

    c10d._new_process_group_helper, c10d._get_object_coll_device = helper, for_objects
