"""How long training stands still for a checkpoint, with and without --async_save, in steps that are lost by it.

    python benchmarks/save_stall.py                                  # writes benchmarks/save_stall.json
    python benchmarks/save_stall.py --flags "--model_preset 1B --seq_length 2048" --rounds 5           # on a GPU

- a step: from the end of one to the end of the next, with no save between them and none being written.
- training waits: what `Checkpointer.save` keeps the training loop, for the checkpoint before as well where that is
  still being written.
- lost in all: how much longer than others the steps took on whose way the checkpoint was saved, or written in the
  background. Evaluation and logging are left out.
"""

import argparse
import runpy
import shlex
import statistics
import sys
import time

import rounds
from rounds import DEVICE, PRECISIONS, ROOT, Row

KINDS = {"synchronous": False, "in the background": True}
WARM_UP = 3  # steps


def training(options: argparse.Namespace) -> Row:
    """Run templates/pretrain.py in this process, with a look at the clock after each step and around each save."""
    from shared.run import checkpoint, metrics

    ends: dict[int, float] = {}
    calls: dict[int, float] = {}
    writing: dict[int, bool] = {}  # whether a checkpoint is still written when a step ends
    savers: list[checkpoint.Checkpointer] = []
    log, save = metrics.Logger.step, checkpoint.Checkpointer.save

    def logged(logger, step, *, due):  # type: ignore[no-untyped-def]
        ends[step.number] = time.perf_counter()
        writing[step.number] = any(saver.pending is not None and not saver.pending.done() for saver in savers)
        log(logger, step, due=due)

    def saved(saver, state):  # type: ignore[no-untyped-def]
        savers[:] = [saver]
        start = time.perf_counter()
        save(saver, state)
        calls[state.step] = time.perf_counter() - start

    metrics.Logger.step, checkpoint.Checkpointer.save = logged, saved  # type: ignore[method-assign]
    given = {"max_steps": options.steps, "save_steps": options.every, "async_save": KINDS[options.work]}
    given |= dict.fromkeys(("eval_steps", "logging_steps"), options.steps + 1) | {"eval_samples": 1, "report_to": "none"}
    given |= {"output_dir": f"{options.folder}/{options.work}-{options.number}", "optim": "adamw"}
    template = str(ROOT / "templates/pretrain.py")
    sys.argv = [template, *rounds.flags(given), *shlex.split(options.flags)]
    runpy.run_path(template, run_name="__main__")

    lengths = {step: ends[step] - ends[step - 1] for step in ends if step - 1 in ends}
    # The save comes between two steps' ends; the steps on whose way it is written are those until one ends without it.
    saves = [s for s in calls if s + options.every <= options.steps]
    reach = {s: [s + 1 + i for i in range(options.every) if i == 0 or writing[s + i]] for s in saves}
    touched = {step for steps in reach.values() for step in steps}
    step = statistics.median(lengths[s] for s in lengths if s not in touched and s > WARM_UP)
    lost = [sum(lengths[s] - step for s in steps) for steps in reach.values()]
    waits = [calls[s] for s in reach]
    figures = {"step": step, "waits": statistics.median(waits), "lost": statistics.median(lost)}
    return {name: 1000 * seconds for name, seconds in figures.items()}


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=3, steps=36, least=6)
    parser.add_argument("--every", type=rounds.at_least(4), default=8, help="steps from save to save")
    parser.add_argument("--flags", default="--model_preset 30M --seq_length 64 --global_batch_size 2", help="of pretrain.py")
    options = rounds.parse(parser, dict.fromkeys(KINDS, training))
    if options.steps < 2 * options.every:
        parser.error("--steps has to be at least twice --every")
    with rounds.folder(options) as environment:
        environment["ACCELERATE_MIXED_PRECISION"] = precision = "bf16" if DEVICE.type == "cuda" else "no"
        rows = rounds.alternate(
            KINDS, options.rounds, lambda name, number: rounds.worker(__file__, name, options, environment, number=number)
        )
    for row in rows:
        row |= {f"{name}_in_steps": row[name] / row["step"] for name in ("waits", "lost")}
    columns = {"a step, ms": ("step", ",.0f"), "training waits, ms": ("waits", ",.0f")}
    columns |= {"in steps": ("waits_in_steps", ".2f"), "lost in all, in steps": ("lost_in_steps", ".2f")}
    what = f"`{options.flags}`, {PRECISIONS[precision]}"
    notes = [f"Medians (and ranges) of {options.rounds} rounds of {options.steps} steps; {what}."]
    rounds.report(options, rows, rounds.table("checkpoint", rows, columns), notes)


if __name__ == "__main__":
    main()
