"""python -m shared COMMAND [--help]

plan            predicts the memory of each launch config, without a GPU and without weights
audit           proves that a run used each sample exactly once an epoch, over all its restarts
verify-resume   kills and resumes a run of yours, and compares it with one that was not killed
"""

import importlib
import sys

from shared import config as configs
from shared.config import ConfigError

COMMANDS = ("plan", "audit", "verify-resume")


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return
    command = sys.argv.pop(1)
    with configs.clean_exit():
        if command not in COMMANDS:
            raise ConfigError(f"no command {command!r}: there is {', '.join(COMMANDS)}")
        importlib.import_module(f"shared.commands.{command.replace('-', '_')}").main()


if __name__ == "__main__":
    main()
