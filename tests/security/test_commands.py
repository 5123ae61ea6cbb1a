"""Commands change nothing outside of their folder, and run no code that a file names."""

import subprocess

import hypothesis  # noqa: F401  # pytest would import it after these tests, when Python 3.11 has miscounted its recursion
import pytest

from shared.process import start
from shared.process.errors import ConfigError

HOSTILE = """x$(touch ran)y 'it's `touch ran`'; touch ran; "; touch ran; " \\$(touch ran)"""


def test_the_command_that_names_another_checkout_runs_nothing_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = tmp_path / HOSTILE / "shared/config/parse.py"
    module.parent.mkdir(parents=True)
    module.touch()
    with pytest.raises(ConfigError) as caught:
        start.require_shared_beside(tmp_path / HOSTILE / "train.py")
    command = str(caught.value).partition(": put ")[2].partition(" before the command")[0]
    told = subprocess.run(["sh", "-c", f"{command} printenv PYTHONPATH"], check=True, capture_output=True, text=True).stdout
    assert told == f"{tmp_path / HOSTILE}\n" and not (tmp_path / "ran").exists()
