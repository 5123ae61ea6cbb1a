"""The model that teaches: another one, whole, sharded or in 4 bits; or an adapter of the student's
base.
"""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.utils import extract_model_from_parallel
from torch.distributed.fsdp import fully_shard

from shared import demo
from shared.answers.answers import log_answers
from shared.data.order import Batch
from shared.extras.distillation.compared import Compared, OpenHead, at_head, scored
from shared.extras.distillation.kept import Kept, claimed
from shared.models.adapters import load_base
from shared.models.blocks import repeated_blocks
from shared.models.checks import require_tokens_fit
from shared.models.fused_head import fuse_head
from shared.models.hub import file_of, identity_of_weights
from shared.models.isolation import isolate_documents
from shared.models.options import AdapterConfig
from shared.models.tokenizers import load_tokenizer, require_same_tokens
from shared.process.errors import ConfigError, first_line
from shared.process.printing import print_main

ADAPTER = "teacher"  # its name in the student
TEACHER = demo.MODEL.with_name("tiny-llama-tuned")  # of the demo: see README.md in it


class Live:
    """A teacher that predicts as it is asked.

    Args:
        model: on the device. None: an adapter of the student, which `begin` gives.
    """

    identity = ""  # of its weights

    def __init__(self, model: Any = None) -> None:
        self.model = model
        self.is_adapter = model is None

    def begin(self, setup: Any, model: Any, data: Any) -> None:
        """Called with the prepared student before the first step. Every rank calls this."""
        if self.is_adapter:
            self.model = model

    @contextlib.contextmanager
    def teaching(self) -> Iterator[None]:
        """With the teacher's adapter in place of the student's, and without gradients."""
        student: Any = extract_model_from_parallel(self.model) if self.is_adapter else None
        if student:
            student.set_adapter(ADAPTER, inference_mode=True)
        try:
            with torch.no_grad():
                yield
        finally:
            if student:
                student.set_adapter("default")

    def at_head(self, batch: Batch, use: Any) -> torch.Tensor:
        """See `compared.at_head`."""
        with self.teaching():
            return at_head(self.model, batch, use)

    def answer(self, run: Any, held_out: Any, tokenizer: Any, score: Any) -> dict[str, float]:
        """Print what it answers to validation prompts. Returns the means of its scores, as
        `eval_teacher_NAME`. Every rank calls this.
        """
        if run.config.show_answers:
            print_main("what the teacher answers, then the student:")
        with self.teaching():
            means = log_answers(run, self.model, held_out, tokenizer, score)
        return {f"eval_teacher_{name[5:]}": value for name, value in means.items()}

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, Any]:
        """(states of a batch's targets, what makes `Compared` of some of them)."""
        heads: list[Any] = []

        def keep(states: torch.Tensor, _: torch.Tensor, logits_of: Any) -> torch.Tensor:
            heads.append(logits_of)
            return states

        return self.at_head(batch, keep), partial(_predict, *heads)


def _predict(
    logits_of: Any,
    states: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    temperature: float,
) -> Compared:
    """See `compared.compare`: logits are of the student, [tokens, vocab] fp32."""
    taught = logits_of(states)
    width = min(logits.shape[-1], taught.shape[-1])  # one may have rows that no token uses
    student, own_loss = scored(logits[:, :width], labels, temperature)
    teacher, loss = scored(taught[:, :width], labels, temperature)
    return Compared(student, teacher, own_loss, loss, student.argmax(-1) == teacher.argmax(-1))


def load_teacher(setup: Any, tokenizer: Any, name: str) -> Live:
    """The model at `name`, frozen, in the launch's precision, on the device; FSDP shards it. Every
    rank calls this.

    Args:
        setup: a `run.setup.Setup`.
        tokenizer: the student's.

    Raises:
        ConfigError: it has other tokens than the student.
    """
    require_same_tokens(tokenizer, load_tokenizer(name), name, "student")
    accelerator = setup.accelerator
    config = setup.config
    in_4bit = config.teacher_load_in_4bit
    adapter = AdapterConfig(load_in_4bit=in_4bit)
    # whole: what FSDP loads in shards is made for `setup.prepare`
    model = load_base(name, adapter, config.speed, accelerator, to_merge=not in_4bit)
    length = config.data.seq_length + config.max_new_tokens * bool(config.on_policy)
    require_tokens_fit(model, tokenizer, length, f"{name}: --seq_length, and --max_new_tokens,")
    model = model.requires_grad_(False).eval()
    if accelerator.distributed_type == DistributedType.FSDP:
        for block in repeated_blocks(model):  # each goes to the device when it is cut
            fully_shard(block)
        fully_shard(model)  # what is left, with the head, stays whole after its first forward
    else:
        model.to(accelerator.device)
    where = "in 4 bits" if in_4bit else f"in {model.dtype}"
    setup.about["teacher"] = f"{name}, {where}"
    fuse_head(accelerator, model, kind=OpenHead)
    return Live(model)


def add_adapter(setup: Any, student: Any, name: str) -> Live:
    """The adapter at `name` beside the one that is trained, on one base. The student becomes the
    model of `Live` when it is prepared.

    Raises:
        ConfigError: it does not fit the base, or changes the head.
    """
    try:
        if not file_of(name, "adapter_model.safetensors"):
            raise ConfigError(f"--teacher_adapter {name}: there is no adapter_model.safetensors")
        keys = student.load_adapter(name, ADAPTER, is_trainable=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--teacher_adapter {name}: {first_line(error)}") from None
    if wrong := [*keys.missing_keys, *keys.unexpected_keys]:
        raise ConfigError(f"--teacher_adapter {name}: is of another base: {wrong[0]}")
    if hasattr(student.get_output_embeddings(), "lora_A"):
        raise ConfigError(f"--teacher_adapter {name}: changes the head: merge it, and name that")
    student.set_adapter("default")
    setup.about["teacher"] = f"the adapter {name} on the student's base"
    return Live()


def identity_of(config: Any, name: str) -> str:
    """Of weights in a folder a digest; else their name on the Hub."""
    files = "adapter_model.safetensors" if config.teacher_adapter else "*.safetensors"
    weights = identity_of_weights(name, files=files) if Path(name).is_dir() else name
    return f"{weights}, 4 bits: {config.teacher_load_in_4bit}"


def build_teacher(setup: Any, tokenizer: Any, student: Any, train: Any, held_out: Any) -> Any:
    """The teacher that the flags name, or what it predicted before. Every rank calls this, before
    the student is prepared.

    Args:
        setup: a `run.setup.Setup`.
        train, held_out: `chat.Conversations`. They are not packed if the teacher sees more than one
            at once.

    Raises:
        ConfigError: they name none, or one that does not fit.
    """
    config = setup.config
    for flag in ("on_policy", "teacher_logits"):
        if getattr(config, flag):
            setup.strategy.require(f"--{flag}")
    name = config.teacher_adapter or config.teacher_name_or_path
    if name is None and config.model_name_or_path == str(demo.MODEL):
        name = str(TEACHER)
    kept = Kept(config, student, train, held_out) if config.teacher_logits else None
    teacher: Any = None
    if kept and kept.is_whole():
        setup.about["teacher"] = f"kept in {config.teacher_logits}"
    elif name is None:
        raise ConfigError("which model teaches? Name it with --teacher_name_or_path")
    elif config.teacher_adapter:
        teacher = add_adapter(setup, student, name)
    else:
        teacher = load_teacher(setup, tokenizer, name)
    identity = name and identity_of(config, name)
    if kept:
        kept.teacher = teacher
        kept.identity = claimed(config, identity)
        return kept
    teacher.identity = identity
    if teacher.model is not None and config.data.packing != "off":
        apart, why = isolate_documents(
            teacher.model,
            setup.device,
            config.batch.micro_batch()[0],
            length=config.data.row_length,
        )
        if not apart:
            train.why_not_packed = f"the teacher: {why.removeprefix('off: ')}"
    return teacher
