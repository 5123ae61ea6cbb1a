"""What a run reports each `--logging_steps`: a line of metrics.jsonl, for the tracker and on the
screen.

What steps log adds up on the device. The host reads it once a line, and once a save: the rest of an
interval is in the checkpoint, so that a resumed run logs the same.
"""

import contextlib
import json
import math
import resource
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from shared.data import audit
from shared.models.counts import PEAK_FLOPS, known_gpu
from shared.parallel.sharding import total
from shared.process.collectives import wait_for_main
from shared.process.files import keep_json_lines
from shared.process.printing import print_main
from shared.run.plots import draw_curves
from shared.run.prepared import Prepared
from shared.run.profiling import start_profile
from shared.run.state import TrainState
from shared.run.tracking import Tracker
from shared.training.step import Step

T = TypeVar("T")

STEPS = "finite steps"  # the sum that counts them, beside those that steps log
GIVEN = "#"  # begins the sums that count the steps with a value that not all have


class Logger:
    """Collects each step and writes a line when one is due. Every rank makes one and calls it
    alike.

    Args:
        prepared: the run.
        state: resumed or new; a tracker's run id is put into it.
        total_steps: optimizer steps of the whole run.
    """

    def __init__(self, prepared: Prepared, state: TrainState, total_steps: int) -> None:
        accelerator = self.accelerator = prepared.accelerator
        config = prepared.config
        self.state = state
        # of pairs, tokens pass through the model
        self.passed = "tokens" if prepared.unit == "pairs" else prepared.unit
        self.unit = prepared.unit
        self.flops = prepared.flops
        self.first = state.step
        self.total_steps = total_steps
        self.best_metric: str = config.evaluation.metric_for_best_model
        self.main = accelerator.is_main_process
        self.file = prepared.dir / "metrics.jsonl"
        if self.main:
            # not what a killed run logged after the checkpoint that is resumed
            keep_json_lines(self.file, partial(_is_of, state))
        self.tracker = Tracker(prepared, state)
        self.recorder = (
            audit.Recorder(accelerator, prepared.dir, state.step) if config.log.audit_data else None
        )
        self.profile = None
        if config.log.profile and self.main:
            self.profile = start_profile(prepared.dir, total_steps - state.step)
        self.recent: deque[float] = deque(maxlen=20)  # losses, for the warning
        # a log file gets lines instead
        quiet = not self.main or not sys.stderr.isatty()
        self.bar_of = partial(tqdm, leave=False, dynamic_ncols=True, disable=quiet)
        self.bar = self.bar_of(
            total=total_steps, initial=state.step, desc=prepared.name, unit="step"
        )
        self._begin_interval()
        # resumed within an interval; with another number of processes, each has an equal share
        saved = state.interval
        if len(saved) == accelerator.num_processes:
            saved = [saved[accelerator.process_index]]
        for sums in saved:
            for name, value in sums.items():
                self.sums[name] += value / len(saved)
        self.mark = self.printed = self.begun = self.drawn = time.perf_counter()

    def _begin_interval(self) -> None:
        device = self.accelerator.device
        # not all others have fp64
        dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        zero = partial(torch.zeros, (), dtype=dtype, device=device)
        # of this rank: what steps log, each step's per target; only of finite steps
        self.sums: dict[str, torch.Tensor] = defaultdict(zero, {STEPS: zero()})
        self.targets = self.positions = 0
        self.seconds = self.waited = 0.0

    def waiting(self, windows: Iterable[T]) -> Iterator[T]:
        """Pass the loader's windows on, and time how long each keeps the training waiting."""
        if self.accelerator.device.type == "cuda":
            # what was tried before may have taken more
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        start = time.perf_counter()
        for window in windows:
            self.waited += time.perf_counter() - start
            yield window
            start = time.perf_counter()

    def print_each_minute(self, line: str) -> None:
        """Print this if there is no progress bar, and nothing was printed for a minute."""
        if self.bar.disable and time.perf_counter() - self.printed > 60:
            print_main(line)
            self.printed = time.perf_counter()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent in here (evaluation, saving) is not training time."""
        self.seconds += time.perf_counter() - self.mark
        yield
        self.mark = time.perf_counter()

    def step(self, step: Step, *, due: bool) -> None:
        """Count one optimizer step; if a line is `due`, write it. Every rank calls this. The host
        waits for the device, and for other ranks, only in steps with a line.
        """
        if self.recorder is not None:
            self.recorder.write(self.state.step, step.window)
        assert step.finite is not None
        self.sums[STEPS] += step.finite
        scale = step.scale
        for name, values in step.sums.items():
            for value in values:
                self.sums[name].add_(torch.where(step.finite, value, 0), alpha=scale)
        for name, mean in step.means.items():
            self.sums[name] += mean
            self.sums[GIVEN + name] += 1
        self.targets += step.num_targets
        self.positions += step.positions
        self.waited += step.waited
        self.bar.update()
        if self.profile is not None:
            self.profile.step()
        if self.state.step == self.first + 1:
            self.begun = time.perf_counter()
            self.printed = -math.inf  # a resumed run shows that it goes on
        if due:
            self._write_line(step)
        else:
            self.print_each_minute(f"step {self.state.step}/{self.total_steps}")

    def _write_line(self, step: Step) -> None:
        positions = torch.full_like(self.sums[STEPS], self.positions)
        over_ranks = total(self.accelerator, torch.stack([*self.sums.values(), positions]))
        assert step.grad_norm is not None
        # one copy to the host
        *sums, processed, grad_norm = torch.stack([*over_ranks, step.grad_norm]).tolist()
        means = dict(zip(self.sums, sums, strict=True))
        steps = means.pop(STEPS)  # of all replicas: if they train apart, each skips its own
        counts = {name: means.pop(GIVEN + name, steps) for name in list(means) if name[0] != GIVEN}
        means = {n: means[n] / count if count else math.nan for n, count in counts.items()}
        now = time.perf_counter()
        seconds = self.seconds + now - self.mark
        rate = processed / seconds
        values = means | {
            "learning_rate": step.learning_rate,
            "grad_norm": grad_norm,
            f"trained_{self.unit}_per_second": self.targets / seconds,
            f"processed_{self.passed}_per_second": rate,
            "data_wait_share": self.waited / seconds,
            "peak_memory_gb": peak_memory(self.accelerator.device) / 1e9,
            self.unit: self.state.targets,
        }
        peak = peak_flops(self.accelerator.device)
        if peak and self.flops:
            values["mfu"] = self.flops * rate / self.accelerator.num_processes / peak
        if self.state.skipped:
            values["skipped_steps"] = self.state.skipped
        sources = step.window.sources.items()
        epochs = {f"epochs/{name}": drawn / size for name, (size, drawn) in sources}
        values |= epochs
        loss = means.get("loss", math.nan)
        shown = "reward" if "reward" in means else "loss"  # that of rewards is 0 in the mean
        if shown == "loss":
            self._warn_of_a_spike(loss)
        digits = 0 if rate >= 10 else 2
        progress = f"{shown} {means.get(shown, loss):.3f}, {rate:,.{digits}f} {self.passed}/s"
        progress += "".join(f", {name} {done:.2f}" for name, done in epochs.items())
        self.bar.set_postfix_str(progress, refresh=False)
        if self.bar.disable:
            # with evaluations; the first step is no measure
            done = self.state.step - self.first - 1
            each = (now - self.begun) / done if done else seconds
            left = tqdm.format_interval((self.total_steps - self.state.step) * each)
            print_main(f"step {self.state.step}/{self.total_steps}: {progress}, {left} left")
            self.printed = now
        self.log(values)
        self._begin_interval()
        self.mark = now  # what logging takes belongs to the next interval

    def note_interval(self) -> None:
        """Put what the next line is made of so far into the state. Every rank calls this."""
        values = torch.stack([*self.sums.values()]).tolist()
        self.state.interval = gather_object([dict(zip(self.sums, values, strict=True))])

    def _warn_of_a_spike(self, loss: float) -> None:
        """A loss far above the recent ones, in units of how much these differ, deserves a look."""
        if len(self.recent) >= 5:
            middle = statistics.median(self.recent)
            spread = statistics.median(abs(value - middle) for value in self.recent)
            if loss > middle + max(8 * spread, 0.25 * abs(middle)):
                print_main(
                    f"warning: step {self.state.step}: the loss is {loss:.4g}, after a median of "
                    f"{middle:.4g} before. Its samples: "
                    f"python -m shared replay RUN --step {self.state.step} -- COMMAND"
                )
        if math.isfinite(loss):
            self.recent.append(loss)

    def log(self, values: dict[str, Any]) -> None:
        """Write values of this step to metrics.jsonl and the tracker. The main rank acts."""
        if not self.main:
            return
        # JSON has no NaN.
        row = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.state.step, **row}) + "\n")
        self.tracker.log(values)

    def log_evaluation(self, values: dict[str, float]) -> None:
        """Log and print an evaluation's values. Every rank calls this."""
        self.log(values)
        figures = ", ".join(
            f"{name.removeprefix('eval_')} {value:.4f}" for name, value in values.items()
        )
        print_main(f"step {self.state.step}: validation {figures}")
        # working out the figures, after the pass over the data, was no training either
        self.mark = time.perf_counter()

    def close(self) -> None:
        """Draw the curves and end the tracker's run. Every rank calls this."""
        self.bar.close()
        if self.profile is not None:
            self.profile.stop()
        self.draw(now=True)
        wait_for_main("the main rank is done")  # which may still write
        self.accelerator.wait_for_everyone()  # the next takes the process group down
        self.tracker.close()

    def draw(self, *, now: bool = False) -> None:
        """Draw curves.png, unless `now` at most once a minute: all wait. The main rank acts."""
        if self.main and (now or time.perf_counter() - self.drawn > 60):
            draw_curves(self.file, self.best_metric)
            self.drawn = time.perf_counter()


def _is_of(state: TrainState, row: dict[str, Any]) -> bool:
    """Whether a run in this state has logged the row."""
    evaluation = any(key.startswith("eval_") for key in row)
    last = state.evaluated if evaluation else state.step
    return isinstance(row.get("step"), int) and row["step"] <= last


def peak_memory(device: torch.device) -> int:
    """Most bytes this process has held: on the GPU if it trains there, since `Logger.waiting`
    began; else in memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a known device, else None."""
    if device.type != "cuda":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return PEAK_FLOPS[gpu] if gpu else None
