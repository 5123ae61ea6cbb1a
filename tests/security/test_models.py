"""Nothing in a model's folder runs."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from tests.conftest import save_classifier
from tests.security.conftest import refused, trains


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
    files.pop(model / "generation_config.json", None)  # transformers leaves it aside if it is damaged
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
    (model / name).unlink()
    message = refused(template, tmp_path, *flags)
    assert message.startswith(f"{pickled}: a pickle, which can run code")
    assert "take safetensors weights" in message


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


@pytest.mark.parametrize(
    "named",
    [
        {"model_args": {"checkpoint_path": "{}"}},
        {"model_args": {"pretrained_cfg": {"file": "{}"}}},
        {"model_args": {"pretrained_cfg_overlay": {"url": "http://127.0.0.1:9/weights.pth"}}},
        {"architecture": "hf-hub:of/others"},
    ],
    ids=str,
)
def test_weights_that_a_config_of_timm_names_are_not_read(named, architectures, image_folder, tmp_path, payload):
    model = Path(shutil.copytree(architectures / "timm", tmp_path / "model"))
    (tmp_path / "weights.pth").write_bytes(payload)
    content = json.loads((model / "config.json").read_text())
    text = json.dumps(content | named).replace("{}", str(tmp_path / "weights.pth"))
    (model / "config.json").write_text(text)
    message = refused("image_classification", tmp_path, "--train_dir", image_folder, "--config_name", model)
    key = next(iter(named["model_args"])) if "model_args" in named else "architecture"
    assert message == f"{model}: its config.json names weights from elsewhere ({key}), which are not read"
