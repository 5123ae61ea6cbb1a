"""Pipeline parallelism: a model's blocks spread over ranks, micro-batches passing through them
(PipeDream-Flush's 1F1B, arXiv 2006.09503), on PyTorch's own schedule."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator, DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from shared.data.order import IGNORED, Batch
from shared.models.attention import Rows, row_mask
from shared.models.blocks import as_in_an_evaluation
from shared.models.fused_head import measure_head
from shared.models.loss import can_balance
from shared.process.errors import ConfigError, reason_of


class _Through(nn.Module):
    """Stands where another rank has a module: returns its input."""

    def forward(self, x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
        return x


class _Stage(nn.Module):
    """Consecutive blocks of a causal language model; the first stage has its embeddings, the last
    one its head.

    The model's own forward runs, with `_Through` in place of the blocks of other ranks.
    """

    def __init__(self, model: nn.Module, cuts: list[int], number: int, autocast: Any) -> None:
        super().__init__()
        blocks = range(cuts[number], cuts[number + 1])
        is_last = number == len(cuts) - 2
        self.is_first = number == 0
        decoder = copy.copy(model.get_decoder())  # type: ignore[operator]
        decoder._modules = dict(decoder._modules)
        decoder.layers = nn.ModuleList(
            block if i in blocks else _Through() for i, block in enumerate(decoder.layers)
        )
        if not self.is_first:
            decoder.embed_tokens = _Through()
        if not is_last:
            decoder.norm = _Through()
        self.decoder = decoder
        self.autocast = autocast
        self.head = model.get_output_embeddings() if is_last else None  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq] tokens or [batch, seq, width] of the stage before; gives the same width, or
        logits."""
        with self.autocast():
            inputs = {
                "input_ids" if self.is_first else "inputs_embeds": x,
                "attention_mask": row_mask(x, Rows()),
            }
            hidden = self.decoder(**inputs, use_cache=False).last_hidden_state
            return hidden if self.head is None else self.head(hidden)


@torch.no_grad()
def try_stages(model: Any, cuts: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Try the stages between `cuts` in a row: their logits must be those of the whole model, here
    on one short row.

    Each stage runs the decoder's own forward, which may do something to its input or output, or
    hand on more than one tensor from block to block.

    Returns:
        What the model computes of its head's logits.

    Raises:
        ConfigError: this model cannot be cut.
    """
    name = type(model).__name__
    x = torch.arange(16)[None] % model.get_input_embeddings().num_embeddings
    try:
        with as_in_an_evaluation(model):
            logits_of = measure_head(model, model, {"input_ids": x}) or nn.Identity()
            whole = model(input_ids=x, use_cache=False).logits
            for number in range(len(cuts) - 1):
                x = _Stage(model, cuts, number, nullcontext)(x)
        error = float((logits_of(x) - whole).norm() / whole.norm())
        why = "" if error < 1e-3 else f"their logits differ by {error:.2g} of the whole model's"
    except Exception as problem:  # blocks that return something else can fail anywhere
        why = reason_of(problem)
    if why:
        raise ConfigError(
            f"{name} cannot be cut into pipeline stages ({why}): use fsdp2.yaml with "
            "templates/pretrain.py"
        )
    return logits_of


class Pipeline:
    """This rank's stage of `model`, and the schedule that passes micro-batches through all of
    them. Every rank makes one.

    Ranks next to each other hold the stages of one model; groups of them read different data.
    Modules of other ranks are taken out of `model`. The names of the others do not change, so
    checkpoints are those of any other strategy.

    Args:
        model: a causal language model of transformers, whole, on every rank.
        ranks: that hold one model's stages.
        micro_batches: of one optimizer step.

    Raises:
        ConfigError: a pipeline cannot be made of this model, or of so many blocks or micro-batches.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: Any,
        *,
        ranks: int,
        micro_batches: int,
    ) -> None:
        kind = accelerator.distributed_type
        sizes = getattr(accelerator, "parallelism_config", None)
        plain = kind in (DistributedType.MULTI_GPU, DistributedType.MULTI_CPU) and (
            sizes is None or sizes.total_size == 1
        )
        if not plain:
            raise ConfigError(
                "a pipeline is launched with ddp.yaml or multi_node_ddp.yaml: "
                "it spreads the model itself"
            )
        if accelerator.mixed_precision in ("fp16", "fp8"):
            raise ConfigError(
                f"a pipeline does not work with {accelerator.mixed_precision}: use bf16"
            )
        decoder = model.get_decoder()
        text = model.config.get_text_config()
        name = type(model).__name__
        parts_of_llama = {"embed_tokens", "layers", "norm"}
        found = {child for child, _ in decoder.named_children()}
        if (
            not parts_of_llama <= found <= parts_of_llama | {"rotary_emb"}
            or text is not model.config
        ):
            raise ConfigError(
                f"{name} is not built like Llama, which a pipeline needs: use fsdp2.yaml"
            )
        if can_balance(text) and text.output_router_logits:
            raise ConfigError(
                "a pipeline leaves out the loss that balances experts: use fsdp2.yaml with "
                "templates/pretrain.py, or --config_overrides output_router_logits=false"
            )
        if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
            raise ConfigError(
                "the first and the last stage cannot share embeddings: the model has "
                "tie_word_embeddings"
            )
        blocks = len(decoder.layers)
        if blocks < ranks:
            raise ConfigError(f"{blocks} blocks cannot make {ranks} pipeline stages")
        if micro_batches < ranks:
            raise ConfigError(
                f"{micro_batches} micro-batches do not keep {ranks} pipeline ranks busy: choose a "
                f"--global_batch_size so that there are at least {ranks}"
            )
        self.readers = accelerator.num_processes // ranks
        mesh = init_device_mesh(
            accelerator.device.type, (self.readers, ranks), mesh_dim_names=("data", "pipeline")
        )
        self.data_group = mesh["data"].get_group()
        self.group = mesh["pipeline"].get_group()
        self.device = accelerator.device
        self.micro_batches = micro_batches
        self.scale = 1.0
        number = dist.get_rank(self.group)
        cuts = [blocks * i // ranks for i in range(ranks + 1)]
        self.logits_of = try_stages(model, cuts)
        self.part = _Stage(model, cuts, number, accelerator.autocast).to(self.device)
        self.stage: Any = PipelineStage(self.part, number, ranks, self.device, group=self.group)
        decoder._modules = self.part.decoder._modules
        if not self.stage.is_last:
            model.set_output_embeddings(_Through())
        self.schedule = Schedule1F1B(
            self.stage, n_microbatches=micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Summed over the targets of a micro-batch, and scaled."""
        flat = self.logits_of(logits).flatten(0, 1).float()
        return (
            F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction="sum")
            * self.scale
        )

    def _pass(self, run: Any, batches: list[Batch]) -> torch.Tensor:
        filling = {
            "input_ids": batches[0]["input_ids"],
            "labels": torch.full_like(batches[0]["labels"], IGNORED),
        }
        batches = batches + [filling] * (
            self.micro_batches - len(batches)
        )  # which counts for nothing
        inputs = (
            (torch.cat([batch["input_ids"] for batch in batches]),) if self.stage.is_first else ()
        )
        target = torch.cat([batch["labels"] for batch in batches]) if self.stage.is_last else None
        losses: list[torch.Tensor] = []
        run(*inputs, target=target, losses=losses)
        total = (
            torch.stack([loss.detach() for loss in losses]).sum()
            if losses
            else torch.zeros((), device=self.device)
        )
        dist.all_reduce(total, group=self.group)
        return total / self.scale

    def train(self, batches: list[Batch], scale: float) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients are those of `scale` times the
        summed loss, mean over data.

        Every rank calls this with the micro-batches that its group reads.

        Returns:
            Scalar: the group's summed loss, on each of its ranks.
        """
        self.scale = scale
        loss = self._pass(self.schedule.step, batches)
        if self.readers > 1:
            for gradient in [p.grad for p in self.part.parameters() if p.grad is not None]:
                dist.all_reduce(gradient, group=self.data_group)
                gradient /= self.readers
        return loss

    @torch.no_grad()
    def evaluate(self, batches: list[Batch]) -> torch.Tensor:
        """The summed loss of micro-batches, without gradients. Every rank calls this."""
        self.scale = 1.0
        self.part.eval()
        loss = self._pass(self.schedule.eval, batches)
        self.part.train()
        # PyTorch 2.11 receives without gradients once it has evaluated
        for received in self.stage.args_recv_info.values():
            for info in received:
                if isinstance(getattr(info, "buffer", None), torch.Tensor):
                    info.buffer.requires_grad_(True)
        return loss
