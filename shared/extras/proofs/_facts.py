"""What `check` notes inside of a run on one process, in a JSON file."""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shared.data.loader import Window
from shared.models.blocks import in_eval_mode
from shared.models.loss import causal_lm_loss
from shared.run.exits import Finished
from shared.run.run import Run
from shared.run.setup import Setup
from shared.training.step import Step

INPUTS = ("input_ids", "pixel_values")  # what a model that is loaded elsewhere is given
EXACT = 1e-4  # of the largest score: the same weights, in other kernels
ROUNDED = 3e-2  # weights that final/ has in 16 bits


def watch(file: Path) -> None:
    """Note which trained parameters got no gradient, which frozen ones changed, and whether final/,
    loaded by transformers or PEFT alone, gives the scores of the run's own model.
    """
    facts: dict[str, Any] = {}
    without: set[str] = set()  # gradient, so far
    frozen: dict[str, torch.Tensor] = {}
    inputs: dict[str, torch.Tensor] = {}  # of the last call
    start = Setup.start
    update = Step.update
    close = Run.close

    def note_inputs(_model: nn.Module, _args: Any, named: dict[str, Any]) -> None:
        inputs.clear()
        inputs.update({key: named[key].detach() for key in INPUTS if key in named})
        facts["others"] = [k for k in named if k.startswith(("image_", "video_", "pixel_values_"))]

    def started(self: Setup, *arguments: Any, **named: Any) -> Run:
        run = start(self, *arguments, **named)
        model = run.unwrap(run.models["model"])
        model.register_forward_pre_hook(note_inputs, with_kwargs=True)
        for name, parameter in _parameters(run):
            if parameter.requires_grad:
                without.add(name)
            else:
                frozen[name] = _digest(parameter)
        facts["trained"] = len(without)
        facts["frozen"] = len(frozen)
        facts["run"] = run
        return run

    def updated(self: Step, optimizers: list[Any]) -> None:
        for name, parameter in _parameters(facts["run"]):
            if parameter.grad is not None and parameter.grad.any():
                without.discard(name)
        update(self, optimizers)

    def closed(self: Run, *messages: str) -> None:
        now = dict(_parameters(self))
        result: dict[str, Any] = {"trained": facts["trained"], "frozen": facts["frozen"]}
        result["without_gradient"] = sorted(without)
        same = {n: n in now and bool(torch.equal(_digest(now[n]), frozen[n])) for n in frozen}
        result["changed"] = sorted(name for name, is_same in same.items() if not is_same)
        close(self, *messages)
        if facts.get("others"):
            result["final"] = "not tried: the model's inputs are more than tokens and pixels"
        else:
            result["final"] = _final(self, {key: value[:1] for key, value in inputs.items()})
        if self.is_main:  # of a pipeline, its first stage
            file.write_text(json.dumps(result), encoding="utf-8")

    Setup.start = started  # type: ignore[method-assign]
    Step.update = updated  # type: ignore[method-assign]
    Run.close = closed  # type: ignore[method-assign]


def _parameters(run: Run) -> Iterator[tuple[str, torch.Tensor]]:
    for of, model in run.models.items():
        for name, parameter in run.unwrap(model).named_parameters():
            yield (name if of == "model" else f"{of}.{name}"), parameter


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers that change when a bit of the tensor does, with near certainty: sums of its
    bytes, plain and by their place.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).to(torch.int64)
    return torch.stack([data.sum(), (data * torch.arange(1, 1 + len(data))).sum()])


def _final(run: Run, inputs: dict[str, torch.Tensor]) -> Any:
    """How much the scores of final/ differ from the run's own, relative to the largest; a text
    where that cannot be said.
    """
    folder = run.dir / "final"
    own = run.unwrap(run.models["model"])
    if not inputs or not folder.exists():
        return "not tried: no final/, or no inputs of tokens or pixels"
    other = load(folder).to(run.device)
    with torch.no_grad(), in_eval_mode(own), in_eval_mode(other):
        mine, theirs = (model(**inputs).logits.float() for model in (own, other))
    if mine.shape != theirs.shape:
        return f"final/ has scores of shape {[*theirs.shape]}, the run's model {[*mine.shape]}"
    error = float((mine - theirs).abs().max() / mine.abs().max())
    return [error, ROUNDED if _is_rounded(folder) else EXACT]


def load(folder: Path) -> Any:
    """A saved model or adapter, by transformers or PEFT alone, in fp32."""
    import transformers

    if (folder / "adapter_config.json").exists():
        peft = importlib.import_module("peft")  # not in all projects
        return peft.AutoPeftModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (name,) = config["architectures"]
    kind = getattr(transformers, name, None)
    if kind is not None:
        return kind.from_pretrained(folder, dtype=torch.float32)
    auto = next(key for key in config["auto_map"] if key.startswith("AutoModelFor"))
    return getattr(transformers, auto).from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True
    )


def _is_rounded(folder: Path) -> bool:
    from safetensors import safe_open

    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            types = {file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118
        if types & {"BF16", "F16"}:
            return True
    return False


def repeat_first_step(file: Path) -> None:
    """Train each step on the samples of the first. Notes the cross-entropy of their labels before
    and after, where the data are tokens with labels.
    """
    start = Setup.start

    def started(self: Setup, train: Any, loss: Any, **named: Any) -> Run:
        windows = train.windows
        if hasattr(train, "needs_answers") or hasattr(train, "place"):
            raise Finished("samples are made, or streamed")

        def first(_start: int, stop: int) -> Iterator[Window]:
            for _ in range(_start, stop):
                yield from windows(0, 1)

        train.windows = first
        run = start(self, train, loss, **named)
        model = run.models["model"]

        def entropy() -> float | None:
            window = next(windows(0, 1))
            total, count = 0.0, 0
            for batch in window.micro_batches:
                is_text = batch["labels"].shape == batch.get("input_ids", batch["labels"][:0]).shape
                if not is_text or "answers" in batch or loss is None:
                    return None
                with torch.no_grad(), in_eval_mode(model):
                    total += float(causal_lm_loss(model, batch))
                count += int((batch["labels"] >= 0).sum())
            return total / count if count else None

        close = run.close
        before = entropy()

        def closed(*messages: str) -> None:
            close(*messages)
            file.write_text(json.dumps({"entropy": [before, entropy()]}), encoding="utf-8")

        run.close = closed  # type: ignore[method-assign]
        return run

    Setup.start = started  # type: ignore[method-assign]
