"""Models of these families read in shards are those that are whole, bit for bit. Every rank runs this.

accelerate launch ... tests/compare_shards.py FOLDER FAMILY...
"""

import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from shared.models.loading import load_causal_lm
from shared.parallel.shards import make_whole
from shared.run import launch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.model_families import make


def compare(whole: torch.nn.Module, cut: torch.nn.Module) -> str:
    held = sum(getattr(p, "_local_tensor", p).numel() for p in cut.parameters()) / sum(p.numel() for p in whole.parameters())
    make_whole(cut)
    ours, theirs = cut.state_dict(), whole.state_dict()
    wrong = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    wrong += [name for name, b in whole.named_buffers() if not torch.equal(b, cut.get_buffer(name))]
    same_ties = len(list(whole.parameters())) == len(list(cut.parameters()))
    if wrong or ours.keys() != theirs.keys() or not same_ties:
        return f"differs in {len(wrong)} of {len(theirs)}: {wrong[:3]}"
    return f"equal, {held:.2f} held"


def main(folder: Path, families: list[str]) -> None:
    accelerator = launch.start(0)
    for family in families:
        if accelerator.is_main_process:
            make(family, folder / family)
        dist.barrier()
        name = str(folder / family)
        try:
            given = {"attn_implementation": "auto", "dtype": torch.float32}
            said = compare(load_causal_lm(name, whole=True, **given), load_causal_lm(name, **given))
        except Exception:
            said = traceback.format_exc().strip().splitlines()[-1]
        print(f"{family} of rank {accelerator.process_index}: {said}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
