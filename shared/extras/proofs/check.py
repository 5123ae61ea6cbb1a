"""Check all that an edit of the training can break: one verdict, one exit code.

python -m shared check -- accelerate launch train.py --train_file chats.jsonl

Runs your command for a few steps at a time, on CPU processes, and checks that
- launches: it learns the same on every launch (verify-launch);
- sum: the loss is a sum over its targets, and padding adds nothing;
- resume: a killed run continues as if it had not been killed (verify-resume);
- repeats: a second run gives the same bits;
- inert: evaluating and saving change nothing;
- gradients: every trained parameter gets a gradient;
- frozen: no other parameter changes;
- by-heart: it learns the samples of one batch, and their labels;
- final: final/, loaded by transformers or PEFT alone, gives the run's own scores.
Ends with exit code 3 if one fails. --only resume,by-heart runs some, --launches ddp2,fsdp2 chooses
what is compared. With --json, prints one object: {"version": 1, "verdict":
"passed" or "failed", "seconds", "checks": [{"name", "status": "passed", "failed" or
"not applicable", "what": [lines]}]}.
"""

import argparse
import json
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shared.commands import verify_resume
from shared.commands.verify_resume import OURS, Differs, folder_for, without_ours
from shared.extras.proofs import _probe
from shared.extras.proofs._launches import (
    LAUNCHES,
    OTHERS,
    Launcher,
    Result,
    divided,
    start,
)
from shared.extras.proofs._small import with_small_model
from shared.extras.proofs.verify_launch import (
    Difference,
    Found,
    launches,
    lines_of,
    verify,
    why_not,
)
from shared.process.errors import CleanExit, ConfigError
from shared.process.printing import indented

VERSION = 1  # of the JSON
IN_ONE_RUN = ("repeats", "inert", "gradients", "frozen", "final")
NAMES = ("launches", "sum", "resume", *IN_ONE_RUN, "by-heart")
STEPS = 3
STEPS_BY_HEART = 30
LEARNED = 0.98  # of the loss on one batch may be left: adapters of a random model learn little
REPLACED = OURS | OTHERS | {"eval_steps", "metric_for_best_model", "early_stopping_patience"}
LAST = {"metric_for_best_model": "none"}  # final/ has the last weights


@dataclass
class Check:
    """What one check has found.

    Attributes:
        status: passed, failed or not applicable.
        what: lines: what was seen, what fails and where, or why it does not apply.
    """

    name: str
    status: str
    what: list[str]


def passed_if(passed: bool, name: str, *what: str) -> Check:
    return Check(name, "passed" if passed else "failed", [*what])


def failure(name: str, result: Result) -> Check:
    """A check whose run ended with an error."""
    if result.code == 1:
        print(*indented(result.cause), sep="\n", file=sys.stderr)
    return passed_if(False, name, f"exit code {result.code}", result.cause.splitlines()[-1])


class Checks:
    """The checks of a command, on runs in `folder`."""

    def __init__(self, launcher: Launcher, command: Sequence[str], folder: Path) -> None:
        self.launcher = launcher
        words, flags = divided(command)
        self.command = [*words, *flags]
        self.folder = folder
        self.script = without_ours([words[-1], *flags], folder, REPLACED)
        self.launch = LAUNCHES["one"]

    def all(self, names: Sequence[str], only: Collection[str]) -> Iterator[Check]:
        """Run those in `only`. ConfigError if the command fails by itself.

        Args:
            names: of launches.
        """
        if {"launches", "sum"} & {*only}:
            folder = self.folder / "launches"
            folder.mkdir()
            found: Found = dict(verify(self.launcher, self.command, folder, names, STEPS))
            if "ddp4" in found:  # a pipeline
                self.launch = LAUNCHES["ddp2"]
            yield passed_if(not why_not(found), "launches", *lines_of(found), *why_not(found))
            yield of_rows(found)
        if "resume" in only:
            yield self.resume()
        if {*IN_ONE_RUN} & {*only}:
            facts = self.folder / "facts.json"
            often = self.run("often", 1, {_probe.FACTS: str(facts)})
            if often.code:
                yield failure("repeats", often)
                return
            if {"repeats", "inert"} & {*only}:
                yield from self.repeats(often)
            yield from of_facts(facts)
        if "by-heart" in only:
            yield self.by_heart()

    def run(self, name: str, every: int, environment: dict[str, str]) -> Result:
        """A run that evaluates and saves each so many steps."""
        flags = LAST | {"eval_steps": every, "save_steps": min(every, STEPS)}
        title = (
            f"{self.launch.title}: evaluates and saves {'often' if every == 1 else 'at its end'}"
        )
        launch = replace(self.launch, title=title, flags=flags)
        return start(self.launcher, launch, self.script, self.folder / name, STEPS, environment)

    def resume(self) -> Check:
        folder = self.folder / "resume"
        folder.mkdir()
        print("verify-resume:", file=sys.stderr)
        try:
            found = verify_resume.verify(self.command, folder, 4, verbose=True)
        except CleanExit as error:
            return passed_if(False, "resume", str(error))
        differs = [f"{part}: {where}" for part, where in found.items() if where]
        same = f"same, bit for bit: {', '.join(part for part in found if not found[part])}"
        return passed_if(not differs, "resume", *(differs or [same]))

    def repeats(self, often: Result) -> list[Check]:
        """Whether a run that evaluates and saves at its end alone has the same bits, and if not,
        whether any second run has.
        """
        seldom = self.run("seldom", 1000, {_probe.FACTS: str(self.folder / "unused.json")})
        differs = differences(often, seldom)
        if not differs:
            same = "samples, losses, weights and optimizer, bit for bit"
            return [passed_if(True, "repeats", same), passed_if(True, "inert", same)]
        again = differences(often, self.run("again", 1, {_probe.FACTS: str(self.folder / "2")}))
        why = "the same command twice is not the same: draws that the seed does not decide?"
        repeats = passed_if(not again, "repeats", *([*again, why] if again else ["same bits"]))
        if again:
            return [repeats, Check("inert", "not applicable", ["runs do not repeat"])]
        why = "without evaluations and saves between, training is another"
        return [repeats, passed_if(False, "inert", *differs, why)]

    def by_heart(self) -> Check:
        """Whether the loss on one batch falls, and with it that on the batch's labels."""
        file = self.folder / "by-heart.json"
        flags = LAST | {"eval_steps": 1000}
        launch = replace(self.launch, title="one batch, to be learned by heart", flags=flags)
        environment = {_probe.BY_HEART: str(file)}
        run_dir = self.folder / "by-heart"
        run = start(self.launcher, launch, self.script, run_dir, STEPS_BY_HEART, environment)
        if run.code == 0 and not file.exists():
            return Check(
                "by-heart", "not applicable", ["samples are made in each step, or streamed"]
            )
        if run.code:
            return failure("by-heart", run)
        before, after = (run.values[step, "loss"] for step in (1, STEPS_BY_HEART))
        lines = [f"loss {before:.4g} to {after:.4g} in {STEPS_BY_HEART} steps on one batch"]
        if not after < before - (1 - LEARNED) * abs(before):
            return passed_if(
                False,
                "by-heart",
                *lines,
                "it hardly learns: a rate that is too low, or a loss whose gradient is lost",
            )
        own = json.loads(file.read_text(encoding="utf-8"))["entropy"]
        if own and own[0] is not None:
            lines += [f"cross-entropy of the batch's labels {own[0]:.4g} to {own[1]:.4g}"]
            if own[0] - own[1] < (before - after) / 3:
                why = "what is learned is not the next token: labels are shifted already"
                return passed_if(False, "by-heart", *lines, why)
        return passed_if(True, "by-heart", *lines)


def of_rows(found: Found) -> Check:
    """Whether micro-batches of one row, without padding, add up to the whole batch."""
    if "rows" not in found or isinstance(found["rows"], str | Result):
        return Check("sum", "not applicable", ["the launch `rows` was not compared"])
    what = found["rows"]
    text = what.text if isinstance(what, Difference) else "12 batches of one row are as one of 12"
    return passed_if(what is None, "sum", text)


def differences(one: Result, other: Result) -> list[str]:
    """What two runs of a command computed differently, but for evaluations."""
    if other.code:
        return [other.cause]
    found = verify_resume.compare(one.run_dir, other.run_dir)
    found = {part: where.replace(", resumed ", ", then ") for part, where in found.items()}
    return [f"{k}: {where}" for k, where in found.items() if where and k != "evaluations"]


def of_facts(file: Path) -> list[Check]:
    """What a run has noted of itself, see `_facts.watch`."""
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    without = facts["without_gradient"]
    names = f"{', '.join(without[:5])}{', ...' * (len(without) > 5)}"
    text = f"no gradient in {STEPS} steps: {names} ({len(without)} of {facts['trained']})"
    gradients = passed_if(
        not without, "gradients", text if without else f"all {facts['trained']} have one"
    )
    changed = facts["changed"]
    text = f"all {facts['frozen']} are as they were"
    if changed:
        text = f"changed although frozen: {', '.join(changed[:5])} ({len(changed)})"
    frozen = passed_if(not changed, "frozen", text)
    if not facts["frozen"]:
        frozen = Check("frozen", "not applicable", ["all parameters are trained"])
    return [gradients, frozen, of_final(facts["final"])]


def of_final(final: Any) -> Check:
    if isinstance(final, str):
        return Check("final", "not applicable" if final.startswith("not") else "failed", [final])
    error, allowed = final
    text = f"scores differ by {error:.1e} of the largest, at most {allowed:g} is rounding"
    return passed_if(error <= allowed, "final", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument("--only", help=f"checks, separated by commas: {', '.join(NAMES)}")
    parser.add_argument("--launches", help="to compare, as --only of verify-launch")
    parser.add_argument("--no_shrink", action="store_true", help="take a large model as it is")
    parser.add_argument("--keep", type=Path, help="keep the runs in this empty folder")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the whole command")
    options = parser.parse_args()
    names = launches(options.launches)
    only = options.only.split(",") if options.only else NAMES
    if unknown := [name for name in only if name not in NAMES]:
        raise ConfigError(f"--only {unknown[0]}: there is {', '.join(NAMES)}")
    began = time.monotonic()
    with folder_for(options.keep) as folder, Launcher(folder) as launcher:
        command = (
            options.command if options.no_shrink else with_small_model(options.command, folder)
        )
        found = Checks(launcher, command, folder).all(names, only)
        checks = [check for check in found if check.name in only or check.status == "failed"]
    failed = [check.name for check in checks if check.status == "failed"]
    if options.json:
        verdict = "failed" if failed else "passed"
        about: dict[str, Any] = {"version": VERSION, "verdict": verdict}
        about["seconds"] = round(time.monotonic() - began)
        print(json.dumps(about | {"checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            first, *more = check.what
            status = check.status.upper() if check.status == "failed" else check.status
            print(f"{check.name:<10} {status:<15} {first}")
            print(*(f"{'':<27}{line}" for line in more), sep="\n", end="\n" * bool(more))
    if failed:
        raise Differs(f"failed: {', '.join(failed)}")
    if not options.json:
        print("right, as far as these runs can show it")


if __name__ == "__main__":
    main()
