"""How strong the tests are: change the code in one place at a time and see whether a test fails.

    pip install cosmic-ray==8.7.0
    python benchmarks/mutants.py run FOLDER                          # all of SOURCES, two at a time
    python benchmarks/mutants.py run FOLDER --only shared/data/order.py --lines 40-60
    python benchmarks/mutants.py report FOLDER                       # scores, and what survived

Cosmic Ray makes the changes: numbers, comparisons, operators, conditions, loops, decorators. It was
chosen because a change is in the file, where launched processes meet it too, and because decorated
functions are changed as well; of its operators, one replacement of each kind is used (OPERATORS).
Each change meets the fast tests of its own folder (TESTS), in a fork of a process that has imported
the libraries, so that most take one to three seconds. Needs Linux.

A score is the share of changes that a test notices; a test that hangs notices. Changes that make no
difference (EQUIVALENT in the report) are listed with one word why in benchmarks/mutants.json.
"""

import argparse
import contextlib
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 25  # changes that a worker takes at a time

# Each file and the tests that it meets: those of its folder, the nearest first.
TESTS: dict[str, str] = {
    "data/order": "data/test_data.py data/test_mixture.py",
    "data/loader": "data/test_data.py data training/test_steps.py",
    "training/step": "training/test_steps.py training/test_sync.py promises/test_strategies.py",
    "training/optim": "training/test_optim.py training/test_defaults.py",
    "parallel/strategy": "training promises/test_strategies.py",
    "parallel/gradients": "training promises/test_strategies.py",
    "run/checkpoint": "run/test_checkpoint.py run/test_state.py promises/test_faults.py",
    "run/checkpoint_files": "run/test_checkpoint.py promises/test_faults.py",
    "run/tensors": "run/test_tensors.py run/test_checkpoint.py run",
    "run/state": "run/test_state.py run/test_checkpoint.py run",
    "run/metrics": "run/test_metrics.py run",
    "text/packing": "text/test_corpus.py text",
    "text/encoder": "text/test_chat.py known_bugs/test_conversations.py known_bugs/test_tables.py",
    "models/isolation": "models/test_attention.py models/test_model.py",
    "models/loss": "models/test_lm_loss.py models/test_targets.py",
    "rollouts/rollouts": "rollouts promises/test_grpo.py",
    "evaluation/kinds": "evaluation promises/test_multi_label.py",
    "images/augment": "images",
}
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Add|Pow_Mul"
    r"|BitAnd_BitOr|BitXor_BitAnd|RShift_LShift|LShift_RShift)"
    r"|ReplaceComparisonOperator_(Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is)"
    r"|ReplaceUnaryOperator_Delete_\w+|Replace(True|False|And|Or|Continue|Break)\w+"
    r"|AddNot|NumberReplacer|RemoveDecorator|ZeroIterationForLoop|ExceptionReplacer)"
)
MARK = "MUTANTS_WORKER"  # in the environment of all that a worker starts


def changes(source: str) -> list[dict[str, Any]]:
    """Each change of a file: operator, which occurrence of it, line and text of the changed line."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path

    tree = get_ast_from_path(ROOT / source)
    rows = []
    for name in cosmic_ray.plugins.operator_names():
        if OPERATORS.fullmatch(name):
            operator = cosmic_ray.plugins.get_operator(name)()
            places = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
            for occurrence, (start, _end) in enumerate(places):
                rows.append({"operator": name, "occurrence": occurrence, "line": start[0]})
    return sorted(rows, key=lambda row: row["line"])


def changed(code: str, change: dict[str, Any]) -> tuple[str, str]:
    """The file with one change, and its difference in two lines."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    mutant = mutate_code(code, get_operator(change["operator"])(), change["occurrence"])
    lines = difflib.unified_diff(code.splitlines(), mutant.splitlines(), n=0, lineterm="")
    return mutant, "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def copy_of_the_tree(folder: Path) -> None:
    """What git knows of, as it stands, compiled: tests change files there."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "shared", "templates"], cwd=folder)


class Killers:
    """A pytest plugin: the tests that failed of late run first, and the one that fails is written down."""

    recent: list[str] = []

    def __init__(self, report: int) -> None:
        self.report = report

    def pytest_collection_modifyitems(self, items: list) -> None:
        items.sort(key=lambda item: -self.recent.index(item.nodeid) if item.nodeid in self.recent else 1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            os.write(self.report, f"{report.nodeid}\n".encode())


def fork(run: Any, *args: object) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        try:
            os._exit(run(*args))
        except BaseException:
            os._exit(70)
    return pid


def pytest_here(tests: list[str], report: int) -> int:
    import pytest

    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    return pytest.main(["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *tests], plugins=[Killers(report)])


def end_all_but(kept: set[int]) -> None:
    """Kill what a test left behind: each process that has this worker's mark in its environment."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) not in kept and mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def meet(tests: list[str], limit: float, kept: set[int]) -> tuple[str, str]:
    """("survived" | "killed" | "hung", the test that failed) of the code as it now is on disk."""
    readable, writable = os.pipe()
    pid = fork(pytest_here, tests, writable)
    os.close(writable)
    end, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.01)
    end_all_but(kept)
    if status is None:
        os.waitpid(pid, 0)
    with open(readable) as report:
        failed = report.read().split("\n")[0]
    if failed:
        Killers.recent = [*[test for test in Killers.recent if test != failed], failed][-20:]
    return "hung" if status is None else "survived" if status == 0 else "killed", failed


def work(folder: Path, units: list[list[Any]]) -> None:
    """Take units that no other worker has taken, until none is left."""
    place = folder / f"tree-{os.environ[MARK]}"
    copy_of_the_tree(place)
    os.chdir(place)
    sys.path[:] = [str(place), *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)]
    sys.path.insert(1, str(place / "tests"))
    import launcher

    for name in (*launcher.PRELOADED, "pytest", "hypothesis", "pandas", "scipy", "timm", "trl", "wandb"):
        with contextlib.suppress(ImportError):
            __import__(name)
    address = str(folder / f"launcher-{os.environ[MARK]}")
    os.environ["TESTS_LAUNCHER"] = address  # the tests launch from a fork of this process
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    kept = {os.getpid(), fork(launcher.serve, address)}
    limits: dict[str, float] = {}
    for source, number, part in units:
        claim = folder / f"{source.replace('/', '.')}-{number:02d}.jsonl"
        try:
            file = open(claim, "x")  # noqa: SIM115
        except FileExistsError:
            continue
        tests = [f"tests/{test}" for test in TESTS[source[len("shared/") : -len(".py")]].split()]
        code = Path(source).read_text()
        if source not in limits:
            began = time.monotonic()
            if (result := meet(tests, 1800, kept))[0] != "survived":
                raise SystemExit(f"{source}: the tests fail before any change: {result}")
            limits[source] = 30 + 3 * (time.monotonic() - began)
            print(f"{source}: {time.monotonic() - began:.0f} s a survivor", flush=True)
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two changes within a second look alike
        with file:
            for change in part:
                mutant, difference = changed(code, change)
                began = time.monotonic()
                Path(source).write_text(mutant)
                outcome, test = meet(tests, limits[source], kept)
                Path(source).write_text(code)
                took = round(time.monotonic() - began, 1)
                row = {**change, "change": difference, "outcome": outcome, "test": test, "seconds": took}
                file.write(json.dumps(row) + "\n")
                file.flush()
    os.kill((kept - {os.getpid()}).pop(), signal.SIGKILL)


def report(folder: Path) -> None:
    """Scores by file, and the changes that no test noticed."""
    known = json.loads((ROOT / "benchmarks" / "mutants.json").read_text())["equivalent"]
    for path in TESTS:
        source = f"shared/{path}.py"
        files = sorted(folder.glob(f"{source.replace('/', '.')}-*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        if not rows:
            continue
        alive = [row for row in rows if row["outcome"] == "survived"]
        same = [row for row in alive if row["change"] in known.get(source, {})]
        counted = len(rows) - len(same)
        score = (len(rows) - len(alive)) / max(1, counted)
        print(f"{source}: {len(rows)} changes, {len(same)} equivalent, {score:.1%} noticed")
        for row in alive:
            if row not in same:
                print(f"  {row['line']}: {row['operator'].removeprefix('core/')}")
                print("    " + row["change"].replace("\n", "\n    "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "report", "worker"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="a file of shared/, as in TESTS; may be repeated")
    parser.add_argument("--lines", help="FIRST-LAST")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.what == "worker":
        return work(folder, json.loads((folder / "units.json").read_text()))
    if options.what == "run":
        folder.mkdir(parents=True, exist_ok=True)
        first, last = map(int, (options.lines or "1-100000").split("-"))
        units = []
        for path in TESTS:
            source = f"shared/{path}.py"
            if not options.only or source in options.only:
                rows = [row for row in changes(source) if first <= row["line"] <= last]
                units += [[source, k // CHUNK, rows[k : k + CHUNK]] for k in range(0, len(rows), CHUNK)]
        (folder / "units.json").write_text(json.dumps(units))
        print(f"{sum(len(part) for *_, part in units)} changes", flush=True)
        own = [sys.executable, __file__, "worker", str(folder)]
        workers = [
            subprocess.Popen(own, env=os.environ | {MARK: str(number), "OMP_NUM_THREADS": "1"})
            for number in range(options.workers)
        ]
        if any([worker.wait() for worker in workers]):
            sys.exit(1)
    report(folder)


if __name__ == "__main__":
    main()
