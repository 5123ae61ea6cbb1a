"""What comes from outside stays text: on the console one line, in a model card its own place."""

import re
import subprocess
import sys

import pytest
import yaml

from shared.answers.answers import show
from shared.models.card import model_card
from shared.process.errors import CleanExit, ConfigError, NotNow, shown
from shared.process.printing import indented, label, print_main, summary
from shared.process.signals import clean_exit
from shared.run.exits import Stopped
from tests.conftest import ROOT, paint
from tests.security.conftest import refused, trains

FORGED = "step 9/9: loss 0.0000"
HOSTILE = f"cat\n{FORGED}\r\x1b[2J\x1b]0;title\x07\x9b31m\u2028\u202egnp\u2066\u200f\x00"
MOVES = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")  # all but a newline


def harmless(printed: str) -> bool:
    return not MOVES.search(printed) and FORGED not in printed.splitlines()


def test_each_way_to_the_console_shows_control_characters_as_escapes(capsys):
    assert shown(HOSTILE) == label(HOSTILE) and "\n" not in shown(HOSTILE) and harmless(shown(HOSTILE))
    assert shown(shown(HOSTILE)) == shown(HOSTILE) and shown("naïve 猫 שלום") == "naïve 猫 שלום"
    print_main(f"warning: {HOSTILE}")
    print_main("first sample:", *indented(HOSTILE))
    summary("run", {"data": HOSTILE, "model": HOSTILE})
    for end in (CleanExit, ConfigError, NotNow, Stopped):
        with pytest.raises(SystemExit), clean_exit():
            raise end(f"another run is writing to it ({HOSTILE})")
    with pytest.raises(SystemExit), clean_exit():
        raise CleanExit("what", f"  next: {HOSTILE}")
    show({"step": 9, "prompt": HOSTILE, "reference": HOSTILE, "answer": HOSTILE})
    printed = "".join(capsys.readouterr())
    assert harmless(printed) and printed.count("cat") == 12 and "\n  cat\n  step 9/9" in printed


def test_names_of_files_and_classes_stay_text_in_a_run(tmp_path, capfd):
    classes = (f"a\n{FORGED}", "b\x1b[2J\u202e| ![x](http://x) ```")
    images = tmp_path / f"images\n{FORGED}"
    for kind, name in enumerate(classes):
        for number in range(4):
            paint(images / name.replace("/", "") / f"{number}\n{FORGED}\x1b[2J.png".replace("/", ""), kind, number, (16, 16))
    bad = next(images.glob("b*/0*"))
    bad.write_bytes(b"no picture")
    assert harmless(refused("image_classification", tmp_path, "--train_dir", images))
    assert trains("image_classification", tmp_path, "--train_dir", images, "--skip_bad_images", "--report_to", "none")
    printed = "".join(capfd.readouterr())
    assert harmless(printed) and "skipped 1 of 8 images" in printed
    card = (tmp_path / "run/final/README.md").read_text()
    assert FORGED not in card.splitlines() and not MOVES.search(card)


def test_a_model_card_is_not_forged():
    name = "x\n---\nlicense: mit\n# [link](http://x) <img src=x> `code`"
    settings = {"run_name": "a\n```\n\n# forged\n````\n", "seed": 1, "unset": None}
    results, load = {f"eval_loss/a|b\n{name}": 0.5}, f"load({name!r})"
    card = model_card(f"LoRA adapter of {name}", name, results, settings, made_by=name, load=load, base_model=name)
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front) == {"library_name": "transformers", "base_model": shown(name)}
    lines = body.splitlines()
    assert [line for line in lines if line.startswith("#")] == [lines[1], "## Results", "## Settings"]
    assert "license: mit" not in lines and "---" not in lines
    outside = re.sub(r"(?ms)^(`{3,}).*?^\1$", "", body)
    assert "forged" not in outside and not re.search(r"(?<!\\)[\[\]<>`]", outside)
    kept = re.search(r"(?ms)^(`{3,})yaml\n(.*?)^\1$", body)
    assert kept and yaml.safe_load(kept[2]) == {"run_name": settings["run_name"], "seed": 1}
    assert yaml.safe_load(model_card("t", "d", {}, {}, made_by="", load="", base_model="https://a:b@c").split("---\n")[1])


ASKED = """
import sys
import lora_finetune, shared.run.run, wandb
from huggingface_hub import constants
from wandb.env import error_reporting_enabled
run = wandb.init(dir=sys.argv[1], mode="offline", project="x")
print("said:", constants.HF_HUB_DISABLE_TELEMETRY, error_reporting_enabled(), run.settings.base_url)
run.finish()
"""


@pytest.mark.slow
def test_telemetry_is_off_and_a_run_s_folder_does_not_say_where_the_key_of_wandb_goes(tmp_path):
    places = {name: tmp_path / name / "wandb" for name in ("run", "current")}
    for number, place in enumerate(places.values()):
        place.mkdir(parents=True)
        (place / "settings").write_text(f"[default]\nbase_url = http://127.0.0.1:{number + 1}\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{ROOT}/templates:{ROOT}"}
    command = [sys.executable, "-c", ASKED, str(tmp_path / "run")]
    told = subprocess.run(command, cwd=tmp_path / "current", env=env, capture_output=True, text=True, check=True).stdout
    assert "said: True False http://127.0.0.1:2" in told  # the rule that docs/logging.md names
