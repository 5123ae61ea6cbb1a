"""Runs a template for `verify-launch`, on as many processes as it says.

What differs from launch to launch by design is turned off: dropout, layers that are left out at
random, BatchNorm's statistics of a micro-batch. With PROBE_NOISE=1, the first weights are changed
by one unit in their last place, and gradient norms are summed in fp64, so that a comparison can see
what rounding comes to. For `check`, PROBE_FACTS names the file of what `_facts` is to note, or
PROBE_BY_HEART that of a run which has its first step's samples in each step; nothing is turned off
then.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
import zlib
from pathlib import Path
from typing import Any

NOISE = "PROBE_NOISE"
FACTS = "PROBE_FACTS"
BY_HEART = "PROBE_BY_HEART"
SHORT = {"eval_samples": 25, "show_answers": 0}  # long evaluations show no more; 25: a ragged batch


def calm(model: Any) -> None:
    """Turn off in a model what makes launches differ. Dropout stays where no gradient is wanted:
    an evaluation that has it should be seen.
    """
    import torch
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm

    def dropout(self: nn.Module, x: Any) -> Any:
        return x if torch.is_grad_enabled() else type(self).forward(self, x)

    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.forward = types.MethodType(dropout, module)  # type: ignore[method-assign]
        elif isinstance(module, _BatchNorm):
            module.eval()
            module.train = types.MethodType(lambda self, mode=True: self, module)  # type: ignore
        else:
            for name, value in vars(module).items():  # of attention, of whole layers
                if isinstance(value, float) and ("drop" in name):
                    setattr(module, name, 0.0)


def shake(model: Any) -> None:
    """Change each trained weight by one unit in its last place, up or down."""
    import torch

    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            up = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            unit = torch.finfo(parameter.dtype).eps
            with torch.no_grad():
                parameter.mul_((1 + up * unit).to(parameter.device, parameter.dtype))


def run_script(arguments: list[str]) -> None:
    """Run a template as `__main__`."""
    from shared.config import parse as configs
    from shared.parallel import strategy
    from shared.run.setup import Setup

    parse = configs.parse_or_exit

    def parsed(kind: Any, *arguments: Any) -> Any:
        config = parse(kind, *arguments)
        given = configs.flatten(config)
        return configs.replace(config, **{k: v for k, v in SHORT.items() if k in given})

    configs.parse_or_exit = parsed  # type: ignore[assignment]

    prepare = Setup.prepare
    norm = strategy.gradient_norm
    is_noisy = bool(os.environ.get(NOISE))

    def in_fp64(accelerator: Any, gradients: list[Any], group: Any = None) -> Any:
        exact = norm(accelerator, [gradient.double() for gradient in gradients], group)
        return exact.to(gradients[0].dtype) if gradients else exact

    def prepared(self: Setup, model: Any, *arguments: Any, **named: Any) -> Any:
        calm(model)
        if is_noisy:
            shake(model)
        return prepare(self, model, *arguments, **named)

    noted = {name: os.environ[name] for name in (FACTS, BY_HEART) if name in os.environ}
    if noted:
        from shared.extras.proofs import _facts

        for name, file in noted.items():
            (_facts.watch if name == FACTS else _facts.repeat_first_step)(Path(file))
    else:
        Setup.prepare = prepared  # type: ignore[method-assign]
    if is_noisy:
        strategy.gradient_norm = in_fp64
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def start_rank(request: dict[str, Any], rank: int) -> int:
    """Fork a process of the launch. Returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        output = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(request["environment"])
        if request["processes"] > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        run_script(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def launch(request: dict[str, Any]) -> int:
    """Run all ranks to their end. Returns the exit code of the first that fails, or 0. The others
    have ten seconds then.
    """
    running = {start_rank(request, rank) for rank in range(request["processes"])}
    failed, until = 0, float("inf")
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            running.remove(pid)
            failed = failed or os.waitstatus_to_exitcode(status)
            if failed and until == float("inf"):
                until = time.monotonic() + 10
        elif time.monotonic() > until:
            for rank in running:
                os.kill(rank, signal.SIGKILL)
            until = float("inf")
        else:
            time.sleep(0.02)
    return failed


# Not this project's modules, which note at their import who has started the process.
LIBRARIES = (
    "accelerate.utils.fsdp_utils",
    "matplotlib.backends.backend_agg",
    "matplotlib.pyplot",
    "peft",
    "sklearn.metrics",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchvision.transforms.v2",
    "transformers.integrations",
    "transformers.loss.loss_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


def main() -> None:
    """Launch what is asked for, a line of JSON each, and answer with the exit code. The imports,
    which take longer than small runs, are made once.
    """
    sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):  # a project need not have all
            importlib.import_module(name)
    for line in sys.stdin:
        print(launch(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
