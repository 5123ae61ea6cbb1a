"""What few runs need: imported by the function that asks, and nowhere else; a project may lack it."""

import http.server
import os
import re
import sys
import tarfile
import threading
from functools import partial

import pytest
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from shared import extras
from shared.run import exits
from tests.conftest import LAUNCHER, MISSING, ROOT, free_port, load_template, run_here, write_lines
from tools import extras as extras_of
from tools import new

# Who asks for which extra. A new line is a new place at which the core knows of a rare capability.
ASKED = {
    ("data/order.py", "mixture"),
    ("text/loaders.py", "streaming"),
    ("data/records.py", "remote"),
    ("images/files.py", "tars"),
    ("models/adapters.py", "experts"),
    ("models/attention.py", "sequence"),
    ("models/loading.py", "experts"),
    ("models/loss.py", "experts"),
    ("models/loss.py", "sequence"),
    ("models/weights.py", "deepspeed"),
    ("parallel/sharding.py", "sequence"),
    ("parallel/sharding.py", "tensor"),
    ("parallel/strategy.py", "deepspeed"),
    ("parallel/strategy.py", "sequence"),
    ("rollouts/rollouts.py", "engines"),
    ("rollouts/rollouts.py", "refill"),
    ("rollouts/rollouts.py", "reward_model"),
    ("rollouts/rollouts.py", "turns"),
    ("rollouts/prompts.py", "turns"),
    ("rollouts/prompts.py", "vision"),
    ("run/checkpoint_files.py", "mirror"),
    ("run/setup.py", "averages"),
    ("run/setup.py", "mirror"),
    ("run/setup.py", "rehearsal"),
    ("text/loaders.py", "vision"),
    ("text/preferences.py", "reward_model"),
    ("text/preferences.py", "vision"),
    ("text/pretraining.py", "streaming"),
    ("training/optim.py", "optimizers"),
}


def test_the_core_imports_an_extra_in_the_function_that_asks_alone():
    found = set()
    for path in (ROOT / "shared").rglob("*.py"):
        place = path.relative_to(ROOT / "shared")
        if place.parts[0] == "extras":
            continue
        for name, in_function in new.imports(path):
            match = re.match(r"shared\.extras\.(\w+)", name)
            assert in_function or not name.startswith("shared.extras"), (place, name)
            if match:
                found.add((str(place), match[1]))
    assert found == ASKED


def test_each_extra_is_listed_and_the_templates_import_only_what_they_cannot_do_without():
    names = {path.stem for path in (ROOT / "shared/extras").iterdir() if path.stem not in ("__init__", "__pycache__")}
    assert {*names, *MISSING} == extras_of.EXTRAS.keys() == ALONE.keys() | extras_of.ALWAYS | COMMANDS
    for template in (ROOT / "templates").glob("*.py"):
        outside = [name.split(".") for name, inside in new.imports(template) if not inside]
        needed = {name[2] for name in outside if len(name) > 2 and "extras" in name}
        assert needed <= extras_of.CANNOT_DO_WITHOUT.get(template.stem, set())


SHORT = ("--max_steps", 2, "--global_batch_size", 4, "--per_device_train_batch_size", 2, "--report_to", "none")
TEXT = ("--seq_length", 32, "--train_file", "{one}")
STREAM = ("--streaming", "--tokenizer_name", "{tiny}", "--validation_split_percentage", 30)
ALONE = {  # extra: template, launch config of two processes, flags
    "averages": ("text_classification", None, ("--ema_decay", 0.5, "--seq_length", 32, "--validation_split_percentage", 2)),
    "deepspeed": ("pretrain", "deepspeed_zero2", (*TEXT, "--optim", "adamw", "--vocab_size", 300)),
    "distillation": ("distill", "ddp", ("--seq_length", 64, "--max_train_samples", 40, "--on_policy", 0.5)),
    "engines": ("grpo", None, ("--group_size", 2, "--max_new_tokens", 4, "--rollout_engine", "continuous")),
    "experts": ("full_finetune", None, (*TEXT, "--model_name_or_path", "{moe}", "--show_answers", 0)),
    "masked": ("pretrain", None, (*TEXT, "--vocab_size", 300, "--optim", "adamw", "--objective", "mlm")),
    "mirror": ("lora_finetune", "ddp", (*TEXT, "--show_answers", 0, "--mirror_to", "{mirror}")),
    "mixture": ("lora_finetune", None, ("--seq_length", 64, "--train_file", "{one}", "{other}", "--mix_weights", 1, 2)),
    "optimizers": ("full_finetune", None, (*TEXT, "--weights_dtype", "bf16", "--show_answers", 0)),
    "pipeline": ("pretrain_pipeline", "ddp", (*TEXT, "--vocab_size", 300, "--optim", "adamw")),
    "refill": ("grpo", None, ("--group_size", 2, "--max_new_tokens", 4, "--eval_answers", 2, "--show_answers", 0)),
    "rehearsal": ("lora_finetune", None, (*TEXT, "--find_batch_size", "--dress_rehearsal", "--show_answers", 0)),
    "remote": ("lora_finetune", None, ("--seq_length", 64, "--train_file", "{url}", "--show_answers", 0)),
    "replicas": ("pretrain", "ddp", (*TEXT, "--vocab_size", 300, "--sync_every", 2)),
    "reward_model": ("dpo", None, ("--seq_length", 64, "--train_file", "{pairs}", "--loss_type", "reward")),
    "sequence": ("lora_finetune", "sequence_parallel", (*TEXT, "--show_answers", 0)),
    "streaming": ("pretrain", None, (*TEXT, *STREAM)),
    "tagging": ("token_classification", "ddp", ("--seq_length", 32, "--validation_split_percentage", 2)),
    "tars": ("image_classification", None, ("--train_file", "{tar}", "--image_size", 16, "--dataloader_num_workers", 0)),
    "tensor": ("lora_finetune", "tensor_parallel", (*TEXT, "--show_answers", 0)),
    "turns": ("grpo", None, ("--train_file", "{asked}", "--group_size", 2, "--max_new_tokens", 9, "--max_turns", 2)),
    "vision": ("full_finetune", None, ("--demo_images", "--show_answers", 0)),
}
COMMANDS = {"comparisons"}  # which no run asks for
IN_ONE_PROCESS = [(extra, *ALONE[extra][::2]) for extra in ALONE if ALONE[extra][1] is None or extra == "replicas"]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, image_folder, tiny_model):
    """What the flags name, as text."""
    folder, rows = tmp_path_factory.mktemp("inputs"), [{"text": f"{n} " + "and so on " * 9} for n in range(60)]
    with tarfile.open(folder / "photos.tar", "w") as tar:
        tar.add(image_folder / "train", "photos")
    asked = [{"messages": [{"role": "user", "content": str(n)}], "answer": str(n)} for n in range(30)]
    picture = {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}
    paths = {"one": write_lines(folder / "a.jsonl", rows), "other": write_lines(folder / "b.jsonl", rows)}
    paths |= {"tar": folder / "photos.tar", "pictures": write_lines(folder / "c.jsonl", [picture]), "tiny": tiny_model}
    pairs = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(60)]
    paths |= {"asked": write_lines(folder / "d.jsonl", asked), "pairs": write_lines(folder / "e.jsonl", pairs)}
    paths["mirror"] = folder / "mirror"
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for part in (tokenizer, Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **sizes))):
        part.save_pretrained(folder / "moe")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/a.jsonl"
        yield {name: str(value) for name, value in paths.items()} | {"moe": str(folder / "moe"), "url": url}
        server.shutdown()


@pytest.mark.parametrize(
    ("extra", "template", "flags"),
    [
        *IN_ONE_PROCESS,
        *(("vision", template, ("--train_file", "{pictures}")) for template in ("lora_finetune", "dpo", "grpo")),
    ],
)
def test_a_run_that_asks_for_a_missing_extra_ends_with_one_line(monkeypatch, tmp_path, inputs, extra, template, flags):
    for name in [name for name in sys.modules if name.startswith(f"shared.extras.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, f"shared.extras.{extra}", None)
    monkeypatch.delattr(extras, extra, raising=False)
    with pytest.raises(ImportError) as caught:
        run_here(template, *(str(flag).format(**inputs) for flag in flags), "--output_dir", tmp_path / "run")
    end = exits._as_clean_exit(caught.value, load_template(template).Config())
    assert end is not None and end.exit_code == 2
    missing = f"shared/extras/{extra} is not in this project: add it with the line that its README.md gives"
    assert str(end).startswith(missing)
    assert not (tmp_path / "run/metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("extra", ALONE)
def test_a_project_has_what_an_extra_needs_and_without_it_says_so(extra, tmp_path, inputs):
    template, config, flags = ALONE[extra]

    def train(folder, extras):
        new.create(folder, new.build((template,), "x", extras))
        argv = ["--mixed_precision", "no", "--main_process_port", str(free_port()), "--num_processes", str(1 + bool(config))]
        if config:  # launch configs come with what they need
            argv = ["--config_file", str(ROOT / f"accelerate_configs/{config}.yaml"), *argv]
        flat = [str(flag).format(**inputs) for flag in (*SHORT, *flags)]
        return LAUNCHER.run([*argv, "train.py", *flat, "--output_dir", str(folder / "run")], dict(os.environ), cwd=folder)

    code, output = train(tmp_path / "with", [extra])
    assert code == 0 and (tmp_path / "with/run/final").is_dir(), output
    assert re.search(rf"^  extras +.*\b{extra}\b", (tmp_path / "with/run/summary.txt").read_text(), re.M)
    if extra not in extras_of.OF_A_TEMPLATE:  # without which their templates are not there
        code, output = train(tmp_path / "without", [])
        assert code != 0 and f"error: shared/extras/{extra} is not in this project" in output, output
