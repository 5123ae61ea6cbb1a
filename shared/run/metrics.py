"""What a run reports: W&B or any tracker, metrics.jsonl, curves.png, a progress bar, throughput and
memory.
"""

import contextlib
import json
import math
import os
import resource
import secrets
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm import tqdm

from shared.config.options import LogConfig
from shared.data import audit
from shared.models.counts import PEAK_FLOPS, known_gpu
from shared.parallel.sharding import total
from shared.process.collectives import wait_for_main
from shared.process.errors import ConfigError, first_line
from shared.process.files import open_regular, read_json_lines
from shared.process.printing import print_main
from shared.process.ranks import data_parallel_size
from shared.process.redaction import redact
from shared.run.plots import draw_curves
from shared.run.profiling import Profiler
from shared.run.state import TrainState
from shared.training.step import Step

T = TypeVar("T")

# steps whose losses may lie on the device: more would fill memory where nothing is logged for long
UNREAD = 1000


def tracker_name(report_to: str) -> str | None:
    """The tracker for `launch.start`, None for none. Raises ConfigError for one that is unknown or
    not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if report_to == "none":
        return None
    if report_to not in LOGGER_TYPE_TO_CLASS:
        raise ConfigError(
            f"--report_to {report_to}: expected none or one of {', '.join(LOGGER_TYPE_TO_CLASS)}"
        )
    if report_to not in {str(name) for name in get_available_trackers()}:
        raise ConfigError(
            f"--report_to {report_to}: not installed (pip install {report_to}), or use none"
        )
    return report_to


class Logger:
    """Collects each step and writes every `logging_steps`. Every rank makes one and calls it alike.

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
        self.config = config
        self.run_dir = run_dir
        self.state = state
        self.passed = "tokens" if unit == "pairs" else unit
        self.unit = unit
        self.flops = flops
        self.first = state.step
        self.total_steps = total_steps
        self.tracker = tracker_name(config.report_to)
        self.best_metric = settings.get("metric_for_best_model", "loss")
        self.main = accelerator.is_main_process
        self.file = run_dir / "metrics.jsonl"
        if self.main:
            _keep_whole_lines(self.file, state)
            if self.tracker:
                self._start_tracker(template, settings)
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
            # a log file gets a line each logging step instead
            disable=not self.main or not sys.stderr.isatty(),
            dynamic_ncols=True,
        )
        self._reset()
        if state.interval:  # resumed within an interval
            self.steps, readers, each = state.interval
            own = each[accelerator.process_index % len(each)]
            if len(each) != accelerator.num_processes:  # of another world size: the same sum
                share = readers / data_parallel_size() / len(each)
                own = {name: share * sum(sums[name] for sums in each) for name in own}
            self.sums.update(own)
        self.mark = self.drawn = self.printed = self.begun = time.perf_counter()
        self.drawing = 0.5  # seconds that the curves take, the first time by a guess

    def _reset(self) -> None:
        self.targets = self.positions = 0
        self.seconds = self.waited = 0.0
        # of this rank, by name: values per target, summed over the finite steps
        self.sums: dict[str, float] = {}
        self.steps = 0  # that are finite
        # sums, finite, targets
        self.unread: list[tuple[dict[str, list[torch.Tensor]], torch.Tensor, int]] = []

    def waiting(self, windows: Iterable[T]) -> Iterator[T]:
        """Pass the loader's windows on, and time how long each keeps the training waiting."""
        if self.accelerator.device.type == "cuda":
            # what was tried before may have taken more
            torch.cuda.reset_peak_memory_stats(self.accelerator.device)
        iterator = iter(windows)
        while True:
            start = time.perf_counter()
            try:
                window = next(iterator)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield window

    def bar_of(self, windows: Iterable[T], total: int) -> Iterable[T]:
        """Pass the windows of an evaluation on, with a second bar if it takes some seconds; in a
        file, a line a minute.
        """
        told = time.perf_counter()
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
            if self.bar.disable and time.perf_counter() - told > 60:
                print_main(f"evaluating: {number} of {total} batches")
                told = time.perf_counter()
            yield window

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
        """Count one optimizer step; if a line is `due`, and at the last, sum over ranks and write.
        Every rank calls this.
        """
        if self.recorder is not None:
            self.recorder.write(self.state.step, step.window)
        assert step.finite is not None and step.grad_norm is not None
        self.unread.append((step.sums, step.finite, step.num_targets))
        self.targets += step.num_targets
        self.positions += step.positions
        self.waited += step.waited
        self.bar.update()
        if self.state.step == self.first + 1:
            self.begun = time.perf_counter()
        if self.profiler is not None:
            self.profiler.step()
        if not due and self.state.step != self.total_steps:
            now = time.perf_counter()
            if self.bar.disable and (
                self.state.step == self.first + 1 or now - self.printed > 60
            ):  # the next line may be far
                print_main(f"step {self.state.step}/{self.total_steps}")
                self.printed = now
            if len(self.unread) == UNREAD:
                self._read()
            return
        grad_norm = self._read(step.grad_norm)
        alone = self.accelerator.num_processes == 1
        read = [*self.sums.values(), self.steps, self.positions]
        own = torch.tensor(read, device="cpu" if alone else self.accelerator.device)
        *sums, finite, positions = total(self.accelerator, own).tolist()
        steps = finite / data_parallel_size()  # replicas that train apart skip steps of their own
        means = {
            name: value / steps if steps else math.nan
            for name, value in zip(self.sums, sums, strict=True)
        }
        now = time.perf_counter()
        seconds = self.seconds + now - self.mark
        processed = positions / seconds
        values = means | {
            "learning_rate": step.learning_rate,
            "grad_norm": grad_norm,
            f"trained_{self.unit}_per_second": self.targets / seconds,
            f"processed_{self.passed}_per_second": processed,
            "data_wait_share": self.waited / seconds,
            "peak_memory_gb": peak_memory(self.accelerator.device) / 1e9,
            self.unit: self.state.targets,
        }
        peak = peak_flops(self.accelerator.device)
        if peak and self.flops:
            values["mfu"] = self.flops * processed / self.accelerator.num_processes / peak
        if self.state.skipped:
            values["skipped_steps"] = self.state.skipped
        epochs = {name: drawn / size for name, (size, drawn) in step.window.sources.items()}
        values |= {f"epochs/{name}": done for name, done in epochs.items()}
        loss = means.get("loss", math.nan)
        self._warn_of_a_spike(loss)
        progress = f"loss {loss:.3f}, {processed:,.0f} {self.passed}/s"
        if epochs:
            progress += ", epochs " + ", ".join(
                f"{name} {done:.2f}" for name, done in epochs.items()
            )
        self.bar.set_postfix_str(progress, refresh=False)
        if self.bar.disable:
            # with evaluations; the first step is no measure
            done = self.state.step - self.first - 1
            took = now - self.begun
            each = took / done if done else seconds
            left = tqdm.format_interval((self.total_steps - self.state.step) * each)
            print_main(f"step {self.state.step}/{self.total_steps}: {progress}, {left} left")
            self.printed = now
        self.log(values)
        self._reset()
        self.mark = now  # what logging takes belongs to the next interval

    def note_interval(self) -> None:
        """Put what the next log line is made of into the state: a resumed run logs the same. Every
        rank calls this.
        """
        self._read()
        self.state.interval = [self.steps, data_parallel_size(), gather_object([self.sums])]

    def _read(self, norm: torch.Tensor | None = None) -> float:
        """Fetch and sum up what the steps left on the device: not in each of them, which it would
        cost six small kernels.

        Returns:
            `norm`, which is fetched with it: the host waits for the device once.
        """
        if not self.unread:
            return math.nan
        left = torch.stack(
            [v for sums, _, _ in self.unread for each in sums.values() for v in each]
        )
        flags = torch.stack([finite for _, finite, _ in self.unread])
        more = left.new_zeros(1) if norm is None else norm[None]
        *read, last = torch.cat([left, flags.to(left.dtype), more.to(left.dtype)]).tolist()
        values = iter(read)
        good = [flag == 1 for flag in read[len(left) :]]
        for (sums, _, targets), is_finite in zip(self.unread, good, strict=True):
            for name, each in sums.items():
                summed = sum(islice(values, len(each)))
                self.sums[name] = self.sums.get(name, 0.0) + (
                    summed / max(1, targets) if is_finite else 0.0
                )
        self.steps += sum(good)
        self.unread.clear()
        return last

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
        """Write values of this step to metrics.jsonl and the trackers. The main rank acts."""
        if not self.main:
            return
        # JSON has no NaN.
        row = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in values.items()
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": self.state.step, **row}) + "\n")
        # As a value, not as the tracker's own step: W&B drops steps that a resumed run repeats.
        with self._tracking():
            self.accelerator.log({**values, "step": self.state.step}, step=self._tracker_step)

    def log_evaluation(self, values: dict[str, float]) -> None:
        """Log and print an evaluation's values. Every rank calls this."""
        self.log(values)
        figures = ", ".join(
            f"{name.removeprefix('eval_')} {value:.4f}" for name, value in values.items()
        )
        print_main(f"step {self.state.step}: validation {figures}")
        # working out the figures, after the pass over the data, was no training either
        self.mark = time.perf_counter()

    @contextlib.contextmanager
    def _tracking(self) -> Iterator[None]:
        """What goes wrong in a tracker is said once, and the run goes on without it."""
        try:
            yield
        except Exception as error:
            if self.tracker:
                print_main(
                    f"warning: {self.tracker} failed and is left out from here on "
                    f"({first_line(error)})"
                )
            self.tracker = None
            self.accelerator.trackers.clear()

    @property
    def _tracker_step(self) -> int | None:
        return None if self.tracker == "wandb" else self.state.step

    def log_table(self, name: str, columns: list[str], rows: list[list[str]]) -> None:
        """Show a table of texts in W&B; other trackers have none. The main rank acts."""
        if rows and self.main and self.tracker == "wandb":
            with self._tracking():
                self.accelerator.get_tracker("wandb").log_table(
                    name, columns=columns, data=redact(rows), step=None
                )

    def log_picture(self, name: str, file: Path) -> None:
        """Show a picture in the tracker, where it takes pictures. The main rank acts."""
        if not (self.main and self.tracker in ("wandb", "tensorboard")):
            return
        from PIL import Image

        picture = Image.open(file, formats=["PNG"]).convert("RGB")
        with self._tracking():
            if self.tracker == "wandb":
                self.accelerator.get_tracker("wandb").log_images({name: [picture]}, step=None)
            else:
                array = np.asarray(picture).transpose(2, 0, 1)[None]
                self.accelerator.get_tracker("tensorboard").log_images(
                    {name: array}, step=self.state.step
                )

    def close(self) -> None:
        """Draw the curves and end the tracker's run. Every rank calls this."""
        self.bar.close()
        if self.profiler is not None:
            self.profiler.close()
        self.draw(now=True)
        wait_for_main()  # which may still write
        self.accelerator.wait_for_everyone()  # end_training takes the process group down
        with self._tracking():
            self.accelerator.end_training()

    def draw(self, *, now: bool = False) -> None:
        """Draw curves.png from metrics.jsonl, unless `now` at most for 2 % of the time: all wait.
        The main rank acts.
        """
        start = time.perf_counter()
        if self.main and (now or start - self.drawn > 50 * self.drawing):
            draw_curves(self.file, self.run_dir / "curves.png", self.best_metric)
            self.drawn = time.perf_counter()
            self.drawing = self.drawn - start

    def _start_tracker(self, template: str, settings: dict[str, Any]) -> None:
        project = redact(self.config.project_name or template)
        settings = redact(settings)
        if self.tracker != "wandb":
            self.accelerator.project_configuration.logging_dir = str(self.run_dir)
            plain = {
                k: v if isinstance(v, int | float | str | bool) else str(v)
                for k, v in settings.items()
            }
            # what a killed run wrote after its checkpoint is not shown
            purge = self.state.step + (self.state.step > 0)
            of_tracker = (
                {"tensorboard": {"purge_step": purge}} if self.tracker == "tensorboard" else {}
            )
            self.accelerator.init_trackers(project, plain, of_tracker)
            return
        import wandb

        self.state.tracker_run_id = self.state.tracker_run_id or secrets.token_hex(4)
        mode = os.environ.get("WANDB_MODE", "")
        options: dict[str, Any] = {
            "id": self.state.tracker_run_id,
            "name": redact(self.config.run_name or self.run_dir.name),
            "dir": str(self.run_dir),
            "resume": "allow",
            "mode": mode or ("online" if _wandb_login() else "offline"),
            # Its metadata are the command line, where secrets may stand, and machine, user and
            # repository.
            "settings": wandb.Settings(
                quiet=True,
                silent=True,
                console="off",
                save_code=False,
                x_disable_meta=True,
                init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", "30")),
            ),
        }
        try:
            self.accelerator.init_trackers(project, settings, {"wandb": options})
        except wandb.errors.Error as error:
            print_main(f"warning: W&B cannot be reached ({first_line(error)})")
            self.accelerator.trackers.clear()
            wandb.teardown()  # its service still holds the run's id
            options["mode"] = "offline"
            try:
                self.accelerator.init_trackers(project, settings, {"wandb": options})
            except wandb.errors.Error as error:  # nor without a network: it is what was asked for
                raise ConfigError(f"W&B does not take this run ({first_line(error)})") from None
        if options["mode"] == "offline":
            kept = shlex.quote(str(self.run_dir / "wandb"))
            print_main(
                "W&B: this run is logged offline; to upload it: wandb login && "
                f"wandb sync {kept}/offline-*"
            )
        run = self.accelerator.get_tracker("wandb", unwrap=True)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")


def _wandb_login() -> bool:
    import wandb

    with contextlib.suppress(Exception):  # no key, or none that W&B takes
        return bool(wandb.login(prompt=False, verify=False))
    return False


def _keep_whole_lines(file: Path, state: TrainState) -> None:
    """Drop a half-written last line, and what a killed run logged after the checkpoint that is
    resumed.
    """
    if not file.exists():
        return
    kept = []
    for row in read_json_lines(file):
        evaluation = any(key.startswith("eval_") for key in row)
        last = state.evaluated if evaluation else state.step
        if isinstance(row.get("step"), int) and row["step"] <= last:
            kept.append(json.dumps(row) + "\n")
    temporary = file.with_name(".metrics.jsonl")
    with open_regular(temporary) as rewritten:
        rewritten.write("".join(kept))
    temporary.replace(file)


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
