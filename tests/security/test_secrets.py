"""No secret is written anywhere."""

import random
import string
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.process.redaction import masked, redact
from tests.conftest import run_here
from tests.security.conftest import TINY


def canary(characters: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    """Random letters, so that no scanner takes this file for a leak and no other text has them by chance."""
    return "".join(random.SystemRandom().choice(alphabet) for _ in range(characters - 2)) + "A1"


def canaries() -> dict[str, tuple[str, str]]:
    """(a text that holds a secret, the secret) by kind."""
    long, upper = canary(40), canary(16, string.ascii_uppercase + string.digits)
    digits = "".join(random.SystemRandom().choice("0123456789abcdef") for _ in range(64))
    parts = {size: canary(size) for size in (24, 27, 35)}
    jwt = f"eyJ{long}.eyJ{long}.{long}"
    lines = "\n".join([long, long])
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
        "aws-secret": (f"aws_secret_access_key = {long}", long),
        "aws-secret-in-json": (f'{{"SecretAccessKey": "{long}"}}', long),
        "openrouter": (f"sk-or-v1-{digits}", digits),
        "gitlab": (f"glpat-{long[:20]}", long[:20]),
        "google-api": (f"AIza{parts[35]}", parts[35]),
        "google-oauth": (f"ya29.{long}", long),
        "slack": (f"xoxb-1234567890-1234567890-{parts[24]}", parts[24]),
        "wandb": (f"wandb_v1_{long}", long),
        "wandb-named": (f"WANDB_API_KEY={digits[:40]}", digits[:40]),
        "wandb-login": (f"wandb login {digits[:40]}", digits[:40]),
        "json-web-token": (jwt, long),
        "bearer": (f"Authorization: Bearer {long}", long),
        "bearer-alone": (f"curl -H 'bearer {long}'", long),
        "basic": (f"authorization: Basic {long}==", long),
        "pem": (f"-----BEGIN RSA PRIVATE KEY-----\n{lines}\n-----END RSA PRIVATE KEY-----", long),
        "pem-in-json": (f'"-----BEGIN PRIVATE KEY-----\\n{long}\\n-----END PRIVATE KEY-----\\n"', long),
        "pem-cut": (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{long}", long),
        "azure-storage": (f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={long * 2}A1Bc+/==;E=x", long),
        "databricks": (f"dapi{digits[:32]}", digits[:32]),
        "docker": (f"dckr_pat_{parts[27]}", parts[27]),
        "password": (f"password: {long}", long),
        "database": (f"postgresql://me:{long}@example.com:5432/x", long),
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
        "0.1.0+ee4acbd, commit da39a3ee5e6b4b0d3255bfef95601890afd80709",
        "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
        "wandb: run 3f9c1a2b, https://wandb.ai/team/project/runs/3f9c1a2b",
        "eos_token: </s>, pad_token_id=0, max_new_tokens=1000000000, tokenizer_name: meta-llama/Llama-3.1-8B",
        "step 120/2000: loss 2.3456, 1,234 tokens/s, eta 0:12:34",
        "/data/sk-learn-digits-and-other-things/train-00001-of-00010.parquet",
        "/home/me/.cache/huggingface/hub/models--org--name/snapshots/da39a3ee5e6b4b0d3255bfef95601890afd80709/config.json",
        "Qwen/Qwen2.5-Coder-32B-Instruct-GPTQ-Int4",
        "model.layers.31.self_attn.q_proj.lora_A.default.weight: differs",
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
        "20260101-120000:checkpoint-000120 of lora_finetune",
        "the password is asked for; a secret; bearer of good news; password: str",
        "http://127.0.0.1:29500",
    ],
)
def test_what_only_resembles_a_secret_is_left_alone(text, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setenv("MY_PASSWORD", "checkpoint")  # a word
    monkeypatch.setenv("MAX_TOKEN", "1000000000")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(Path(__file__)))
    assert redact(text) == masked(text) == text
    assert redact(str(Path(__file__))) == str(Path(__file__))


def test_the_environment_s_secrets_are_masked_wherever_they_stand(monkeypatch):
    names = ("MY_TOKEN", "CLIENT_SECRET", "PGPASSWORD", "SOME_API_KEY", "AWS_SECRET_ACCESS_KEY", "THE_CREDENTIAL")
    values = {name: f"/{canary(12)} {canary(8)}" for name in names}  # of no known shape
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LONGER_TOKEN", longer := values["MY_TOKEN"] + canary(8))
    for value in (*values.values(), longer):
        assert redact(f"x{value}y") == "x***y" and redact({"a": [value]}) == {"a": ["***"]}
        assert masked(value) == value  # names and identities of data depend on themselves alone


HINTS = "hf_ sk- ghp_ github_pat_ glpat- AKIA AIza ya29. xoxb- wandb_v1_ dapi dckr_pat_ eyJ".split()  # noqa: SIM905
HINTS += ["wandb login ", "authorization: ", "bearer ", "api_key", "secret=", "password: ", "https://"]
PIECES = [*HINTS, *"?&=:@/. -_'\"\n*0aA", "://", "api_key=", "&sig=", "-----BEGIN PRIVATE KEY-----", "a" * 40, "A1" * 20]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_masking_twice_changes_nothing(text):
    assert masked(masked(text)) == masked(text)


def test_hostile_text_costs_linear_time():
    size = 40_000
    starts = [*PIECES, "?token", "sk-", "://a:", "https://", "eyJ", "glpat-", "bearer ", "SG.", "M", "1:", "***"]
    starts += ["machine a login b password ", "-----BEGIN PRIVATE KEY-----a-", "wandb login "]
    texts = [start * (size // len(start)) for start in starts] + [start + end * size for start in starts for end in "aA- :"]
    for text in (*texts, " ".join(HINTS) * (size // 400)):
        began = time.process_time()
        masked(text)
        assert time.process_time() - began < 1, text[:60]  # 0.02 s; with backtracking, five seconds


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
    flags = ["--config", tmp_path / "run.yaml", "--report_to", "wandb", *TINY[template], "--output_dir", tmp_path / "run"]
    flags += ["--run_name", " ".join(text for text, _ in texts.values())]
    of_images = ["--train_dir", image_folder, "--config_name", architectures / "convnext"]
    of_text = ["--model_name_or_path", tiny_model, "--train_file", text_file]
    flags += of_images if template == "image_classification" else of_text
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
