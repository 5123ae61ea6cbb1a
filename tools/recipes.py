"""List the ready --config files in recipes/: for which model, on which GPUs, from which source.

python -m shared recipes
python -m shared recipes qwen3_8b_qlora_24gb > run.yaml      # one of them, to edit
"""

import argparse
import signal
from pathlib import Path

from shared.process.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "recipes"
HEAD = ("what", "command", "needs", "budget", "source")


def head(path: Path) -> dict[str, str]:
    """The first lines of a recipe, `# what: ...` and so on, by their names."""
    lines = path.read_text(encoding="utf-8").splitlines()[: len(HEAD)]
    parts = [line.removeprefix("# ").partition(": ") for line in lines]
    return {name: text for name, _, text in parts}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", help="print this one")
    name = parser.parse_args().name
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it
    if name:
        file = FOLDER / f"{name}.yaml"
        if not file.exists():
            raise ConfigError(f"no recipe {name!r}: recipes lists them")
        print(file.read_text(encoding="utf-8"), end="")
        return
    for path in sorted(FOLDER.glob("*.yaml")):
        lines = head(path)
        print(f"{path.stem}: {lines.pop('what')}")
        print("".join(f"    {name:<8} {text}\n" for name, text in lines.items()))
    print(
        "Edit the file for your data, or override it: flags on the command line "
        "win. All flags are in --help all."
    )


if __name__ == "__main__":
    main()
