"""lora_finetune.py, launched for real."""

import contextlib
import json
import math
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.process.errors import ConfigError
from shared.process.version import version
from tests.conftest import LAUNCHER, ROOT, Run, launch_environment, run, run_here, slow
from tests.plain_loop import padded_chats

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
            runs[packing, config] = run("lora_finetune", folder, *flags, processes=processes, config=config)
        return runs[packing, config]

    return launch


def adapter(folder):
    return load_file(folder / "final" / "adapter_model.safetensors")


def assert_same_learning(a: Run, b: Run, tolerance=1e-5):
    assert a.losses.keys() == b.losses.keys()
    for step, loss in a.losses.items():
        assert b.losses[step] == pytest.approx(loss, rel=tolerance), step
    assert b.last("eval_loss") == pytest.approx(a.last("eval_loss"), rel=tolerance)
    ours, theirs = adapter(a.folder), adapter(b.folder)
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 2 * len(LAYERS)
    for name, value in ours.items():
        # AdamW's first steps have the size of the rate whatever the gradient, so rounding near zero shows most there.
        torch.testing.assert_close(theirs[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("packing", "config", "strategy"),
    [
        ("--packing", "ddp", "DDP x 2 on cpu, fp32"),
        ("--no_packing", "fsdp2", "FSDP2 x 2 on cpu, fp32"),
        slow("--packing", "fsdp2", "FSDP2 x 2 on cpu, fp32"),
        slow("--no_packing", "ddp", "DDP x 2 on cpu, fp32"),
    ],
)
def test_learns_the_same_however_launched(launched, packing, config, strategy):
    other = launched(packing, 2, config)
    assert other.manifest(8)["world_size"] == 2
    assert other.manifest(8)["strategy"] == strategy
    assert_same_learning(launched(packing), other)


@pytest.mark.parametrize("packing", ["--packing", "--no_packing"])
def test_equals_a_plain_loop(tiny_model, chat_file, tmp_path, packing):
    """PEFT and a hand-written padded loop with none of shared/; all samples in each batch, so order plays no part.

    Packed rows must give the very same, since packed documents do not see each other.
    """
    from accelerate.utils import set_seed
    from peft import LoraConfig, get_peft_model

    steps, rate = 5, 1e-2
    rows = [json.loads(line)["messages"] for line in chat_file.read_text().splitlines()]
    packed_rows = None
    if packing == "--packing":
        from shared.text import chat, options
        from shared.text.packing import Packed

        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        settings = options.ChatConfig(train_file=(str(chat_file),), validation_file=(str(chat_file),), seq_length=96)
        packed_rows = len(Packed(chat.open_samples(settings, tokenizer)[0], 96))
    size = packed_rows or len(rows)
    theirs = run(
        *("lora_finetune", tmp_path, "--model_name_or_path", tiny_model, "--train_file", chat_file),
        *("--validation_file", chat_file, "--seq_length", 96, "--lora_r", 4, "--lora_alpha", 8, "--learning_rate", rate),
        *("--lr_scheduler_type", "constant", "--warmup_steps", 0, "--max_steps", steps, "--max_grad_norm", 0),
        *("--global_batch_size", size, "--per_device_train_batch_size", size, "--show_answers", 0, packing),
    )

    ids, labels, mask = padded_chats(AutoTokenizer.from_pretrained(tiny_model), rows)
    set_seed(0)  # which decides the adapters' random start
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    for step in range(steps):
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert theirs.losses[step + 1] == pytest.approx(loss.item(), rel=1e-5)
    expected = {n.replace(".default", ""): p.detach() for n, p in model.named_parameters() if p.requires_grad}
    for name, value in adapter(tmp_path).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_a_checkpoint_holds_the_adapter_only_and_resumes_elsewhere(base, launched, tmp_path):
    ddp = launched("--packing", 2, "ddp")
    start = ddp.folder / "checkpoint-000004"
    size = sum(p.stat().st_size for p in start.glob("*.safetensors"))
    adapters = sum(v.numel() * 4 for v in adapter(ddp.folder).values())
    assert size < 3 * adapters + 2000 * 4 * len(adapter(ddp.folder))  # weights, two moments, headers; no base
    flags = (*base, "--packing", "--per_device_train_batch_size", 2, "--resume_from_checkpoint", start)
    other = run("lora_finetune", tmp_path, *flags, processes=2, config="fsdp2")
    assert other.manifest(8)["strategy"] == "FSDP2 x 2 on cpu, fp32"
    assert other.losses == pytest.approx({step: loss for step, loss in ddp.losses.items() if step > 4}, rel=1e-5)


def evaluation_loss(model, folder, chat_file) -> float:
    """Mean loss a learned token of the whole file, by hand, padded one by one."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total = count = 0.0
    for line in chat_file.read_text().splitlines():
        encoded = tokenizer.apply_chat_template(
            json.loads(line)["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, learned = torch.tensor([encoded["input_ids"]]), torch.tensor([encoded["assistant_masks"]]).bool()
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1]
        labels = torch.where(learned, ids, -100)[:, 1:]
        total += F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum").item()
        count += int((labels != -100).sum())
    return total / count


@pytest.mark.parametrize(
    "extra",
    [
        ("--load_in_4bit",),
        ("--use_dora", "--use_rslora"),
        ("--modules_to_save", "lm_head"),
    ],
    ids=lambda e: "-".join(f.strip("-") for f in e) or "plain",
)
def test_what_is_saved_evaluates_the_same_when_reloaded(base, tiny_model, chat_file, tmp_path, extra):
    from peft import PeftModel
    from transformers import BitsAndBytesConfig

    flags = (*base, "--validation_file", chat_file, "--merge_adapter", "--max_steps", 4, "--per_device_train_batch_size", 4)
    run_here("lora_finetune", *flags, *extra, "--output_dir", tmp_path)
    said = Run(tmp_path, 0, "")
    assert said.last("eval_loss") < said.rows[0]["eval_loss"]
    options = {}
    if "--load_in_4bit" in extra:
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
        options |= {"bnb_4bit_compute_dtype": torch.float32}
    quantised = {"quantization_config": BitsAndBytesConfig(**options), "device_map": {"": "cpu"}} if options else {}
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, **quantised)
    model = PeftModel.from_pretrained(model, str(tmp_path / "final")).eval()
    assert evaluation_loss(model, tmp_path / "final", chat_file) == pytest.approx(said.last("eval_loss"), rel=1e-4)
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
    run_here("lora_finetune", *base, "--load_in_4bit", "--max_steps", 2, "--output_dir", tmp_path)
    assert Run(tmp_path, 0, "").last("eval_loss") > 0


@pytest.mark.parametrize("config", ["fsdp2", slow("ddp")])
def test_qlora_on_two_processes_equals_one(base, tiny_model, chat_file, tmp_path, config):
    from peft import PeftModel

    flags = (*base, "--load_in_4bit")
    one = run("lora_finetune", tmp_path / "one", *flags, "--per_device_train_batch_size", 4)
    two = run("lora_finetune", tmp_path / "two", *flags, "--per_device_train_batch_size", 2, processes=2, config=config)
    assert two.manifest(8)["strategy"].startswith("FSDP2 x 2" if config == "fsdp2" else "DDP x 2")
    assert_same_learning(one, two)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    PeftModel.from_pretrained(model, str(tmp_path / "two" / "final"))
    names = [name for name in two.manifest(8)["files"] if name.endswith(".safetensors")]
    assert len(names) == 2


@pytest.mark.slow
def test_a_head_that_is_trained_is_sharded_saved_and_resumed(base, tmp_path):
    """FSDP2 keeps the head's weights gathered after a forward, such as the look at packing before the first step."""
    flags = (*base, "--modules_to_save", "lm_head", "embed_tokens", "--per_device_train_batch_size", 2)
    one = run("lora_finetune", tmp_path / "one", *flags)
    two = run("lora_finetune", tmp_path / "two", *flags, processes=2, config="fsdp2")
    assert two.manifest(8)["world_size"] == 2 and two.manifest(8)["strategy"].startswith("FSDP2 x 2")
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    start = tmp_path / "two" / "checkpoint-000004"
    again = run("lora_finetune", tmp_path / "again", *flags, "--resume_from_checkpoint", start, processes=2, config="fsdp2")
    assert again.losses == {step: loss for step, loss in two.losses.items() if step > 4}
    ours, theirs = adapter(tmp_path / "one"), adapter(tmp_path / "two")
    assert ours.keys() == theirs.keys()
    name = next(name for name in ours if "lm_head" in name)
    torch.testing.assert_close(theirs[name], ours[name], rtol=1e-3, atol=1e-4)


def test_a_run_that_was_killed_while_it_merged_merges_and_an_older_merge_is_named(base, tmp_path, capsys):
    flags = (*base, "--show_answers", 0, "--output_dir", tmp_path)
    run_here("lora_finetune", *flags, "--max_steps", 2, "--merge_adapter")
    assert f"base with adapter in {tmp_path}/merged" in capsys.readouterr().err
    (tmp_path / "merged").rename(tmp_path / "was")
    run_here("lora_finetune", *flags, "--max_steps", 2, "--merge_adapter")
    ours, theirs = load_file(tmp_path / "merged/model.safetensors"), load_file(tmp_path / "was/model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    run_here("lora_finetune", *flags, "--max_steps", 3, "--allow_changed", "max_steps")
    assert f"warning: {tmp_path}/merged holds an earlier adapter" in capsys.readouterr().err


def test_continues_from_an_adapter(base, tmp_path):
    flags = (*base, "--per_device_train_batch_size", 4)
    run_here("lora_finetune", *flags, "--output_dir", tmp_path / "first")
    first = Run(tmp_path / "first", 0, "")
    adapter_folder = tmp_path / "first" / "final"
    goes_on = ("--adapter_name_or_path", adapter_folder, "--output_dir", tmp_path / "second")
    with pytest.raises(ConfigError, match="continues from that adapter as it was made: drop --lora_r"):
        run_here("lora_finetune", *flags, *goes_on)
    rank = flags.index("--lora_r")
    run_here("lora_finetune", *flags[:rank], *flags[rank + 2 :], *goes_on)
    assert json.loads((tmp_path / "second/final/adapter_config.json").read_text())["r"] == 4
    with pytest.raises(ConfigError, match="final: an adapter, not a model"):
        run_here("lora_finetune", *flags, "--model_name_or_path", adapter_folder, "--output_dir", tmp_path / "third")
    second = Run(tmp_path / "second", 0, "")
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
    flags = (*base, "--per_device_train_batch_size", 4, "--report_to", "wandb", "--output_dir", tmp_path / "run")
    run_here("lora_finetune", *flags, "--max_steps", 4)
    assert "W&B: this run is logged offline" in capsys.readouterr().err
    run_here("lora_finetune", *flags, "--allow_changed", "max_steps")
    # The names of the folders tell less: two in one second differ by a suffix.
    offline = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(offline) == 2 and len({path.name for path in offline}) == 1


def test_tensorboard_gets_the_scalars_in_the_runs_folder(base, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = (*base, "--per_device_train_batch_size", 4, "--report_to", "tensorboard", "--output_dir", tmp_path / "run")
    run_here("lora_finetune", *flags)
    (events,) = (tmp_path / "run/lora_finetune").glob("events.out.tfevents.*")
    seen = EventAccumulator(str(events)).Reload()
    losses = [event.value for event in seen.Scalars("loss")]
    assert losses == pytest.approx(list(Run(tmp_path / "run", 0, "").losses.values()), rel=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"messages": []}\n', "data.jsonl:1: no message has the role assistant"),
        ('{"question": "x"}\n', "data.jsonl:1: columns question are of no known form"),
        ('{"prompt": "' + "long " * 200 + '", "completion": "x"}\n', "none of its 1 samples has a token to learn"),
        ('{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n', "fewer than one --global_batch_size"),
    ],
)
def test_bad_data_is_one_config_error(base, tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_text(content)
    given = [path if before == "--train_file" else flag for before, flag in zip((None, *base), base, strict=False)]
    flags = (*given, "--per_device_train_batch_size", 4, "--output_dir", tmp_path / "run")
    with pytest.raises(ConfigError) as caught:
        run_here("lora_finetune", *flags)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_answers_end_where_learned_turns_do(base, tiny_model, tmp_path, capsys):
    """A base model whose text ends with another token than its chat template's turns."""
    shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    turn = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<|pad|>\\n' }}{% endfor %}"
    tokenizer.chat_template = turn + "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    tokenizer.save_pretrained(tmp_path / "model")
    flags = [tmp_path / "model" if flag == tiny_model else flag for flag in base]
    run_here("lora_finetune", *flags, "--max_steps", 2, "--merge_adapter", "--output_dir", tmp_path / "run")
    config = json.loads((tmp_path / "run/merged/generation_config.json").read_text())
    assert config["eos_token_id"] == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|pad|>")]


def test_other_base_weights_are_refused_on_resume(base, tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "model")
    flags = [tmp_path / "model" if flag == tiny_model else flag for flag in base]
    run_here("lora_finetune", *flags, "--max_steps", 2, "--save_steps", 1, "--output_dir", tmp_path / "run")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        model.model.norm.weight *= 2
    model.save_pretrained(tmp_path / "model")
    more = ("--max_steps", 3, "--allow_changed", "max_steps", "--output_dir", tmp_path / "run")
    with pytest.raises(ConfigError, match="belongs to a run on other base weights"):
        run_here("lora_finetune", *flags, *more)


@pytest.mark.parametrize(
    ("flag", "names"), [("--lora_target_modules", ("q_proj", "vproj")), ("--modules_to_save", ("lmhead",))]
)
def test_a_name_that_the_model_does_not_have_is_refused(base, tmp_path, flag, names):
    with pytest.raises(ConfigError, match=f"{flag} {names[-1]}: the model has no module of that name"):
        run_here("lora_finetune", *base, flag, *names, "--output_dir", tmp_path)


def test_samples_are_looked_at_without_a_model(base, tmp_path, capsys):
    ignored, learned = ({"role": "assistant", "content": text} for text in ("not this", "but this"))
    asked = {"role": "user", "content": "Well?"}
    rows = [{"messages": [asked, ignored | {"weight": 0}, asked, learned]}] * 4 + [{"messages": [asked, learned]}] * 20
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = list(base)
    flags[flags.index("--train_file") + 1] = tmp_path / "chats.jsonl"
    run_here("lora_finetune", *flags, "--output_dir", tmp_path / "run", "--preprocess_only")
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
    done = run("lora_finetune", tmp_path, "--max_steps", 1, "--eval_samples", 8, "--max_new_tokens", 4)
    assert "functions of the Python standard library" in done.output
    assert math.isfinite(done.last("eval_loss"))
    lines = done.output.splitlines()
    console = lines[lines.index("lora_finetune") : next(n for n, line in enumerate(lines) if line.startswith("  output "))]
    assert 9 <= len(console) <= 12 and max(map(len, console)) <= 100
    assert all(line.strip().removesuffix(" ...") in done.summary for line in console)  # which has more of it
    assert "  attention  " in done.summary and "  attention  " not in done.output


def test_evaluates_without_dropout(base, tiny_model, tmp_path):
    losses = []
    for dropout in (0.0, 0.5):
        model = shutil.copytree(tiny_model, tmp_path / f"model-{dropout}")
        settings = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(settings | {"attention_dropout": dropout}))
        flags = [model if flag == tiny_model else flag for flag in base]
        run_here("lora_finetune", *flags, "--max_steps", 1, "--output_dir", tmp_path / f"run-{dropout}")
        losses.append(Run(tmp_path / f"run-{dropout}", 0, "").rows[0]["eval_loss"])
    assert losses[0] == losses[1]
    first = Run(tmp_path / "run-0.0", 0, "").rows[0]["eval_loss"]
    assert f"| eval_loss_before | {first:.4f} |" in (tmp_path / "run-0.0/final/README.md").read_text()
