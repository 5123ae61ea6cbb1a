#!/usr/bin/env python3
"""Check that a tag may be released: `.ci/release.py v0.1.0`. Version, changelog, citation and tag say the same."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problems(tag: str) -> list[str]:
    version = re.search(r'__version__ = "(.*)"', (ROOT / "shared/__init__.py").read_text())[1]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    said = {"tag": tag.removeprefix("v"), "CITATION.cff": cited, "CHANGELOG.md": newest}
    return [
        f"{name} says {other}, shared/__init__.py {version}"
        for name, other in said.items()
        if other != version
    ]


if __name__ == "__main__":
    found = problems(sys.argv[1])
    sys.exit("\n".join(found) or 0)
