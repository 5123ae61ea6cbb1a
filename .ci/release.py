#!/usr/bin/env python3
"""Check that a tag may be released: `.ci/release.py v0.1.0`. Version, changelog, citation and tag say the same.

`.ci/package` builds and tries what is released."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def problems(tag: str) -> list[str]:
    version = re.search(r'__version__ = "(.*)"', (ROOT / "shared/__init__.py").read_text())[1]
    cited = re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    dates = re.findall(
        r"^## (\S+)(?: \((20\d\d-\d\d-\d\d)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    released = re.search(r"^date-released: (.*)$", (ROOT / "CITATION.cff").read_text(), re.M)[1]
    said = {"tag": tag.removeprefix("v"), "CITATION.cff": cited, "CHANGELOG.md": dates[0][0]}
    wrong = [f"CHANGELOG.md has no date of {name}" for name, date in dates if not date]
    if dates != sorted(dates, key=lambda each: each[1], reverse=True):
        wrong.append("CHANGELOG.md: dates do not fall")
    if released != dates[0][1]:
        wrong.append(f"CITATION.cff says {released}, CHANGELOG.md {dates[0][1]}")
    return wrong + [
        f"{name} says {other}, shared/__init__.py {version}"
        for name, other in said.items()
        if other != version
    ]


if __name__ == "__main__":
    found = problems(sys.argv[1])
    sys.exit("\n".join(found) or 0)
