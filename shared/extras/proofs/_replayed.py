"""Runs a template for `replay`, from a checkpoint to one step, which it looks at.

python _replayed.py train.py --flags ..., with REPLAY, JSON, in the environment:
{"step", "without": [samples], "look": whether at each sample, "result": a file}.
"""

import base64
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP = 10  # layers


def main() -> None:
    sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
    from shared.extras.proofs import _script

    request = json.loads(os.environ["REPLAY"])
    loaded = _script.note_tokenizers()
    replay = Replay(request["step"], {*request["without"]}, Path(request["result"]), loaded)
    replay.looks = request["look"]
    replay.patch()
    _script.run()


class Replay:
    """Looks at one step of a run.

    Args:
        number: of the step, from 1.
        left_out: samples that it does without.
        result: JSON file for what was seen; the main rank writes it.
        tokenizers: that the template has loaded.
    """

    def __init__(
        self, number: int, left_out: set[int], result: Path, tokenizers: list[Any]
    ) -> None:
        self.number = number
        self.left_out = left_out
        self.result = result
        self.tokenizers = tokenizers
        self.looks = True
        self.loss: Any = None
        self.samples: Any = None  # of the loader
        self.run: Any = None
        self.parts: list[dict[str, Any]] = []  # of this rank
        self.why_not = ""
        self.steps: list[dict[str, Any]] = []
        # of each parameter's gradient, in the step before and in this one; so far, and of `number`
        self.norms: list[dict[str, float]] = [{}, {}]
        self.layers: list[dict[str, float]] = [{}, {}]

    def patch(self) -> None:
        """Let the template's own code run up to the step, and no further."""
        from shared.run.run import Run
        from shared.run.setup import Setup
        from shared.training.step import Step

        setups: Any = Setup
        runs: Any = Run
        steps_of: Any = Step
        start, steps, use, clip = setups.start, runs.steps, steps_of.use, steps_of.clip_gradients

        def started(setup: Any, train: Any, loss: Any, **named: Any) -> Any:
            self.loss = loss
            self.samples = getattr(train, "samples", None) or getattr(train, "prompts", None)
            self.run = start(setup, train, loss, **named)
            return self.run

        def stepped(run: Any) -> Iterator[Any]:
            for step in steps(run):
                # those that sample what they learn `use` it
                is_read = step.number == self.number and not hasattr(run.train, "needs_answers")
                if is_read and self.looks:
                    self.look(step)
                yield step
                run._complete_step()
                self.note(step)
                due = run.state.step % run.config.log.every(run.total_steps) == 0
                if step.number >= self.number and (due or run.is_last or step.number == 1):
                    self.finish()

        def used(step: Any, *arguments: Any) -> None:
            use(step, *arguments)
            is_new = not self.parts and not self.why_not
            if step.number == self.number and self.looks and is_new:
                self.look(step)

        def clipped(step: Any, *arguments: Any, **named: Any) -> Any:
            self.norms = [self.norms[1], norms_of(step.models)]
            found = clip(step, *arguments, **named)
            if step.number == self.number:
                self.layers = self.norms
            return found

        setups.start = started
        runs.steps = stepped
        runs.should_evaluate = lambda run: False
        runs._save = lambda run: None
        steps_of.use = used
        steps_of.clip_gradients = clipped

    def look(self, step: Any) -> None:
        """Note each sample of the step, and leave out what is to be left out. Every rank calls
        this.
        """
        from accelerate.utils import gather_object

        from shared.data.order import seed_all
        from shared.extras.proofs._parts import without
        from shared.parallel import sharding

        batches = step.batches
        seed = self.run.config.batch.seed, step.number - 1
        draws = sharding.draws_rank(self.run.accelerator)
        if any("row_labels" in batch for batch in batches):
            self.why_not = "ranks share rows: replay it on another launch"
        elif self.loss is None or self.samples is None:
            self.why_not = "this template gives `setup.start` no loss, or streams its data"
        else:
            self.parts = self.look_at(step, batches)
            if self.left_out:
                both = zip(batches, step.indices, strict=True)
                changed = [without(b, i, self.samples, self.left_out) for b, i in both]
                counts = dict(gather_object([(self.part_of_data, sum(n for _, n in changed))]))
                targets = step.num_targets - sum(counts.values())
                step.use([batch for batch, _ in changed], targets, step.indices)
        seed_all(*seed, draws)  # as before it

    @property
    def part_of_data(self) -> int:
        """The same for ranks that read the same samples."""
        from shared.process import ranks

        accelerator = self.run.accelerator
        alike = accelerator.num_processes // ranks.data_parallel_size()
        return int(accelerator.process_index // alike)

    def look_at(self, step: Any, batches: list[Any]) -> list[dict[str, Any]]:
        """Loss and gradient of each sample of this rank, and what it is."""
        import torch
        from accelerate.utils import gather_object

        from shared.extras.proofs._parts import nothing, only, split
        from shared.models.weights import persistent_buffers
        from shared.training.step import reduced

        unmixed = [{k: v for k, v in batch.items() if k != "mix"} for batch in batches]
        both = [*zip(unmixed, step.indices, strict=True)]
        parts = [split(batch, indices, self.samples) for batch, indices in both]
        counts = gather_object([[len(of_batch) for of_batch in parts]])
        parameters = [p for model in step.models for p in model.parameters() if p.requires_grad]
        # sharded ones are gathered by hooks that know only the whole step's backward pass
        whole = all(type(p) is torch.nn.Parameter and p.numel() for p in parameters)
        whole = whole and self.run.accelerator.distributed_type not in ("FSDP", "DEEPSPEED")
        buffers = [b for model in step.models for b in persistent_buffers(model).values()]
        before = [buffer.clone() for buffer in buffers]
        found = []
        for place, (batch, _) in enumerate(both):
            for number in range(max(of_rank[place] for of_rank in counts)):
                part = parts[place][number] if number < len(parts[place]) else None
                keep = part.keep if part else nothing(batch)  # ranks go forward together
                with (
                    reduced(self.run.accelerator, step.models, last=False),
                    torch.set_grad_enabled(whole and part is not None),
                ):
                    loss = self.loss(only(batch, keep))
                if part is None:
                    continue
                row = self.describe(batch, part) | {"loss": loss.item(), "targets": part.targets}
                if whole and loss.requires_grad:
                    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
                    squares = [g.double().pow(2).sum() for g in gradients if g is not None]
                    row["gradient"] = float(torch.stack(squares).sum().sqrt() / step.num_targets)
                found.append(row)
        for buffer, value in zip(buffers, before, strict=True):
            buffer.copy_(value)
        return found

    def describe(self, batch: Any, part: Any) -> dict[str, Any]:
        """What a sample is: where it is from, its text or thumbnail."""
        from shared.extras.proofs._parts import texts

        row: dict[str, Any] = {"sample": part.sample, "name": part.name}
        # pairs are their own; of packed rows, the samples in them
        samples = (
            self.samples if "answers" in batch else getattr(self.samples, "samples", self.samples)
        )
        row["where"] = place_of(samples, part.sample)
        if "input_ids" in batch and self.tokenizers:
            row["texts"] = [*texts(batch, part, self.tokenizers[-1])]
        elif "pixel_values" in batch:
            row["image"] = thumbnail(batch["pixel_values"][part.keep][0])
        labels = batch["labels"]
        if labels.ndim < 2 or "input_ids" not in batch:
            row["label"] = labels[part.keep][0].tolist()
        return row

    def note(self, step: Any) -> None:
        """Keep a finished step's figures. Every rank calls this."""
        import torch

        sums = [*step.sums.get("loss", []), torch.zeros((), device=self.run.device)]
        loss = self.run.sum(torch.stack(sums).double().sum()) / max(1, step.num_targets)
        row = {"step": step.number, "loss": float(loss), "grad_norm": float(step.grad_norm)}
        self.steps.append(row | {"learning_rate": step.learning_rate})

    def finish(self) -> None:
        """Write the result and end the run. Every rank calls this."""
        from accelerate.utils import gather_object

        from shared.run.exits import Finished

        gathered = gather_object([(self.part_of_data, self.parts)])
        parts = [part for _, of_rank in sorted(dict(gathered).items()) for part in of_rank]
        before, now = self.layers
        top = sorted(now, key=lambda name: -now[name])[:TOP]
        result = {
            "steps": self.steps,
            "layers": [[name, now[name], before.get(name)] for name in top],
            "samples": parts,
            "why_not": self.why_not,
        }
        if self.run.is_main:
            self.result.write_text(json.dumps(result), encoding="utf-8")
        raise Finished("replayed")


def place_of(samples: Any, index: int) -> str:
    """Where a sample is in the data."""
    import numpy as np

    if hasattr(samples, "where"):  # images
        return str(samples.where(index))
    if hasattr(samples, "shown"):  # texts with a label
        return str(samples.shown(index)["where"])
    if hasattr(samples, "reference"):  # pairs
        return place_of(samples.samples, 2 * index)
    if hasattr(samples, "prompt"):  # conversations
        return str(samples.line("place", index))
    if hasattr(samples, "cumulative_sizes"):  # several sources
        part = int(np.searchsorted(samples.cumulative_sizes, index, side="right"))
        return place_of(samples.datasets[part], index - [0, *samples.cumulative_sizes][part])
    places = samples._places(index * samples.seq_length, (index + 1) * samples.seq_length)[[0, -1]]
    first, last = np.searchsorted(samples.store["ends"], places, side="right").tolist()
    return f"{samples.store.source}: document {first}" + f" to {last}" * (last > first)


def norms_of(models: list[Any]) -> dict[str, float]:
    """The norm of each parameter's gradient, before clipping. Every rank calls this."""
    import torch

    norms = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad.float())
                norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                norms[name.removeprefix("module.")] = float(norm)
    return norms


def thumbnail(pixels: Any) -> str:
    """A PNG, base64: [3, height, width] uint8."""
    from PIL import Image

    image = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy())
    image.thumbnail((160, 160))
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    main()
