"""verify-launch and check: what is right passes; what people get wrong is seen, with what it comes from."""

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import transformers

from shared.commands.verify_resume import Differs
from shared.extras.proofs._launches import LAUNCHES, Launcher
from shared.extras.proofs._small import with_small_model
from shared.extras.proofs.check import NAMES, Checks
from shared.extras.proofs.verify_launch import HINTS, Difference, hint, lines_of, report, verify, why_not
from tests.conftest import ROOT, SHAPE, python, sentence, slow, write_lines
from tests.plain_loop import turn
from tests.run import test_edits

FOLDER = Path(__file__).parent
EDITS = sorted(FOLDER.glob("wrong_edits/*.diff"))
OF_CHECK = {path: match for path in EDITS if (match := re.search(r"^check: (\S+): (.*)$", path.read_text(), re.M))}
WRONG = [path for path in EDITS if path not in OF_CHECK]
RIGHT = sorted(FOLDER.glob("right_edits/*.diff"))
FIRST_TIER = ("mean_of_a_micro_batch", "last_batch_dropped", "frozen_layer_trains")
ENOUGH = {  # launches that show it; others: rows and ddp2
    **dict.fromkeys(("own_targets", "times_ranks", "divided_by_ranks", "seed_of_a_rank"), "ddp2"),
    **dict.fromkeys(("collective_of_one_rank", "dropout_in_evaluation"), "ddp2"),
    "loss_of_padding": "rows",
    "norm_of_a_shard": "ddp2,fsdp2",
    "mean_over_ranks": "ddp3",
}


def cases(paths):
    return [pytest.param(path, id=path.stem, marks=() if path.stem in FIRST_TIER else pytest.mark.slow) for path in paths]


def edited(folder, diff=""):
    """A folder with the templates, perhaps edited."""
    shutil.copytree(ROOT / "templates", folder / "templates", ignore=shutil.ignore_patterns("__pycache__"))
    if diff:
        subprocess.run(["git", "apply", "-"], input=diff.encode(), cwd=folder, check=True)
    return folder / "templates"


@pytest.fixture(scope="module")
def flags_of(text_file, image_folder, tiny_model, tmp_path_factory):
    """Flags of small runs, by template: their rows differ much in length."""
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(5)
    words = [sentence(rng, rng.randint(1, 120) if n % 3 else 1) for n in range(150)]
    asked = [sentence(rng, rng.randint(1, 9)) for _ in words]
    both = [*zip(asked, words, strict=True)]
    chats = write_lines(folder / "chats.jsonl", [{"messages": [turn("user", q), turn("assistant", a)]} for q, a in both])
    pairs = [{"prompt": q, "chosen": a, "rejected": sentence(rng, 3)} for q, a in both]
    pairs = write_lines(folder / "pairs.jsonl", pairs)
    tuned = ["--model_name_or_path", tiny_model, "--seq_length", 64, "--learning_rate", 0.01, "--train_file"]
    return {
        "pretrain": ["--train_file", text_file, "--vocab_size", 300, "--seq_length", 32, "--config_overrides", SHAPE],
        "lora_finetune": [*tuned, chats, "--lora_dropout", 0.3],
        "full_finetune": [*tuned, chats],
        "dpo": [*tuned, pairs],
        "image_classification": ["--train_dir", image_folder, "--image_size", 16, "--dataloader_num_workers", 0],
    }


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    """Imports the libraries once, for all these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        with Launcher(tmp_path_factory.mktemp("launcher")) as started:
            yield started


@pytest.fixture
def command_of(tmp_path, flags_of):
    def command(diff):
        text = diff.read_text()
        template = re.search(r"a/templates/(\w+)\.py", text)[1]
        flags = [*flags_of[template], *" ".join(re.findall(r"^flags: (.*)$", text, re.M)).split()]
        return ["accelerate", "launch", str(edited(tmp_path, text) / f"{template}.py"), *map(str, flags)]

    return command


def test_all_edits_apply(tmp_path):
    """To the templates as they are; most are tried by the exhaustive tier alone."""
    edited(tmp_path)
    for diff in EDITS + RIGHT:
        done = subprocess.run(["git", "apply", "--check", diff], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (diff, done.stderr)


@pytest.mark.parametrize("diff", cases(WRONG))
def test_a_wrong_edit_is_seen_with_what_it_comes_from(diff, launcher, command_of, tmp_path):
    (expected,) = re.findall(r"^hint: (\w+)$", diff.read_text(), re.M)
    names = ENOUGH.get(diff.stem, "rows,ddp2")
    found = dict(verify(launcher, command_of(diff), tmp_path, names.split(","), 3))
    assert f"  often: {HINTS[expected]}" in why_not(found), lines_of(found)


@pytest.mark.parametrize("diff", cases(OF_CHECK))
def test_check_sees_a_wrong_edit(diff, launcher, command_of, tmp_path):
    name, why = OF_CHECK[diff].groups()
    (found,) = [check for check in Checks(launcher, command_of(diff), tmp_path).all([], [name]) if check.name == name]
    assert found.status == "failed" and why in "\n".join(found.what), found


@pytest.mark.parametrize("diff", cases(RIGHT))
def test_a_right_edit_passes(diff, launcher, command_of, tmp_path):
    command = command_of(diff)
    only = [name for name in NAMES if name != "resume"]  # starts interpreters: below
    checks = [*Checks(launcher, command, tmp_path).all(["rows", "ddp2"], only)]
    assert [check for check in checks if check.status == "failed"] == []
    frozen = next(check.status for check in checks if check.name == "frozen")
    assert frozen == ("passed" if diff.stem not in ("kept_average", "focal") else "not applicable")


@pytest.mark.slow
@pytest.mark.parametrize("diff", test_edits.DIFFS, ids=test_edits.NAMES)
def test_a_documented_edit_passes(diff, launcher, tmp_path, text_file, image_folder):
    template, flags = test_edits.edited(tmp_path, diff, text_file, image_folder)
    command = ["accelerate", "launch", str(tmp_path / f"templates/{template}.py"), *map(str, flags)]
    only = ["launches", "sum", "gradients", "frozen", "final"]
    checks = [*Checks(launcher, command, tmp_path).all(["rows", "ddp2"], only)]
    assert [check for check in checks if check.status == "failed"] == []


def shown(folder, command, template, flags, *options):
    script = str(edited(folder) / f"{template}.py")
    words = [command, *options, "--", "accelerate", "launch", script, *map(str, flags)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    done = python("-m", "shared", *words, env=environment, cwd=folder)
    assert [path.name for path in folder.iterdir()] == ["templates"]  # nothing is left behind
    return done


def test_check_gives_one_verdict(tmp_path, flags_of):
    flags = flags_of["pretrain"]
    done = shown(tmp_path, "check", "pretrain", flags, "--json", "--launches", "rows")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == 1 and found["verdict"] == "passed" and found["seconds"] > 0
    assert [check["name"] for check in found["checks"]] == [*NAMES]
    for check in found["checks"]:
        assert check["status"] == ("not applicable" if check["name"] == "frozen" else "passed") and check["what"], check


@pytest.mark.parametrize(("template", "only"), [slow("lora_finetune", "rows,ddp2,tp")])
def test_templates_learn_the_same_on_every_launch(template, only, tmp_path, flags_of):
    done = shown(tmp_path, "verify-launch", template, flags_of[template], "--only", only)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines.pop() == "this training learns the same on every launch that it can have"
    assert lines == [f"  {LAUNCHES[name].title:<42} same, up to rounding" for name in only.split(",")]


def differences(name, **ratios):
    where = "eval" if name.startswith("eval_") else "train"
    return {launch: Difference(where, "", 1, name, ratio) for launch, ratio in ratios.items()}


@pytest.mark.parametrize(
    ("found", "same", "expected"),
    [
        (differences("loss", rows=12.4, ddp2=2.0, ddp3=5.8, sp=2.0), "", "mean"),
        (differences("loss", ddp2=2.0, ddp3=3.0, hsdp=4.0), "rows", "ranks"),
        (differences("grad_norm", ddp2=2.0, ddp3=3.0), "rows", "ranks"),
        (differences("loss", ddp2=0.5, ddp3=0.34), "rows", "fewer"),
        (differences("grad_norm", rows=0.7, ddp3=0.9), "ddp2", "accumulated"),
        (differences("loss", rows=0.98, ddp3=0.99), "ddp2", "rows"),  # padding that happens to be as long
        (differences("grad_norm", fsdp2=0.7, tp=0.8), "rows ddp2", "sharded"),
        (differences("eval_loss", ddp2=1.1, fsdp2=1.1), "rows", "eval"),
        (differences("loss", ddp2=1.1, fsdp2=0.9), "rows", "rank"),
        ({"ddp2": Difference("train", "", 2, "loss", 1.01)}, "rows", "later"),
        ({"ddp3": Difference("samples", "", 1)}, "rows ddp2", "samples"),
    ],
)
def test_a_hint_follows_from_the_numbers(found, same, expected):
    assert hint(found, same.split()) == HINTS[expected]


def test_a_difference_ends_with_code_3_and_a_wrong_name_with_a_line(tmp_path, text_file):
    with pytest.raises(Differs, match="not the same on every launch: ddp2") as caught:
        report({"rows": None, **differences("loss", ddp2=2.0)})
    assert caught.value.exit_code == 3
    for command in ("verify-launch", "check"):
        done = shown(tmp_path / command, command, "pretrain", ["--train_file", text_file], "--only", "nothing")
        assert done.returncode == 2 and "--only nothing: there is" in done.stderr, done.stderr


def test_an_error_of_the_command_is_said_once(tmp_path, text_file):
    done = shown(tmp_path, "verify-launch", "pretrain", ["--train_file", text_file, "--no_such_flag", 1])
    assert done.returncode == 2 and done.stderr.count("no_such_flag") == 1 and not done.stdout, done.stderr


@pytest.mark.parametrize("name", ["qwen3_next", *map(slow, ("llama", "qwen3_moe", "gemma3_text", "deepseek_v3", "vit"))])
def test_a_large_model_is_tried_small(name, tiny_model, tmp_path, capsys):
    """The same class, few narrow layers of each kind, the tokenizer beside them; a small model is taken as it is."""
    config = transformers.AutoConfig.for_model(name)  # as large as the first of its kind
    kind = {"vit": transformers.AutoModelForImageClassification}.get(name, transformers.AutoModelForCausalLM)
    shutil.copytree(tiny_model, tmp_path / "large", ignore=shutil.ignore_patterns("*.safetensors"))
    if not getattr(config, "layer_types", None):
        config.num_hidden_layers = 24
    config.architectures = [kind._model_mapping[type(config)].__name__]
    config.save_pretrained(tmp_path / "large")
    (tmp_path / "run.yaml").write_text(f"model_name_or_path: {tmp_path}/large\nseed: 1\n")
    command = with_small_model(["train.py", "--config", str(tmp_path / "run.yaml"), "--max_steps", "1"], tmp_path)
    assert command[-2:] == ["--model_name_or_path", str(tmp_path / "small-model")]
    assert "parameters) takes its place" in capsys.readouterr().err
    assert "model_name_or_path" not in Path(command[2]).read_text() and "seed" in Path(command[2]).read_text()
    model = kind.from_pretrained(tmp_path / "small-model")
    assert type(model).__name__ == config.architectures[0] and model.num_parameters() < 50e6
    kinds, of_large = (set(getattr(each, "layer_types", None) or []) for each in (model.config, config))
    assert kinds == of_large
    files = {path.name for path in (tmp_path / "small-model").iterdir()}
    assert files >= {"tokenizer.json", "config.json", "model.safetensors"}
    same = ["train.py", "--model_name_or_path", str(tiny_model)]
    assert with_small_model(same, tmp_path) == same
