"""Faults on purpose: kill, stop, hang or spoil a run at a named place (shared/process/faults.py).

    TEMPLATES_FAULT=save.rename:kill            SIGKILL of this process when it is about to rename a checkpoint
    TEMPLATES_FAULT=micro_batch:nan@3           the third micro-batch of each rank
    TEMPLATES_FAULT=micro_batch:kill@3#1        of rank 1 alone

Places: setup, prepare, micro_batch, update, evaluation, save.shard, save.manifest, save.fsync, save.rename,
save.renamed, save.prune, resume.verified, resume.loaded, finish. Several faults are separated by commas.
"""

import errno
import os
import re
import signal
import time
from collections import Counter
from typing import Any

_seen: Counter[str] = Counter()


def act_at(place: str) -> None:
    """Do what TEMPLATES_FAULT asks for here, if anything."""
    _seen[place] += 1
    for fault in os.environ["TEMPLATES_FAULT"].split(","):
        match = re.fullmatch(r"([a-z_.]+):([a-z]+)(?:@(\d+))?(?:#(\d+))?", fault)
        assert match, f"TEMPLATES_FAULT: {fault!r} is not PLACE:ACTION[@TIMES][#RANK]"
        where, action, count, rank = match.groups()
        if (where, int(count or 1)) == (place, _seen[place]) and rank in (None, os.environ.get("RANK", "0")):
            _act(action)


def _act(action: str) -> None:
    if action in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[action])
    elif action in _SECONDS:
        time.sleep(_SECONDS[action])
    elif action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    elif action == "error":
        raise RuntimeError("a fault on purpose")
    else:
        _spoil(float(action))


_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "usr": signal.SIGUSR1}
_SECONDS = {"hang": 1e6, "pause": 5}


def _spoil(factor: float) -> None:
    """Multiply what the next module computes by NaN or infinity."""
    import torch
    from torch.nn.modules.module import register_module_forward_hook

    def hook(_module: Any, _arguments: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return None
        handle.remove()
        return output * factor

    handle = register_module_forward_hook(hook)
