"""Whatever happens to a run, the same command again continues it as if nothing had happened.

Each fault happens at a named place in a real `accelerate launch` (see tests/fault_actions.py) or comes from outside. The
continued run is compared with one that was left alone: samples of each step, losses, learning rates, evaluations, weights
and the optimizer's state, bit for bit.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from torch.optim.optimizer import register_optimizer_step_post_hook

from shared.commands.run import kill
from shared.process.errors import CleanExit, ConfigError
from shared.run.checkpoint_files import CheckpointError, checkpoints, verify
from shared.run.tensors import read_tensors
from tests.conftest import ACCELERATE, ROOT, SHAPE, Run, command, exit_of, learn_here, python, run, slow, with_fault
from tests.same import assert_same_bits
from tools import audit

STEPS = 8
COMMON = ("--max_steps", STEPS, "--save_steps", 2, "--save_total_limit", 2, "--eval_steps", 3, "--audit_data")
COMMON += ("--logging_steps", 3)  # intervals that no save ends: what a resumed run logs is of the whole interval


@pytest.fixture(scope="module")
def flags(text_file, chat_file, tiny_model, image_folder, architectures):
    """By template: a small run with accumulation, evaluations between the saves, and something random in each step."""
    batch = ("--global_batch_size", 8, "--per_device_train_batch_size", 2)
    return {
        "pretrain": (
            *(*COMMON, *batch, "--train_file", text_file, "--vocab_size", 320, "--seq_length", 32, "--eval_samples", 8),
            *("--per_device_eval_batch_size", 1, "--config_overrides", SHAPE + ",attention_dropout=0.1"),
        ),
        "lora_finetune": (
            *(*COMMON, *batch, "--train_file", chat_file, "--model_name_or_path", tiny_model, "--seq_length", 64),
            *("--lora_dropout", 0.1, "--show_answers", 0, "--eval_samples", 4),
        ),
        "image_classification": (
            *(*COMMON, *batch, "--train_dir", image_folder, "--config_name", architectures / "resnet", "--image_size", 16),
            *("--dataloader_num_workers", 2, "--ema_decay", 0.9, "--mixup_alpha", 0.3, "--cutmix_alpha", 1.0),
            *("--auto_augment", "randaugment", "--random_erasing", 0.3),
        ),
        "pretrain_pipeline": (
            *(*COMMON, *batch, "--train_file", text_file, "--vocab_size", 320, "--seq_length", 32, "--eval_samples", 4),
            *("--config_overrides", SHAPE + ",attention_dropout=0.1,tie_word_embeddings=false"),
        ),
    }


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """(template, processes) -> the run that was left alone, made once."""
    runs: dict[tuple[str, int], Run] = {}

    def launch(template: str, processes: int) -> Run:
        if (template, processes) not in runs:
            folder = tmp_path_factory.mktemp(f"{template}-{processes}") / "run"
            runs[template, processes] = run(template, folder, *flags[template], processes=processes)
        return runs[template, processes]

    return launch


def assert_continues(template, folder, given, straight, processes) -> Run:
    """The same command again ends well, and all is as it would have been."""
    again = run(template, folder, *given, processes=processes)
    assert_same_bits(straight(template, processes), again)
    assert not audit.check(folder).problems
    assert exit_of(folder)["exit_code"] == 0
    left = {p.name for p in folder.iterdir() if p.name.startswith((".tmp", ".old", ".write"))}
    assert left <= {".tmp-notes"}  # which is not ours
    return again


def valid_checkpoints(folder) -> list[int]:
    steps = []
    for path in checkpoints(folder):
        try:
            steps.append(verify(path)["step"])
        except CheckpointError:
            continue
    return steps


# SIGKILL -------------------------------------------------------------------------------------------------------------

# place: checkpoints that are whole then (saves at 2, 4, 6, 8; two are kept). Each run continues what the last has left.
IN_TURN = {
    "setup:kill": [],
    "micro_batch:kill@1": [],
    "micro_batch:kill@6": [2],  # in the middle of accumulation
    "save.shard:kill": [2],
    "update:kill@1": [2],
    "save.manifest:kill": [2],
    "save.rename:kill": [2],
    "save.rename:kill#0": [2],  # one of the two processes
    "resume.verified:kill#1": [2],
    "resume.loaded:kill": [2],
    "save.renamed:kill": [2, 4],
    "save.prune:kill": [2, 4, 6],
    "evaluation:kill": [2, 4, 6],
    "finish:kill": [6, 8],
}


@pytest.mark.slow
def test_a_killed_zero_run_keeps_the_batchnorm_statistics_of_each_rank(flags, tmp_path):
    given = (*flags["image_classification"], "--ema_decay", 0)
    how = {"processes": 2, "config": "deepspeed_zero2"}
    one = run("image_classification", tmp_path / "one", *given, **how)
    killed = with_fault("image_classification", tmp_path / "run", "save.renamed:kill@2", *given, **how)
    assert killed.returncode != 0 and valid_checkpoints(tmp_path / "run")
    assert_same_bits(one, run("image_classification", tmp_path / "run", *given, **how))


@pytest.mark.parametrize(
    ("template", "processes", "faults"),
    [
        ("pretrain", 2, IN_TURN),
        ("lora_finetune", 1, ("micro_batch:kill@10", "finish:kill")),
        ("image_classification", 1, ("micro_batch:kill@10", "evaluation:kill")),
        ("pretrain_pipeline", 2, ("save.manifest:kill@3", "finish:kill")),
        ("image_classification", 2, ("micro_batch:term@10#1", "update:kill@2")),
    ],
)
@pytest.mark.slow
def test_killed_at_many_places_in_turn(flags, straight, tmp_path, template, processes, faults):
    given, folder = flags[template], tmp_path / "run"
    for fault in faults:
        killed = with_fault(template, folder, fault, *given, processes=processes)
        assert killed.returncode != 0 and not (folder / "final").exists(), fault
        assert "does not fit this model" not in killed.output, fault
        whole = valid_checkpoints(folder) if folder.exists() else []
        assert whole == IN_TURN[fault] if faults is IN_TURN else whole, fault
    assert_continues(template, folder, given, straight, processes)
    assert template != "lora_finetune" or "is finished" in run(template, folder, *given).output


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--async_save",)])
def test_one_ranks_save_that_fails_fails_the_run_and_keeps_what_was_saved(flags, straight, tmp_path, more):
    """In the foreground, and in the background, where it may also be killed."""
    given, folder = (*flags["pretrain"], *more), tmp_path / "run"
    failed = with_fault("pretrain", folder, "save.shard:full@2#1", *given, processes=2)
    assert failed.output.count("error: checkpoint-000004 could not be saved: rank 1: ") == 1
    assert "No space left on device" in failed.output and exit_of(folder)["exit_code"] == 3
    assert valid_checkpoints(folder) == [2] and not list(folder.glob(".tmp-*"))
    if more:
        assert with_fault("pretrain", folder, "save.rename:kill#0", *given, processes=2).returncode != 0
        assert valid_checkpoints(folder) == [2]
    assert_continues("pretrain", folder, given, straight, 2)


# Signals -------------------------------------------------------------------------------------------------------------


def assert_stopped(stopped, folder, step):
    assert stopped.returncode != 0
    cause = exit_of(folder)
    assert cause["exit_code"] == 143 and cause["cause"].startswith("stopped by SIG")
    assert stopped.output.count("stopped by SIG") == 1 and "/shared/" not in stopped.output  # no traceback of ours
    assert cause["step"] == step


@pytest.mark.parametrize(
    "in_turn",
    [
        {  # fault: step of the last checkpoint then
            "evaluation:term@1#1": 0,  # the evaluation is broken off, and made after the resume
            "micro_batch:usr@6#0": 3,
            "save.shard:term#1": 6,  # noted while it saves step 4, sent after step 5
        },
        slow(
            {
                "micro_batch:term@1#1": 2,  # nothing waits for the device after step 1: agreed on in the next
                "micro_batch:term@4#1,update:term@2#1": 4,  # twice
                "micro_batch:term@4#1,save.manifest:kill": 4,  # too slow: killed in the save that the signal asked for
                "micro_batch:term@8#1": 8,  # in the last step
            }
        ),
    ],
)
def test_asked_to_stop_on_one_rank(flags, straight, tmp_path, in_turn):
    given, folder = flags["pretrain"], tmp_path / "run"
    for fault, step in in_turn.items():
        stopped = with_fault("pretrain", folder, fault, *given, processes=2)
        if "kill" not in fault:
            assert_stopped(stopped, folder, step)
        assert stopped.returncode != 0 and valid_checkpoints(folder)[-1:] == [step][: bool(step)], fault
    assert_continues("pretrain", folder, given, straight, 2)


def start(template, folder, fault, *given, processes=1, how=""):
    """A real launch in the background, and the file that its output goes to."""
    log = folder.parent / f"{folder.name}.log"

    def in_the_foreground() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a shell ignores in its background jobs
        signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)

    argv = [*ACCELERATE, *command(template, folder, *given, processes=processes)]
    if how == "nohup":
        argv = [sys.executable, "-m", "shared", "run", *argv]
    if how == "through tee":
        argv = ["bash", "-c", '"$@" 2>&1 | tee "$0"', log, *argv]
    output = {"stdout": log.open("a") if how != "through tee" else subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    env = os.environ | {"PYTHONPATH": str(ROOT), "TEMPLATES_FAULT": fault}
    options = {"env": env, "start_new_session": True, "preexec_fn": in_the_foreground}
    return subprocess.Popen(argv, **output, **options), log


def wait_for(log, text, process, seconds=180):
    deadline = time.monotonic() + seconds
    while text not in log.read_text():
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.02)


def assert_nothing_is_left(folder, seconds=40):
    """No process has a command line that names the run's folder."""
    deadline = time.monotonic() + seconds
    while left := [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(folder) in (process.info["cmdline"] or []) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "processes", "number", "how"),
    [
        ("pretrain", 1, signal.SIGTERM, "to the launcher"),  # which dies without passing it on: the run notices
        ("pretrain", 2, signal.SIGKILL, "to the launcher"),
        ("image_classification", 1, signal.SIGINT, "to all"),  # with reading processes
        ("pretrain", 2, signal.SIGHUP, "through tee"),  # `accelerate launch ... 2>&1 | tee train.log`: it ends tee as well
        ("pretrain", 2, signal.SIGHUP, "nohup"),
    ],
)
def test_a_signal_from_outside(flags, straight, tmp_path, template, processes, number, how):
    """Stopping or killing the launcher, Ctrl-C, closing the terminal, in the fourth step."""
    given, folder = flags[template], tmp_path / "run"
    pause = f"micro_batch:pause@{16 // processes}"
    launcher, log = start(template, folder, pause, *given, processes=processes, how=how)
    log.touch()
    wait_for(log, "step 3/8", launcher)
    launcher.send_signal(number) if how == "to the launcher" else os.killpg(launcher.pid, number)
    code = launcher.wait(timeout=100)
    assert_nothing_is_left(folder)
    end = exit_of(folder)
    if how == "nohup":
        assert code == 0 and end["cause"] == "finished", log.read_text()
        assert_same_bits(straight(template, processes), Run(folder, 0, ""))
        return
    assert code != 0 or how == "through tee"
    if number != signal.SIGKILL:
        assert end["exit_code"] == 143 and re.match(f"stopped by ({number.name}|SIGTERM) at step", end["cause"]), end
    assert how != "to all" or log.read_text().count("stopped by") == 1
    assert_continues(template, folder, given, straight, processes)


def test_a_signal_before_the_first_step_ends_at_once(flags, tmp_path):
    done = with_fault("pretrain", tmp_path / "run", "setup:term", *flags["pretrain"])
    assert done.returncode != 0 and "stopped by SIGTERM at step 0" in done.output
    assert "Traceback" not in done.output.split("subprocess.CalledProcessError")[0].split("stopped by")[0]


# Ranks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(flags, straight, tmp_path):
    given, folder = (*flags["pretrain"], "--ddp_timeout", 5), tmp_path / "run"
    done = with_fault("pretrain", folder, "micro_batch:hang@6#1", *given, processes=2)
    assert done.returncode != 0 and exit_of(folder)["exit_code"] == 5
    assert "error: rank 0 at step 3: another rank does not answer: it has ended, or hangs" in done.output
    assert_continues("pretrain", folder, given, straight, 2)


# Disk ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system needs root and the right to mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.slow
def test_a_disk_that_fills_up(flags, straight, small_disk):
    given, folder = flags["pretrain"], small_disk / "run"
    process = subprocess.Popen([*ACCELERATE, *command("pretrain", folder, *given)], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    for line in process.stderr:
        seen += line
        if "step 3/8" in line:
            with contextlib.suppress(OSError):
                (small_disk / "other").write_bytes(bytes(8_000_000))
    assert process.wait(timeout=120) != 0
    assert ("No space left on device" in seen or "could not be written whole" in seen) and seen.count("error: ") == 1
    assert valid_checkpoints(folder)
    (small_disk / "other").unlink()
    assert_continues("pretrain", folder, given, straight, 1)


@pytest.mark.slow
def test_three_processes_continue_bit_for_bit(flags, tmp_path):
    """From three on, the place of a gradient in DDP's buckets decides the order of sums; they are laid out anew once."""
    given = (*flags["pretrain"], "--global_batch_size", 12, "--per_device_train_batch_size", 2)
    whole = run("pretrain", tmp_path / "whole", *given, processes=3)
    with_fault("pretrain", tmp_path / "run", "update:kill@4", *given, processes=3)
    assert_continues("pretrain", tmp_path / "run", given, lambda *_: whole, 3)


@pytest.mark.slow
def test_two_runs_on_one_folder(flags, straight, tmp_path):
    given, folder = flags["pretrain"], tmp_path / "run"
    first, log = start("pretrain", folder, "update:hang@4", *given)
    wait_for(log, "step 3/8", first)
    second = run("pretrain", folder, *given, check=False)
    assert second.returncode != 0
    assert f"error: --output_dir {folder}: another run is writing to it (process " in second.output
    kill(first.pid)
    first.wait()
    assert_continues("pretrain", folder, given, straight, 1)  # at once: no lock is left


# Numbers -------------------------------------------------------------------------------------------------------------


def test_one_ranks_bad_micro_batch_skips_the_step_on_all(flags, fault, tmp_path):
    # No dropout: the same on any number of processes. The bad step is one that is saved.
    given = (*flags["pretrain"], "--config_overrides", SHAPE, "--save_total_limit", 9, "--logging_steps", 1)
    given = (*given, "--max_steps", 6, "--save_steps", 1)
    two = with_fault("pretrain", tmp_path / "two", "micro_batch:inf@8#1", *given, processes=2, config="fsdp2")
    assert two.returncode == 0, two.output
    assert two.manifest(6)["strategy"].startswith("FSDP2 x 2")
    assert "warning: step 4: loss or gradient is not finite" in two.output
    samples = audit.records_of_steps(tmp_path / "two")[4][2]
    named = two.output.split("rank 1, micro-batch 2: ")[1].split(")")[0]
    assert set(map(int, named.split(", "))) <= set(samples)
    assert next(row for row in two.rows if row["step"] == 4 and "learning_rate" in row)["loss"] is None
    assert two.last("skipped_steps") == 1 and two.manifest(4)["state"]["skipped"] == 1
    third, bad, fifth = (read_tensors(two.folder / f"checkpoint-{step:06d}") for step in (3, 4, 5))
    assert all(bad[name].equal(third[name]) for name in third)
    assert not any(fifth[name].equal(bad[name]) for name in bad if name.startswith("model.") and fifth[name].ndim == 2)
    fault("micro_batch:inf@13")
    one = learn_here("pretrain", tmp_path / "one", *given)
    others = {step: loss for step, loss in one.losses.items() if step != 4}
    assert {s: v for s, v in two.losses.items() if s != 4} == pytest.approx(others, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "allowed", "why"),
    [
        ("ddp", 0, "error: step 5: loss or gradient is not finite"),
        ("deepspeed_zero2", 9, "DeepSpeed has updated with it"),  # it cannot skip a step
    ],
)
@pytest.mark.slow
def test_more_bad_steps_than_allowed_end_the_run_with_good_checkpoints(flags, straight, tmp_path, config, allowed, why):
    given, folder, launch = flags["pretrain"], tmp_path / "run", {"processes": 2, "config": config}
    reference = straight("pretrain", 2)
    if config != "ddp":  # it takes AdamW alone
        reference = run("pretrain", tmp_path / "reference", *given, "--optim", "adamw", processes=2)
    failed = with_fault("pretrain", folder, "micro_batch:nan@10#1", *given, "--max_skipped_steps", allowed, **launch)
    assert failed.returncode != 0 and exit_of(folder)["exit_code"] == 4
    assert failed.output.count(why) == 1 and "step 5: loss or gradient is not finite" in failed.output
    assert valid_checkpoints(folder) == [2, 4]
    again = run("pretrain", folder, *given, **launch)
    assert again.losses == pytest.approx(reference.losses, rel=0 if config == "ddp" else 1e-5)


def test_running_statistics_that_were_spoiled_are_not_trained_on(flags, fault, tmp_path):
    fault("micro_batch:nan@10")
    with pytest.raises(CleanExit, match="The running statistics have taken it in") as caught:
        learn_here("image_classification", tmp_path, *flags["image_classification"], "--dataloader_num_workers", 0)
    assert caught.value.exit_code == 4


# W&B -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small(flags):
    return (*flags["pretrain"], "--report_to", "wandb", "--max_steps", 4, "--logging_steps", 1)


@pytest.mark.parametrize("key", ["0123456789abcdef0123456789abcdef01234567", "not a key"])
def test_wandb_that_cannot_be_reached_or_knows_no_such_key(small, tmp_path, monkeypatch, capsys, key):
    monkeypatch.setenv("WANDB_MODE", "online" if key.isalnum() else "")
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "3")
    learn_here("pretrain", tmp_path / "run", *small)
    said = capsys.readouterr().err
    assert "this run is logged offline" in said and ("W&B cannot be reached" in said) == key.isalnum()
    assert list((tmp_path / "run/wandb").glob("offline-run-*")) and (tmp_path / "run/final").exists()


def test_wandb_that_dies_in_the_middle(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")

    def kill_it(*_):
        for process in psutil.Process().children(recursive=True):
            if "wandb" in process.name():
                process.kill()

    hook = register_optimizer_step_post_hook(kill_it)
    done = learn_here("pretrain", tmp_path / "run", *small)
    hook.remove()
    assert "warning: wandb failed, and the run goes on without it" in capsys.readouterr().err
    assert sorted(done.losses) == [1, 2, 3, 4] and (tmp_path / "run/final").exists()


# World sizes ---------------------------------------------------------------------------------------------------------


def test_two_processes_then_four(flags, tmp_path):
    """From two to one: test_strategies.py."""
    given = (*flags["pretrain"], "--config_overrides", SHAPE, "--global_batch_size", 12, "--per_device_train_batch_size", 2)
    whole, folder = learn_here("pretrain", tmp_path / "whole", *given), tmp_path / "run"
    with_fault("pretrain", folder, "update:kill@4", *given, processes=2)
    last = run("pretrain", folder, *given, processes=4)
    assert "4 processes x 1 at once x 3 accumulated" in last.summary
    assert last.losses == pytest.approx(whole.losses, rel=1e-5)
    assert audit.records_of_steps(folder) == audit.records_of_steps(tmp_path / "whole")
    assert last.each("learning_rate") == whole.each("learning_rate")


# Rehearsal, audit, and the user's own template -----------------------------------------------------------------------


@pytest.mark.parametrize(("template", "processes"), [("pretrain", 2), slow("image_classification", 1)])
def test_a_dress_rehearsal_changes_nothing(flags, straight, tmp_path, template, processes):
    done = run(template, tmp_path / "run", *flags[template], "--dress_rehearsal", processes=processes)
    assert "dress rehearsal: the longest batch" in done.output
    assert_same_bits(straight(template, processes), done)


@pytest.mark.parametrize(
    ("where", "cause"),
    [("save.manifest:full", "checkpoint-000000 could not be saved"), ("evaluation:error", "a fault on purpose")],
)
def test_a_dress_rehearsal_finds_what_would_fail_later(flags, fault, tmp_path, capsys, where, cause):
    fault(where)
    with pytest.raises((CheckpointError, RuntimeError), match=cause):
        learn_here("pretrain", tmp_path, *flags["pretrain"], "--dress_rehearsal")
    assert "step 1/" not in capsys.readouterr().err


def test_an_audit_finds_what_is_wrong(straight, tmp_path):
    shutil.copytree(straight("pretrain", 2).folder / "audit", tmp_path / "audit")
    assert not audit.check(tmp_path).problems
    first, second = (tmp_path / "audit" / f"rank-0000{rank}.jsonl" for rank in (0, 1))
    lines = second.read_text().splitlines(keepends=True)
    second.write_text("".join([*lines, lines[0]]))
    assert "used more than once" in audit.check(tmp_path).problems[0]
    second.unlink()
    with pytest.raises(ConfigError, match="the records of some ranks are missing"):
        audit.check(tmp_path)
    second.write_text("".join(lines))
    for path in (first, second):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] != 4))
    assert "4: no record of these steps" in audit.check(tmp_path).problems[0]


WRONG = """
import os, runpy, sys
sys.path.insert(0, {root!r})
from shared.data import order
right = order.seed_all
order.seed_all = lambda _, *key, **options: right(os.getpid(), *key, **options)
from shared.run.run import Run
asked = Run.should_evaluate
def noted(run):
    run.state.notes["process"] = os.getpid()
    return asked(run)
Run.should_evaluate = noted
runpy.run_path({template!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_verify_resume_trusts_a_good_template_and_names_what_a_bad_one_gets_wrong(flags, tmp_path):
    launch = [sys.executable, *command("pretrain", tmp_path / "unused", *flags["pretrain"])]
    verify = ("-m", "shared", "verify-resume", "--steps")
    good = python(*verify, 3, "--", *launch)
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stdout.count("same, bit for bit") == 8

    edited = tmp_path / "train.py"  # dropout that depends on when the process was started
    edited.write_text(WRONG.format(root=str(ROOT), template=str(ROOT / "templates/pretrain.py")))
    launch[launch.index(str(ROOT / "templates/pretrain.py"))] = str(edited)
    bad = python(*verify, 4, "--keep", tmp_path / "kept", "--", *launch)
    assert bad.returncode == 3, bad.stdout + bad.stderr
    assert "samples of each step   same" in bad.stdout and "losses and own values  DIFFERS" in bad.stdout
    assert "notes                  DIFFERS: first at step 0: process" in bad.stdout
    assert "error: the resumed run differs from the uninterrupted one" in bad.stderr
