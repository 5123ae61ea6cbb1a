"""Nothing in a model, in data or in settings runs, and no secret is written anywhere."""

import json
import os
import pickle
import random
import re
import shutil
import string
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from shared.process.printing import redact
from tests.conftest import paint, run_here

# Secrets -------------------------------------------------------------------------------------------------------------


def canary(characters: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Random letters, so that no scanner takes this file for a leak and no other text has them by chance."""
    return "".join(random.SystemRandom().choice(alphabet) for _ in range(characters - 2)) + "A1"


def canaries() -> dict[str, tuple[str, str]]:
    """(a text that holds a secret, the secret) by kind."""
    long, upper = canary(40), canary(16, string.ascii_uppercase + string.digits)
    return {
        "url": (f"https://me:{long}@example.com/x", long),
        "query": (f"https://example.com/x?a=1&access_token={long}&b=2", long),
        "signed": (f"s3://bucket/x?X-Amz-Signature={long}", long),
        "hugging-face": (f"hf_{long}", f"hf_{long}"),
        "openai": (f"sk-{long}", f"sk-{long}"),
        "openai-project": (f"sk-proj-{long[:20]}-{long[20:]}", long[20:]),
        "github": (f"ghp_{long}", f"ghp_{long}"),
        "github-pat": (f"github_pat_{long}", f"github_pat_{long}"),
        "aws": (f"AKIA{upper}", f"AKIA{upper}"),
    }


@pytest.mark.parametrize("kind", canaries())
def test_what_looks_like_a_secret_is_masked_wherever_it_stands(kind):
    text, secret = canaries()[kind]
    for place in (text, f"a {text} b", f"--run_name={text}", f'"{text}"', f"({text})", f"{text}\n"):
        masked = redact(place)
        assert secret not in masked and "***" in masked
    assert redact({"a": [text, (text,)], "b": {"c": text}, "n": 3}) == {
        "a": [redact(text), [redact(text)]],
        "b": {"c": redact(text)},
        "n": 3,
    }
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize(
    "text",
    [
        "meta-llama/Llama-3.1-8B",
        "/data/hf_datasets/sk-learn-experiments-2024-second-attempt/a.jsonl",
        "https://example.com/a?page=2&tokens",
        "abfs://container@account.dfs.core.windows.net/x",
        "runs/*.jsonl?",
        "hf_hub",
        "a1b2c3d4" * 8,
        "user@example.com",
        "2e-4",
    ],
)
def test_what_only_resembles_a_secret_is_left_alone(text):
    assert redact(text) == text


def files_with(needle: str, *folders: Path) -> list[Path]:
    found = [p for folder in folders for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    assert found
    return [p for p in found if needle.encode() in p.read_bytes() or needle in p.name]


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "image_classification"])
def test_no_secret_is_in_any_file_that_a_run_writes(
    template, tiny_model, text_file, image_folder, architectures, tmp_path, monkeypatch, capfd
):
    texts = canaries()
    secrets = {name: canary(40) for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_OWN_PASSWORD")}
    places = {"HOME": str(tmp_path / "home"), "TEMPLATES_CACHE": str(tmp_path / "cache"), "WANDB_MODE": "offline"}
    for name, value in (secrets | places).items():
        monkeypatch.setenv(name, value)
    in_yaml, in_prompt = canary(40), canary(40)
    (tmp_path / "run.yaml").write_text(f"project_name: hf_{in_yaml}\n")
    flags = ["--config", tmp_path / "run.yaml", "--report_to", "wandb", "--max_steps", 2, "--output_dir", tmp_path / "run"]
    flags += ["--run_name", " ".join(text for text, _ in texts.values()), "--global_batch_size", 4]
    if template == "image_classification":
        flags += ["--train_dir", image_folder, "--config_name", architectures / "convnext", "--image_size", 16]
        flags += ["--per_device_train_batch_size", 4, "--dataloader_num_workers", 0]
    else:
        flags += ["--model_name_or_path", tiny_model, "--train_file", text_file, "--seq_length", 32, "--eval_samples", 2]
    flags += ["--sample_prompt", f"hf_{in_prompt}"] if template == "pretrain" else []
    monkeypatch.setattr(sys, "argv", [template, *map(str, flags)])  # which W&B would store
    run_here(template, *flags)
    (tmp_path / "run.yaml").unlink()
    (tmp_path / "console.txt").write_text("".join(capfd.readouterr()))
    assert list((tmp_path / "run" / "wandb").rglob("*.wandb"))
    for secret in [*secrets.values(), *(secret for _, secret in texts.values()), in_yaml, in_prompt]:
        assert files_with(secret, tmp_path) == []
    assert files_with("***", tmp_path / "run" / "wandb")  # the settings are there: a secret in them would have been found
    for name in ("config.yaml", "final/README.md"):
        assert "access_token=***" in (tmp_path / "run" / name).read_text()


# Code in models ------------------------------------------------------------------------------------------------------


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.fixture
def payload(tmp_path):
    """A pickle that leaves a trace; afterwards, that there is none."""
    content = pickle.dumps(Payload(tmp_path / "ran"))
    yield content
    assert not (tmp_path / "ran").exists()
    pickle.loads(content).close()  # it would have
    assert (tmp_path / "ran").exists()


TEXT = ("--max_steps", 1, "--eval_samples", 2, "--global_batch_size", 2)
TINY = {
    "pretrain": (*TEXT, "--seq_length", 16),
    "lora_finetune": (*TEXT, "--seq_length", 32, "--num_generations", 0),
    "image_classification": (
        *("--max_steps", 1, "--global_batch_size", 2, "--per_device_train_batch_size", 2, "--dataloader_num_workers", 0),
        *("--image_size", 16),
    ),
}


def refused(template: str, folder: Path, *flags: object) -> str:
    """The one line with which a run ends, with exit code 2."""
    with pytest.raises(ConfigError) as caught:
        run_here(template, *TINY[template], "--output_dir", folder / "run", *flags)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    return str(caught.value)


def trains(template: str, folder: Path, *flags: object) -> bool:
    run_here(template, *TINY[template], "--output_dir", folder / "run", *flags)
    return (folder / "run" / "final").is_dir()


@pytest.fixture
def model(tiny_model, tmp_path):
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.fixture(scope="module")
def classifier(architectures, tmp_path_factory):
    """A folder with a tiny ConvNeXt of the pictures' classes and its image processor."""
    from transformers import AutoConfig, AutoModelForImageClassification, ConvNextImageProcessor

    folder = tmp_path_factory.mktemp("classifier")
    AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(architectures / "convnext")).save_pretrained(
        folder
    )
    ConvNextImageProcessor().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained_adapter(tiny_model, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    assert trains("lora_finetune", folder, "--model_name_or_path", tiny_model, "--train_file", text_file)
    return folder / "run" / "final"


@pytest.fixture
def adapter(trained_adapter, tmp_path):
    return Path(shutil.copytree(trained_adapter, tmp_path / "adapter"))


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune"])
@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        *("model.safetensors", "chat_template.jinja", "special_tokens_map.json"),
    ],
)
def test_a_pickle_in_place_of_a_model_s_file_runs_nothing(template, model, text_file, tmp_path, payload, name):
    (model / name).write_bytes(payload)
    assert str(model) in refused(template, tmp_path, "--model_name_or_path", model, "--train_file", text_file)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_pickle_in_place_of_an_adapter_s_file_runs_nothing(tiny_model, adapter, text_file, tmp_path, payload, name):
    (adapter / name).write_bytes(payload)
    flags = ("--model_name_or_path", tiny_model, "--train_file", text_file, "--adapter_name_or_path", adapter)
    assert refused("lora_finetune", tmp_path, *flags).startswith(f"{adapter / name}: damaged")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "preprocessor_config.json"])
def test_a_pickle_in_place_of_a_classifier_s_file_runs_nothing(classifier, image_folder, tmp_path, payload, name):
    model = Path(shutil.copytree(classifier, tmp_path / "model"))
    (model / name).write_bytes(payload)
    message = refused("image_classification", tmp_path, "--model_name_or_path", model, "--train_dir", image_folder)
    assert message.startswith(f"{model / name}: damaged")


def convert(message: str) -> None:
    """Do what an error advises."""
    command = re.search(r'python -c "(.*)"$', message)
    assert command
    exec(command[1], {})


def pickled(folder: Path, name: str, into: str) -> None:
    """Have the same weights as a pickle alone."""
    torch.save(load_file(folder / name), folder / into)
    (folder / name).unlink()


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune"])
def test_pickled_weights_are_refused_and_the_remedy_works(template, model, text_file, tmp_path):
    pickled(model, "model.safetensors", "pytorch_model.bin")
    flags = ("--model_name_or_path", model, "--train_file", text_file)
    message = refused(template, tmp_path, *flags)
    assert message.startswith(f"{model}/pytorch_model.bin: a pickle, which can run code")
    convert(message)
    assert trains(template, tmp_path, *flags)


def test_a_pickled_adapter_is_refused_and_the_remedy_works(tiny_model, adapter, text_file, tmp_path):
    pickled(adapter, "adapter_model.safetensors", "adapter_model.bin")
    flags = ("--model_name_or_path", tiny_model, "--train_file", text_file, "--adapter_name_or_path", adapter)
    message = refused("lora_finetune", tmp_path, *flags)
    assert message.startswith(f"{adapter}/adapter_model.bin: a pickle, which can run code")
    convert(message)
    assert trains("lora_finetune", tmp_path, *flags)


def test_a_pickled_classifier_is_refused_and_the_remedy_works(classifier, image_folder, tmp_path):
    model = Path(shutil.copytree(classifier, tmp_path / "model"))
    pickled(model, "model.safetensors", "pytorch_model.bin")
    flags = ("--model_name_or_path", model, "--train_dir", image_folder)
    message = refused("image_classification", tmp_path, *flags)
    assert message.startswith(f"{model}/pytorch_model.bin: a pickle, which can run code")
    convert(message)
    assert trains("image_classification", tmp_path, *flags)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "weights.pt"])
def test_no_library_unpickles_behind_our_back(tmp_path, payload, name):
    """What a repository on the Hub holds is not known before it is loaded: torch.load itself is closed meanwhile."""

    class Loader:
        @staticmethod
        def from_pretrained(folder, **_):
            return torch.load(f"{folder}/{name}", weights_only=False)

    before = torch.load
    (tmp_path / name).write_bytes(payload)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a pickle, which can run code"):
        from_hub(Loader, tmp_path)
    assert torch.load is before


@pytest.fixture(params=["terminal", "closed"])
def nobody_answers(request, monkeypatch):
    """Standard input is a terminal at which nobody sits, or closed; a question would wait for ever or fail."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    if request.param == "closed":
        monkeypatch.setattr(sys, "stdin", None)
        yield
        return
    _, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        assert terminal.isatty()
        monkeypatch.setattr(sys, "stdin", terminal)
        yield


OWN_CODE = "needs code of its own, which is never run here"


@pytest.mark.parametrize(
    ("template", "flag", "file", "maps"),
    [
        ("pretrain", "model_name_or_path", "config.json", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}),
        ("pretrain", "config_name", "config.json", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}),
        ("pretrain", "tokenizer_name", "tokenizer_config.json", {"AutoTokenizer": ["code.T", "code.T"]}),
        ("lora_finetune", "model_name_or_path", "config.json", {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}),
        ("lora_finetune", "model_name_or_path", "tokenizer_config.json", {"AutoTokenizer": ["code.T", "code.T"]}),
    ],
)
def test_code_in_a_model_s_folder_is_not_run(template, flag, file, maps, model, text_file, tmp_path, nobody_answers):
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\nclass T: pass\n")
    content = json.loads((model / file).read_text()) | {"auto_map": maps}
    content |= {"model_type": "of_its_own"} if file == "config.json" else {"tokenizer_class": "OfItsOwn"}
    (model / file).write_text(json.dumps(content))
    message = refused(template, tmp_path, "--train_file", text_file, f"--{flag}", model)
    assert message.startswith(f"{model}: ") and OWN_CODE in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "maps", "own"),
    [
        ("config.json", {"AutoConfig": "code.C", "AutoModelForImageClassification": "code.M"}, {"model_type": "of_its_own"}),
        ("preprocessor_config.json", {"AutoImageProcessor": "code.T"}, {"image_processor_type": "OfItsOwn"}),
    ],
)
def test_code_in_a_classifier_s_folder_is_not_run(classifier, image_folder, tmp_path, nobody_answers, file, maps, own):
    model = Path(shutil.copytree(classifier, tmp_path / "model"))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\nclass M: pass\nclass T: pass\n")
    (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | {"auto_map": maps} | own))
    message = refused("image_classification", tmp_path, "--model_name_or_path", model, "--train_dir", image_folder)
    assert OWN_CODE in message
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir(messages[0]['content']) }}",
        "{{ messages.append(messages[0]) }}",
    ],
)
def test_a_chat_template_reaches_nothing_beyond_the_messages(model, tmp_path, template):
    (model / "chat_template.jinja").write_text(template)
    chats = tmp_path / "chats.jsonl"
    made = str(tmp_path / "made")
    turns = [{"role": "user", "content": made}, {"role": "assistant", "content": "x"}]
    chats.write_text((json.dumps({"messages": turns}) + "\n") * 20)
    message = refused("lora_finetune", tmp_path, "--model_name_or_path", model, "--train_file", chats)
    assert "chats.jsonl:1: the chat template refuses this conversation (" in message
    assert not Path(made).exists()


# Code in data --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.tsv", "a.parquet", "a.npy", "a.pkl", "a.txt"])
def test_a_pickle_in_place_of_data_runs_nothing(name, tiny_model, tmp_path, payload):
    (tmp_path / name).write_bytes(payload)
    for template in ("pretrain", "lora_finetune", "image_classification"):
        flags = () if template == "image_classification" else ("--model_name_or_path", tiny_model)
        assert refused(template, tmp_path, "--train_file", tmp_path / name, *flags).startswith(str(tmp_path / name))


def test_a_pickle_in_place_of_an_image_runs_nothing(tmp_path, payload):
    for kind in ("a", "b"):
        for number in range(4):
            paint(tmp_path / "images" / kind / f"{number}.png", 0, number, (16, 16))
    bad = tmp_path / "images" / "b" / "0.png"
    bad.write_bytes(payload)
    message = refused("image_classification", tmp_path, "--train_dir", tmp_path / "images")
    assert message.startswith(f"{bad}: not an image")


def test_code_in_a_data_set_s_folder_is_not_run(tiny_model, tmp_path, nobody_answers):
    data = tmp_path / "data"
    data.mkdir()
    (data / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    refused("pretrain", tmp_path, "--dataset_name", data, "--model_name_or_path", tiny_model)
    refused("image_classification", tmp_path, "--dataset_name", data)
    assert not (tmp_path / "ran").exists()


PREPARED = {
    "pretrain": ["meta.json", "train-00000.bin", "validation-00000.bin", "tokenizer/tokenizer.json"],
    "lora_finetune": ["meta.json", *(f"{s}-{n}.npy" for s in ("train", "validation") for n in ("ids", "learned", "ends"))],
    "image_classification": ["meta.json", "paths.npy", "ends.npy", "labels.npy"],
}


@pytest.mark.parametrize(("template", "name"), [(template, name) for template, names in PREPARED.items() for name in names])
def test_a_pickle_in_place_of_prepared_data_runs_nothing(
    template, name, tiny_model, text_file, image_folder, architectures, tmp_path, payload, monkeypatch
):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
    flags = {
        "pretrain": (
            "--train_file",
            text_file,
            "--vocab_size",
            320,
            "--config_overrides",
            "num_hidden_layers=1",
        ),
        "lora_finetune": ("--train_file", text_file, "--model_name_or_path", tiny_model),
        "image_classification": ("--train_dir", image_folder, "--config_name", architectures / "convnext"),
    }[template]
    assert trains(template, tmp_path, *flags)
    (prepared,) = (tmp_path / "cache").glob("*/*")
    (prepared / name).write_bytes(payload)
    message = refused(template, tmp_path / "again", *flags)
    assert message.startswith(f"{prepared}: prepared data is damaged (") and message.endswith(
        "remove the folder to make it anew"
    )
    shutil.rmtree(prepared)
    assert trains(template, tmp_path / "again", *flags)
