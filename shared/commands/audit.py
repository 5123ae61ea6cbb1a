"""Check that each sample was used exactly once an epoch, over all restarts of a run.

python -m shared audit outputs/lora_finetune/20260101-120000

Reads what `--audit_data` wrote. Exit code 0 if so, 3 if not.
"""

import argparse
from pathlib import Path

from shared.data import audit
from shared.process.errors import CleanExit, shown


class Differs(CleanExit):
    exit_code = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m shared audit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="a run's output_dir")
    run_dir = parser.parse_args().run
    findings = audit.check(run_dir)
    print(shown(f"{run_dir}: {findings.steps:,} optimizer steps"))
    for epoch, (count, of) in findings.epochs.items():
        print(f"  epoch {epoch}: {count:,} {'samples' if of is None else f'of {of:,} samples'}")
    for name, (used, of) in findings.sources.items():
        print(shown(f"  {name}: {used:,} used of {of:,} samples, {used / of:.2f} epochs"))
    if findings.problems:
        raise Differs("; ".join(findings.problems))
    print(
        "each sample was used at most once an epoch, and in whole epochs exactly once; each step "
        "was done once"
    )
