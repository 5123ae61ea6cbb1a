"""docs/support.md: every cell is launched. A yes trains, a no ends with its line; `plan` says no, too."""

import sys

import pytest

from shared.config import parse as configs
from shared.process.errors import ConfigError
from tests.conftest import ROOT, Run, load_template, run
from tests.extras.test_vision import many, models  # noqa: F401
from tools import memory, new, plan, support

FOUR = ("hsdp", "fsdp2_tensor_parallel", "fsdp2_sequence_parallel")
FLAG = {"compile": "torch_compile", "4 bits": "load_in_4bit", "streaming": "streaming"}
FLAG |= {"EMA": "ema_decay", "mixtures": "mix_weights"}


def test_the_page_and_its_names_are_those_of_the_tables():
    assert (ROOT / "docs/support.md").read_text() == support.page(), "python -m tools.support > docs/support.md"
    assert {*support.TEMPLATES} == {*new.templates()}
    elsewhere = {"cpu", "single_gpu", "fp8", "multi_node_ddp", "multi_node_hsdp"}
    assert {path.stem for path in (ROOT / "accelerate_configs").iterdir()} - elsewhere == {*support.LAUNCHES}


def test_the_table_is_that_of_the_flags():
    for name in support.TEMPLATES:
        template = load_template(name)
        known = configs.flags(template.Config)
        for feature, flag in FLAG.items():
            if name == "pretrain_pipeline" and feature in ("streaming", "EMA"):
                with pytest.raises(ConfigError, match="not with a pipeline"):
                    configs.parse(template.Config, [f"--{flag}", "0.9"][: 1 + (feature == "EMA")])
                known.pop(flag)
            assert (flag in known) == (not support.refusal(name, features=[feature])), (name, feature)
        assert ("packing" in known or "pretrain" in name) == (not support.refusal(name, features=["packing"]))
        assert ("skip_bad_images" in known) == (not support.refusal(name, features=["images"]))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--template grpo --launch sequence_parallel", "cannot divide rows over GPUs"),
        ("--template grpo --ema_decay 0.9 --launch deepspeed_zero3", "--ema_decay does not work with DeepSpeed"),
        ("--lora_r 8 --load_in_4bit --launch tensor_parallel", "cannot cut quantised weights"),
        ("--template dpo --streaming", "dpo.py has no streaming"),
        ("--template flux", "--template is one of lora_finetune, "),
        ("--launch hsdp --seq_length 64", "no figures for --launch hsdp"),
    ],
)
def test_plan_refuses_what_the_page_says_no_to(monkeypatch, flags, said):
    monkeypatch.setattr(sys, "argv", ["plan", *flags.split()])
    with pytest.raises(ConfigError, match=said):
        plan.main()


def test_plan_leaves_out_launches_that_a_template_cannot_use(monkeypatch, capsys):
    monkeypatch.setattr(memory, "activations", lambda *_, **__: dict.fromkeys(memory.CHECKPOINTING, 0.0))
    monkeypatch.setattr(sys, "argv", ["plan", "--template", "grpo", "--gpus", "2", "--seq_length", "64"])
    plan.main()
    table, _, rest = capsys.readouterr().out.partition("\n\nactivations and peak")
    assert "fsdp2_sequence_parallel" not in table and "tensor_parallel " in table
    assert "fsdp2_sequence_parallel is left out: this template cannot divide rows" in rest


def refuses(done: Run, line: str) -> bool:
    """Whether a launch ended with this line, once."""
    errors = [text for text in done.output.splitlines() if text.startswith("error: ")]
    return done.returncode != 0 and len(errors) == 1 and line in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("template", sorted({*support.TEMPLATES} - {"pretrain", "lora_finetune"}))
def test_every_template_trains_or_ends_with_its_line(tmp_path, template):
    """pretrain.py does on every launch in promises/test_strategies.py, lora_finetune.py does below."""
    wrong = {}
    for launch in support.LAUNCHES:
        flags = (*new.FLAGS[template].split(), "--max_steps", 2)
        done = run(template, tmp_path / launch, *flags, processes=4 if launch in FOUR else 2, config=launch, check=False)
        line = support.refusal(template, launch)
        if not (refuses(done, line) if line else done.returncode == 0 and (tmp_path / launch / "final").is_dir()):
            wrong[launch] = done.output
    assert wrong == {}


@pytest.fixture(scope="module")
def asked(tmp_path_factory, tiny_model, chat_file, many, models):  # noqa: F811
    """The flags of lora_finetune.py by feature."""
    more = tmp_path_factory.mktemp("more") / "more.jsonl"
    more.write_text(chat_file.read_text().replace("the", "a"))
    text = ("--model_name_or_path", tiny_model, "--seq_length", 64, "--train_file", chat_file)
    return {
        "packing": (*text, "--packing", "on"),
        "compile": (*text, "--torch_compile"),
        "4 bits": (*text, "--load_in_4bit"),
        "images": ("--model_name_or_path", models("qwen2_5_vl"), "--seq_length", 1024, "--train_file", many),
        "streaming": (*text, "--streaming", "--validation_file", chat_file),
        "EMA": (*text, "--ema_decay", 0.9),
        "mixtures": (*text, more, "--mix_weights", 0.7, 0.3),
    }


@pytest.mark.slow
@pytest.mark.parametrize("feature", support.FEATURES)
def test_every_feature_learns_what_one_process_learns_or_ends_with_its_line(asked, tmp_path, feature):
    few = ("--max_steps", 3, "--global_batch_size", 8, "--eval_samples", 8, "--show_answers", 0, "--lora_dropout", 0.0)

    def losses(launch: str, processes: int) -> list[float]:
        given = (*asked[feature], *few, "--per_device_train_batch_size", 4 // processes)
        done = run("lora_finetune", tmp_path / launch, *given, processes=processes, config=launch, check=False)
        line = support.refusal("lora_finetune", launch, [feature])
        assert refuses(done, line) if line else done.returncode == 0, (launch, done.output)
        return [] if line else [*done.losses.values(), *done.each("eval_loss")]

    alone = losses("cpu", 1)
    for launch in support.LAUNCHES:
        found = losses(launch, 4 if launch in FOUR else 2)
        assert not found or found == pytest.approx(alone, abs=2e-5), launch
