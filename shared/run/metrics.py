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
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from shared.config.options import LogConfig
from shared.data import audit
from shared.models.counts import PEAK_FLOPS, known_gpu
from shared.parallel.sharding import total
from shared.process.collectives import wait_for_main
from shared.process.files import keep_json_lines
from shared.process.printing import print_main
from shared.run.plots import draw_curves
from shared.run.profiling import Profiler
from shared.run.state import TrainState
from shared.run.tracking import Tracker
from shared.training.step import Step

T = TypeVar("T")

STEPS = "finite steps"  # the sum that counts them, beside those that steps log
# settings that raise the loss of training, and not that of the validation
HARDER = ("label_smoothing", "mixup_alpha", "cutmix_alpha")
GIVEN = "#"  # begins the sums that count the steps with a value that not all have


class Logger:
    """Collects each step and writes a line when one is due. Every rank makes one and calls it
    alike.

    Args:
        accelerator: of the run, made with `log_with`.
        config: the logging group.
        run_dir: where metrics.jsonl and curves.png go.
        state: of the run; a tracker's run id is put into it.
        total_steps: length of the progress bar.
        settings: the flat config, stored in the tracker.
        template: names the tracker's project.
        unit: what the throughput counts: tokens, images, or pairs, of which tokens pass through the
            model.
        flops: floating-point operations of forward and backward for one token or image, for MFU;
            None where unknown.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: LogConfig,
        run_dir: Path,
        state: TrainState,
        total_steps: int,
        settings: dict[str, Any],
        *,
        template: str,
        unit: str = "tokens",
        flops: float | None = None,
    ) -> None:
        self.accelerator = accelerator
        self.run_dir = run_dir
        self.state = state
        self.passed = "tokens" if unit == "pairs" else unit
        self.unit = unit
        self.flops = flops
        self.first = state.step
        self.total_steps = total_steps
        self.best_metric = settings.get("metric_for_best_model", "loss")
        # such a loss may stay above that of the validation
        harder = [name for name in HARDER if settings.get(name)]
        self.training = " + ".join(["training", *harder])
        self.main = accelerator.is_main_process
        self.file = run_dir / "metrics.jsonl"
        if self.main:
            # not what a killed run logged after the checkpoint that is resumed
            keep_json_lines(self.file, partial(_is_of, state))
        self.tracker = Tracker(accelerator, config, run_dir, state, settings, template)
        self.recorder = (
            audit.Recorder(accelerator, run_dir, state.step) if config.audit_data else None
        )
        self.profiler = Profiler(run_dir) if config.profile and self.main else None
        self.recent: deque[float] = deque(maxlen=20)  # losses, for the warning
        self.bar = tqdm(
            total=total_steps,
            initial=state.step,
            desc=template,
            unit="step",
            # a log file gets lines instead
            disable=not self.main or not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        self._begin_interval()
        # resumed within an interval; with another number of processes, each has an equal share
        saved = state.interval
        if len(saved) == accelerator.num_processes:
            saved = [saved[accelerator.process_index]]
        for sums in saved:
            for name, value in sums.items():
                self.sums[name] += value / len(saved)
        self.mark = self.printed = self.begun = time.perf_counter()
        self.draw_after = self.mark + 25

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

    def bar_of(self, windows: Iterable[T], total: int) -> Iterable[T]:
        """Pass the windows of an evaluation on, with a second bar if it takes some seconds."""
        for number, window in enumerate(
            tqdm(
                windows,
                "evaluating",
                total,
                leave=False,
                delay=3,
                disable=self.bar.disable,
                dynamic_ncols=True,
            )
        ):
            self._print_each_minute(f"evaluating: {number} of {total} batches")
            yield window

    def _print_each_minute(self, line: str) -> None:
        """In a file, whose next line may be far."""
        if self.bar.disable and time.perf_counter() - self.printed > 60:
            print_main(line)
            self.printed = time.perf_counter()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Time spent in here (evaluation, saving) is not training time, nor the progress bar's."""
        start = time.perf_counter()
        self.seconds += start - self.mark
        yield
        self.mark = time.perf_counter()
        if not self.bar.disable:
            self.bar.start_t += self.mark - start
            self.bar.last_print_t += self.mark - start

    def step(self, step: Step, *, due: bool) -> None:
        """Count one optimizer step; if a line is `due`, and at the last, write it. Every rank calls
        this. The host waits for the device, and for other ranks, only in steps with a line.
        """
        if self.recorder is not None:
            self.recorder.write(self.state.step, step.window)
        assert step.finite is not None
        self.sums[STEPS] += step.finite
        for name, values in step.sums.items():
            for value in values:
                self.sums[name].add_(torch.where(step.finite, value, 0), alpha=step.scale)
        for name, mean in step.means.items():
            self.sums[name] += mean
            self.sums[GIVEN + name] += 1
        self.targets += step.num_targets
        self.positions += step.positions
        self.waited += step.waited
        self.bar.update()
        if self.profiler is not None:
            self.profiler.step()
        if self.state.step == self.first + 1:
            self.begun = time.perf_counter()
            self.printed = -math.inf  # a resumed run shows that it goes on
        if due or self.state.step == self.total_steps:
            self._write_line(step)
        else:
            self._print_each_minute(f"step {self.state.step}/{self.total_steps}")

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
        self._warn_of_a_spike(loss)
        shown = "reward" if "reward" in means else "loss"  # that of rewards is 0 in the mean
        progress = f"{shown} {means.get(shown, loss):.3f}, {rate:,.0f} {self.passed}/s"
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
                    f"{middle:.4g} before"
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
        if self.profiler is not None:
            self.profiler.close()
        self.draw(now=True)
        wait_for_main("the main rank is done")  # which may still write
        self.accelerator.wait_for_everyone()  # the next takes the process group down
        self.tracker.close()

    def draw(self, *, now: bool = False) -> None:
        """Draw curves.png from metrics.jsonl, unless `now` at most for 2 % of the time: all wait.
        The main rank acts.
        """
        start = time.perf_counter()
        if self.main and (now or start > self.draw_after):
            picture = self.run_dir / "curves.png"
            draw_curves(self.file, picture, self.best_metric, self.training)
            end = time.perf_counter()
            self.draw_after = end + 50 * (end - start)


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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def peak_flops(device: torch.device) -> float | None:
    """Dense bf16 FLOP/s of a known device, else None."""
    if device.type != "cuda":
        return None
    gpu = known_gpu(torch.cuda.get_device_name(device))
    return PEAK_FLOPS[gpu] if gpu else None
