"""What happens before training, in the order in which a template calls it:

setup = Setup(config, "pretrain")                       # processes; the run's folder
setup.set_defaults("3M parameters", learning_rate=4e-3) # what the user left open
setup.describe_data(train, held_out, tokenizer)         # data.json
model, optimizers = setup.prepare(model, optimizers)    # on the device, sharded
setup.keep("seen", {"count": count})                    # your own tensors
run = setup.start(train, loss, fingerprint="...")       # compiled, tried, resumed
"""

import importlib
import math
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from shared.config import parse as configs
from shared.data.order import Batch
from shared.models.blocks import compile_blocks, compile_images
from shared.models.counts import describe_parameters
from shared.parallel.kept import Tensors
from shared.parallel.strategy import Strategy, strategy_of
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.printing import note, print_main, summary
from shared.process.redaction import redact
from shared.run import exits, launch, tracking
from shared.run.checkpoint import Checkpointer
from shared.run.checkpoint_files import find
from shared.run.folder import open_run
from shared.run.prepared import Prepared
from shared.run.rehearsal import Rehearsal
from shared.run.resumable import measured_by, require_resumable
from shared.run.run import Run
from shared.run.state import TrainState, better
from shared.training import defaults, optim


class Setup(Prepared):
    """A run before its first step. All ranks call the same methods in the same order.

    `setup.config` is the template's config with what was chosen so far. Before `start`, a template
    may write rows of the summary into `about` and `details`.

    Args:
        config: the template's, with the groups data, batch, optim, speed, evaluation, checkpoint
            and log.
        name: template name, for the run's folder and the tracker's project.
        unit: what throughput counts: tokens, images, texts or pairs.
        demo: what the demo's data are trained with, by flag.
        strategy: makes the Strategy.
    """

    def __init__(
        self,
        config: Any,
        name: str,
        *,
        unit: str = "tokens",
        demo: dict[str, Any] | None = None,
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
        self._started = False
        self._found: tuple[Path, dict[str, Any]] | None = None  # to continue from
        # preprocessing makes no run folder, and compiles nothing
        if not config.data.preprocess_only:
            if speed.torch_compile and not launch.has_compiler():
                raise ConfigError(
                    "--torch_compile needs a compiler and Python's headers: apt install g++ "
                    "python3-dev, in an image --build-arg EXTRA_PACKAGES=g++"
                )
            self.dir = open_run(self.accelerator, config.checkpoint.output_dir, name)
            if config.checkpoint.mirror_to:
                from shared.extras.mirror.mirror import Mirror

                self.mirror = Mirror(self.dir, config.checkpoint).open()
            named = config.checkpoint.resume_from_checkpoint
            self._found = on_main(partial(find, self.dir, named))
        asked = {
            "rehearsal": config.batch.find_batch_size or config.checkpoint.dress_rehearsal,
            "averages": config.evaluation.ema_decay,
            "mixture": config.data.mix_weights,
            "report": config.data.fail_on,
        }
        if config.optim.skip_steps:
            self.strategy.require("--skip_steps")
        for extra in filter(asked.get, asked):  # before anything is loaded: it may not be there
            importlib.import_module(f"shared.extras.{extra}")
        if self._found:
            # before minutes of loading; `Checkpointer.resume` knows the rest
            settings = redact(configs.flatten(config))
            given = {name: value for name, value in settings.items() if value is not None}
            require_resumable(*self._found, {"settings": given}, config)
        if demo and config.data.is_demo:
            self.set_defaults("the demo", **demo)

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
        before = {name: value for name, value in settings.items() if value is not None}
        values = {
            name: before.get(name, value)
            for name, value in values.items()
            if not (has_budget and name in configs.BUDGETS) and given[name] is None
        }
        self.config = configs.replace(self.config, **values)
        if values and reason:
            said = (
                f"{name} {f'{value:g}' if isinstance(value, float) else value}"
                for name, value in values.items()
            )
            self._chosen.append(f"{', '.join(said)} ({reason})")
        return self.config

    def describe_data(self, train: Any, held_out: Any, tokenizer: Any = None) -> None:
        """Report on the data, see `extras/report`: data.json in the run's folder. Every rank calls
        this.

        Args:
            train, held_out: as the readers of data return them.
            tokenizer: of token ids.

        Raises:
            Finished: with --preprocess_only.
            ConfigError: the data have more of something than --fail_on allows.
        """
        if report := launch.optional("report.report"):
            on_main(partial(report.write, self, train, held_out, tokenizer))
        if self.config.data.preprocess_only:
            raise exits.Finished("the data are prepared")

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
        trained = {p for p in model.parameters() if p.requires_grad}
        given = {p for o in optimizers for group in o.param_groups for p in group["params"]}
        if not given or given - trained:
            raise ConfigError(
                f"setup.prepare: the optimizers of {name!r} have {len(given - trained)} parameters "
                f"that are frozen or not of this model, and {len(given & trained)} others: give it "
                "what is trained (a frozen model needs no prepare: move it to setup.device)"
            )
        path = configs.flatten(self.config).get("model_name_or_path") if name == "model" else None
        described = f"{path or type(model).__name__}, {describe_parameters(model)}"
        self.about.setdefault(name, described)
        options = self.config.optim
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if group["lr"] != options.peak:
                    ratio = float(group["lr"]) / options.peak
                    group["lr_scale"] = group.get("lr_scale", 1.0) * ratio
        if spread:
            model, optimizers = self.strategy.prepare(model, optimizers, options)
        self.models[name] = model
        self.optimizers += optimizers
        decay = self.config.evaluation.ema_decay
        if name == "model" and decay:
            self.strategy.require("--ema_decay")
            from shared.extras.averages import MovingAverage

            self.average = self.kept["ema."] = MovingAverage(self.accelerator, model, decay)
        elif name == "model":
            self.average = self.strategy.average
        return model, optimizers

    def keep(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Save more tensors in checkpoints, and load them in place on resume. Before `start`;
        change them in place.
        """
        if self._started:
            raise RuntimeError("call setup.keep before setup.start, which resumes")
        self.strategy.require("Setup.keep")
        self._extra |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}
        self.kept["extra."] = Tensors(self._extra)

    def start(
        self,
        train: Any,
        loss: Callable[[Batch], torch.Tensor] | None,
        *,
        fingerprint: str,
        steps: int | None = None,
        makes: str = "final",
    ) -> Run:
        """Decide what is left, in this order, and begin or continue:

        1. the number of optimizer steps;
        2. whether blocks are compiled;
        3. what the loss decides (`loss.begin`), such as to fuse the model's head;
        4. --find_batch_size;
        5. DDP's buckets;
        6. --dress_rehearsal;
        7. the newest whole checkpoint, or the beginning;
        8. config.yaml, summary, logs. From here on a signal stops the run with a checkpoint.

        Args:
            train: the training data: a `Loader`, `Stream` or `Rollouts`.
            loss: batch -> scalar, through all models. Its method `begin(setup)`, if it has one, is
                called while the models have their first weights, also where the run continues.
                None: nothing can be tried, as with a pipeline.
            fingerprint: of the samples; a run on other samples is not continued.
            steps: optimizer steps of the whole run, if --max_steps and --num_train_epochs do not
                say it.
            makes: the last thing that the template writes. If it exists, a run without steps left
                is finished.

        Raises:
            Finished: nothing is left to do.
            ConfigError: the checkpoint's run has other settings that change what the model learns.
        """
        self._started = True
        if steps is None:
            steps = self.config.batch.total_steps(train.steps_per_epoch)
        self._compile(steps, one_shape=train.one_shape)
        begin = getattr(loss, "begin", None)
        if begin is not None:
            begin(self)
        models = [*self.models.values()]
        kept = [*self._extra.values()]
        trials = Rehearsal(self.strategy, models, self.optimizers, train, loss, kept)
        if self.config.batch.find_batch_size:
            from shared.extras.rehearsal import find_batch_size

            rows = find_batch_size(trials)
            self.config = configs.replace(self.config, per_device_train_batch_size=rows)
        trials.settle_ddp()
        saver = Checkpointer(self, fingerprint)
        if self.config.checkpoint.dress_rehearsal and not self._found:
            from shared.extras.rehearsal import dress_rehearsal

            dress_rehearsal(trials, saver)
        state = saver.resume(self._found)
        if self.mirror:
            self.mirror.start()
        self._continue(state, train, steps, fingerprint)
        is_over = state.step >= steps or bool(state.stopped_early)
        if is_over and on_main((self.dir / makes).exists):
            raise exits.Finished(
                f"{self.dir} is finished: {state.step} steps. Train longer with a larger budget "
                "(--max_steps or --num_train_epochs) and its name after --allow_changed, or choose "
                "another --output_dir"
            )
        if self.is_main:
            config = configs.replace(self.config, output_dir=self.dir)
            configs.save(config, self.dir / "config.yaml")
        self._print_summary(train, steps)
        return Run(self, train, saver, state, steps)

    def _compile(self, steps: int, *, one_shape: bool) -> None:
        """Compile the model in place, if --torch_compile says so or, where it is not given, if that
        saves time on this device. A run that continues keeps what it did.

        Args:
            one_shape: all batches have one; each other shape would be compiled anew, and slower.
        """
        how, least = compile_blocks, defaults.STEPS_TO_COMPILE
        if self.unit == "images":
            how, least = compile_images, defaults.STEPS_TO_COMPILE_IMAGES
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
                how(self.accelerator.unwrap_model(self.models["model"]))
            except ConfigError as error:
                if asked:
                    raise
                self.config = configs.replace(self.config, torch_compile=False)
                note(f"not compiled: {error}")

    def _continue(self, state: TrainState, train: Any, steps: int, fingerprint: str) -> None:
        """Let the data go on where the checkpoint's run was, and see what of its state still
        counts.
        """
        options = self.config.evaluation
        if state.place:
            train.place = state.place
        rate = optim.learning_rate(self.config.optim, state.step, steps)
        if state.next_rate is not None and not math.isclose(rate, state.next_rate):
            print_main(
                "warning: with this budget and schedule the learning rate goes from "
                f"{state.next_rate:.3g} to {rate:.3g} here (docs/after_training.md, Train longer)"
            )
        state.begin_scoring(options.metric_for_best_model, fingerprint, measured_by(self.config))
        if state.stopped_early != [steps, options.early_stopping_patience]:
            state.stopped_early = []

    def _print_summary(self, train: Any, steps: int) -> None:
        config = self.config
        epoch = train.steps_per_epoch
        epochs = f", {steps / epoch:.2f} epochs" if epoch else ""
        describe = getattr(getattr(train, "order", None), "describe", None)
        if describe is not None:  # of a mixture
            self.details["mixture"] = describe(steps)
        cadence = f"evaluates every {config.evaluation.every(steps, epoch):,} steps"
        cadence += f", saves every {config.checkpoint.every(steps):,} steps"
        metric = config.evaluation.metric_for_best_model
        if metric != "none":
            cadence += f", keeps the best {metric} ({better(metric)} is better)"
        used = {name.split(".")[2] for name in sys.modules if name.startswith("shared.extras.")}
        self.details["extras"] = ", ".join(sorted(used)) or None
        rows = "rows" if self.unit == "tokens" else self.unit
        lines = {
            "run on": launch.strategy(self.accelerator),
            **self.about,
            **self.details,
            "batch": launch.batch_line(config.batch, self.accelerator, rows),
            "budget": f"{steps:,} steps{epochs}",
            "cadence": cadence,
            "optimizer": config.optim.describe(),
            "by default": "; ".join(self._chosen) or None,
            "output": f"{os.path.relpath(self.dir)}; summary.txt there says more",
        }
        lines |= self.about  # which may say more of batches, or optimizers
        summary(self.name, lines, details=self.details.keys(), file=self.dir / "summary.txt")
