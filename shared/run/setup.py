"""What happens before training, in the order in which a template calls it:

setup = Setup(config, "pretrain")                       # processes; the run's folder
model, optimizers = setup.prepare(model, optimizers)    # on the device, sharded
config = setup.compile(model, 100)                      # --torch_compile, or where it saves time
config = setup.rehearse(train, loss)                    # --find_batch_size, --dress_rehearsal
run = setup.start(train, fingerprint="...", total_steps=100)
"""

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from shared.config import parse as configs
from shared.data.mixture import Mixture
from shared.data.order import Batch
from shared.models.blocks import compile_blocks
from shared.parallel.kept import Tensors
from shared.parallel.strategy import Strategy
from shared.parallel.zero import strategy_of
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.printing import note, print_main, summary
from shared.process.redaction import redact
from shared.run import exits, launch, tracking
from shared.run.checkpoint import Checkpointer
from shared.run.checkpoint_files import find, refuse_changes
from shared.run.folder import open_run
from shared.run.prepared import Prepared
from shared.run.rehearsal import Rehearsal
from shared.run.run import Run
from shared.run.state import better
from shared.run.trained import MovingAverage
from shared.training import defaults, optim

# Rows of the summary that only summary.txt has.
DETAILS = (
    *("adapters", "attention", "packing", "loss", "log-probabilities", "log probabilities"),
    *("documents", "mixture", "reference", "labels", "images", "weights"),
)


def _is_open(value: Any) -> bool:
    """Whether the user left a setting open: None, or 0 of a size. False counts as given."""
    return not value and value is not False


class Setup(Prepared):
    """A run before its first step. All ranks call the same methods in the same order.

    Args:
        config: the template's, with the groups data, batch, optim, speed, evaluation, checkpoint
            and log.
        name: template name, for the run's folder and the tracker's project.
        unit: what throughput counts: tokens, images, texts or pairs.
        strategy: makes the Strategy.
    """

    def __init__(
        self,
        config: Any,
        name: str,
        *,
        unit: str = "tokens",
        strategy: Callable[[Accelerator], Strategy] = strategy_of,
    ) -> None:
        speed = config.speed
        accelerator = launch.start(
            config.batch.seed,
            log_with=tracking.tracker_name(config.log.report_to),
            timeout=speed.ddp_timeout,
            deterministic=speed.deterministic,
        )
        super().__init__(config, name, unit, accelerator, strategy(accelerator))
        self._chosen: list[str] = []
        self._extra: dict[str, torch.Tensor] = {}
        self._found: tuple[Path, dict[str, Any]] | None = None  # to continue from
        # preprocessing makes no run folder, and compiles nothing
        if not getattr(config.data, "preprocess_only", False):
            if speed.torch_compile and not launch.has_compiler():
                raise ConfigError(
                    "--torch_compile needs a compiler and Python's headers: apt install g++ "
                    "python3-dev, in an image --build-arg EXTRA_PACKAGES=g++"
                )
            self.dir = open_run(self.accelerator, config.checkpoint.output_dir, name)
            named = config.checkpoint.resume_from_checkpoint
            self._found = on_main(partial(find, self.dir, named))
        if self._found:
            # before minutes of loading; `Checkpointer.resume` looks at all settings
            given = {n: v for n, v in redact(configs.flatten(config)).items() if not _is_open(v)}
            refuse_changes(self._found[0], self._found[1]["settings"], given, config)

    def set_defaults(self, reason: str, **values: Any) -> Any:
        """Set what the user left open, and return the config with it. The summary says it.

        A run that continues keeps those of its checkpoint, also on another number of processes.

        Args:
            reason: what they follow from, for people; "" leaves them out of the summary.
            values: by flag; ignored if the flag was given, and a budget if any budget was.
        """
        given = configs.flatten(self.config)
        has_budget = any(given.get(name) is not None for name in configs.BUDGETS)
        settings = self._found[1]["settings"] if self._found else {}
        before = {name: value for name, value in settings.items() if not _is_open(value)}
        values = {
            name: before.get(name, value)
            for name, value in values.items()
            if not (has_budget and name in configs.BUDGETS) and _is_open(given[name])
        }
        self.config = configs.replace(self.config, **values)
        if values and reason:
            said = (
                f"{name} {f'{value:g}' if isinstance(value, float) else value}"
                for name, value in values.items()
            )
            self._chosen.append(f"{', '.join(said)} ({reason})")
        return self.config

    def prepare(
        self, model: Any, optimizers: list[Any], name: str = "model", *, spread: bool = True
    ) -> tuple[Any, list[Any]]:
        """Model and optimizers as the launch config wants them: on the device, wrapped, sharded.
        Call once for each model.

        Args:
            model: the whole model on every rank, with the same weights.
            optimizers: new ones. A group with another rate keeps its ratio to --learning_rate.
            name: name in checkpoints; "model" is the one that final/ is made of.
            spread: False for a model that is distributed already, as a pipeline is.

        Raises:
            ConfigError: the launch config cannot spread them.
        """
        if self.models:
            self.strategy.require("a second model")
        options = self.config.optim
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if group["lr"] != options.peak:
                    group.setdefault("lr_scale", group["lr"] / options.peak)
        if spread:
            model, optimizers = self.strategy.prepare(model, optimizers, options)
        self.models[name] = model
        self.optimizers += optimizers
        decay = self.config.evaluation.ema_decay
        if name == "model" and decay:
            self.strategy.require("--ema_decay")
            self.average = self.kept["ema."] = MovingAverage(self.accelerator, model, decay)
        elif name == "model":
            self.average = self.strategy.average
        return model, optimizers

    def compile(
        self,
        model: Any,
        steps: int,
        how: Callable[[Any], None] = compile_blocks,
        *,
        least: int = defaults.STEPS_TO_COMPILE,
        one_shape: bool = True,
    ) -> Any:
        """Compile `model` in place, if --torch_compile says so or, where it is not given, if that
        saves time on this device. A run that continues keeps what it did.

        Args:
            steps: optimizer steps of the whole run.
            how: compiles a model without wrappers.
            least: steps from which on compiling saves more time than it takes.
            one_shape: all batches have one; each other shape would be compiled anew, and slower.

        Returns:
            The config, which says whether the model is compiled.
        """
        asked = self.config.speed.torch_compile
        can_decide = self.device.type == "cuda"
        can_decide &= "--torch_compile by default" not in self.strategy.lacks
        saves = can_decide and one_shape and steps >= least
        if saves and asked is None and not launch.has_compiler():
            saves = False
            note("no C compiler is installed, so nothing is compiled: apt install g++ python3-dev")
        # on a CPU, nothing is decided, so there is nothing to say
        reason = f"{steps:,} steps on a {self.device.type.upper()} device" if can_decide else ""
        self.set_defaults(reason, torch_compile=saves)
        if self.config.speed.torch_compile:
            # what nobody asked for must not end the run
            torch._dynamo.config.suppress_errors = asked is None
            try:
                how(self.accelerator.unwrap_model(model))
            except ConfigError as error:
                if asked:
                    raise
                self.config = configs.replace(self.config, torch_compile=False)
                note(f"not compiled: {error}")
        return self.config

    def keep(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Save more tensors in checkpoints, and load them in place on resume."""
        self.strategy.require("Setup.keep")
        self._extra |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        self.kept["extra."] = Tensors(self._extra)

    def rehearse(
        self, train: Any, *losses: Callable[[Batch], torch.Tensor], multiple: int = 1
    ) -> Any:
        """Do what --find_batch_size and --dress_rehearsal ask for, and let DDP build its buckets.
        Changes no weights.

        Args:
            train: the training data: a `Loader` or `Stream`.
            losses: batch -> scalar; together they pass through all models.
            multiple: the rows of a micro-batch have to be a multiple of this.

        Returns:
            The config, with the batch size that was found.
        """
        models = list(self.models.values())
        trial = Rehearsal(self.strategy, models, self.optimizers, train, losses)
        if self.config.batch.find_batch_size:
            rows = trial.find_batch_size(multiple)
            self.config = configs.replace(self.config, per_device_train_batch_size=rows)
        trial.settle_ddp()
        if self.config.checkpoint.dress_rehearsal and not self._found:
            trial.dress_rehearsal(Checkpointer(self, ""))
        return self.config

    def start(
        self,
        train: Any,
        *,
        fingerprint: str,
        total_steps: int,
        makes: str = "final",
        samples: str = "rows",
        flops: float | None = None,
        **rows: Any,
    ) -> Run:
        """Continue from the newest whole checkpoint of the run's folder, or begin: write
        config.yaml, print the summary, start the logs. From here on a signal stops the run with a
        checkpoint.

        Args:
            train: the training data: a `Loader` or `Stream`.
            fingerprint: of the samples; a run on other samples is not continued.
            total_steps: optimizer steps of the whole run.
            makes: the last thing that the template writes. If it exists, a run without steps left
                is finished.
            samples: the unit of a batch, for the summary: rows, images, texts.
            flops: floating-point operations of forward and backward for one token or image, for
                MFU.
            rows: more lines of the summary; `optimizer` and `batch` replace what the flags say.

        Raises:
            Finished: nothing is left to do.
            ConfigError: the checkpoint's run has other settings that change what the model learns.
        """
        config = self.config
        saver = Checkpointer(self, fingerprint)
        state = saver.resume(self._found)
        if state.place:
            train.place = state.place
        rate = optim.learning_rate(config.optim, state.step, total_steps)
        if state.next_rate is not None and not math.isclose(rate, state.next_rate):
            print_main(
                "warning: with this budget and schedule the learning rate goes from "
                f"{state.next_rate:.3g} to {rate:.3g} here (docs/after_training.md, Train longer)"
            )
        metric = config.evaluation.metric_for_best_model
        state.begin_scoring(metric, fingerprint, configs.measured_by(config))
        if state.stopped_early != [total_steps, config.evaluation.early_stopping_patience]:
            state.stopped_early = []
        is_over = state.step >= total_steps or bool(state.stopped_early)
        if is_over and on_main((self.dir / makes).exists):
            raise exits.Finished(
                f"{self.dir} is finished: {state.step} steps. Train longer with a larger budget "
                "(--max_steps or --num_train_epochs) and its name after --allow_changed, or choose "
                "another --output_dir"
            )
        config = configs.replace(config, output_dir=self.dir)
        if self.is_main:
            configs.save(config, self.dir / "config.yaml")
        self._print_summary(train, total_steps, samples, rows)
        return Run(self, train, saver, state, total_steps, flops)

    def _print_summary(
        self, train: Any, total_steps: int, samples: str, rows: dict[str, Any]
    ) -> None:
        config = self.config
        epoch = train.steps_per_epoch
        epochs = f", {total_steps / epoch:.2f} epochs" if epoch else ""
        if isinstance(order := getattr(train, "order", None), Mixture):
            rows["mixture"] = order.describe(total_steps)
        cadence = f"evaluates every {config.evaluation.every(total_steps, epoch):,} steps"
        cadence += f", saves every {config.checkpoint.every(total_steps):,} steps"
        metric = config.evaluation.metric_for_best_model
        if metric != "none":
            cadence += f", keeps the best {metric} ({better(metric)} is better)"
        own = {name.replace("_", " "): value for name, value in rows.items()}
        lines = {
            "run on": launch.strategy(self.accelerator),
            **own,
            "batch": launch.batch_line(config.batch, self.accelerator, samples),
            "budget": f"{total_steps:,} steps{epochs}",
            "cadence": cadence,
            "optimizer": config.optim.describe(),
            "by default": "; ".join(self._chosen) or None,
            "output": f"{os.path.relpath(self.dir)}; summary.txt there says more",
        }
        lines |= own  # which may describe its batches, or optimizers, itself
        summary(self.name, lines, details=DETAILS, file=self.dir / "summary.txt")
