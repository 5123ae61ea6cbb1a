"""What few runs need: imported by the function that asks, and nowhere else; a project may lack it."""

import http.server
import json
import os
import re
import sys
import tarfile
import threading
from functools import partial
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from shared import extras
from shared.run import exits
from tests.conftest import LAUNCHER, ROOT, free_port, load_template, run_here, write_lines
from tools import extras as extras_of
from tools import new

# Who asks for which extra. A new line is a new place at which the core knows of a rare capability.
ASKED = {
    ("data/order.py", "mixture"),
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
    ("run/setup.py", "averages"),
    ("run/setup.py", "rehearsal"),
    ("text/loaders.py", "vision"),
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
    assert names == extras_of.EXTRAS.keys() == ALONE.keys()
    for template in (ROOT / "templates").glob("*.py"):
        needed = {
            name.split(".")[2]
            for name, inside in new.imports(template)
            if name.count(".") > 1 and "extras" in name and not inside
        }
        assert needed <= extras_of.CANNOT_DO_WITHOUT.get(template.stem, set())


@pytest.fixture
def inputs(tmp_path, image_folder):
    rows = [{"text": f"{n} " + "and so on " * 9} for n in range(60)]
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(image_folder / "train", "photos")
    other = write_lines(tmp_path / "b.jsonl", rows)
    picture = {"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}
    return SimpleNamespace(
        one=write_lines(tmp_path / "a.jsonl", rows), other=other, tar=tmp_path / "photos.tar",
        pictures=write_lines(tmp_path / "c.jsonl", [picture]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "template", "flags"),
    [
        ("averages", "full_finetune", ["--ema_decay", "0.9"]),
        ("mixture", "lora_finetune", ["--train_file", "{one}", "{other}", "--mix_weights", "1", "2"]),
        ("optimizers", "image_classification", ["--layer_decay", "0.9", "--max_steps", "1"]),
        ("rehearsal", "lora_finetune", ["--find_batch_size"]),
        ("remote", "lora_finetune", ["--train_file", "https://localhost:1/a.jsonl"]),
        ("replicas", "pretrain", ["--sync_every", "2"]),
        ("streaming", "pretrain", ["--streaming", "--tokenizer_name", "{tiny}", "--train_file", "{one}"]),
        ("tars", "image_classification", ["--train_file", "{tar}"]),
        ("vision", "full_finetune", ["--demo_images"]),
        ("vision", "lora_finetune", ["--train_file", "{pictures}"]),
    ],
)
def test_a_run_that_asks_for_an_extra_that_is_not_there_ends_with_one_line(
    monkeypatch, tmp_path, inputs, tiny_model, extra, template, flags
):
    for name in [name for name in sys.modules if name.startswith(f"shared.extras.{extra}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, f"shared.extras.{extra}", None)
    monkeypatch.delattr(extras, extra, raising=False)
    values = {name: str(value) for name, value in vars(inputs).items()} | {"tiny": str(tiny_model)}
    flags = [flag.format(**values) for flag in flags]
    with pytest.raises(ImportError) as caught:
        run_here(template, *flags, "--output_dir", tmp_path / "run")
    end = exits._as_clean_exit(caught.value, load_template(template).Config())
    assert end is not None and end.exit_code == 2
    assert str(end).startswith(
        f"shared/extras/{extra} is not in this project: add it with the line that its README.md gives"
    )
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_the_summary_names_the_extras_of_a_run(tmp_path, inputs):
    flags = ("--train_file", inputs.one, inputs.other, "--mix_weights", 1, 2, "--max_steps", 0, "--seq_length", 32)
    flags = (*flags, "--show_answers", 0, "--global_batch_size", 2, "--output_dir", tmp_path / "run")
    run_here("lora_finetune", *flags)
    assert re.search(r"^  extras +.*\bmixture\b", (tmp_path / "run/summary.txt").read_text(), re.M)
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["step"] == 0


SHORT = ("--max_steps", 2, "--global_batch_size", 4, "--per_device_train_batch_size", 2, "--report_to", "none")
TEXT = ("--seq_length", 32, "--train_file", "{one}")
ALONE = {  # extra: template, launch config of two processes, flags
    "averages": ("text_classification", None, ("--ema_decay", 0.5, "--seq_length", 32, "--validation_split_percentage", 2)),
    "deepspeed": ("pretrain", "deepspeed_zero2", (*TEXT, "--optim", "adamw", "--vocab_size", 300)),
    "experts": ("full_finetune", None, (*TEXT, "--model_name_or_path", "{moe}", "--show_answers", 0)),
    "mixture": ("lora_finetune", None, ("--seq_length", 64, "--train_file", "{one}", "{other}", "--mix_weights", 1, 2)),
    "optimizers": ("full_finetune", None, (*TEXT, "--weights_dtype", "bf16", "--show_answers", 0)),
    "pipeline": ("pretrain_pipeline", "ddp", (*TEXT, "--vocab_size", 300, "--optim", "adamw")),
    "rehearsal": ("lora_finetune", None, (*TEXT, "--find_batch_size", "--dress_rehearsal", "--show_answers", 0)),
    "remote": ("lora_finetune", None, ("--seq_length", 64, "--train_file", "{url}", "--show_answers", 0)),
    "replicas": ("pretrain", "ddp", (*TEXT, "--vocab_size", 300, "--sync_every", 2)),
    "sequence": ("lora_finetune", "sequence_parallel", (*TEXT, "--show_answers", 0)),
    "streaming": (
        "pretrain",
        None,
        (*TEXT, "--streaming", "--tokenizer_name", "{tiny}", "--validation_split_percentage", 30),
    ),
    "tars": ("image_classification", None, ("--train_file", "{tar}", "--image_size", 16, "--dataloader_num_workers", 0)),
    "tensor": ("lora_finetune", "tensor_parallel", (*TEXT, "--show_answers", 0)),
    "vision": ("full_finetune", None, ("--demo_images", "--show_answers", 0)),
}


@pytest.fixture
def served(inputs, tmp_path):
    """A URL of the first file."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/{inputs.one.name}"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("extra", ALONE)
def test_a_project_has_what_an_extra_needs_and_without_it_says_so(extra, tmp_path, inputs, served, tiny_model):
    template, config, flags = ALONE[extra]
    if extra == "experts":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 4}
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        tokenizer.save_pretrained(tmp_path / "moe")
        Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), num_experts_per_tok=2, **sizes)).save_pretrained(
            tmp_path / "moe"
        )
    values = {name: str(value) for name, value in vars(inputs).items()}
    values |= {"tiny": str(tiny_model), "moe": str(tmp_path / "moe"), "url": served}

    def train(folder, extras):
        new.create(folder, new.build((template,), "x", extras))
        argv = ["--mixed_precision", "no", "--main_process_port", str(free_port()), "--num_processes", str(1 + bool(config))]
        if config:  # launch configs come with what they need
            argv = ["--config_file", str(ROOT / f"accelerate_configs/{config}.yaml"), *argv]
        flat = [str(flag).format(**values) for flag in (*SHORT, *flags)]
        return LAUNCHER.run([*argv, "train.py", *flat, "--output_dir", str(folder / "run")], dict(os.environ), cwd=folder)

    code, output = train(tmp_path / "with", [extra])
    assert code == 0 and (tmp_path / "with/run/final").is_dir(), output
    assert re.search(rf"^  extras +.*\b{extra}\b", (tmp_path / "with/run/summary.txt").read_text(), re.M)
    if extra != "pipeline":  # without which its template is not there
        code, output = train(tmp_path / "without", [])
        assert code != 0 and f"error: shared/extras/{extra} is not in this project" in output, output
