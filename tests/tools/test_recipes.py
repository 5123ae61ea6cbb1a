"""Each recipe is understood, fits its GPUs by `plan`, and trains a tiny model of its family."""

import json
import math
import re
import shlex

import pytest
import yaml
from PIL import Image
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, ModernBertConfig

from shared import demo
from shared.config import parse as configs
from shared.models.options import PRESETS
from tests import vision_models
from tests.conftest import ROOT, Run, load_template, run, run_here, save_classifier, slow, write_lines
from tests.model_families import make
from tools import memory
from tools.plan import RESERVED, PlanConfig
from tools.recipes import FOLDER, HEAD, head

RECIPES = sorted(FOLDER.glob("*.yaml"))
KNOWN = json.loads((FOLDER / "architectures.json").read_text())
ARCHITECTURES = KNOWN | {"runs/sft/final": KNOWN["meta-llama/Llama-3.1-8B"]}


def parts(path):
    """(template, launch config, processes, settings) of a recipe."""
    tokens = shlex.split(head(path)["command"])
    template, launcher = next(t for t in tokens if t.startswith("templates/")), tokens[tokens.index("--config_file") + 1]
    processes = int(tokens[tokens.index("--num_processes") + 1]) if "--num_processes" in tokens else 1
    assert tokens[-2:] == ["--config", f"recipes/{path.name}"] and (ROOT / template).exists() and (ROOT / launcher).exists()
    return template[10:-3], launcher[19:-5], processes, yaml.safe_load(path.read_text())


def planned(path):
    """GB on each GPU that `plan` predicts; None where it plans no such model."""
    template, config, processes, given = parts(path)
    if "classification" in template or given.get("objective") == "mlm":
        return None
    if "model_preset" in given:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
        facts = {"model_type": "llama", "tie_word_embeddings": True, "vocab_size": given["vocab_size"]}
        facts |= dict(zip(names, PRESETS[given["model_preset"]], strict=True))
    else:
        facts = ARCHITECTURES[given.get("model_name_or_path") or given["config_name"]]
    lora = given.get("lora_r", 0)
    rows = given["per_device_train_batch_size"] * (2 if template == "dpo" else 1)
    length = given["seq_length"] + (given["max_new_tokens"] if template == "grpo" else 0)
    shape = (AutoConfig.for_model(**facts), rows, length, True, lora, given.get("load_in_4bit", False))
    packed, experts = lora > 0 and template != "grpo", given.get("lora_experts", True)
    beside = 0.0
    if teacher := given.get("teacher_name_or_path"):
        facts = AutoConfig.for_model(**ARCHITECTURES[teacher])
        beside = memory.frozen(memory.Job(facts, 1, 16, four_bits=given.get("teacher_load_in_4bit", False)))
    packed &= "image_max_pixels" not in given
    job = memory.Job(*shape, packed=packed, lora_experts=experts, beside=beside)
    name = config.removeprefix("multi_node_")
    peak = next(peak for planned, _, peak in memory.plan(job, processes) if planned == name)
    return peak.total(str(given.get("gradient_checkpointing", "none"))) / 1e9


@pytest.fixture
def files(tmp_path, monkeypatch):
    """What stands for the user's data while a config is checked."""
    names = "chats.jsonl names.jsonl pairs.jsonl problems.jsonl reviews.csv corpus/a.txt imagenet/a/1.jpg photos/a/1.jpg"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("-")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", [p if "0.6b" in p.stem else slow(p) for p in RECIPES], ids=lambda path: path.stem)
def test_a_recipe_is_understood_and_fits(path, files, monkeypatch):
    said = head(path)
    assert tuple(said) == HEAD
    template, _, processes, given = parts(path)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    config = configs.parse(load_template(template).Config, ["--config", str(path)])
    rows, accumulation = config.batch.micro_batch()
    assert rows == given["per_device_train_batch_size"] and rows * accumulation * processes == given["global_batch_size"]
    gigabytes = planned(path)
    needs = re.fullmatch(r"(\d) (?:GPUs?|machines with 1 GPU) of (\d+) GB; (.*)", said["needs"])
    assert needs and int(needs[1]) == processes
    other = "not by `plan`, which is for causal language models"
    assert needs[3] == (f"{gigabytes:.0f} GB by `plan`" if gigabytes else other)
    assert not gigabytes or gigabytes < (1 - RESERVED) * int(needs[2])
    if gigabytes:  # the command takes the same from the file
        told = configs.parse(PlanConfig, ["--config", str(path)], only_known=True)
        assert bool(told.loss_type) == (template == "dpo") and told.load_in_4bit == given.get("load_in_4bit", False)
        assert told.lora_experts == given.get("lora_experts", True)
        model = told.model_preset or told.config_name or told.model_name_or_path
        assert model in (given.get("model_preset"), given.get("config_name"), given.get("model_name_or_path"))
        assert told.lora_r == given.get("lora_r", 0) and told.seq_length == given["seq_length"]
        assert told.per_device_train_batch_size == rows
    assert "arXiv" in said["source"]


FAMILY = {"meta-llama": "llama", "runs": "llama", "Qwen": "qwen3", "google/gemma": "gemma3", "openai-community": "gpt2"}
FAMILY = {"Qwen/Qwen2.5": "qwen2", "Qwen/Qwen3-30B-A3B": "qwen3_moe", "unsloth/gpt-oss": "gpt_oss"} | FAMILY
SEES = {"Qwen/Qwen3-VL": "qwen3_vl", "HuggingFaceTB/SmolVLM2": "smolvlm"}  # trained on images in conversations
FAMILY |= {"google/vit": "vit", "microsoft/resnet": "resnet", "facebook/convnext": "convnext", "answerdotai": "modernbert"}
SHORT = {"max_steps": 3, "global_batch_size": 8, "per_device_train_batch_size": 2, "dataloader_num_workers": 0}
TEXT = {"seq_length": 64, "eval_samples": 4}
LOOPED = ("num_train_epochs", "max_tokens", "torch_compile", "output_dir", "config_overrides", "sync_every")


@pytest.fixture(scope="module")
def data(user_files, text_file, image_folder, tmp_path_factory):
    """Small files in the form of a recipe's data, by its word for them."""
    folder = tmp_path_factory.mktemp("data")
    images = []
    for number, label in enumerate(["red", "green"] * 6):
        Image.new("RGB", (30 + number, 40), label).save(folder / f"{number}.png")
        parts = [{"type": "image", "path": f"{number}.png"}, {"type": "text", "text": "Which colour?"}]
        images.append({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": label}]})
    files = {path.name: path for path in [*user_files.iterdir(), write_lines(folder / "images.jsonl", images)]}
    return files | dict.fromkeys(("imagenet/", "photos/"), image_folder) | {"corpus/": text_file.parent}


def tiny(name, folder, architectures):
    """A model of the family of a repository of the Hub."""
    if sees := next((family for start, family in SEES.items() if name.startswith(start)), None):
        vision_models.make(sees, folder)
        return folder
    family = next(family for start, family in FAMILY.items() if name.startswith(start))
    if family in ("vit", "resnet", "convnext"):
        return save_classifier(architectures / family, folder)
    if family != "modernbert":
        make(family, folder)
        return folder
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    ids = {"pad_token_id": tokenizer.pad_token_id, "cls_token_id": 1, "sep_token_id": 2}
    AutoModelForMaskedLM.from_config(ModernBertConfig(vocab_size=len(tokenizer), **sizes, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("path", [p if "0.6b" in p.stem else slow(p) for p in RECIPES], ids=lambda path: path.stem)
def test_a_recipe_trains(path, data, architectures, tmp_path):
    """Three steps of a tiny model of the same family, on a tiny file in the form of its data."""
    template, config, processes, recipe = parts(path)
    given = {key: value for key, value in recipe.items() if key not in LOOPED} | SHORT
    for key in ("train_file", "train_dir"):
        if key in given:
            given[key] = str(data["images.jsonl" if "image_max_pixels" in given else given[key]])
    for key in ("model_name_or_path", "config_name", "tokenizer_name"):
        if key in given:
            given[key] = str(tiny(given[key], tmp_path / "model", architectures))
    if "teacher_name_or_path" in given:
        given["teacher_name_or_path"] = given["model_name_or_path"]
    given |= {"image_size": 16} if template == "image_classification" else TEXT
    if "image_max_pixels" in given:
        given["seq_length"] = 256
    if template == "grpo":
        given |= {"max_new_tokens": 8, "group_size": 2, "eval_answers": 4}
    if template == "distill":
        given |= {"max_new_tokens": 8}
    if template in ("text_classification", "token_classification"):
        del given["eval_samples"]
    if "model_preset" in given:
        given |= {"model_preset": "3M", "vocab_size": 320}
    if "sync_every" in recipe:
        given["sync_every"] = 2
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(given))
    if processes > 1:
        config = config.removeprefix("multi_node_")
        run(template, tmp_path / "run", "--config", tmp_path / "recipe.yaml", processes=2, config=config)
    else:
        run_here(template, "--output_dir", tmp_path / "run", "--config", tmp_path / "recipe.yaml")
    losses = Run(tmp_path / "run", 0, "").losses.values()
    assert losses and all(map(math.isfinite, losses)) and (tmp_path / "run/final").is_dir()
