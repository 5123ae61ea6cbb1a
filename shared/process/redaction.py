"""Secrets masked: what looks like a token or a password, and values of the environment's variables that are named so."""

import functools
import os
import re
from collections.abc import Mapping
from typing import Any

_IS_NAMED = r"[\"']?\s{0,3}[:=]\s{0,3}[\"']?"
_KEYS = r"(?:access|account|api|auth|private|secret|storage)[_-]?(?:key|token)|secret"
_IN_QUERIES = "token|key|secret|passw|signature|sig|credential"
_VALUE = r"[^\s\"'&,;<>(){}]{8,}"
_RANDOM = (r"\d", r"[A-Z]|[0-9a-f]{32}")  # not a folder that is called sk-learn-something

# Name; lower-case texts, of which one is there; what stays before the secret; the secret; what must be in it.
# The time is linear: a pattern that fails far from where it began cannot begin again on the way.
SHAPES: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("Hugging Face", "hf_ api_org_", "", r"(?:hf_|api_org_)[A-Za-z0-9]{30,}", ()),
    ("OpenAI, Anthropic and others", "sk-", "", r"sk-[\w-]{20,}", _RANDOM),
    ("GitHub", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", "", r"(?:gh[pousr]_|github_pat_)\w{20,}", ()),
    ("GitLab", "gl", "", r"gl(?:pat|dt|ft|soat|rt|cbt|imt|ptt|agent|oas|ffct|wt)-[\w-]{20,}", ()),
    ("GitLab runner", "gr1348941", "", r"GR1348941[\w-]{20,}", ()),
    ("AWS key id", "akia asia abia acca", "", r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{16}(?![A-Za-z0-9])", ()),
    ("Google API", "aiza", "", r"AIza[\w-]{35,}", ()),
    ("Google OAuth", "ya29.", "", r"ya29\.[\w.-]{20,}", ()),
    ("Google client", "gocspx-", "", r"GOCSPX-[\w-]{20,}", ()),
    ("Slack", "xox xapp", "", r"(?:xox[a-z]|xapp)-[\w-]{10,}", ()),
    ("Slack webhook", "hooks.slack.com", r"hooks\.slack\.com/[a-z]+/", r"[\w/-]{8,}", ()),
    ("Discord webhook", "webhooks/", r"discord(?:app)?\.com/api/webhooks/", r"[\w/-]{8,}", ()),
    ("Discord bot", ".", "", r"[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}", _RANDOM),
    ("Telegram bot", ":", "", r"\d{8,10}:[\w-]{35}(?![\w-])", _RANDOM),
    ("W&B", "wandb_v", "", r"wandb_v\d_[\w-]{20,}", ()),
    ("W&B, by its name", "key login", r"(?i:key|login)[\"']?[\s:=]{1,3}[\"']?", r"[0-9a-f]{40}(?![0-9a-zA-Z])", ()),
    ("JSON web token", "eyj", "", r"eyJ[\w.-]{20,}", (r"\.",)),
    ("npm", "npm_", "", r"npm_[A-Za-z0-9]{36,}", ()),
    ("PyPI", "pypi-age", "", r"pypi-AgE[\w-]{16,}", ()),
    ("Stripe", "k_live_ k_test_", "", r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,}", ()),
    ("Stripe webhook", "whsec_", "", r"whsec_[A-Za-z0-9+/=]{24,}", ()),
    ("SendGrid", "sg.", "", r"SG\.[\w-]{16,}\.[\w-]{16,}", ()),
    ("Twilio", "ac sk", "", r"(?:AC|SK)[0-9a-f]{32}(?![0-9a-zA-Z])", ()),
    ("Databricks", "dapi", "", r"dapi[0-9a-f]{32}\w*", ()),
    ("DigitalOcean", "_v1_", "", r"do[opr]_v1_[0-9a-f]{64}\w*", ()),
    ("Docker Hub", "dckr_", "", r"dckr_[a-z]+_[\w-]{20,}", ()),
    ("Groq, Replicate", "gsk_ r8_", "", r"(?:gsk|r8)_[A-Za-z0-9]{30,}", ()),
    ("NVIDIA, xAI", "nvapi- xai-", "", r"(?:nvapi|xai)-[\w-]{40,}", _RANDOM),
    ("PEM", "private key", r"-----BEGIN (?:[A-Z0-9]+ ){0,3}PRIVATE KEY(?: BLOCK)?-----", r"[^-]+(?:-(?!----)[^-]*)*+", ()),
    ("netrc", "machine", r"machine\s{1,3}\S{1,80}\s{1,9}login\s{1,3}\S{1,80}\s{1,9}password\s{1,3}", r"\S+", ()),
    ("bearer", "bearer", r"(?i:bearer)\s{1,3}", r"[\w.~+/-]{16,}=*", (r"\d",)),
    ("authorization", "authorization", rf"(?i:authorization){_IS_NAMED}(?i:basic |token |bearer )?", r"[\w.~+/=-]{8,}", ()),
    ("key or token, by its name", "key token secret", rf"(?i:{_KEYS}){_IS_NAMED}", _VALUE, (r"\d",)),
    ("password, by its name", "passw passphrase", rf"(?i:passw(?:or)?d|passphrase){_IS_NAMED}", _VALUE, ()),
    ("query of a URL", "=", r"[?&][\w-]+=", r"[^&\s\"'<>]*[^&\s\"'<>:,.;)]", (rf"(?i)^[^=]*(?:{_IN_QUERIES})",)),
    ("user:password@ of a URL", "://", r"://", r"[^/\s:@]*:[^/\s]+(?=@)", ()),
    ("token@ of a URL", "://", r"https?://", r"[^/\s:@]+(?=@)", ()),
]


@functools.cache
def _patterns() -> list[tuple[list[str], re.Pattern[str], tuple[str, ...]]]:
    """Of each shape: texts of which one is there; the pattern, whose group 1 stays; what must be in a match."""
    apart = "(?<![A-Za-z0-9])"
    return [(hints.split(), re.compile(f"({kept or apart})(?:{secret})"), must) for _, hints, kept, secret, must in SHAPES]


def masked(text: str) -> str:
    """`text` with `***` for what looks like a secret. By the text alone, so that names and identities of data stay equal."""
    lower = text.lower()
    for hints, pattern, must in _patterns():
        for hint in hints:
            if hint in lower:
                text = pattern.sub(functools.partial(_hide, must), text)
                break
    return text


def _hide(must: tuple[str, ...], found: re.Match[str]) -> str:
    return f"{found[1]}***" if all(re.search(pattern, found[0]) for pattern in must) else found[0]


def redact(value: Any) -> Any:
    """The same text, list or mapping with `***` for what looks like a secret, and for secrets of the environment.

    For whatever is written to a file, a console or a tracker: none of them is a place for secrets.
    """
    return _redact(value, secrets_of(os.environ))


def _redact(value: Any, known: list[str]) -> Any:
    if isinstance(value, str):
        for secret in known:
            value = value.replace(secret, "***")
        return masked(value)
    if isinstance(value, dict):
        return {key: _redact(item, known) for key, item in value.items()}
    return [_redact(item, known) for item in value] if isinstance(value, list | tuple) else value


def secrets_of(environment: Mapping[str, str]) -> list[str]:
    """The values of variables that are named as secrets are, the longest first; neither words, numbers nor files."""
    found = {value for name, value in environment.items() if len(value) >= 8 and _is_secret(name)}
    plain = {value for value in found if re.fullmatch(r"[A-Za-z]{1,15}|\d+|\*+", value) or os.path.exists(value)}
    return sorted(found - plain, key=len, reverse=True)


_NAMES = r"(?i)(token|secret|passw(or)?d|passphrase|_pwd|_pass|credentials?|(api|access|account|private|secret)_?key)$"


@functools.lru_cache(4096)
def _is_secret(name: str) -> bool:
    return bool(re.search(_NAMES, name))
