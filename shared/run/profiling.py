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

    Pauses between steps (an evaluation, a save) are part of the trace.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / TRACE
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        schedule = torch.profiler.schedule(wait=AFTER - 1, warmup=1, active=STEPS, repeat=1)
        self.profile = profile(activities=activities, schedule=schedule, on_trace_ready=self._write)
        self.profile.start()

    def step(self) -> None:
        """Count an optimizer step."""
        self.profile.step()

    def close(self) -> None:
        """End a trace that is still being made; nothing is written of it."""
        self.profile.stop()
        if self.profile.step_num < AFTER + STEPS:
            print_main(
                f"no profile: it needs {AFTER + STEPS} steps after the start; this run made "
                f"{self.profile.step_num}"
            )

    def _write(self, trace: profile) -> None:
        if trace.step_num < AFTER + STEPS:  # what the trace holds is the end of training
            return
        trace.export_chrome_trace(str(self.path))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=60)
        print_main(
            f"profile of {STEPS} steps ({self.path}; open it in ui.perfetto.dev):",
            *table.splitlines(),
        )
