"""A run's folder: what it has not written stays, what is not its own is not loaded, and no link leads out of it."""

from pathlib import Path

import pytest

from shared.process.errors import ConfigError
from shared.run.checkpoint_files import CheckpointError
from shared.run.folder import FILES, MODELS, _tidy
from shared.run.state import TrainState
from tests.conftest import run_here
from tests.run.test_checkpoint import make
from tests.security.conftest import TINY


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


# What is not the run's own -------------------------------------------------------------------------------------------


def test_folders_without_a_manifest_are_never_removed(tmp_path):
    """The user's own, of the names of checkpoints; also where the run saves at that very step."""
    _, _, saver = make(tmp_path / "run", save_total_limit=1)
    saver.save(TrainState(step=1))
    theirs = [tmp_path / "run" / name for name in ("checkpoint-1", "checkpoint-000003", "checkpoint-000004")]
    for folder in theirs:
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    _, _, saver = make(tmp_path / "run", save_total_limit=1)
    assert saver.resume().step == 1
    saver.save(TrainState(step=2))
    with pytest.raises(CheckpointError, match="checkpoint-000003 is in the way, which is no checkpoint"):
        saver.save(TrainState(step=3))
    saver.save(TrainState(step=5))
    assert all(list(files_of(folder)) == ["thesis.txt"] for folder in theirs)
    own = {p.name for p in (tmp_path / "run").glob("checkpoint-0*")} - {p.name for p in theirs}
    assert own == {"checkpoint-000005"}


def test_only_what_a_killed_run_was_writing_is_tidied_away(tmp_path):
    """A checkpoint that it was replacing comes back."""
    _, _, saver = make(tmp_path / "run")
    folder = saver.run_dir
    for step in (4, 6):
        saver.save(TrainState(step=step))
    (folder / "checkpoint-000099").write_text("a file")
    for name in ("checkpoint-best", "checkpoint-000004/notes", ".tmp-checkpoint-000006", ".tmp-notes", ".old-final"):
        (folder / name).mkdir()
    (folder / "checkpoint-000004/rng_state_0.pth").write_bytes(b"of another tool")
    (folder / "final").mkdir()
    (folder / "checkpoint-000006").rename(folder / ".old-checkpoint-000006")
    _tidy(folder)
    left = {"checkpoint-000004", "checkpoint-000006", "checkpoint-000099", "checkpoint-best", ".tmp-notes", "final"}
    assert {path.name for path in folder.iterdir()} == left and saver.resume().step == 6


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.txt", "curves.png", "final/model.safetensors"])
def test_files_of_the_user_are_not_overwritten(name, tmp_path, tiny_model, text_file):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(f"train_file: {text_file}\nmodel_name_or_path: {tiny_model}\nmax_steps: 1\n")
    before = files_of(folder)
    flags = ["--config", folder / name] if name == "config.yaml" else []
    with pytest.raises(ConfigError, match=f"holds {name.split('/')[0]}, which the run would overwrite.*another folder"):
        run_here("pretrain", "--max_steps", 1, "--output_dir", folder, *flags)
    assert files_of(folder) == before


# Links ---------------------------------------------------------------------------------------------------------------


def test_no_link_is_followed_where_a_run_writes(tmp_path, image_folder, architectures):
    """A link in the place of a lock or of a temporary folder leaves its target alone."""
    folder, target, victim = tmp_path / "run", tmp_path / "target", tmp_path / "victim.txt"
    folder.mkdir(), target.mkdir()
    victim.write_text("precious"), (target / "precious.txt").write_text("precious")
    (folder / ".run.lock").symlink_to(victim)
    flags = [*TINY["image_classification"], "--train_dir", image_folder, "--config_name", architectures / "convnext"]
    flags += ["--max_steps", 2, "--save_steps", 1, "--output_dir", folder, "--audit_data", "--profile"]
    with pytest.raises(ConfigError, match=r"holds \.run\.lock"):
        run_here("image_classification", *flags)
    (folder / ".run.lock").unlink()
    steps = ("checkpoint-000001", "checkpoint-000002", "final", "gone-checkpoint-000001")
    for name in (*(f".tmp-{step}" for step in steps), ".old-final"):
        (folder / name).symlink_to(target)
    run_here("image_classification", *flags)
    assert victim.read_text() == "precious" and files_of(target) == {"precious.txt": b"precious"}
    assert (folder / "final" / "model.safetensors").is_file() and not (folder / "final").is_symlink()
    # else the list of files that a run refuses to overwrite would not be true
    names = {p.name for p in folder.iterdir() if not p.name.startswith((".", "checkpoint-"))}
    assert names <= {*FILES, *MODELS} and len(names) > 6
