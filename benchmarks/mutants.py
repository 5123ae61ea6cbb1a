"""How strong the tests are: change the code in one place at a time and see whether a test fails.

    pip install cosmic-ray==8.7.0
    python benchmarks/mutants.py run FOLDER                          # all of SOURCES, two at a time
    python benchmarks/mutants.py run FOLDER --rest                   # what survived meets longer tests, and launches
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
import ast
import contextlib
import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parents[1]
CHUNK = 25  # changes that a worker takes at a time
MOST = 125  # changes of a file, evenly spread over it
QUICK = 20.0  # seconds of tests that each change meets at first, as traced

# Each file and the tests that it meets: those of its folder, the nearest first.
TESTS: dict[str, str] = {
    "data/order": "data/test_data.py extras/test_mixture.py training/test_steps.py text/test_chat.py",
    "data/loader": "data/test_data.py data/test_prepared.py extras/test_mixture.py training/test_steps.py",
    "training/step": "training/test_steps.py extras/test_replicas.py",
    "training/optim": "training/test_optim.py training/test_defaults.py",
    "parallel/strategy": "parallel training",
    "parallel/gradients": "parallel training",
    "run/checkpoint": "run known_bugs/test_resumed_runs.py",
    "run/checkpoint_files": "run known_bugs/test_resumed_runs.py",
    "run/tensors": "run",
    "run/state": "run",
    "run/metrics": "run tools/test_throughput.py",
    "text/packing": "text known_bugs/test_documents.py",
    "text/encoder": "text known_bugs/test_conversations.py",
    "text/outline": "text known_bugs/test_conversations.py",
    "models/isolation": "models/test_attention.py models/test_model.py",
    "models/loss": "models/test_lm_loss.py models/test_targets.py known_bugs/test_experts.py",
    "models/fused_head": "models/test_lm_loss.py models/test_targets.py known_bugs/test_experts.py",
    "rollouts/rollouts": "rollouts",
    "evaluation/kinds": "evaluation data/test_multi_label.py",
    "images/augment": "models/test_classifier.py data/test_multi_label.py known_bugs/test_oracles.py",
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


class Trace:
    """A pytest plugin: which functions of the changed files each test calls, how long it takes, whether it launches."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.tests: dict[str, dict] = {}

    def pytest_runtest_protocol(self, item: Any) -> None:
        self.called: set[str] = set()
        self.launches, self.began = False, (time.process_time(), time.monotonic())
        sys.setprofile(self.look)
        threading.setprofile(self.look)

    def look(self, frame: Any, event: str, _argument: object) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if "/shared/" in name:
                self.called.add(f"shared/{name.rpartition('/shared/')[2]}:{frame.f_code.co_qualname}")
            elif frame.f_code.co_qualname == "Launcher.run":
                self.launches = True
            elif frame.f_code.co_qualname == "BaseProcess.start":
                self.called.add("a fork")  # which may call anything
            elif frame.f_code is subprocess.Popen.__init__.__code__:
                self.launches |= sys.executable in str(frame.f_locals["args"])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.setprofile(None)
        # processor time, as others may compute, too; but launched processes have their own
        clocks = (time.process_time(), time.monotonic())
        took = clocks[self.launches] - self.began[self.launches]
        self.tests[nodeid] = {"called": sorted(self.called), "launches": self.launches, "seconds": took}

    def pytest_sessionfinish(self) -> None:
        Path(self.path).write_text(json.dumps(self.tests))


def function_at(code: str, line: int) -> str | None:
    """The name of the outermost function around a line, with its class; None outside of functions."""
    places: list[tuple[ast.AST, str]] = [(ast.parse(code), "")]
    while places:
        parent, prefix = places.pop()
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, ast.ClassDef):
                places.append((node, f"{prefix}{node.name}."))
            elif isinstance(node, ast.FunctionDef) and node.body[0].lineno <= line <= (node.end_lineno or 0):
                return prefix + node.name
    return None


def tests_for(traced: dict[str, dict], rest: bool, source: str, code: str, line: int) -> list[str]:
    """The tests that call the changed function (any, for what no function holds), the shortest first: those of the
    first QUICK seconds, or the `rest`, with all that launch.
    """
    own = function_at(code, line)
    names = (f"{source}:{own}", f"{source}:{own}.<locals>")
    quick: list[str] = []
    others: list[str] = []
    seconds = 0.0
    for name, test in sorted(traced.items(), key=lambda item: item[1]["seconds"]):
        if test["launches"]:
            others.append(name)
        elif own is None or any(c in (names[0], "a fork") or c.startswith(names[1]) for c in test["called"]):
            seconds += test["seconds"]
            (quick if seconds < QUICK else others).append(name)
    return others if rest else quick


class Killers:
    """A pytest plugin: the tests that failed of late run first, and the one that fails is written down."""

    recent: ClassVar[list[str]] = []

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


def pytest_here(tests: list[str], plugin: object) -> int:
    import pytest

    output = os.open(f"../output-{os.environ[MARK]}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    return pytest.main(["-x", "-q", "--tb=short", "-p", "no:cacheprovider", *tests], plugins=[plugin])


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
    pid = fork(pytest_here, tests, Killers(writable))
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


def work(folder: Path, units: list[list[Any]], rest: bool) -> None:
    """Take units that no other worker has taken, until none is left."""
    place = folder / f"tree-{os.environ[MARK]}"
    copy_of_the_tree(place)
    os.chdir(place)
    others = (entry for entry in sys.path if Path(entry or ".").resolve() != ROOT)
    sys.path[:] = [str(place / "tests"), str(place), *others]  # a launched script's folder replaces the first
    import launcher

    for name in (*launcher.PRELOADED, "pytest", "hypothesis", "pandas", "scipy", "timm", "trl", "wandb"):
        with contextlib.suppress(ImportError):
            __import__(name)
    address = str(folder / f"launcher-{os.environ[MARK]}")
    os.environ["TESTS_LAUNCHER"] = address  # the tests launch from a fork of this process
    with contextlib.suppress(FileNotFoundError):
        os.unlink(address)
    server = fork(launcher.serve, address)
    try:
        take(folder, units, rest, {os.getpid(), server})
    finally:
        os.kill(server, signal.SIGKILL)


def trace(tests: str) -> dict[str, dict]:
    """What the tests do before any change. SystemExit if one fails."""
    path = f"../trace-{os.environ[MARK]}.json"
    pid = fork(pytest_here, [f"tests/{test}" for test in tests.split()], Trace(path))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise SystemExit(f"{tests}: fail before any change: {Path.cwd().parent}/output-{os.environ[MARK]}.txt")
    result = json.loads(Path(path).read_text())
    parts = [sum(t["seconds"] for t in result.values() if t["launches"] == which) for which in (False, True)]
    print(f"{tests}: {parts[0]:.0f} s here, {parts[1]:.0f} s launched", flush=True)
    return result


def take(folder: Path, units: list[list[Any]], rest: bool, kept: set[int]) -> None:
    traces: dict[str, dict] = {}
    numbered = [*enumerate(units)]
    for number, (source, part) in numbered[:: -1 if int(os.environ[MARK]) % 2 else 1]:  # from both ends: less to trace
        try:
            (folder / f"{number}.taken").open("x").close()
        except FileExistsError:
            continue
        tests = TESTS[source[len("shared/") : -len(".py")]]
        code = Path(source).read_text()
        if tests not in traces:
            traces[tests] = trace(tests)
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # two changes within a second look alike
        with (folder / f"{source.replace('/', '.')}.jsonl").open("a") as file:
            for change in part:
                mutant, difference = changed(code, change)
                began = time.monotonic()
                Path(source).write_text(mutant)
                chosen = tests_for(traces[tests], rest, source, code, change["line"])
                limit = 10 + 3 * sum(traces[tests][test]["seconds"] for test in chosen)
                outcome, test = meet(chosen, limit, kept) if chosen else ("survived", "")
                Path(source).write_text(code)
                took = round(time.monotonic() - began, 1)
                row = {**change, "change": difference, "outcome": outcome, "test": test, "seconds": took, "rest": rest}
                file.write(json.dumps(row) + "\n")
                file.flush()


def results(folder: Path, source: str) -> list[dict[str, Any]]:
    """The latest row of each change: that of the rest of the tests where it has met them, too."""
    file = folder / f"{source.replace('/', '.')}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return list({(row["operator"], row["occurrence"]): row for row in rows}.values())


def report(folder: Path) -> None:
    """Scores by file, and the changes that no test noticed."""
    known = json.loads((ROOT / "benchmarks" / "mutants.json").read_text())["equivalent"]
    for path in TESTS:
        source = f"shared/{path}.py"
        rows = results(folder, source)
        alive = [row for row in rows if row["outcome"] == "survived"]
        same = [row for row in alive if row["change"] in known.get(source, {})]
        if rows:
            score = (len(rows) - len(alive)) / max(1, len(rows) - len(same))
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
    parser.add_argument("--all", action="store_true", help=f"more than {MOST} changes of a file")
    parser.add_argument("--rest", action="store_true", help="what survived meets the rest of the tests")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder.resolve()
    if options.what == "worker":
        return work(folder, json.loads((folder / "units.json").read_text()), options.rest)
    if options.what == "run":
        folder.mkdir(parents=True, exist_ok=True)
        first, last = map(int, (options.lines or "1-100000").split("-"))
        units: list[list[Any]] = []
        for path in TESTS:
            source = f"shared/{path}.py"
            if not options.only or source in options.only:
                done = {(row["operator"], row["occurrence"]): row for row in results(folder, source)}
                rows = changes(source)
                if not options.all:
                    rows = rows[:: -(-len(rows) // MOST)]
                rows = [row for row in rows if first <= row["line"] <= last]
                if options.rest:
                    rows = [row for row in done.values() if row["outcome"] == "survived" and not row.get("rest")]
                else:
                    rows = [row for row in rows if (row["operator"], row["occurrence"]) not in done]
                units += [[source, rows[k : k + CHUNK]] for k in range(0, len(rows), CHUNK)]
        (folder / "units.json").write_text(json.dumps(units))
        for file in folder.glob("*.taken"):
            file.unlink()
        print(f"{sum(len(part) for _, part in units)} changes", flush=True)
        own = [sys.executable, __file__, "worker", str(folder), *["--rest"] * options.rest]
        workers = [
            subprocess.Popen(own, env=os.environ | {MARK: str(number), "OMP_NUM_THREADS": "1"})
            for number in range(options.workers)
        ]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            sys.exit(1)
    report(folder)


if __name__ == "__main__":
    main()
