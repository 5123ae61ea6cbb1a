"""Where the time of a training step goes: a trace of a few steady steps, and its largest parts as a
table.
"""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from shared.process.printing import print_main

AFTER = 6
STEPS = 3  # steps that warm up (the last of them under the profiler), and that are looked at
TRACE = "profile.json"  # for chrome://tracing or ui.perfetto.dev


class Profiler:
    """Traces optimizer steps 7 to 9 after the start on the main rank, writes profile.json and
    prints what took long.

    `step` is called after each optimizer step; pauses between them (an evaluation, a save) are part
    of the trace.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.steps = 0
        activities = [
            ProfilerActivity.CPU,
            *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
        ]
        schedule = torch.profiler.schedule(wait=AFTER - 1, warmup=1, active=STEPS, repeat=1)
        self.profile: profile | None = profile(
            activities=activities, schedule=schedule, on_trace_ready=self._ready
        )
        self.profile.start()

    def step(self) -> None:
        """Count an optimizer step."""
        self.steps += 1
        if self.profile is not None:
            self.profile.step()
            if self.steps >= AFTER + STEPS:
                self.close()

    def close(self) -> None:
        """End a trace that is still being made; nothing is written if training ends before the
        first of its steps.
        """
        if self.profile is not None:
            ended = self.profile
            self.profile = None
            ended.stop()
            if self.steps < AFTER + STEPS:
                print_main(
                    f"no profile: it needs {AFTER + STEPS} steps after the start; this run made "
                    f"{self.steps}"
                )

    def _ready(self, trace: profile) -> None:
        if self.steps < AFTER + STEPS:  # what the trace holds is the end of training
            return
        path = self.run_dir / TRACE
        trace.export_chrome_trace(str(path))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=60)
        print_main(
            f"profile of {STEPS} steps ({path}; open it in ui.perfetto.dev):", *table.splitlines()
        )
