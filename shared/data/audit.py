"""Records which samples each optimizer step used, over all restarts of a run."""

import json
from collections import defaultdict
from pathlib import Path

from accelerate import Accelerator

from shared.data.loader import Window
from shared.process import ranks
from shared.process.files import keep_json_lines, read_json_lines

FOLDER = "audit"


class Recorder:
    """Writes one line a step for each rank that reads data of its own. Every rank makes one.

    Args:
        accelerator: of the run.
        run_dir: where `audit/` goes.
        step: that the run continues from; what a killed run wrote after it is dropped.
    """

    def __init__(self, accelerator: Accelerator, run_dir: Path, step: int) -> None:
        folder = run_dir / FOLDER
        if accelerator.is_main_process:
            folder.mkdir(exist_ok=True)
            for path in folder.glob("rank-*.jsonl"):
                keep_json_lines(path, lambda line: line.get("step", step + 1) <= step)
        accelerator.wait_for_everyone()
        alike = accelerator.num_processes // ranks.data_parallel_size()  # ranks that read the same
        self.file = None
        if accelerator.process_index % alike == 0:
            name = f"rank-{accelerator.process_index:05d}.jsonl"
            # a line at a time reaches the disk
            self.file = (folder / name).open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, window: Window) -> None:
        """Note this rank's samples of the step that was just done."""
        if self.file is not None:
            samples = window.indices[window.indices >= 0].tolist()
            sizes = {name: size for name, (size, _) in window.sources.items()}  # of a mixture
            counts = {"of": sizes or window.epoch_samples, "all": window.num_samples}
            line = {"step": step, "epoch": window.epoch, **counts, "samples": samples}
            self.file.write(json.dumps(line) + "\n")


def samples_of_steps(run_dir: Path) -> dict[int, list[int]]:
    """The samples of each step over all ranks, sorted."""
    samples: dict[int, list[int]] = defaultdict(list)
    for path in (run_dir / FOLDER).glob("rank-*.jsonl"):
        for line in read_json_lines(path):
            samples[line["step"]] += line["samples"]
    return {step: sorted(samples[step]) for step in sorted(samples)}
