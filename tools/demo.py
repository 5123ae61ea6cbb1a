"""Train a template's demo: a small model, real data, offline, on any machine.

python -m shared demo                                        # lora_finetune, two minutes on two cores
python -m shared demo image_classification --max_steps 10    # flags of the template
"""

import importlib.util
import os
import sys

from shared.commands.run import run
from shared.process.errors import ConfigError
from tools.new import INSTALL, SOURCE, TWO, templates


def main() -> None:
    if {"-h", "--help"} & {*sys.argv[1:2]}:
        print(f"{__doc__}\n{', '.join(templates())}")
        return
    given = sys.argv[1:]
    name = given.pop(0) if given and not given[0].startswith("-") else "lora_finetune"
    if name not in templates():
        raise ConfigError(f"no template {name!r}: there is {', '.join(templates())}")
    for package in ("torch", "accelerate", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{package} is not installed: {INSTALL}")
    launch = ["accelerate", "launch"]
    if name == "pretrain_pipeline":
        os.environ["ACCELERATE_USE_CPU"] = "true"
        launch = TWO.replace("accelerate_configs", f"{SOURCE}/accelerate_configs").split(" ")
    sys.exit(run([*launch, str(SOURCE / f"templates/{name}.py"), *given]))
