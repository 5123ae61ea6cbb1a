"""Models of families on two ranks: read in `shards` they are those that are whole, bit for bit; where ranks share the tokens
of rows (`sequences`) they learn what one rank learns, or are refused. Every rank writes what it saw of each family to
FOLDER/rankN.json: lines of several processes get mixed.

accelerate launch --config_file ... tests/compare_families.py shards|sequences FOLDER FAMILY...
"""

import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from shared.data.loader import cu_seqlens_of
from shared.extras.sequence import sequence
from shared.extras.sequence.stretches import cut
from shared.models.loading import load_causal_lm
from shared.models.loss import causal_lm_loss
from shared.parallel.shards import make_whole
from shared.parallel.strategy import Strategy
from shared.parallel.strategy import strategy_of_rows as strategy_of
from shared.process.errors import ConfigError
from shared.run import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.model_families import make

ROWS, LENGTH = 2, 45  # of no multiple of the ranks
AS_GIVEN = {"attn_implementation": "auto", "dtype": torch.float32}


def shards(name: str, _: Strategy) -> str:
    whole, cut = load_causal_lm(name, whole=True, **AS_GIVEN), load_causal_lm(name, **AS_GIVEN)
    held = sum(getattr(p, "_local_tensor", p).numel() for p in cut.parameters()) / sum(p.numel() for p in whole.parameters())
    make_whole(cut)
    ours, theirs = cut.state_dict(), whole.state_dict()
    wrong = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    wrong += [name for name, b in whole.named_buffers() if not torch.equal(b, cut.get_buffer(name))]
    same_ties = len(list(whole.parameters())) == len(list(cut.parameters()))
    if wrong or ours.keys() != theirs.keys() or not same_ties:
        return f"differs in {len(wrong)} of {len(theirs)}: {wrong[:3]}"
    return f"equal, {held:.2f} held"


def batch_of(vocab_size: int, packed: bool) -> dict[str, torch.Tensor]:
    """Windows of 16 tokens are shorter than the rows; the labels of the first half do not count."""
    tokens = torch.randint(0, vocab_size, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    labels = tokens[:, 1:].clone()
    labels[0, : LENGTH // 2 + 2] = -100
    batch = {"input_ids": tokens[:, :-1], "labels": labels}
    if packed:
        positions = torch.arange(LENGTH).expand(ROWS, -1) % 19
        batch |= {"position_ids": positions, "cu_seqlens": torch.from_numpy(cu_seqlens_of(positions.numpy()))}
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


def sequences(name: str, strategy: Strategy) -> str:
    assert dist.get_world_size(sequence.group()) == 2
    model = load_causal_lm(name, **AS_GIVEN).eval()
    strategy.require_equal_logits(model)
    errors = []
    for packed in (False, True):
        batch = batch_of(model.config.get_text_config().vocab_size, packed)
        (loss, gradient), (expected, wanted) = learned(model, cut(batch)), learned(model, batch)
        errors += [abs(loss / expected - 1), ((gradient - wanted).norm() / wanted.norm()).item()]
    return f"equal to {max(errors):.1e}"


if __name__ == "__main__":
    compare, folder, *families = {"shards": shards, "sequences": sequences}[sys.argv[1]], Path(sys.argv[2]), *sys.argv[3:]
    accelerator = launch.start(0)
    strategy = strategy_of(accelerator)
    seen = {}
    for family in families:
        if accelerator.is_main_process:
            make(family, folder / family)
        dist.barrier()
        try:
            seen[family] = compare(str(folder / family), strategy)
        except ConfigError as error:
            seen[family] = f"refused: {error}"
        except Exception:
            seen[family] = traceback.format_exc().strip().splitlines()[-1]
    (folder / f"rank{accelerator.process_index}.json").write_text(json.dumps(seen))
