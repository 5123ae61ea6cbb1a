"""What is printed: one line on the main rank, without secrets."""

import re
import sys
from typing import Any

from shared.process import ranks

_SECRETS = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s]+(?=@)"  # user:password@ of a URL
    r"|(?<=http://)[^/\s:@]+(?=@)|(?<=https://)[^/\s:@]+(?=@)"  # token@
    r"|(?i:([?&][\w-]*(?:token|key|secret|passw|signature|sig|credential)[\w-]*=)[^&\s]+)"  # in its query
    r"|\bhf_[A-Za-z0-9]{30,}"  # Hugging Face
    r"|\bsk-(?=[\w-]*\d)(?=[\w-]*[A-Z])[\w-]{20,}"  # OpenAI, Anthropic: not a folder that is called sk-learn-something
    r"|\b(?:gh[pousr]_|github_pat_)\w{20,}"  # GitHub
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"  # AWS
)


def redact(value: Any) -> Any:
    """The same text, list or mapping with `***` in place of what looks like a password or an access token.

    For whatever is written to a file, a console or a tracker: none of them is a place for secrets.
    """
    if isinstance(value, str):
        return _SECRETS.sub(lambda found: (found[1] or "") + "***", value)
    if isinstance(value, dict):
        return {key: redact(item) for key, item in value.items()}
    return [redact(item) for item in value] if isinstance(value, list | tuple) else value


def print_main(text: str) -> None:
    """Print one line on the main rank, above a progress bar if there is one."""
    if ranks.is_main_rank():
        from tqdm import tqdm

        tqdm.write(redact(text), file=sys.stderr)
        sys.stderr.flush()


def summary(title: str, rows: dict[str, Any]) -> None:
    """Print the settings in force, one aligned line each, on the main rank. Rows that are None are left out."""
    rows = {k: v for k, v in rows.items() if v is not None}
    width = max(map(len, rows))
    print_main("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]))
