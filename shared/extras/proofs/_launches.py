"""Launches of a user's command on CPU processes, for the proofs."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils.launch import get_free_port

from shared.commands.run import kill
from shared.commands.verify_resume import MEASURED, OURS
from shared.data import audit
from shared.extras.proofs import _probe
from shared.process.errors import ConfigError
from shared.process.files import read_json_lines
from shared.run.checkpoint_files import checkpoints
from shared.run.tensors import read_tensors

BATCH = 12  # rows of a step, which 1 to 4 processes divide
OTHERS = {
    "global_batch_size",
    "per_device_train_batch_size",
    "find_batch_size",
    "ddp_timeout",
    "torch_compile",
    "dress_rehearsal",
    "allow_changed",
}


@dataclass(frozen=True)
class Launch:
    """How the command is started.

    Args:
        rows: that a process computes at once, at most.
        kind: Accelerate's `distributed_type`.
        more: of Accelerate's config.
        shares_rows: the processes compute the same rows together.
        flags: of the template.
    """

    title: str
    processes: int
    rows: int
    kind: str = "MULTI_GPU"  # on the CPU, too
    more: dict[str, Any] = field(default_factory=dict)
    shares_rows: bool = False
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        """Of one process in one step."""
        return BATCH // (1 if self.shares_rows else self.processes) // self.rows


def _sizes(**sizes: int) -> dict[str, Any]:
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    values = {f"parallelism_config_{name}_size": sizes.get(name, 1) for name in names}
    return {"parallelism_config": values}


FSDP = {
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_cpu_ram_efficient_loading": False,
    }
}
ZERO = {"deepspeed_config": {"zero_stage": 2}}
LAUNCHES = {
    "one": Launch("one process", 1, 12, "NO"),
    "rows": Launch("one process, 12 micro-batches of one row", 1, 1, "NO"),
    "ddp2": Launch("DDP, 2 processes", 2, 6),
    "ddp3": Launch("DDP, 3 processes, 2 micro-batches", 3, 2),
    "fsdp2": Launch("FSDP2, 2 processes, 2 micro-batches", 2, 3, "FSDP", FSDP),
    "hsdp": Launch(
        "HSDP, 2 x 2 processes", 4, 3, "FSDP", FSDP | _sizes(dp_replicate=2, dp_shard=2)
    ),
    "zero2": Launch("ZeRO-2, 2 processes, 2 micro-batches", 2, 3, "DEEPSPEED", ZERO),
    "sp": Launch("sequence parallelism, 2 processes", 2, 12, more=_sizes(sp=2), shares_rows=True),
    "tp": Launch("tensor parallelism, 2 processes", 2, 12, more=_sizes(tp=2), shares_rows=True),
    "compiled": Launch("one process, compiled", 1, 12, "NO", flags={"torch_compile": True}),
    # where one process is not enough: of a pipeline
    "ddp4": Launch("4 processes", 4, 3),
}
ON_REQUEST = ("compiled", "ddp4")


@dataclass
class Result:
    """What a launch did."""

    launch: Launch
    run_dir: Path
    code: int = 0
    cause: str = ""

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What was chosen, without what a launch is told here."""
        text = (self.run_dir / "config.yaml").read_text(encoding="utf-8")
        return {k: v for k, v in yaml.safe_load(text).items() if k not in OURS | OTHERS}

    @cached_property
    def samples(self) -> dict[int, list[int]]:
        return audit.samples_of_steps(self.run_dir)

    @cached_property
    def values(self) -> dict[tuple[int, str], float]:
        """All that was logged, by step and name, in the order in which it was computed."""
        values: dict[tuple[int, str], float] = {}
        for row in read_json_lines(self.run_dir / "metrics.jsonl"):
            for name, value in row.items():
                apart = (*MEASURED, "step", "learning_rate", "epochs/", "skipped_")
                if isinstance(value, int | float) and not name.startswith(apart):
                    values[row["step"], name] = value
        return values

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return read_tensors(checkpoints(self.run_dir)[-1], "model.")


class Launcher:
    """Starts launches from one process, which imports the libraries once. It ends with the `with`
    block.
    """

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        environment |= {"ACCELERATE_USE_CPU": "true", "WANDB_MODE": "disabled"}
        self.log = folder / "launcher.log"
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                [sys.executable, _probe.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )

    def run(self, request: dict[str, Any]) -> int:
        """The exit code of a launch: see `_probe.launch`."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(self.log.read_text(encoding="utf-8", errors="replace")[-4000:])
        return int(answer)

    def __enter__(self) -> "Launcher":
        return self

    def __exit__(self, *_: object) -> None:
        kill(self.process.pid)


def environment_of(launch: Launch, config: Path) -> dict[str, str]:
    """What `accelerate launch --config_file CONFIG` gives to each process."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import launch as prepared

    # said, or it would be warned of
    given = ["--config_file", str(config), "--num_cpu_threads_per_process", "1", "train.py"]
    arguments = launch_command_parser().parse_args(given)
    arguments, defaults, _ = _validate_launch_command(arguments)
    if launch.kind == "NO":
        _, environment = prepared.prepare_simple_launcher_cmd_env(arguments)
    elif launch.kind == "DEEPSPEED":
        fields = ",".join(defaults.deepspeed_config)
        arguments.deepspeed_fields_from_accelerate_config = fields
        _, environment = prepared.prepare_deepspeed_cmd_env(arguments)
    else:
        environment = prepared.prepare_multi_gpu_env(arguments)
    changed = {name for name, value in environment.items() if os.environ.get(name) != value}
    return {name: environment[name] for name in changed}


def start(
    launcher: Launcher,
    launch: Launch,
    command: list[str],
    run_dir: Path,
    steps: int,
    environment: dict[str, str] | None = None,
) -> Result:
    """Run the command with another launch, with a line on the screen. An error of its own is in the
    result.
    """
    began = time.monotonic()
    print(f"{launch.title} ... ", end="", file=sys.stderr, flush=True)
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": launch.kind,
        "num_machines": 1,
        "num_processes": launch.processes,
        "mixed_precision": "no",
        "use_cpu": launch.kind == "NO",
        **launch.more,
    }
    file = run_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    ends = run_dir.with_suffix(".end")
    ends.mkdir()
    port = get_free_port()
    # TEMPLATES_RUN gets exit.json
    variables = environment_of(launch, file) | (environment or {}) | {"TEMPLATES_RUN": str(ends)}
    if launch.processes > 1:
        variables |= {"WORLD_SIZE": str(launch.processes), "MASTER_ADDR": "127.0.0.1"}
        variables |= {"LOCAL_WORLD_SIZE": str(launch.processes), "MASTER_PORT": str(port)}
    flags = {
        "output_dir": run_dir,
        "max_steps": steps,
        "save_steps": steps,
        "logging_steps": 1,
        "report_to": "none",
        "audit_data": True,
        "deterministic": True,
        "global_batch_size": BATCH,
        "per_device_train_batch_size": launch.rows,
        "ddp_timeout": 60,
        "torch_compile": False,
    }
    arguments = [*command]
    for name, value in (flags | launch.flags).items():
        is_switch = isinstance(value, bool)
        arguments.append(f"--{'no_' * (is_switch and not value)}{name}")
        arguments += [str(value)] * (not is_switch)
    log = run_dir.with_suffix(".log")
    request = {"environment": variables, "arguments": arguments, "log": str(log)}
    code = launcher.run(request | {"processes": launch.processes})
    result = Result(launch, run_dir, code)
    if code:
        text = log.read_text(encoding="utf-8", errors="replace")
        result.cause = text[-4000:]  # a traceback
        if (end := ends / "exit.json").exists():
            recorded = json.loads(end.read_text(encoding="utf-8"))
            result.code = recorded["exit_code"]
            if result.code != 1:
                result.cause = recorded["cause"]
        elif said := re.search(r"^error: (.*)", text, re.M):  # before a run began
            result.code, result.cause = 2, said[1]
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{took}, exit code {result.code}" if result.code else took, file=sys.stderr)
    return result


def divided(command: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the command up to its script, the script's flags). ConfigError if it names no script."""
    command = [*command[command[:1] == ["--"] :]]
    for place, token in enumerate(command):
        if token.endswith(".py"):
            return command[: place + 1], command[place + 1 :]
    raise ConfigError("give `--` and the command that starts the training, with its script.py")


def needs_processes(result: Result) -> bool:
    """Whether a launch failed because a pipeline needs several processes."""
    return result.code == 2 and "cannot be split into pipelines" in result.cause
