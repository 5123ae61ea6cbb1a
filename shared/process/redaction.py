"""Secrets masked: what looks like a token or a password, and the environment's secrets."""

import os
import re
from collections.abc import Mapping
from typing import Any

# Each begins a word. The time is linear: what fails far from its begin cannot begin again on the
# way, and what looks ahead does so over at most 99 characters.
TOKENS = (
    r"(?:hf_|api_org_)[A-Za-z0-9]{30,}",  # Hugging Face
    # OpenAI, Anthropic, OpenRouter; not a folder that is called sk-learn-something
    r"sk-(?=[\w-]{0,99}\d)(?=[\w-]{0,99}(?:[A-Z]|[0-9a-f]{32}))[\w-]{20,}",
    r"(?:gh[pousr]_|github_pat_)\w{20,}",  # GitHub
    r"glpat-[\w-]{20,}",  # GitLab
    r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",  # AWS
    r"AIza[\w-]{35,}",  # Google
    r"ya29\.[\w.-]{20,}",
    r"xox[a-z]-[\w-]{10,}",  # Slack
    r"wandb_v\d_[\w-]{20,}",  # W&B
    r"dapi[0-9a-f]{32}\w*",  # Databricks
    r"dckr_pat_[\w-]{20,}",  # Docker Hub
    r"eyJ[\w.-]{20,}",  # JSON web tokens
)
_KEYS = r"(?:access|account|api|auth|private|secret|storage)[_-]?(?:key|token)|secret"
_QUERIES = "token|key|secret|passw|signature|sig|credential"
_IS = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
_VALUE = r"[^\s\"'&,;<>(){}]{8,}"
_DIGIT = r"(?=\S{0,99}?\d)"

# Group 1 stays.
_PATTERNS = [
    re.compile(rf"()(?<![A-Za-z0-9])(?:{'|'.join(TOKENS)})"),
    re.compile(
        r"(-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----)"
        r"[^-]+(?:-(?!----)[^-]*)*"
    ),
    re.compile(r"(wandb login )[0-9a-f]{40}"),
    re.compile(rf"(?i)(authorization{_IS}(?:basic |token |bearer )?){_VALUE}"),
    re.compile(rf"((?i:bearer)\s{{1,3}}){_DIGIT}[\w.~+/-]{{16,}}=*"),
    re.compile(rf"((?i:{_KEYS}){_IS}){_DIGIT}{_VALUE}"),
    re.compile(rf"((?i:passw(?:or)?d|passphrase){_IS}){_VALUE}"),
    re.compile(rf"(?i)([?&][\w-]{{0,40}}(?:{_QUERIES})[\w-]{{0,40}}=)[^&\s\"'<>]+"),
    re.compile(r"(://)[^/\s:@]*:[^/\s]+(?=@)"),  # user:password@
    re.compile(r"(https?://)[^/\s:@]+(?=@)"),  # token@
]


def masked(text: str) -> str:
    """`text` with `***` for what looks like a secret.

    By the text alone, so that names and identities of data stay equal.
    """
    for pattern in _PATTERNS:
        text = pattern.sub(r"\1***", text)
    return text


def redact(value: Any) -> Any:
    """The same text, list or mapping with `***` for what looks like a secret or is in secrets_of.

    For whatever is written to a file, a console or a tracker: none of them is a place for secrets.
    """
    if isinstance(value, str):
        for secret in secrets_of(os.environ):
            value = value.replace(secret, "***")
        return masked(value)
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    return [redact(item) for item in value] if isinstance(value, list | tuple) else value


_NAMES = re.compile(
    r"(?i)(token|secret|passw(or)?d|passphrase|_pwd|_pass|credentials?"
    r"|(api|access|account|private|secret)_?key)$"
)
_NO_SECRET = re.compile(r".{,7}|[A-Za-z]{1,15}|\d+|\*+")  # short, a word, a number, masked


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The values of variables that are named as secrets are, the longest first."""
    found = [
        value
        for name, value in environment.items()
        if _NAMES.search(name) and not _NO_SECRET.fullmatch(value) and not os.path.exists(value)
    ]
    return sorted(found, key=len, reverse=True)
