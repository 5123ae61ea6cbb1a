"""One run, around the training loop: processes, folder, checkpoints, logs, evaluation.

A template holds its own code and the optimizer step. The rest is the same for all templates:

    run = Run(config, "pretrain")                         # processes; the run's folder
    model, optimizers = run.prepare(model, optimizers)    # on the device, sharded
    config = run.compile(model, 100)                      # --torch_compile, or where it saves time
    run.resume(train, data=fingerprint, total_steps=100)  # the newest checkpoint, if any
    config = run.rehearse(loss)                           # --find_batch_size, --dress_rehearsal
    run.start(model="...")                                # summary, logs; signals are obeyed
    for step in run.steps(): ...                          # seeds, rate, logs, checkpoints
    run.load_best_weights()
    run.close("done")

There are no callbacks. To change the step, edit the template. To change the rest, edit this file.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.config import parse as configs
from shared.config.options import SyncConfig
from shared.data.loader import Window
from shared.data.mixture import Mixture
from shared.data.order import Batch
from shared.models.blocks import compile_blocks
from shared.models.card import model_card
from shared.models.hub import identity_of_frozen
from shared.models.weights import (
    WeightCopy,
    average_buffers,
    evaluation_weights,
    persistent_buffers,
)
from shared.parallel import sharding, zero
from shared.process import faults
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.printing import note, print_main, summary
from shared.process.version import version
from shared.run import exits, launch, metrics, tracking
from shared.run.checkpoint import Checkpointer
from shared.run.checkpoint_files import settings_of
from shared.run.folder import open_run
from shared.run.guard import Guard
from shared.run.rehearsal import Rehearsal
from shared.run.state import TrainState
from shared.training import defaults, optim
from shared.training.step import Step
from shared.training.sync import Replicas


def _is_open(value: Any) -> bool:
    """Whether a setting is not given: None, or 0 of a size; not False."""
    return not value and value is not False


class Run:
    """Everything that a run needs besides model, data and step. All ranks call the same methods in
    the same order.

    Args:
        config: the template's, with the groups data, batch, optim, speed, evaluation, checkpoint
            and log.
        name: template name, for the run's folder and the tracker's project.
        unit: what throughput counts: tokens, images, texts or pairs.

    Attributes:
        accelerator, device, is_main: Accelerate's object, this rank's device, whether this is rank
            0.
        dir: the run's folder.
        state: counts and scores; `notes` is for the template: JSON, saved in checkpoints.
        total_steps: optimizer steps of the whole run.
        is_last: the present step is the last one.
    """

    def __init__(self, config: Any, name: str, *, unit: str = "tokens") -> None:
        self.config = config
        self.name = name
        self.unit = unit
        self.sync: SyncConfig = getattr(config, "sync", SyncConfig())  # pretrain.py alone has one
        tracker = tracking.tracker_name(config.log.report_to)
        speed = config.speed
        self.accelerator = launch.start(
            config.batch.seed,
            log_with=tracker,
            timeout=speed.ddp_timeout,
            deterministic=speed.deterministic,
        )
        self.device = self.accelerator.device
        self.is_main = self.accelerator.is_main_process
        self.made_by = f"version {version()}, {launch.strategy(self.accelerator)}"
        self.dir = Path()
        # preprocessing makes no run folder, and compiles nothing
        if not getattr(config.data, "preprocess_only", False):
            if speed.torch_compile and not launch.has_compiler():
                raise ConfigError(
                    "--torch_compile needs a compiler: apt install g++, in an image "
                    "--build-arg EXTRA_PACKAGES=g++"
                )
            self.dir = open_run(self.accelerator, config.checkpoint.output_dir, name)
        self.state = TrainState()
        self.total_steps = 0
        self.eval_steps = 1
        self.save_steps = 1
        self.models: dict[str, nn.Module] = {}
        self.optimizers: list[Any] = []
        self.ema: WeightCopy | None = None
        self.replicas: Replicas | None = None
        self._kept: dict[str, torch.Tensor] = {}
        self._chosen: list[str] = []
        self._before: dict[str, Any] = {}
        if self.dir != Path():
            named = config.checkpoint.resume_from_checkpoint
            self._before = on_main(partial(settings_of, self.dir, named))
        self._step: Step | None = None  # the present step, until it is logged
        self.is_last = self._is_settled = False

    # Before training ------------------------------------------------------------------------------

    def choose(self, reason: str, **values: Any) -> Any:
        """Settle settings that the user left open, and return the config with them. The summary
        says them.

        A run that continues keeps those of its checkpoint, also on another number of processes.

        Args:
            reason: what they follow from, for people.
            values: by flag; ignored where the flag was given, or, of a budget, any budget was.
        """
        given = configs.flatten(self.config)
        budgets = (
            configs.BUDGETS
            if any(given.get(name) is not None for name in configs.BUDGETS)
            else set()
        )
        before = {name: value for name, value in self._before.items() if not _is_open(value)}
        values = {
            name: before.get(name, value)
            for name, value in values.items()
            if name not in budgets and _is_open(given[name])
        }
        if values:
            self.config = configs.replace(self.config, **values)
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
        if self.models and zero.is_used(self.accelerator):
            raise ConfigError("DeepSpeed takes one model: use ddp.yaml or fsdp2.yaml")
        options = self.config.optim
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if group["lr"] != options.peak:
                    group.setdefault("lr_scale", group["lr"] / options.peak)
        apart = self.sync.sync_every > 1
        if spread:
            model, optimizers = sharding.prepare(
                self.accelerator,
                model,
                optimizers,
                max_grad_norm=options.max_grad_norm,
                comm_hook=self.config.speed.ddp_comm_hook,
                replicas=apart,
            )
        self.models[name] = model
        self.optimizers += optimizers
        if apart and self.config.evaluation.ema_decay:
            raise ConfigError("--sync_every takes no --ema_decay")
        if name == "model" and self.config.evaluation.ema_decay:
            self.ema = WeightCopy(self.accelerator, model)
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
        saves time on this device. A run that continues keeps what it did. Call before `resume`.

        Args:
            steps: optimizer steps of the whole run.
            how: compiles a model without wrappers.
            least: steps from which on compiling saves more time than it takes.
            one_shape: all batches have one; each other shape would be compiled anew, and slower.

        Returns:
            The config, which says whether the model is compiled.
        """
        asked = self.config.speed.torch_compile
        measured = self.device.type == "cuda" and not zero.is_used(self.accelerator)
        saves = measured and one_shape and steps >= least
        if saves and asked is None and not launch.has_compiler():
            saves = False
            note("no C compiler is installed, so nothing is compiled: apt install g++")
        self.choose(f"{steps:,} steps on a {self.device.type.upper()} device", torch_compile=saves)
        if self.config.speed.torch_compile:
            # what nobody asked for must not end the run
            torch._dynamo.config.suppress_errors = asked is None
            with contextlib.suppress(*[ConfigError] * (asked is None)):
                how(self.unwrap(model))
        return self.config

    def keep(self, name: str, tensors: dict[str, torch.Tensor]) -> None:
        """Save more tensors in checkpoints, and load them in place on resume. Call before `resume`;
        not with DeepSpeed.
        """
        if zero.is_used(self.accelerator):
            raise ConfigError(
                "checkpoints of DeepSpeed hold one model and no more tensors: "
                "use ddp.yaml or fsdp2.yaml"
            )
        self._kept |= {f"{name}.{key}": tensor for key, tensor in tensors.items()}

    def resume(self, train: Any, *, data: str, total_steps: int, makes: str = "final") -> None:
        """Continue from the newest whole checkpoint of the run's folder, or begin.

        Args:
            train: the training data: a `Loader` or `Stream`.
            data: fingerprint of the samples; a run on other samples is not continued.
            total_steps: optimizer steps of the whole run.
            makes: the last thing that the template writes. If it exists, a run without steps left
                is finished.

        Raises:
            Finished: nothing is left to do.
            ConfigError: the checkpoint's run has other settings that change what the model learns.
            CheckpointError: none of the run's checkpoints is whole.
        """
        config = self.config
        given = configs.flatten(self.config)
        self.train = train
        model = self.models["model"]
        if self.sync.sync_every > 1:
            self.replicas = Replicas(self.accelerator, model, self.sync, total_steps)
        base = identity_of_frozen(given.get("model_name_or_path") or "", self.unwrap(model))
        self.saver = Checkpointer(
            self.accelerator,
            self.models,
            self.optimizers,
            self.dir,
            config,
            data=data,
            base=base,
            ema=self.ema,
            extra=self._kept,
            replicas=self.replicas,
        )
        self.state = self.saver.resume(config.checkpoint.resume_from_checkpoint)
        if self.state.place:
            longer = train.resume(self.state.step, self.state.place)
            total_steps += longer if config.batch.max_steps is None else 0
        self.total_steps = total_steps
        if self.replicas:
            self.replicas.total_steps = total_steps
        self.eval_steps = config.evaluation.every(total_steps, train.steps_per_epoch)
        self.save_steps = config.checkpoint.every(total_steps)
        rate = optim.learning_rate(config.optim, self.state.step, total_steps)
        if self.state.next_rate is not None and not math.isclose(rate, self.state.next_rate):
            print_main(
                "warning: with this budget and schedule the learning rate goes from "
                f"{self.state.next_rate:.3g} to "
                f"{rate:.3g} here (docs/after_training.md, Train longer)"
            )
        self.state.begin_scoring(
            config.evaluation.metric_for_best_model, data, configs.measured_by(config)
        )
        if self.state.stopped_early != [total_steps, config.evaluation.early_stopping_patience]:
            self.state.stopped_early = []
        self.is_last = self.state.step >= total_steps or bool(self.state.stopped_early)
        if self.is_last and on_main((self.dir / makes).exists):
            budget = next(
                (name for name in ("max_tokens", "num_train_epochs") if given.get(name)),
                "max_steps",
            )
            raise exits.Finished(
                f"{self.dir} is finished: {self.state.step} steps. Train longer "
                f"with a larger --{budget} and "
                f"--allow_changed {budget}, or choose another --output_dir"
            )

    def rehearse(self, *losses: Callable[[Batch], torch.Tensor], multiple: int = 1) -> Any:
        """Do what --find_batch_size and --dress_rehearsal ask for, and let DDP build its buckets.
        Changes no weights.

        Args:
            losses: batch -> scalar; together they pass through all models.
            multiple: the rows of a micro-batch have to be a multiple of this.

        Returns:
            The config, with the batch size that was found.
        """
        trial = Rehearsal(
            self.accelerator, list(self.models.values()), self.optimizers, self.train, losses
        )
        if self.config.batch.find_batch_size:
            rows = trial.find_batch_size(multiple)
            self.config = configs.replace(self.config, per_device_train_batch_size=rows)
        trial.settle_ddp()
        if self.config.checkpoint.dress_rehearsal and self.state.step == 0:
            trial.dress_rehearsal(self.saver, self.state)
        return self.config

    def start(self, *, samples: str = "rows", flops: float | None = None, **rows: Any) -> None:
        """Write config.yaml, print the summary, start the logs. From here on a signal stops the run
        with a checkpoint.

        Args:
            samples: the unit of a batch, for the summary: rows, images, texts.
            flops: floating-point operations of forward and backward for one token or image, for
                MFU.
            rows: more lines of the summary; `optimizer` replaces what the flags say.
        """
        config = configs.replace(self.config, output_dir=self.dir)
        if self.is_main:
            configs.save(config, self.dir / "config.yaml")
        epochs = ""
        if epoch := self.train.steps_per_epoch:
            epochs = f", {(self.total_steps - self.train.order.extra_steps) / epoch:.2f} epochs"
        if isinstance(order := getattr(self.train, "order", None), Mixture):
            rows["mixture"] = order.describe(self.total_steps)
        summary(
            self.name,
            {
                "run on": launch.strategy(self.accelerator),
                "each process holds": sharding.sharding_summary(
                    self.accelerator, self.models["model"], self.optimizers
                ),
                **{name.replace("_", " "): value for name, value in rows.items()},
                "batch": launch.batch_line(config.batch, self.accelerator, samples),
                "budget": f"{self.total_steps:,} steps{epochs}",
                "cadence": launch.cadence_line(
                    config, self.eval_steps, self.save_steps, self.total_steps
                ),
                "optimizer": rows.get("optimizer", config.optim.describe()),
                **({"by default": "; ".join(self._chosen)} if self._chosen else {}),
                "output": self.dir,
            },
        )
        self.logger = metrics.Logger(
            self.accelerator,
            config.log,
            self.dir,
            self.state,
            self.total_steps,
            configs.flatten(self.config),
            template=self.name,
            unit=self.unit,
            flops=flops,
        )
        self.guard = Guard(
            self.accelerator,
            list(self.models.values()),
            self.state,
            max_skipped=config.optim.max_skipped_steps,
            replicas=self.replicas,
            timeout=config.speed.ddp_timeout,
        )

    # Training -------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield each optimizer step that is left. Before each: data, learning rate, seed; after
        each: logs, checkpoint.

        To end early, call `stop`. A `break` skips the last checkpoint.

        Raises:
            Stopped: on all ranks, by a signal, after a checkpoint.
            NonFiniteError: on all ranks: too many updates were not finite.
        """
        # No `with` or `try` around the yield: after a break, Python closes this generator at
        # another time on each rank.
        config = self.config
        models = [*self.models.values()]
        until = self.state.step if self.is_last else self.total_steps
        group = self.replicas.inner if self.replicas else None
        for window in self.logger.waiting(self.train.windows(self.state.step, until)):
            launch.seed_step(
                config.batch.seed, self.state.step, sharding.data_rank(self.accelerator)
            )
            rate = optim.set_learning_rate(
                self.optimizers, config.optim, self.state.step, self.total_steps
            )
            # now, so that an evaluation in the loop's body knows its step
            self.state.advance(window)
            self.is_last = self.state.step == self.total_steps
            self._step = Step(
                self.accelerator,
                models,
                window,
                number=self.state.step,
                rate=rate,
                verdict=self.guard.finite,
                group=group,
            )
            yield self._step
            self._complete_step()
            evaluated = self.state.step == self.state.evaluated
            best = self.state.step == self.state.best_step
            saving = self.is_last or best or self.state.step % self.save_steps == 0
            self._stop_if_asked(now=evaluated or saving)
            with self.logger.pause():
                if evaluated:
                    self.logger.draw()
                if saving:
                    self._save()
            if self.is_last:
                break
        self._settle()

    def stop(self) -> None:
        """Make the present step the last one."""
        self.is_last = True

    def _complete_step(self) -> None:
        """Update the moving average and log the present step. Once a step: before an evaluation, or
        at the step's end.
        """
        step = self._step
        self._step = None
        if step is None:
            return
        if step.finite is None:
            raise RuntimeError(
                "call step.update() before an evaluation and before the end of the loop's body"
            )
        if self.ema:
            done = self.state.step - 1
            # lower at first
            self.ema.average_in(min(self.config.evaluation.ema_decay, (1 + done) / (10 + done)))
        exits.at_step(self.state.step)
        if self.replicas:
            self.replicas.after(self.state.step)
        every = self.config.log.every(self.total_steps)
        due = self.state.step in (1, self.total_steps) or self.state.step % every == 0
        if due:
            self.guard.count_skipped()
        self.logger.step(step, due=due)

    def _stop_if_asked(self, *, now: bool) -> None:
        try:
            self.guard.stop_if_asked(now=now)
        except exits.Stopped:
            self._save_and_close()
            raise

    def _save(self) -> None:
        self.logger.note_interval()
        self.state.next_rate = optim.learning_rate(
            self.config.optim, self.state.step, self.total_steps
        )
        self.saver.save(self.state)

    def _save_and_close(self) -> None:
        self._save()
        self.saver.wait()
        self.logger.close()

    def _settle(self) -> None:
        """Wait for a save in the background. From here on a signal ends the run at once."""
        # once: while one rank writes final/, the others must not wait in a collective
        if not self._is_settled:
            self._is_settled = True
            self.saver.wait()
            self.guard.release()

    # Evaluation -----------------------------------------------------------------------------------

    def should_evaluate(self) -> bool:
        """Whether an evaluation is due: before the first step, each --eval_steps, at the last step;
        once a step.
        """
        due = (
            self.state.step % self.eval_steps == 0
            or self.state.step in (0, self.total_steps)
            or self.is_last
        )
        return due and self.state.evaluated < self.state.step

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """For the block that evaluates: eval mode, averaged weights, no gradients; its time is not
        training time.

        Afterwards all is as before. A signal in `read` ends the run, with a checkpoint.
        """
        self._complete_step()
        self._stop_if_asked(now=True)
        modes = {module: module.training for module in model.modules()}
        weights = evaluation_weights(
            self.accelerator,
            self.unwrap(model),
            self.replicas.agreed if self.replicas else self.ema,
        )
        try:
            # An evaluation's varying sizes would be compiled as variables, which are slower, and
            # from then on training would use these, too.
            with (
                self.logger.pause(),
                weights,
                torch.compiler.set_stance("force_eager"),
                torch.no_grad(),
            ):
                model.eval()
                yield
        except exits.Stopped:
            self._save_and_close()
            raise
        finally:
            for module, mode in modes.items():
                module.training = mode

    def read(self, loader: Any) -> Iterator[Window]:
        """Windows of one pass over validation data. Inside of `evaluating`. A signal raises Stopped
        on all ranks.
        """
        steps = loader.order.steps_per_epoch
        for window in self.logger.bar_of(loader.windows(0, steps), steps):
            self.guard.stop_if_asked()
            faults.point("evaluation")
            yield window

    def mean_loss(self, loader: Any, loss: Callable[[Batch], torch.Tensor]) -> float:
        """The mean over the targets of one pass over validation data. Inside of `evaluating`.

        Args:
            loss: micro-batch -> scalar, summed over its targets.
        """
        total = torch.zeros((), device=self.device)
        targets = 0
        for window in self.read(loader):
            for batch in window.micro_batches:
                total += loss(batch)
            targets += window.num_targets
        return self.sum(total).item() / targets

    def log_evaluation(self, values: dict[str, float]) -> None:
        """Log an evaluation's `eval_*` values, eval_loss among them; score it; stop early if the
        patience runs out.
        """
        options = self.config.evaluation
        self.logger.log_evaluation(values)
        self.state.score(values, options.metric_for_best_model)
        patience = options.early_stopping_patience * self.eval_steps
        waited = self.state.step - self.state.best_step
        if 0 < patience <= waited and self.state.step < self.total_steps:
            self.state.stopped_early = [self.total_steps, options.early_stopping_patience]
            print_main(
                f"stopped early: no better {options.metric_for_best_model} since step "
                f"{self.state.best_step}"
            )
            self.stop()

    # The end --------------------------------------------------------------------------------------

    def load_best_weights(self) -> None:
        """Load the weights for final/: the best by --metric_for_best_model, or the last; the
        average, with --ema_decay.
        """
        best = self.state.best_step
        metric = self.config.evaluation.metric_for_best_model
        if best:
            if best != self.state.step and not self.saver.load_best(best):  # it is damaged
                self.state.best_step = self.state.step
                self.state.results = self.state.latest
            print_main(
                f"best by {metric}: step {self.state.best_step}, "
                f"{self.state.results[f'eval_{metric}']:.4f}"
            )
        for other in (self.replicas and self.replicas.agreed, self.ema):
            if other:
                other.swap()
        self.replicas = self.ema = None  # later evaluations measure what final/ holds
        average_buffers(self.accelerator, [persistent_buffers(self.unwrap(self.models["model"]))])

    @property
    def best_checkpoint(self) -> Path:
        """The checkpoint of the best evaluation, or the last. For models that no rank has as a
        whole.
        """
        return self.dir / f"checkpoint-{self.state.best_step or self.state.step:06d}"

    def card(self, title: str, data: str, *, load: str, **front: str) -> str:
        """The model card: data, code, launch, results before training and of the best evaluation,
        settings. Main rank.
        """
        before = {f"{name}_before": value for name, value in self.state.before.items()}
        results = before | self.state.results | {"step": self.state.best_step or self.state.step}
        return model_card(
            title,
            data,
            results,
            configs.flatten(self.config),
            made_by=self.made_by,
            load=load,
            **front,
        )

    def close(self, *messages: str) -> None:
        """Wait for the main rank, end the logs and print the last lines."""
        self._settle()
        self.logger.close()
        for message in messages:
            print_main(message)

    # Helpers --------------------------------------------------------------------------------------

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of `value` over the data that all ranks have read, each sample counted once."""
        return sharding.total(self.accelerator, value)

    def unwrap(self, model: Any) -> Any:
        """The model without the wrappers of DDP and the like."""
        return self.accelerator.unwrap_model(model)
