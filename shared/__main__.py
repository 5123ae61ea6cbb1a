"""python -m shared COMMAND [--help]: commands around the training."""

import ast
import importlib
import sys
from pathlib import Path

from shared.process.errors import ConfigError
from shared.process.printing import quieten_imports
from shared.process.signals import clean_exit
from shared.process.start import sleep_between_parallel_regions

ROOT = Path(__file__).resolve().parents[1]
# in tools/, which only a checkout of the templates has
TOOLS = ("new", "demo", "plan", "recipes", "audit", "selftest", "shrink")


def commands() -> dict[str, Path]:
    """The module of each command."""
    files = [
        *ROOT.glob("shared/commands/[a-z]*.py"),
        *ROOT.glob("shared/extras/proofs/[a-z]*.py"),
        *ROOT.glob("shared/extras/comparisons/[a-z]*.py"),
        *(ROOT / f"tools/{name}.py" for name in TOOLS),
    ]
    return {
        file.stem.replace("_", "-"): file
        for file in sorted(files, key=lambda file: file.stem)
        if file.exists()
    }


def main() -> None:
    modules = commands()
    script = Path(sys.argv[0]).name
    called = "python -m shared" if script == "__main__.py" else script  # or the package's script
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__.replace("python -m shared", called) + "\n")
        for name, file in modules.items():
            about = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
            print(f"  {name:<14} {about.splitlines()[0]}")
        return
    quieten_imports()
    sleep_between_parallel_regions()
    command = sys.argv.pop(1)
    sys.argv[0] = f"{called} {command}"  # as --help shows it
    with clean_exit():
        if command not in modules:
            checkout = (
                "; a checkout of the templates, or their package (training-templates), has new, "
                "plan, recipes, ask, evaluate, selftest and shrink, too"
            )
            raise ConfigError(
                f"no command {command!r}: there is "
                f"{', '.join(modules)}{checkout * ('new' not in modules)}"
            )
        sys.path.insert(0, str(ROOT))  # the current folder may have a tools/ of its own
        importlib.import_module(
            ".".join(modules[command].relative_to(ROOT).with_suffix("").parts)
        ).main()


if __name__ == "__main__":
    main()
