"""No secret is written anywhere."""

import random
import string
import sys
from pathlib import Path

import hypothesis  # noqa: F401  # pytest would import it after these tests, when Python 3.11 has miscounted its recursion
import pytest

from shared.process.printing import redact
from tests.conftest import run_here


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
