"""Where the time of a training step goes: a trace of a few steady steps, and its largest parts as a table."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from shared.process.printing import print_main

AFTER, STEPS = 6, 3  # steps that warm up (the last of them under the profiler), and that are looked at
TRACE = "profile.json"  # for chrome://tracing or ui.perfetto.dev


class Profiler:
    """Traces optimizer steps 7 to 9 after the start on the main rank, writes profile.json and prints what took long.

    `step` is called after each optimizer step; pauses between them (an evaluation, a save) are part of the trace.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir, self.steps = run_dir, 0
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        schedule = torch.profiler.schedule(wait=AFTER - 1, warmup=1, active=STEPS, repeat=1)
        self.profile: profile | None = profile(activities=activities, schedule=schedule, on_trace_ready=self._ready)
        self.profile.start()

    def step(self) -> None:
        """Count an optimizer step."""
        self.steps += 1
        if self.profile is not None:
            self.profile.step()
            if self.steps >= AFTER + STEPS:
                self.close()

    def close(self) -> None:
        """End a trace that is still being made; nothing is written if training ends before the first of its steps."""
        if self.profile is not None:
            ended, self.profile = self.profile, None
            ended.stop()
            if self.steps < AFTER + STEPS:
                print_main(
                    f"no profile: it is of the {STEPS} steps after the first {AFTER} of a start, which made {self.steps}"
                )

    def _ready(self, trace: profile) -> None:
        if self.steps < AFTER + STEPS:  # what the trace holds is the end of training
            return
        path = self.run_dir / TRACE
        trace.export_chrome_trace(str(path))
        print_main(f"profile of {STEPS} steps ({path}; open it in ui.perfetto.dev):\n{report(trace.events() or [])}")


def report(events: Iterable[Any], rows: int = 12) -> str:
    """The operators that take most time in their own code (on the GPU where there is one), and the share of idle time.

    Idle is when no kernel runs on the GPU; without a GPU, when the training thread is in no operator of PyTorch: Python,
    waiting for data.
    """
    events = list(events)
    gpu = torch.autograd.DeviceType.CUDA
    kernels = [e for e in events if e.device_type == gpu and not getattr(e, "is_user_annotation", False)]
    kernels = [e for e in kernels if not e.name.startswith("ProfilerStep")]
    operators = [e for e in events if e.device_type != gpu]
    steps = [e for e in operators if e.name.startswith("ProfilerStep")]
    if not steps:
        return "  no whole step was traced"
    start, end = min(e.time_range.start for e in steps), max(e.time_range.end for e in steps)
    threads = {e.thread for e in steps}
    counted = kernels or [e for e in operators if not e.name.startswith("ProfilerStep")]
    counted = [e for e in counted if start <= e.time_range.start < end]  # the device is behind, and finishes later
    sums: dict[str, list[float]] = {}
    for event in counted:
        took = event.time_range.elapsed_us() if kernels else event.self_cpu_time_total
        entry = sums.setdefault(event.name, [0.0, 0])
        entry[0] += took
        entry[1] += 1
    whole = sum(took for took, _ in sums.values()) or 1.0
    lines = [f"  {'share':>6}  {'ms a step':>10}  {'calls':>6}  {'kernel' if kernels else 'operator'}"]
    for name, (took, calls) in sorted(sums.items(), key=lambda item: -item[1][0])[:rows]:
        per_step = took / 1000 / len(steps)
        lines.append(f"  {took / whole:6.1%}  {per_step:10.2f}  {calls / len(steps):6.0f}  {name[:90]}")
    busy = _union(
        (max(e.time_range.start, start), min(e.time_range.end, end)) for e in counted if kernels or e.thread in threads
    )
    where = "the GPU" if kernels else "the training thread"
    lines.append(
        f"  a step takes {(end - start) / 1000 / len(steps):.1f} ms; {where} idles {1 - busy / (end - start):.1%} of it"
    )
    return "\n".join(lines)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what the spans cover together."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
