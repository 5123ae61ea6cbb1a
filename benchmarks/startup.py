"""How long each template takes to print its --help, to make its first optimizer step, and to resume and make one more.

    python benchmarks/startup.py                                     # writes benchmarks/startup.json
    python benchmarks/startup.py --rounds 7 --templates pretrain --flags "--model_preset 125M" --output results.json

Each is compared with a script that imports torch and the model's class and builds the model: what any training script
has to do first. All are programs started anew, on the CPU's warm file cache, with the demo's prepared data in place.
A first step is what `python templates/pretrain.py --report_to none` has done when the first update is behind it, the
evaluation before it (and the text it samples) included; a resume verifies and loads a checkpoint
first. `accelerate launch` adds the time of its own imports, a line of the table; another is the same program without those
for its other commands, `accelerate-launch`.

"Compiled" is a first step with --torch_compile, of the templates that --compiled names: with an empty cache of compiled
code, and with the one that this has left.

The columns of parts say where the time goes: until `main` begins (interpreter and imports), until the loop is entered
(data, model, optimizer, checkpoint), and until the step is done (evaluation, reading, the step). The pipeline's two
processes are started with `accelerate launch`. A run that does not reach its step, or does not begin where
it should, is an error.
"""

import argparse
import json
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rounds
from rounds import ROOT, Row

from shared import demo

LLAMA = "from transformers import LlamaConfig, LlamaForCausalLM as Model; "
SHAPE = "hidden_size=192, num_hidden_layers=6, num_attention_heads=6, intermediate_size=512, vocab_size=4096"
IMAGES = "from transformers import ResNetConfig, ResNetForImageClassification as Model; "
IMAGE_SHAPE = "embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type='basic'"
BASELINES = {  # the least that a script for the demo's model has to do
    "pretrain": f"import torch; {LLAMA}Model(LlamaConfig({SHAPE}))",
    "pretrain_pipeline": f"import torch; {LLAMA}Model(LlamaConfig({SHAPE}))",
    "lora_finetune": f"import torch; {LLAMA}Model.from_pretrained({str(demo.MODEL)!r})",
    "image_classification": f"import torch; {IMAGES}Model(ResNetConfig({IMAGE_SHAPE}))",
}
# Runs a template until a step is done, and writes down when it got where. What it imports first, the template needs.
PROBE = """
import json, os, runpy, sys, time
stamps = {}
from shared.run import exits, guard, metrics
run, guarded, log = exits.run, guard.Guard.__init__, metrics.Logger.step
def running(*arguments):
    stamps["imports"] = time.time()
    run(*arguments)
def guarding(self, accelerator, models, state, **named):
    stamps["ready"], stamps["from"] = time.time(), state.step
    guarded(self, accelerator, models, state, **named)
def logging(self, step, **named):
    if step.number == int(os.environ["PROBE_STEP"]):
        stamps["step"] = time.time()
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["PROBE_FILE"], "w") as file:
                json.dump(stamps, file)
        os._exit(0)
    log(self, step, **named)
exits.run, guard.Guard.__init__, metrics.Logger.step = running, guarding, logging
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
KINDS = ("--help", "first step", "resume")
COMPILED = ("compiled, cache empty", "compiled, cache filled")


class Starts:
    """Starts of the templates, in a folder and an environment."""

    def __init__(self, options: argparse.Namespace, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.flags = Path(options.folder), environment, shlex.split(options.flags)
        self.steps = options.steps
        self.cache = self.folder / "inductor"  # of compiled code
        self.probe = self.folder / "probe.py"
        self.probe.write_text(PROBE)

    def time(self, arguments: list[str], **environment: str) -> float:
        started = time.time()
        rounds.run(arguments, self.environment | environment)
        return time.time() - started

    def until(self, template: str, step: int, output: Path, *more: str) -> Row:
        """Train, with `more` flags, until a step is done; seconds in all and in parts, and from which step on."""
        stamps, started = self.folder / "stamps.json", time.time()
        stamps.unlink(missing_ok=True)
        flags = ["--report_to", "none", "--save_steps", str(self.steps), "--output_dir", str(output), *self.flags, *more]
        command = [str(self.probe), str(ROOT / "templates" / f"{template}.py"), *flags]
        if template == "pretrain_pipeline":
            config = str(ROOT / "accelerate_configs" / "ddp.yaml")
            launch = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config, "--num_processes", "2"]
            command = [*launch, "--mixed_precision", "no", "--main_process_port", "0", *command]
        on_cpu = {"ACCELERATE_USE_CPU": "true"} if rounds.DEVICE.type == "cpu" else {}
        probe = {"PROBE_FILE": str(stamps), "PROBE_STEP": str(step), "TORCHINDUCTOR_CACHE_DIR": str(self.cache)}
        rounds.run(command, self.environment | on_cpu | probe)
        if not stamps.exists():
            sys.exit(f"{template}: ended before step {step} was done")
        seen = json.loads(stamps.read_text())
        parts = {"imports": seen["imports"] - started, "preparation": seen["ready"] - seen["imports"]}
        parts["to the step"] = seen["step"] - seen["ready"]
        return {"seconds": seen["step"] - started, "from": seen["from"], **parts}

    def prepare(self, template: str) -> None:
        """Prepared data in the cache, and a run with a checkpoint."""
        self.until(template, self.steps + 1, self.folder / f"{template}-stopped")

    def measure(self, template: str, kind: str) -> Row:
        if kind == "--help":
            return {"seconds": self.time([str(ROOT / "templates" / f"{template}.py"), "--help"])}
        output = self.folder / "run"
        shutil.rmtree(output, ignore_errors=True)
        if kind == "resume":
            shutil.copytree(self.folder / f"{template}-stopped", output)
        if kind == COMPILED[0]:
            self.cache = Path(tempfile.mkdtemp(dir=self.folder))  # which no earlier run may still write to
        more = ["--torch_compile"] if kind in COMPILED else []
        row = self.until(template, self.steps + 1 if kind == "resume" else 1, output, *more)
        if row["from"] != (self.steps if kind == "resume" else 0):
            sys.exit(f"{template}, {kind}: began at step {row['from']}")
        return row


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=3, steps=2, least=1, counts="steps before the checkpoint")
    parser.add_argument("--templates", nargs="+", choices=list(BASELINES), default=list(BASELINES))
    parser.add_argument("--compiled", nargs="*", choices=list(BASELINES), default=["pretrain"], help="started compiled, too")
    parser.add_argument("--flags", default="", help="more flags of the templates")
    options = rounds.parse(parser, {})
    launchers = {
        "`accelerate launch` of nothing": ["accelerate.commands.accelerate_cli", "launch"],
        "`accelerate-launch` of nothing": ["accelerate.commands.launch"],
    }
    with rounds.folder(options) as environment:
        starts = Starts(options, environment)
        nothing = starts.folder / "nothing.py"
        nothing.write_text("")
        baselines = {name: starts.folder / f"{name}-baseline.py" for name in options.templates}
        for name, script in baselines.items():
            script.write_text(BASELINES[name] + "\n")
            starts.prepare(name)

        def measure(contender: str, number: int) -> Row:
            name, _, kind = contender.partition(", ")
            if contender in launchers:
                command = ["-m", *launchers[contender], "--mixed_precision", "no", "--cpu"]
                return {"seconds": starts.time([*command, "--num_processes", "1", str(nothing)])}
            if kind == "baseline":
                return {"seconds": starts.time([str(baselines[name])])}
            return starts.measure(name, kind)

        kinds = {name: ("baseline", *KINDS, *(COMPILED if name in options.compiled else ())) for name in options.templates}
        names = [f"{name}, {kind}" for name in options.templates for kind in kinds[name]]
        rows = rounds.alternate([*launchers, *names], options.rounds, measure)
    seconds: dict[Any, float] = {(row["contender"], row["round"]): row["seconds"] for row in rows}
    for row in rows:
        base = seconds.get((row["contender"].partition(", ")[0] + ", baseline", row["round"]))
        row["over"] = None if base is None else row["seconds"] - base
    columns = {"seconds": ("seconds", ".2f"), "over the baseline": ("over", "+.2f")}
    columns |= {"imports": ("imports", ".2f"), "data, model": ("preparation", ".2f"), "to the step": ("to the step", ".2f")}
    notes = [f"Seconds: medians (and ranges) of {options.rounds} rounds; differences are paired by round."]
    rounds.report(options, rows, rounds.table("start", rows, columns), notes)


if __name__ == "__main__":
    main()
