"""Run a template and note a digest of each tensor in its micro-batches: golden.py launches this, with the template first."""

import hashlib
import json
import os
import runpy
import sys
from pathlib import Path

sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from shared.training import step  # noqa: E402

micro_batches = step.Step.micro_batches
folder = Path(os.environ["GOLDEN_BATCHES"])
folder.mkdir(exist_ok=True)


def digest(value: object) -> str:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().numpy().tobytes()
        return hashlib.sha256(data).hexdigest()[:16] + f" {value.dtype} {tuple(value.shape)}"
    return str(value)


def noted(self: step.Step):  # type: ignore[no-untyped-def]
    with (folder / f"rank-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        for batch in micro_batches(self):
            file.write(json.dumps({key: digest(value) for key, value in batch.items()}) + "\n")
            yield batch


step.Step.micro_batches = noted  # type: ignore[method-assign]
sys.argv[0] = str(Path(sys.argv[0]).resolve())
sys.path[1:1] = [str(Path(sys.argv[0]).parent)]
runpy.run_path(sys.argv[0], run_name="__main__")
