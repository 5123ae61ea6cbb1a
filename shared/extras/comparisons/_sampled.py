"""Runs a template that evaluates without training, and notes the loss of each validation sample.

python _sampled.py train.py --flags ..., with SAMPLED, a file, in the environment. Rows are
evaluated one by one.
"""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    sys.path.insert(1, str(Path(__file__).resolve().parents[3]))
    from shared.extras.proofs import _script

    patch(Path(os.environ["SAMPLED"]), _script.note_tokenizers())
    _script.run()


def patch(file: Path, tokenizers: list[Any]) -> None:
    """Let the first evaluation's mean loss write each sample's to `file`, and end the run."""
    from accelerate.utils import gather_object

    from shared.run.exits import Finished
    from shared.run.run import Run

    def mean_loss(self: Run, loader: Any, loss: Any) -> float:
        rows = []
        for window in self.read(loader):
            for batch, (index,) in zip(window.micro_batches, window.indices.tolist(), strict=True):
                value = float(loss(batch))  # all ranks go forward together
                if index >= 0:
                    rows.append(row_of(batch, index, tokenizers) | {"loss": value})
        gathered = gather_object(rows)
        by_index = {row["index"]: row for row in gathered}  # ranks may share rows
        if self.is_main:
            ordered = [by_index[index] for index in sorted(by_index)]
            file.write_text(json.dumps(ordered), encoding="utf-8")
        raise Finished("evaluated")

    Run.mean_loss = mean_loss  # type: ignore[method-assign]


def row_of(batch: Any, index: int, tokenizers: list[Any]) -> dict[str, Any]:
    """What a row of one sample is: a key that is the same in runs on the same data."""
    labels = batch["labels"]
    counted = labels >= 0
    ids = batch["input_ids"].cpu().numpy().tobytes()
    key = hashlib.sha256(ids + labels.cpu().numpy().tobytes()).hexdigest()[:16]
    targets = len(batch["lengths"]) if "lengths" in batch else int(counted.sum())
    text = ""
    if tokenizers:
        text = str(tokenizers[-1].decode(labels[counted].tolist(), skip_special_tokens=True))
    return {"index": index, "key": key, "targets": targets, "text": text}


if __name__ == "__main__":
    main()
