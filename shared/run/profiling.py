"""Where the time of a training step goes: a trace of a few steady steps, and its largest parts as a
table.
"""

from pathlib import Path

import torch
from torch.profiler import profile

from shared.process.printing import print_main

AFTER = 6
STEPS = 3  # steps that warm up (the last of them under the profiler), and that are looked at
TRACE = "profile.json"  # for chrome://tracing or ui.perfetto.dev


def start_profile(run_dir: Path, steps: int) -> profile | None:
    """A trace of optimizer steps 7 to 9 after the start, whose `step` is called after each. It then
    writes profile.json and prints what took long; pauses between steps (an evaluation, a save) are
    part of it.

    Args:
        steps: that the run makes; None where they are too few.
    """
    if steps < AFTER + STEPS:
        print_main(
            f"no profile: it needs {AFTER + STEPS} steps after the start; this run makes {steps}"
        )
        return None

    def write(trace: profile) -> None:
        path = run_dir / TRACE
        trace.export_chrome_trace(str(path))
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = trace.key_averages().table(sort_by=by, row_limit=12, max_name_column_width=60)
        print_main(
            f"profile of {STEPS} steps ({path}; open it in ui.perfetto.dev):", *table.splitlines()
        )

    schedule = torch.profiler.schedule(wait=AFTER - 1, warmup=1, active=STEPS, repeat=1)
    trace = profile(schedule=schedule, on_trace_ready=write)
    trace.start()
    return trace
