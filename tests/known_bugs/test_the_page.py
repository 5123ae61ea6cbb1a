"""docs/internals/known_bugs.md names tests that exist."""

import re

from tests.conftest import ROOT


def test_every_bug_names_tests_that_exist():
    lines = (ROOT / "docs/internals/known_bugs.md").read_text().splitlines()
    rows = [line.split("|")[1:-1] for line in lines if line[:2] == "| "][1:]
    assert len(rows) >= 40 and f"has {len(rows)} bugs" in (ROOT / "docs/known_bugs.md").read_text()
    for bug, _, tests in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert len(named) == tests.count("`") // 2 > 0, bug
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / file).read_text(), (file, name)
