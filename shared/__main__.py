"""python -m shared COMMAND [--help]: commands around the training."""

import ast
import importlib
import sys
from pathlib import Path

from shared.process.errors import ConfigError
from shared.process.printing import quieten_imports
from shared.process.signals import clean_exit


def commands() -> dict[str, str]:
    """The first line of each module in commands/, by the command's name."""
    files = sorted(Path(__file__).parent.glob("commands/[a-z]*.py"))
    documentation = {file.stem: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in files}
    return {stem.replace("_", "-"): text.splitlines()[0] for stem, text in documentation.items()}


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__ + "\n")
        print("\n".join(f"  {name:<14} {about}" for name, about in commands().items()))
        return
    quieten_imports()
    command = sys.argv.pop(1)
    sys.argv[0] = f"python -m shared {command}"  # as --help shows it
    with clean_exit():
        if command not in commands():
            elsewhere = "" if "new" in commands() else "; others are in the templates' repository"
            raise ConfigError(f"no command {command!r}: there is {', '.join(commands())}{elsewhere}")
        importlib.import_module(f"shared.commands.{command.replace('-', '_')}").main()


if __name__ == "__main__":
    main()
