"""Models of these families learn what one rank learns if two share the tokens of rows, or are refused. Every rank runs this.

accelerate launch --config_file accelerate_configs/sequence_parallel.yaml ... tests/compare_sequences.py FOLDER FAMILY...
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shared.data.loader import cu_seqlens_of
from shared.extras.sequence import sequence
from shared.extras.sequence.stretches import cut
from shared.models.loading import load_causal_lm
from shared.models.loss import causal_lm_loss
from shared.parallel.strategy import strategy_of_rows as strategy_of
from shared.process.errors import ConfigError
from shared.run import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.model_families import make

ROWS, LENGTH = 2, 45  # of no multiple of the ranks


def batch_of(vocab_size: int, packed: bool) -> dict[str, torch.Tensor]:
    """Windows of 16 tokens are shorter than the rows; the labels of the first half do not count."""
    tokens = torch.randint(0, vocab_size, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[0, : LENGTH // 2 + 2] = -100
    batch = {"input_ids": tokens[:, :-1], "labels": labels}
    if packed:
        positions = torch.arange(LENGTH).expand(ROWS, -1) % 19
        bounds = torch.from_numpy(cu_seqlens_of(positions.numpy()))
        batch |= {"position_ids": positions, "cu_seqlens": bounds}
    return batch


def learned(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor]:
    """(the loss, all gradients as one vector, summed over the ranks if they share the rows)."""
    model.zero_grad()
    loss = causal_lm_loss(model, batch)
    loss.backward()
    gradient = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    if "row_labels" in batch:
        dist.all_reduce(gradient)
    return loss.item(), gradient


def main(folder: Path, families: list[str]) -> None:
    accelerator = launch.start(0)
    strategy = strategy_of(accelerator)
    assert dist.get_world_size(sequence.group()) == 2
    for family in families:
        if accelerator.is_main_process:
            make(family, folder / family)
        dist.barrier()
        model = load_causal_lm(str(folder / family), attn_implementation="auto", dtype=torch.float32).eval()
        try:
            strategy.require_equal_logits(model)
            errors = []
            for packed in (False, True):
                batch = batch_of(model.config.get_text_config().vocab_size, packed)
                (loss, gradient), (expected, wanted) = learned(model, cut(batch)), learned(model, batch)
                errors += [abs(loss / expected - 1), ((gradient - wanted).norm() / wanted.norm()).item()]
            said = f"equal to {max(errors):.1e}"
        except ConfigError as error:
            said = f"refused: {error}"
        if accelerator.is_main_process:
            print(f"{family}: {said}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
