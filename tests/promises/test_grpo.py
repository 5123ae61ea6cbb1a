"""grpo.py, launched for real: the same on every launch, killed and resumed, and it learns."""

import json
import os
import re
import shutil

import pytest

from shared.models.options import AdapterConfig
from shared.process.errors import ConfigError
from tests.conftest import LAUNCHER, ROOT, command, continued, learn_here, load_template, refusal, run, slow, write_lines
from tests.same import assert_goes_on, assert_same_bits
from tools import audit

STEPS = 4
LOGGED = ("loss", "grad_norm", "reward", "reward/correct", "answer_tokens", "equal_groups", "entropy", "cut_answers")


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory):
    """Answers of one or two digits; rewards differ within most groups."""
    records = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a in range(6) for b in range(4)]
    file = write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", records)
    return (
        *("--model_name_or_path", tiny_model, "--train_file", file, "--validation_file", file, "--max_new_tokens", 8),
        *("--global_batch_size", 4, "--group_size", 4, "--per_device_train_batch_size", 3, "--learning_rate", 5e-3),
        *("--per_device_eval_batch_size", 5, "--max_steps", STEPS, "--eval_steps", 2, "--save_steps", 2),
        *("--eval_answers", 7, "--audit_data"),
    )


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory):
    return learn_here("grpo", tmp_path_factory.mktemp("alone") / "run", *base)


def answers(ended) -> list[dict]:
    return [json.loads(line) for line in (ended.folder / "answers.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("config", ["fsdp2", slow("tensor_parallel"), slow("deepspeed_zero2")])
def test_every_launch_samples_and_learns_the_same(alone, base, tmp_path, config):
    """DDP: below."""
    other = run("grpo", tmp_path / "run", *base, processes=2, config=config)
    assert len(alone.each("grad_norm")) == STEPS and max(alone.each("grad_norm")) > 1e-2
    assert min(alone.each("equal_groups")) < 1
    for name in LOGGED:
        assert other.each(name) == pytest.approx(alone.each(name), abs=2e-4), name
    assert answers(other) == answers(alone)


@pytest.mark.parametrize(("config", "flags"), [(None, ("--full",)), slow("fsdp2", ("--kl_coef", 0.1))])
def test_between_two_updates_of_a_rollout_it_goes_on_bit_for_bit(base, tmp_path, config, flags):
    """On two processes after a kill."""
    given = (*base, "--updates_per_rollout", 3, "--max_steps", 6, "--save_steps", 1, "--save_total_limit", 9, *flags)
    if not config:
        whole = learn_here("grpo", tmp_path / "whole", *given)
        start = ("--resume_from_checkpoint", tmp_path / "whole/checkpoint-000002")
        resumed = learn_here("grpo", tmp_path / "run", *given, *start)
        assert_goes_on(whole, resumed, 2)
        assert answers(resumed) == [row for row in answers(whole) if row["step"] > 2]
    else:
        whole = run("grpo", tmp_path / "whole", *given, processes=2, config=config)
        assert whole.each("kl")[0] == 0 < whole.each("kl")[-1]
        resumed = continued("grpo", tmp_path / "run", "update:kill@3", *given, processes=2, config=config)
        assert_same_bits(whole, resumed)
        assert answers(resumed) == answers(whole) and not audit.check(resumed.folder).problems
    assert max(whole.each("clipped")) > 0 and len(whole.each("reward")) == 2


@pytest.mark.parametrize(("config", "processes"), [("ddp", 2), slow("fsdp2", 2)])
def test_groups_of_equal_rewards_are_sampled_again_and_a_kill_changes_nothing(base, tmp_path, config, processes):
    """Of other prompts, the same on any launch; between two updates, the checkpoint knows which."""
    plain = (*base, "--updates_per_rollout", 2, "--save_steps", 1)
    given = (*plain, "--dynamic_sampling", 3)
    one = learn_here("grpo", tmp_path / "one", *given)
    left_out = learn_here("grpo", tmp_path / "plain", *plain).each("equal_groups")
    assert max(one.each("resampled_groups")) > 0 and sum(one.each("equal_groups")) < sum(left_out)
    whole = run("grpo", tmp_path / "whole", *given, processes=processes, config=config)
    for name in (*LOGGED, "resampled_groups"):
        assert whole.each(name) == pytest.approx(one.each(name), abs=2e-4), name
    assert answers(whole) == answers(one)
    resumed = continued("grpo", tmp_path / "run", "update:kill@4", *given, processes=processes, config=config)
    assert_same_bits(whole, resumed)


def test_a_log_line_has_the_mean_over_its_rollouts_and_a_bad_update_names_its_prompts(base, fault, tmp_path, capsys):
    """Three steps to a line, two to a rollout. Then a loss is not finite."""
    given = (*base, "--updates_per_rollout", 2, "--max_steps", 6)
    each = learn_here("grpo", tmp_path / "each", *given)
    lines = learn_here("grpo", tmp_path / "lines", *given, "--logging_steps", 3)
    assert len(lines.each("loss")) == 3 and lines.each("reward") == pytest.approx(each.each("reward"))
    fault("micro_batch:nan@7")
    bad = learn_here("grpo", tmp_path / "bad", *given)
    said = " ".join("".join(capsys.readouterr()).split())
    told = re.search(r"step (\d): loss or gradient is not finite .* of rank 0, micro-batch (\d): ([\d, ]+)\)", said)
    assert told and 1 < int(told[1]) < 5 and bad.each("skipped_steps")[-1] == 1
    assert 1 <= len(told[3].split(", ")) <= 3 and max(map(int, told[3].split(", "))) < 24


def test_an_error_of_the_reward_function_is_one_line_of_its_own(base, tmp_path):
    """On one rank of two, below a helper in a file of the user's, in Python's own code; the run ends on both."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "templates/helper.py").write_text("import json\n\n\ndef read(text):\n    return json.loads(text)\n")
    template = tmp_path / "templates/grpo.py"
    wrong = "    if os.environ['RANK'] == '1':\n        helper.read('[1, ' + answer[:0])\n    right = record"
    text = template.read_text().replace("    right = record", wrong).replace("import sys\n", "import os\nimport sys\n", 1)
    template.write_text(text.replace("import torch\n", "import helper\nimport torch\n", 1))
    argv = command("grpo", tmp_path / "run", *base, processes=2)
    argv = [argument.replace(str(ROOT / "templates"), str(tmp_path / "templates")) for argument in argv]
    code, output = LAUNCHER.run(argv, dict(os.environ) | {"PYTHONPATH": str(ROOT)})
    print(output)
    line = f"{template.with_name('helper.py')}:5: return json.loads(text): json.decoder.JSONDecodeError: "
    said = " ".join(output.split())
    assert code and said.count(f"error on rank 1: {line}") == 1 and "; the answer is '" in said
    ended = json.loads((tmp_path / "run/exit.json").read_text())
    assert ended["exit_code"] == 2 and ended["rank"] == 1 and ended["cause"].startswith(line)


def test_what_does_not_go_together_is_refused():
    config = load_template("grpo").Config
    for changes, message in (
        ({"group_size": 1}, "--group_size"),
        ({"full": True, "kl_coef": 0.1}, "--kl_coef needs adapters alone"),
        ({"adapter": AdapterConfig(lora_dropout=0.1)}, "--lora_dropout 0.1: probabilities of answers are compared"),
        ({"adapter": AdapterConfig(modules_to_save=("lm_head",)), "kl_coef": 0.1}, "--kl_coef needs adapters alone"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(**changes)


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    """Without a flag: the largest of three digits, of which none to validate on was trained on."""
    demo = run("grpo", tmp_path / "run")
    before, *_, after = demo.each("eval_correct")
    # 0.5 to 0.98, by how a machine rounds; always the same digit would be right for a quarter
    assert before < 0.2 and after > 0.4
    assert len({row["answer"] for row in answers(demo)[-9:]}) > 1
    assert (tmp_path / "run/curves.png").exists()


def test_answers_that_do_not_fit_the_context_are_refused_in_the_name_of_their_flag(base, tmp_path):
    refused = refusal("grpo", *base, "--max_new_tokens", 250, "--output_dir", tmp_path / "run")
    assert re.search(r"--max_new_tokens and the longest prompt: \d+ is longer than the model's context of 256", refused)
