"""python -m shared COMMAND [--help]

plan    predicts the memory of each launch config, without a GPU and without weights
"""

import importlib
import sys

from shared import config as configs
from shared.config import ConfigError

COMMANDS = ("plan",)


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    command = sys.argv.pop(1)
    with configs.clean_exit():
        if command not in COMMANDS:
            raise ConfigError(f"no command {command!r}: there is {', '.join(COMMANDS)}")
        importlib.import_module(f"shared.commands.{command}").main()


if __name__ == "__main__":
    main()
