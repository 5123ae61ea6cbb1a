"""Check that your training learns the same on every launch.

python -m shared verify-launch -- accelerate launch train.py --train_file chats.jsonl

Runs your command for a few steps on CPU processes, with the same global batch each time: one
process; micro-batches of one row; DDP on 2 and 3 processes; FSDP2; HSDP; DeepSpeed's ZeRO-2;
sequence and tensor parallelism. All must have the same samples in each step, losses, gradient
norms, evaluations and weights, up to what rounding comes to: that is measured with one more run,
whose first weights differ in their last place, and whose norms are summed in fp64. Prints what
differs first, and what such a difference often comes from; ends with exit code 3 if a launch
differs. What a launch refuses is said with its reason, and counts as no difference.

A model of more than 100 million parameters is tried small: the same architecture with few narrow
layers, random weights, its own tokenizer; --no_shrink takes it as it is. Computes in fp32, without
dropout, and with BatchNorm's running statistics: these differ from launch to launch by design.
Flags of `accelerate launch` and of the batch are replaced, and evaluations take 25 samples, where a
template has --eval_samples.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shared.commands.verify_resume import OURS, Differs, folder_for, without_ours
from shared.extras.proofs import _probe
from shared.extras.proofs._launches import (
    LAUNCHES,
    ON_REQUEST,
    OTHERS,
    Launcher,
    Result,
    divided,
    needs_processes,
    start,
)
from shared.extras.proofs._small import with_small_model
from shared.process.errors import ConfigError
from shared.process.printing import indented
from shared.run.exits import LostRank

# How often the measured rounding may be exceeded: reductions round in other places than weights.
NOISE = 16.0
# Likewise, of weights: where a gradient is all but zero, Adam's update has rounding's sign.
NOISE_OF_WEIGHTS = 1000.0
LEAST = 1e-6  # relative: rounding that one run happens not to show
SMALL = 0.1  # differences of larger numbers, as rewards are before the first step, round as these
KNOWN = ("loss", "grad_norm")  # others are a template's own
SHARDED = {"fsdp2", "hsdp", "zero2", "tp"}
CHOICES = [name for name in LAUNCHES if name not in ("one", "ddp4")]


@dataclass
class Difference:
    """What two launches computed differently first.

    Attributes:
        where: samples, train, eval or weights.
        ratio: of two numbers.
    """

    where: str
    text: str
    step: int = 0
    name: str = ""
    ratio: float = math.nan


def first_difference(one: Result, other: Result, shaken: Result) -> Difference | None:
    """What two launches computed differently first, beyond rounding; None if nothing.

    Args:
        shaken: what `one` is with other rounding.
    """
    for step in sorted(one.samples | other.samples):
        if one.samples.get(step) != other.samples.get(step):
            return Difference("samples", f"the samples of step {step} are others", step)
    found: list[Difference] = []
    rounding: dict[str, float] = {}  # by name: the largest so far, since it grows
    for (step, name), value in one.values.items():
        theirs = other.values.get((step, name), math.nan)
        beside = abs(shaken.values.get((step, name), value) - value)
        rounding[name] = max(rounding.get(name, 0.0), beside, LEAST * max(abs(value), SMALL))
        by = abs(theirs - value)
        if not by <= NOISE * rounding[name] and not (math.isnan(theirs) and math.isnan(value)):
            ratio = theirs / value if value else math.nan
            text = f"{name} at step {step}: {theirs:.7g}, not {value:.7g}"
            relative = by / abs(value) if value else by
            text += f" (off by {relative:.1e}, rounding {rounding[name] / (abs(value) or 1):.1e})"
            where = "eval" if name.startswith("eval_") else "train"
            found.append(Difference(where, text, step, name, ratio))
    # a value that jumps, such as a share of ties, may do so once by rounding
    often = Counter(each.name for each in found if each.where == "train")
    found = [e for e in found if e.where == "eval" or e.name in KNOWN or often[e.name] > 1]
    if found:
        return next((each for each in found if each.where == "train"), found[0])
    worst = (0.0, "")
    for name, mine in one.weights.items():
        if name not in other.weights:
            return Difference("weights", f"{name.removeprefix('model.')} is not among the weights")
        sizes = [
            float((each.weights[name].double() - mine.double()).norm()) for each in (other, shaken)
        ]
        allowed = max(sizes[1], LEAST * float(mine.double().norm()))
        if allowed and sizes[0] / allowed > worst[0]:
            worst = (sizes[0] / allowed, name.removeprefix("model."))
    if worst[0] > NOISE_OF_WEIGHTS:
        return Difference("weights", f"{worst[1]}: {worst[0]:.0f} times what rounding changes")
    return None


def is_near(ratio: float, *factors: int) -> bool:
    """Whether a ratio is about one of these factors, none of which is 1."""
    return ratio > 0 and any(
        factor > 1 and abs(math.log(ratio / factor)) < 0.2 for factor in factors
    )


def hint(differing: dict[str, Difference], same: Sequence[str], *, lost: bool = False) -> str:
    """What such differences often come from; "" where the numbers do not say.

    Args:
        differing: by launch, without those that failed.
        same: launches that are the same.
        lost: a rank waited for another in vain.
    """
    if not differing:
        return HINTS["collective"] * lost
    kinds = {difference.where for difference in differing.values()}
    if "samples" in kinds:
        return HINTS["samples"]
    if kinds == {"eval"}:
        return HINTS["eval"]
    pairs = [(LAUNCHES[name], difference) for name, difference in differing.items()]
    if kinds == {"train"}:
        if (
            all(
                is_near(each.ratio, of.processes * of.micro_batches, of.micro_batches)
                for of, each in pairs
            )
            and "rows" in differing
        ):
            return HINTS["mean"]
        if all(is_near(each.ratio, of.processes) for of, each in pairs):
            return HINTS["ranks"]
        if all(is_near(1 / each.ratio, of.processes) for of, each in pairs if each.ratio):
            return HINTS["fewer"]
    if "ddp2" in same and differing.keys() <= SHARDED:
        return HINTS["sharded"]
    losses = any(each.where == "train" and each.name != "grad_norm" for _, each in pairs)
    if "ddp2" in same and not losses and all(of.micro_batches > 1 for of, _ in pairs):
        return HINTS["accumulated"]
    if "rows" in differing:
        return HINTS["rows"]
    first = min((each.step for _, each in pairs if each.where == "train"), default=0)
    return HINTS["rank" if first == 1 else "later"]


HINTS = {
    "collective": "a collective (step.backward, run.sum, run.log_evaluation) behind a condition "
    "that differs between ranks: all ranks make the same calls in the same order",
    "samples": "an order of your own: it has to be a function of the step alone",
    "eval": "training is the same, evaluations are not: a mean over ranks or batches of unequal "
    "size (add numerators and denominators with run.sum, then divide), samples that are left out, "
    "or dropout",
    "mean": "the loss grows with the number of micro-batches: it is a mean, where step.backward "
    "expects the sum over the micro-batch's targets",
    "ranks": "loss or gradient grow with the number of ranks: divided by what this rank has "
    "(step.num_targets counts those of all), or multiplied by the number of ranks",
    "fewer": "loss or gradient shrink with the number of ranks: step.backward has divided already "
    "by the targets of all",
    "sharded": "only sharded launches differ: a norm, a clipping or a sum of your own sees this "
    "rank's part alone",
    "accumulated": "only steps of several micro-batches differ: what belongs after the loop over "
    "them, such as clipping, is in it, or a micro-batch depends on the one before",
    "rows": "a row's loss depends on the other rows of its micro-batch: padding that is counted, a "
    "mean over them, or random numbers that are drawn for the batch",
    "rank": "launches of several ranks differ from the first step on: random numbers, counts or "
    "values that each rank has for itself",
    "later": "the first step is the same, later ones are not: state or random numbers that each "
    "rank has for itself, or weights that are changed beside the optimizer",
}


# By launch: its first `Difference` from the launch of reference, its own `Result` where it failed,
# why it is not compared, or None where it is the same.
Found = dict[str, Difference | Result | str | None]


def verify(
    launcher: Launcher, command: Sequence[str], folder: Path, names: Sequence[str], steps: int
) -> Iterator[tuple[str, Difference | Result | str | None]]:
    """Yield each launch's name with what was found, see `Found`.

    Raises:
        ConfigError: the command fails by itself.
    """

    def run(name: str) -> Result:
        return start(launcher, LAUNCHES[name], script, folder / name, steps)

    words, flags = divided(command)
    script = without_ours([words[-1], *flags], folder, OURS | OTHERS)
    reference = run("one")
    if needs_processes(reference):
        reference = run("ddp2")
        names = ["ddp4"]
    if reference.code:
        is_traceback = reference.code == 1
        if is_traceback:
            print(reference.cause, file=sys.stderr)
        text = "its output ends as above" if is_traceback else reference.cause
        raise ConfigError(f"the command failed with exit code {reference.code}: {text}")
    noisy = replace(reference.launch, title=f"{reference.launch.title}, with other rounding")
    shaken = start(launcher, noisy, script, folder / "noise", steps, {_probe.NOISE: "1"})
    for name in names:
        other = run(name)
        if other.code == 2:
            yield name, f"refused: {other.cause}"
        elif other.code:
            yield name, other
        elif other.settings != reference.settings:
            pairs = [(k, v, reference.settings.get(k)) for k, v in other.settings.items()]
            chosen = ", ".join(f"{k} {v}, not {old}" for k, v, old in pairs if v != old)
            yield name, f"not compared: by default it has {chosen}"
        else:
            yield name, first_difference(reference, other, shaken)
        if other.code == LostRank.exit_code:  # so would the others: each waits for a minute
            return


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared verify-launch",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps to train (3)")
    parser.add_argument("--only", help=f"launches, separated by commas: {', '.join(CHOICES)}")
    parser.add_argument("--no_shrink", action="store_true", help="take a large model as it is")
    parser.add_argument("--keep", type=Path, help="keep the runs in this empty folder")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the whole command")
    options = parser.parse_args()
    names = launches(options.only)
    if options.steps < 1:
        raise ConfigError(f"--steps must be at least 1, not {options.steps}")
    with folder_for(options.keep) as folder, Launcher(folder) as launcher:
        command = (
            options.command if options.no_shrink else with_small_model(options.command, folder)
        )
        found = dict(verify(launcher, command, folder, names, options.steps))
    report(found)


def launches(only: str | None) -> list[str]:
    """The names in --only, or those of all that are not on request."""
    names = only.split(",") if only else [name for name in CHOICES if name not in ON_REQUEST]
    if unknown := [name for name in names if name not in CHOICES]:
        raise ConfigError(f"--only {unknown[0]}: there is {', '.join(CHOICES)}")
    return names


def lines_of(found: Found) -> list[str]:
    """A line for each launch."""
    lines = []
    for name, what in found.items():
        text = what if isinstance(what, str) else "same, up to rounding"
        if isinstance(what, Difference):
            text = f"DIFFERS: {what.text}"
        elif isinstance(what, Result):
            cause = what.cause if what.code != 1 else what.cause.strip().splitlines()[-1]
            text = f"FAILED with exit code {what.code}: {cause}"
        lines.append(f"{LAUNCHES[name].title:<42} {text}")
    return lines


def why_not(found: Found) -> list[str]:
    """Which launches are not the same, and what that often comes from; [] where all are."""
    differing = {name: what for name, what in found.items() if isinstance(what, Difference)}
    failed = {name: what for name, what in found.items() if isinstance(what, Result)}
    if not differing and not failed:
        return []
    same = [name for name, what in found.items() if what is None]
    lost = LostRank.exit_code in [what.code for what in failed.values()]
    why = hint(differing, same, lost=lost)
    names = ", ".join([*differing, *failed])
    return [f"not the same on every launch: {names}", *[f"  often: {why}"] * bool(why)]


def report(found: Found) -> None:
    """Print a line for each launch. Raises Differs if one is not the same."""
    for what in found.values():
        if isinstance(what, Result) and what.code == 1:
            print(*indented(what.cause), sep="\n", file=sys.stderr)
    print(*(f"  {line}" for line in lines_of(found)), sep="\n")
    if differs := why_not(found):
        raise Differs(*differs)
    print("this training learns the same on every launch that it can have")
