"""One run, from its first step to its end: steps, logs, checkpoints, evaluations.

A template holds its own code and the optimizer step. The rest is the same for all templates:

    setup = Setup(config, "pretrain")    # before the first step: see setup.py
    ...
    run = setup.start(train, loss, fingerprint="...")
    for step in run.steps(): ...         # seeds, rate, logs, checkpoints
    run.load_best_weights()
    run.close("done")

There are no callbacks. To change the step, edit the template. To change the rest, edit this file.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from shared.config import parse as configs
from shared.data.loader import Window
from shared.data.order import Batch, seed_all
from shared.models.blocks import in_eval_mode
from shared.models.card import model_card
from shared.models.weights import average_buffers, evaluation_weights, persistent_buffers
from shared.parallel import sharding
from shared.process import faults
from shared.process.printing import print_main
from shared.process.version import version
from shared.run import exits, launch
from shared.run.checkpoint import Checkpointer
from shared.run.guard import Guard
from shared.run.metrics import Logger
from shared.run.prepared import Prepared
from shared.run.state import TrainState
from shared.training import optim
from shared.training.step import Step

T = TypeVar("T")


class Run:
    """A run, as `Setup.start` returns it. All ranks call the same methods in the same order.

    Args:
        prepared: the run before its first step.
        train: the training data, as `Setup.start` takes them.
        saver: saves and loads its checkpoints.
        state: resumed or new.
        total_steps: optimizer steps of the whole run.

    Attributes:
        config: the template's, with all that was chosen.
        accelerator, device, is_main: Accelerate's object, this rank's device, whether this is rank
            0.
        dir: the run's folder.
        unit: what throughput counts: tokens, images, texts or pairs.
        state: counts and scores; `notes` is for the template: JSON, saved in checkpoints.
        is_last: the present step is the last one.
    """

    def __init__(
        self,
        prepared: Prepared,
        train: Any,
        saver: Checkpointer,
        state: TrainState,
        total_steps: int,
    ) -> None:
        config = self.config = prepared.config
        self.accelerator = prepared.accelerator
        self.device = prepared.device
        self.is_main = prepared.is_main
        self.strategy = prepared.strategy
        self.dir = prepared.dir
        self.models = prepared.models
        self.optimizers = prepared.optimizers
        self.average = prepared.average
        self.about = prepared.about
        self.unit = prepared.unit
        self.train = train
        self.saver = saver
        self.state = state
        self.total_steps = total_steps
        self.eval_steps = config.evaluation.every(total_steps, train.steps_per_epoch)
        self.save_steps = config.checkpoint.every(total_steps)
        self.logger = Logger(prepared, state, total_steps)
        self.guard = Guard(
            self.strategy,
            list(self.models.values()),
            state,
            max_skipped=config.optim.max_skipped_steps,
            leaves_out=config.optim.skips,
            timeout=config.speed.ddp_timeout,
        )
        self._step: Step | None = None  # the present step, until it is logged
        self.is_last = state.step >= total_steps or bool(state.stopped_early)

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
        for window in self.logger.waiting(self.train.windows(self.state.step, until)):
            # All that a step draws follows from this: a resumed run needs no saved generators, and
            # what evaluations draw changes nothing.
            seed_all(config.batch.seed, self.state.step, sharding.draws_rank(self.accelerator))
            rate = optim.set_learning_rate(
                self.optimizers, config.optim, self.state.step, self.total_steps
            )
            # now, so that an evaluation in the loop's body knows its step
            self.state.advance(window)
            self.is_last = self.state.step == self.total_steps
            self._step = Step(
                self.strategy,
                models,
                window,
                number=self.state.step,
                rate=rate,
                verdict=self.guard.finite,
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
        self.saver.wait()
        self.guard.release()

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
        if self.average:
            self.average.after(self.state.step)
        self.state.targets += step.num_targets
        exits.at_step(self.state.step)
        self.strategy.after(self.state.step, self.total_steps)
        every = self.config.log.every(self.total_steps)
        due = self.state.step in (1, self.total_steps) or self.state.step % every == 0
        if due:
            self.guard.count_skipped()
        self.logger.step(step, due=due)
        step.is_logged = True

    def _stop_if_asked(self, *, now: bool) -> None:
        try:
            self.guard.stop_if_asked(now=now)
        except exits.Stopped:
            self._save()
            self.close()
            raise

    def _save(self) -> None:
        self.logger.note_interval()
        self.state.next_rate = optim.learning_rate(
            self.config.optim, self.state.step, self.total_steps
        )
        self.saver.save(self.state)

    # Evaluation -----------------------------------------------------------------------------------

    def should_evaluate(self) -> bool:
        """Whether an evaluation is due: before the first step, each --eval_steps, at the last step;
        once a step.
        """
        due = self.is_last or self.state.step % self.eval_steps == 0
        return due and self.state.evaluated < self.state.step

    @contextlib.contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """A context for an evaluation: eval mode, averaged weights, no gradients. Its time is not
        training time.

        It ends and logs the present step: what a resumed run needs has to be up to date before it,
        since a signal in `read` or `watch` ends the run here, with a checkpoint.
        """
        self._complete_step()
        self._stop_if_asked(now=True)
        weights = evaluation_weights(self.accelerator, self.unwrap(model), self.average)
        try:
            with self.logger.pause(), weights, in_eval_mode(model), torch.no_grad():
                yield
        except exits.Stopped:
            self._save()
            self.close()
            raise

    def read(self, loader: Any) -> Iterator[Window]:
        """Windows of one pass over validation data. Inside of `evaluating`. A signal raises Stopped
        on all ranks.
        """
        steps = loader.order.steps_per_epoch
        return self.watch(loader.windows(0, steps), steps)

    def watch(self, parts: Iterable[T], count: int) -> Iterator[T]:
        """Pass on the parts of an evaluation, as many on all ranks, with a progress bar. Inside of
        `evaluating`. A signal raises Stopped on all ranks.
        """
        for number, part in enumerate(self.logger.bar_of(parts, "evaluating", count, delay=3)):
            self.logger.print_each_minute(f"evaluating: {number} of {count} batches")
            self.guard.stop_if_asked()
            faults.point("evaluation")
            yield part

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
        """Log an evaluation's `eval_*` values; score it; stop early if the patience runs out."""
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
        average, with --ema_decay. With them comes all else that the best checkpoint holds, but for
        `state`.
        """
        best = self.state.best_step
        metric = self.config.evaluation.metric_for_best_model
        if best and best != self.state.step and not self.saver.load_best(best):  # it is damaged
            self.state.best_step = self.state.step
            self.state.results = self.state.latest
        elif best:
            print_main(f"best by {metric}: step {best}, {self.state.results[f'eval_{metric}']:.4f}")
        if self.average:
            self.average.swap()
        self.average = None  # later evaluations measure what final/ holds
        average_buffers(self.accelerator, persistent_buffers(self.unwrap(self.models["model"])))

    @property
    def best_checkpoint(self) -> Path:
        """The checkpoint of the best evaluation, or the last. For models that no rank has as a
        whole.
        """
        return self.dir / f"checkpoint-{self.state.best_step or self.state.step:06d}"

    def change_of(self, *names: str) -> str:
        """Values of evaluations before and after training, for the last lines. Names are without
        eval_.
        """
        both = self.state.before, self.state.results
        values = [[each.get(f"eval_{name}", math.nan) for each in both] for name in names]
        changes = [
            f"{name} {before:.4f} before, {after:.4f} after training"
            for name, (before, after) in zip(names, values, strict=True)
        ]
        return f"validation {'; '.join(changes)}"

    def write_card(self, folder: Path, title: str, *, load: str, **front: str) -> None:
        """Write the model card: data, code, launch, results before training and of the best
        evaluation, settings; and receipt.json, last. Main rank.

        Args:
            folder: gets it as README.md.
            title: of the model. The line about its data is that of the summary.
            load: lines of Python that load it.
            front: metadata for the Hub.
        """
        before = {f"{name}_before": value for name, value in self.state.before.items()}
        results = before | self.state.results | {"step": self.state.best_step or self.state.step}
        proofs = launch.optional("proofs._receipt")
        card = model_card(
            title,
            self.about.get("data") or "",
            results,
            configs.flatten(self.config),
            made_by=f"version {version()}, {launch.strategy(self.accelerator)}",
            receipt=proofs.digests(self.saver) if proofs else "",
            load=load,
            **front,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
        if proofs:
            proofs.write_receipt(folder, self.saver)

    def close(self, *messages: str) -> None:
        """Wait for the main rank, end the logs and print the last lines."""
        self.saver.wait()
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
