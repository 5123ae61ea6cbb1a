"""The command line of the package: `training-templates new lora_finetune my-project`.

What a checkout has is installed in tree/, out of the way: `import shared` finds nothing of it. This
command puts it on the path of its own process and of those that it starts. In a checkout, the tree
is the checkout.
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREE = HERE / "tree" if (HERE / "tree").is_dir() else HERE.parent
TRAIN = "accelerate-training-templates[train]"


def main() -> None:
    sys.path.insert(0, str(TREE))
    os.environ["PYTHONPATH"] = f"{TREE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    from shared.__main__ import main as of_the_templates

    try:
        of_the_templates()
    except ModuleNotFoundError as error:
        name = (error.name or "").split(".")[0]
        if name in ("", "shared", "tools"):
            raise
        command = Path(sys.argv[0]).name
        print(f"error: {command} needs {name}: install '{TRAIN}', 6 GB", file=sys.stderr)
        sys.exit(2)
