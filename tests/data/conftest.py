"""Tests of data are of the main rank, unless they say that they are of another."""

import pytest


@pytest.fixture(autouse=True)
def main_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
