"""lora_finetune.py, launched for real."""

import contextlib
import json
import math
import shutil
from functools import partial

import pytest
import torch
from accelerate.utils import set_seed
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from shared.process.version import version
from tests.conftest import LAUNCHER, ROOT, instead, launch_environment, learn_here, refusal, run, write_lines
from tests.plain_loop import loss_of_chats, losses_of, padded_chats
from tests.same import assert_goes_on, assert_same_learning

learn = partial(learn_here, "lora_finetune")

LAYERS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def base(tiny_model, chat_file):
    """Flags of a tiny run: very different lengths, epochs that end in a ragged global batch."""
    return (
        *("--model_name_or_path", tiny_model, "--train_file", chat_file, "--validation_split_percentage", 15),
        *("--seq_length", 96, "--lora_r", 4, "--learning_rate", 1e-2, "--global_batch_size", 4, "--max_steps", 8),
        *("--eval_steps", 4, "--save_steps", 4, "--save_total_limit", 5, "--show_answers", 1, "--max_new_tokens", 4),
    )


@pytest.fixture(scope="module")
def launched(base, tmp_path_factory):
    """(packing, processes, config) -> its run, made once; 4 rows in each step, one at once where there are two processes."""
    runs = {}

    def launch(packing, processes=1, config=None):
        if (packing, config) not in runs:
            flags = (*base, packing, "--per_device_train_batch_size", 4 if processes == 1 else 1)
            folder = tmp_path_factory.mktemp("run")
            how = {"processes": processes, "config": config, "env": {} if config else {"TESTS_PAINT": "1"}}
            is_quiet = packing == "--no_packing" and not config  # of which nobody asks what it says
            runs[packing, config] = learn(folder, *flags) if is_quiet else run("lora_finetune", folder, *flags, **how)
        return runs[packing, config]

    return launch


@pytest.mark.parametrize(("packing", "config"), [("--packing", "ddp"), ("--no_packing", "fsdp2")])
def test_learns_the_same_however_launched(launched, packing, config):
    one, other = launched(packing), launched(packing, 2, config)
    assert len(one.weights()) == 2 * 2 * len(LAYERS)
    # AdamW's first steps have the size of the rate whatever the gradient, so rounding near zero shows most there.
    assert_same_learning(one, other, atol=1e-4)


def test_equals_a_plain_loop(tiny_model, tokenizer, chat_file, tmp_path):
    """PEFT and a hand-written padded loop with none of shared/; all samples in each batch, so order plays no part.

    Of packed rows: test_full_finetune.py.
    """
    steps, rate = 5, 1e-2
    rows = [json.loads(line)["messages"] for line in chat_file.read_text().splitlines()]
    theirs = learn(
        *(tmp_path, "--model_name_or_path", tiny_model, "--train_file", chat_file),
        *("--validation_file", chat_file, "--seq_length", 96, "--lora_r", 4, "--lora_alpha", 8, "--learning_rate", rate),
        *("--lr_scheduler_type", "constant", "--warmup_steps", 0, "--max_steps", steps, "--max_grad_norm", 0),
        *("--global_batch_size", len(rows), "--per_device_train_batch_size", len(rows), "--show_answers", 0),
        "--no_packing",
    )

    batch = padded_chats(tokenizer, rows)
    set_seed(0)  # which decides the adapters' random start
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    losses = losses_of(model, lambda: loss_of_chats(model, *batch), steps, rate)
    assert theirs.each("loss") == pytest.approx([*losses], rel=1e-5)
    expected = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name, value in theirs.weights().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_a_checkpoint_holds_the_adapter_only_and_resumes_elsewhere(base, launched, tmp_path):
    ddp = launched("--packing", 2, "ddp")
    start = ddp.folder / "checkpoint-000004"
    size = sum(p.stat().st_size for p in start.glob("*.safetensors"))
    adapters = sum(v.numel() * 4 for v in ddp.weights().values())
    assert size < 3 * adapters + 2000 * 4 * len(ddp.weights())  # weights, two moments, headers; no base
    flags = (*base, "--packing", "--per_device_train_batch_size", 2, "--resume_from_checkpoint", start)
    other = run("lora_finetune", tmp_path, *flags, processes=2, config="fsdp2")
    assert other.losses == pytest.approx({step: loss for step, loss in ddp.losses.items() if step > 4}, rel=1e-5)


def evaluation_loss(model, folder, chat_file) -> float:
    """Mean loss a learned token of the whole file, by hand; the chat template in the folder marks the same tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line)["messages"] for line in chat_file.read_text().splitlines()]
    ids, labels, mask = padded_chats(tokenizer, rows)
    marked = tokenizer.apply_chat_template(rows, return_dict=True, return_assistant_tokens_mask=True)["assistant_masks"]
    assert [sum(learned) for learned in marked] == (labels != -100).sum(1).tolist()
    with torch.no_grad():
        return loss_of_chats(model, ids, labels, mask).item()


@pytest.mark.parametrize("extra", [("--load_in_4bit",), ("--use_dora", "--use_rslora"), ("--modules_to_save", "lm_head")])
def test_what_is_saved_evaluates_the_same_when_reloaded(base, tiny_model, chat_file, tmp_path, extra):
    flags = (*base, "--validation_file", chat_file, "--merge_adapter", "--max_steps", 4, "--per_device_train_batch_size", 4)
    said = learn(tmp_path, *flags, *extra)
    assert said.last("eval_loss") < said.rows[0]["eval_loss"]
    quantised = {}
    if "--load_in_4bit" in extra:
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        settings = BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)
        quantised = {"quantization_config": settings, "device_map": {"": "cpu"}}
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, **quantised)
    model = PeftModel.from_pretrained(model, str(tmp_path / "final")).eval()
    assert evaluation_loss(model, tmp_path / "final", chat_file) == pytest.approx(said.last("eval_loss"), rel=1e-4)
    assert said.last("eval_perplexity") == pytest.approx(math.exp(said.last("eval_loss")), rel=1e-4)  # several batches
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    assert evaluation_loss(merged, tmp_path / "merged", chat_file) == pytest.approx(said.last("eval_loss"), rel=1e-4)
    card = (tmp_path / "final" / "README.md").read_text()
    assert str(tiny_model) in card and "eval_loss" in card and "lora_r: 4" in card
    assert "base_model" not in card.split("---")[1]  # a folder, which the Hub refuses there
    with contextlib.chdir(tmp_path):
        for name in ("final", "merged"):
            scope: dict = {}
            exec((tmp_path / name / "README.md").read_text().split("```python")[1].split("```")[0], scope)
            assert f'from_pretrained("{name}")' in (tmp_path / name / "README.md").read_text() and len(scope["answer"])
    assert f"\nMade by version {version()}, 1 process on cpu, fp32\n" in card
    assert merged.generation_config.eos_token_id == merged.config.eos_token_id  # which ends the turns here, too


def test_an_evaluation_leaves_4_bit_weights_as_they_are(base, tmp_path, monkeypatch):
    """bitsandbytes rearranges and rounds them there, for good, on CPUs that have AVX512-BF16; here all pretend to."""
    from bitsandbytes.nn import modules

    def rearrange(*_):
        raise AssertionError("rearranged")

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", rearrange)
    assert learn(tmp_path, *base, "--load_in_4bit", "--max_steps", 2).last("eval_loss") > 0


@pytest.mark.slow
def test_a_head_that_is_trained_is_sharded_saved_and_resumed(base, tmp_path):
    """FSDP2 keeps the head's weights gathered after a forward, such as the look at packing before the first step."""
    flags = (*base, "--modules_to_save", "lm_head", "embed_tokens", "--per_device_train_batch_size", 2)
    one = learn(tmp_path / "one", *flags)
    two = run("lora_finetune", tmp_path / "two", *flags, processes=2, config="fsdp2")
    assert_same_learning(one, two, atol=1e-4)
    start = tmp_path / "two" / "checkpoint-000004"
    again = run("lora_finetune", tmp_path / "again", *flags, "--resume_from_checkpoint", start, processes=2, config="fsdp2")
    assert_goes_on(two, again, 4)
    assert any("lm_head" in name for name in one.weights())


def test_a_run_that_was_killed_while_it_merged_merges_and_an_older_merge_is_named(base, tmp_path, capsys):
    flags = (*base, "--show_answers", 0)
    learn(tmp_path, *flags, "--max_steps", 2, "--merge_adapter")
    assert f"base with adapter in {tmp_path}/merged" in capsys.readouterr().err
    (tmp_path / "merged").rename(tmp_path / "was")
    done = learn(tmp_path, *flags, "--max_steps", 2, "--merge_adapter")
    ours, theirs = done.weights("merged"), done.weights("was")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    learn(tmp_path, *flags, "--max_steps", 3, "--allow_changed", "max_steps")
    assert f"warning: {tmp_path}/merged holds an earlier adapter" in capsys.readouterr().err


def test_continues_from_an_adapter(base, tmp_path):
    flags = (*base, "--per_device_train_batch_size", 4)
    first = learn(tmp_path / "first", *flags)
    goes_on = ("--adapter_name_or_path", tmp_path / "first/final", "--output_dir", tmp_path / "second")
    assert "continues from that adapter as it was made: drop --lora_r" in refusal("lora_finetune", *flags, *goes_on)
    rank = flags.index("--lora_r")
    second = learn(tmp_path / "second", *flags[:rank], *flags[rank + 2 :], *goes_on)
    assert json.loads((tmp_path / "second/final/adapter_config.json").read_text())["r"] == 4
    assert second.rows[0]["eval_loss"] == pytest.approx(first.last("eval_loss"), rel=1e-5)
    assert second.last("eval_loss") < first.last("eval_loss")


def test_the_log_states_the_data_and_marks_what_is_learned(launched):
    done = launched("--packing")
    assert "chat messages, the default chat template (### User / ### Assistant)" in done.summary
    assert "⟦" in done.output and "<|endoftext|>⟧" in done.output
    assert "23 read, 0 cut to 96 tokens, 0 dropped" in done.summary
    assert "model at step 0" in done.output and "model at step 8" in done.output
    assert {"eval_loss", "eval_perplexity"} <= done.rows[0].keys()
    logged = done.rows[1].keys()
    assert {"loss", "learning_rate", "grad_norm", "trained_tokens_per_second", "processed_tokens_per_second"} <= logged
    assert {"data_wait_share", "peak_memory_gb", "tokens"} <= logged
    assert (done.folder / "curves.png").stat().st_size > 10_000


def test_wandb_is_offline_without_a_login_and_one_run_over_a_resume(base, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    flags = (*base, "--per_device_train_batch_size", 4, "--report_to", "wandb")
    learn(tmp_path / "run", *flags, "--max_steps", 2)
    assert "W&B: this run is logged offline" in capsys.readouterr().err
    learn(tmp_path / "run", *flags, "--max_steps", 4, "--allow_changed", "max_steps")
    # The names of the folders tell less: two in one second differ by a suffix.
    offline = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(offline) == 2 and len({path.name for path in offline}) == 1


@pytest.mark.parametrize(
    ("record", "flags", "message"),
    [
        ({"messages": []}, (), "data.jsonl:1: no message has the role assistant"),
        ({"question": "x"}, (), "data.jsonl:1: columns question are of no known form"),
        ({"prompt": "long " * 200, "completion": "x"}, (), "none of its 1 samples has a token to learn"),
        (None, ("--lora_target_modules", "q_proj", "vproj"), "--lora_target_modules vproj: the model has no module of that"),
        (None, ("--modules_to_save", "lmhead"), "--modules_to_save lmhead: the model has no module of that name"),
    ],
)
def test_bad_input_is_one_config_error(base, tmp_path, record, flags, message):
    given = instead(base, "--train_file", write_lines(tmp_path / "data.jsonl", [record])) if record else base
    assert message in refusal("lora_finetune", *given, *flags, "--output_dir", tmp_path / "run")


def test_samples_are_looked_at_without_a_model(base, tmp_path, capsys):
    ignored, learned = ({"role": "assistant", "content": text} for text in ("not this", "but this"))
    asked = {"role": "user", "content": "Well?"}
    rows = [{"messages": [asked, ignored | {"weight": 0}, asked, learned]}] * 4 + [{"messages": [asked, learned]}] * 20
    file = write_lines(tmp_path / "chats.jsonl", rows)
    learn(tmp_path / "run", *instead(base, "--train_file", file), "--preprocess_only")
    output = capsys.readouterr().err
    assert output.count("the loss counts the tokens between") == 6 and "24 read" in output and "20 to train on" in output
    assert output.count("⟦but this") == 6 and "not this" in output and "⟦not" not in output
    assert not (tmp_path / "run").exists()


def test_a_wrong_model_leaves_no_folder(chat_file, tmp_path):
    argv = [ROOT / "templates/lora_finetune.py", "--model_name_or_path", "/no/such", "--train_file", chat_file]
    code, output = LAUNCHER.run([*map(str, argv), "--report_to", "none"], launch_environment(None), cwd=tmp_path)
    assert code and "error: /no/such: no such folder\n" in output
    assert not list((tmp_path / "outputs/lora_finetune").iterdir())


def test_the_demo_runs_with_no_argument(tmp_path):
    small = ("--max_steps", 1, "--eval_samples", 8, "--max_new_tokens", 4, "--max_train_samples", 200)
    done = run("lora_finetune", tmp_path, *small)
    assert "functions of the Python standard library" in done.output
    assert math.isfinite(done.last("eval_loss"))
    lines = done.output.splitlines()
    console = lines[lines.index("lora_finetune") : next(n for n, line in enumerate(lines) if line.startswith("  output "))]
    assert 9 <= len(console) <= 12 and max(map(len, console)) <= 100
    assert all(line.strip().removesuffix(" ...") in done.summary for line in console)  # which has more of it
    assert "  attention  " in done.summary and "  attention  " not in done.output


def test_evaluates_without_dropout(base, tiny_model, tmp_path):
    runs = []
    for dropout in (0.0, 0.5):
        model = shutil.copytree(tiny_model, tmp_path / f"model-{dropout}")
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(settings | {"attention_dropout": dropout}))
        flags = (*instead(base, "--model_name_or_path", model), "--max_steps", 1)
        runs.append(learn(tmp_path / f"run-{dropout}", *flags))
    first, other = (done.rows[0]["eval_loss"] for done in runs)
    assert first == other
    assert f"| eval_loss_before | {first:.4f} |" in (tmp_path / "run-0.0/final/README.md").read_text()
