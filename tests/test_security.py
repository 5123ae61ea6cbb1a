"""Nothing in a model, in data or in settings runs, and no secret is written anywhere."""

import json
import os
import pickle
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path

import hypothesis  # noqa: F401  # pytest would import it after these tests, when Python 3.11 has miscounted its recursion
import pytest
import torch
from safetensors.torch import load_file

from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from shared.process.printing import redact
from tests.conftest import paint, run_here, save_classifier

# Secrets -------------------------------------------------------------------------------------------------------------


def canary(characters: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Random letters, so that no scanner takes this file for a leak and no other text has them by chance."""
    return "".join(random.SystemRandom().choice(alphabet) for _ in range(characters - 2)) + "A1"


def canaries() -> dict[str, tuple[str, str]]:
    """(a text that holds a secret, the secret) by kind."""
    long, upper = canary(40), canary(16, string.ascii_uppercase + string.digits)
    return {
        "url": (f"https://me:{long}@example.com/x", long),
        "url-without-a-user": (f"https://:{long}@example.com/x", long),
        "url-with-at": (f"https://me:{long[:20]}@{long[20:]}@example.com/x", long[20:]),
        "url-token": (f"https://{long}@example.com/x", long),
        "azure": (f"https://account.blob.core.windows.net/x?sv=2024&se=2026&sig={long}", long),
        "google": (f"https://storage.googleapis.com/b/x?X-Goog-Credential=a&X-Goog-Signature={long}", long),
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
        "https://example.com/a?page=2&tokens",
        "abfs://container@account.dfs.core.windows.net/x",
        "a1b2c3d4" * 8,
        "user@example.com",
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
    return save_classifier(architectures / "convnext", tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def trained_adapter(tiny_model, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    assert trains("lora_finetune", folder, "--model_name_or_path", tiny_model, "--train_file", text_file)
    return folder / "run" / "final"


@pytest.fixture
def given(request, tiny_model, text_file, image_folder, tmp_path):
    """A template's data and, of one of its kinds of model, a folder that may be spoiled: (folder, flags)."""
    template, kind = request.param
    model = Path(shutil.copytree(request.getfixturevalue(kind), tmp_path / "model"))
    flag = "--adapter_name_or_path" if kind == "trained_adapter" else "--model_name_or_path"
    data = ("--train_dir", image_folder) if kind == "classifier" else ("--train_file", text_file)
    base = ("--model_name_or_path", tiny_model) if kind == "trained_adapter" else ()
    return template, model, (*base, *data, flag, model)


MODELS = {
    ("pretrain", "tiny_model"): "model.safetensors",
    ("lora_finetune", "tiny_model"): "model.safetensors",
    ("lora_finetune", "trained_adapter"): "adapter_model.safetensors",
    ("image_classification", "classifier"): "model.safetensors",
}
KINDS = pytest.mark.parametrize("given", MODELS, indirect=True, ids="-".join)


@KINDS
def test_a_pickle_in_place_of_any_file_of_a_model_runs_nothing(given, tmp_path, payload):
    template, model, flags = given
    adapter = (model / "adapter_config.json").exists()  # of such a folder the tokenizer is not read
    files = {path: path.read_bytes() for path in model.glob("adapter_*" if adapter else "*") if path.suffix != ".md"}
    added = ("chat_template.jinja", "special_tokens_map.json") if (model / "tokenizer.json").exists() and not adapter else ()
    assert len(files) > 1
    for path in {*files, *(model / name for name in added)}:
        path.write_bytes(payload)
        assert str(model) in refused(template, tmp_path, *flags), path
        path.write_bytes(files[path]) if path in files else path.unlink()


@KINDS
def test_pickled_weights_are_refused(given, tmp_path):
    template, model, flags = given
    name = next(path.name for path in model.glob("*.safetensors"))
    pickled = model / ("pytorch_model.bin" if name.startswith("model") else "adapter_model.bin")
    torch.save(load_file(model / name), pickled)  # the same weights
    weights = {key: value.tolist() for key, value in load_file(model / name).items()}
    (model / name).unlink()
    message = refused(template, tmp_path, *flags)
    assert message.startswith(f"{pickled}: a pickle, which can run code")
    command = message[message.index("python -c ") :].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True)  # the one that it names
    pickled.unlink()
    assert {key: value.tolist() for key, value in load_file(model / name).items()} == weights


def test_no_library_unpickles_behind_our_back(tmp_path, payload, name="weights.pt"):
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


@pytest.fixture
def nobody_answers(monkeypatch):
    """Standard input is a terminal at which nobody sits: a question would wait for ever."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    _, slave = os.openpty()
    with os.fdopen(slave) as terminal:
        assert terminal.isatty()
        monkeypatch.setattr(sys, "stdin", terminal)
        yield


OWN = {
    "config.json": {"model_type": "of_its_own"},
    "tokenizer_config.json": {"tokenizer_class": "OfItsOwn"},
    "preprocessor_config.json": {"image_processor_type": "OfItsOwn"},
}
CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForImageClassification", "AutoImageProcessor")
MAPS = dict.fromkeys(CLASSES, "code.C") | {"AutoTokenizer": ["code.C", "code.C"]}


@pytest.mark.parametrize(
    ("template", "flag", "file"),
    [
        ("pretrain", "model_name_or_path", "config.json"),
        ("pretrain", "config_name", "config.json"),
        ("pretrain", "tokenizer_name", "tokenizer_config.json"),
        ("lora_finetune", "model_name_or_path", "config.json"),
        ("lora_finetune", "model_name_or_path", "tokenizer_config.json"),
        ("image_classification", "model_name_or_path", "config.json"),
        ("image_classification", "model_name_or_path", "preprocessor_config.json"),
    ],
)
def test_code_in_a_model_s_folder_is_not_run(
    template, flag, file, tiny_model, classifier, text_file, image_folder, tmp_path, nobody_answers
):
    images = template == "image_classification"
    model = Path(shutil.copytree(classifier if images else tiny_model, tmp_path / "model"))
    (model / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    content = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps(content | {"auto_map": MAPS} | OWN[file]))
    data = ("--train_dir", image_folder) if images else ("--train_file", text_file)
    message = refused(template, tmp_path, *data, f"--{flag}", model)
    assert message.startswith(str(model)) and "needs code of its own, which is never run here" in message
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


def test_a_pickle_in_place_of_data_runs_nothing(tiny_model, tmp_path, payload):
    for name in ("a.jsonl", "a.json", "a.csv", "a.parquet", "a.npy", "a.pkl", "a.txt"):
        (tmp_path / name).write_bytes(payload)
        for template in ("pretrain", "lora_finetune", "image_classification"):
            flags = () if template == "image_classification" else ("--model_name_or_path", tiny_model)
            message = refused(template, tmp_path, "--train_file", tmp_path / name, *flags)
            assert message.startswith(str(tmp_path / name)), name


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


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "image_classification"])
def test_a_pickle_in_place_of_prepared_data_runs_nothing(
    template, tiny_model, text_file, image_folder, architectures, tmp_path, payload, monkeypatch
):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
    flags = {
        "pretrain": ("--train_file", text_file, "--vocab_size", 320, "--config_overrides", "num_hidden_layers=1"),
        "lora_finetune": ("--train_file", text_file, "--model_name_or_path", tiny_model),
        "image_classification": ("--train_dir", image_folder, "--config_name", architectures / "convnext"),
    }[template]
    assert trains(template, tmp_path, *flags)
    (prepared,) = (tmp_path / "cache").glob("*/*")
    read = ["meta.json", "tokenizer.json", "train.bin"] + ["*.npy"] * (template != "pretrain")
    files = [path for pattern in read for path in prepared.rglob(pattern)]
    assert len(files) >= 2
    for path in files:
        content = path.read_bytes()
        path.write_bytes(payload)
        message = refused(template, tmp_path / "again", *flags)
        assert message.startswith(f"{prepared}: prepared data is damaged ("), path
        assert message.endswith("remove the folder to make it anew")
        path.write_bytes(content)
    shutil.rmtree(prepared)
    assert trains(template, tmp_path / "again", *flags)
