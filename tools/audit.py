"""Check that each sample was used exactly once an epoch, over all restarts of a run.

python -m shared audit outputs/lora_finetune/20260101-120000

Reads what `--audit_data` wrote. Exit code 0 if so, 3 if not.
"""

import argparse
import json
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from shared.data.audit import FOLDER
from shared.process.errors import CleanExit, ConfigError, shown
from shared.process.files import read_json_lines


class Differs(CleanExit):
    exit_code = 3


Of = int | None | dict[str, int]  # samples of an epoch; of a mixture: of each source


@dataclass
class Findings:
    """What an audit saw."""

    steps: int = 0
    # distinct samples used, of how many
    epochs: dict[int, tuple[int, int | None]] = field(default_factory=dict)
    # of a mixture: samples used, of how many
    sources: dict[str, tuple[int, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def records_of_steps(run_dir: Path) -> dict[int, tuple[int, Of, list[int]]]:
    """(epoch, samples of an epoch or of each source, sorted samples of all ranks) of each step.

    Raises:
        ConfigError: the run was not audited, or a line is not what `Recorder` writes.
    """
    files = sorted((run_dir / FOLDER).glob("rank-*.jsonl"))
    if not files:
        raise ConfigError(f"{run_dir}: no {FOLDER}/ in it; train with --audit_data")
    steps: dict[int, tuple[int, Of, list[int]]] = {}
    sizes: dict[int, int] = {}  # samples of each step over all ranks
    for path in files:
        for line in read_json_lines(path):
            try:
                steps.setdefault(line["step"], (line["epoch"], line["of"], []))[2].extend(
                    line["samples"]
                )
                sizes[line["step"]] = line["all"]
            except (KeyError, TypeError):
                raise ConfigError(
                    f"{path}: {json.dumps(line)[:80]} is not a line of an audit"
                ) from None
    lacking = [
        step for step, (_, _, samples) in sorted(steps.items()) if len(samples) < sizes[step]
    ]
    if lacking:
        raise ConfigError(
            f"{run_dir}: the records of some ranks are missing for steps {_some(lacking)}"
        )
    return {
        step: (epoch, of, sorted(samples)) for step, (epoch, of, samples) in sorted(steps.items())
    }


def check(run_dir: Path) -> Findings:
    """Whether each sample was used exactly once an epoch, and each step done exactly once, over all
    restarts.

    The sources of a mixture have epochs of their own.
    """
    steps = records_of_steps(run_dir)
    findings = Findings(len(steps))
    missing = sorted(set(range(1, max(steps, default=0) + 1)) - set(steps))
    if missing:
        findings.problems.append(f"{_some(missing)}: no record of these steps")
    used: dict[int, Counter[int]] = defaultdict(Counter)
    for epoch, of, samples in steps.values():
        if isinstance(of, dict):
            _check_sources(findings, of, [samples for _, _, samples in steps.values()])
            return findings
        used[epoch].update(samples)
        findings.epochs[epoch] = (len(used[epoch]), of)
    for epoch, counts in used.items():
        if twice := sorted(sample for sample, count in counts.items() if count > 1):
            findings.problems.append(f"epoch {epoch}: used more than once: samples {_some(twice)}")
        distinct, of = findings.epochs[epoch]
        if epoch < max(used) and of is not None and distinct != of:
            findings.problems.append(
                f"epoch {epoch}: {of - distinct} of {of} samples were never used"
            )
    return findings


def _check_sources(findings: Findings, sources: dict[str, int], steps: list[list[int]]) -> None:
    """Whether all samples of each source of a mixture were used before one of them came again."""
    start = 0
    for name, size in sources.items():
        times = Counter[int]()
        twice = set[int]()
        own = range(start, start + size)
        for samples in steps:
            times.update(mine := [sample for sample in samples if sample in own])
            most = math.ceil(times.total() / size)
            twice.update(sample for sample in mine if times[sample] > most)
        if twice:
            findings.problems.append(
                f"{name}: used more than once in an epoch: samples {_some(sorted(twice))}"
            )
        if missing := [sample for sample in own if times[sample] < times.total() // size]:
            findings.problems.append(f"{name}: not used in each epoch: samples {_some(missing)}")
        findings.sources[name] = (times.total(), size)
        start += size


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (
        f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's output_dir")
    run_dir = parser.parse_args().run
    findings = check(run_dir)
    print(shown(f"{run_dir}: {findings.steps:,} optimizer steps"))
    for epoch, (count, of) in findings.epochs.items():
        print(f"  epoch {epoch}: {count:,} {'samples' if of is None else f'of {of:,} samples'}")
    for name, (used, of_source) in findings.sources.items():
        times = used / of_source
        print(shown(f"  {name}: {used:,} used of {of_source:,} samples, {times:.2f} epochs"))
    if findings.problems:
        raise Differs("; ".join(findings.problems))
    print(
        "each sample was used at most once an epoch, and in whole epochs exactly "
        "once; each step was done once"
    )
