"""A run's folder: what it has not written stays, what is not its own is not loaded, and no link leads out of it."""

import json
import os
from pathlib import Path

import pytest

from shared.process.errors import ConfigError
from shared.process.files import digest, whole_folder
from shared.run.checkpoint_files import MANIFEST, CheckpointError, _digest_of, verify
from shared.run.folder import FILES, MODELS, _lock
from shared.run.state import TrainState
from tests.conftest import run_here
from tests.run.test_checkpoint import make


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def rewrite(folder: Path, **changes: object) -> None:
    """Change a manifest, and make its own hash right again, as whoever can write there can."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    manifest |= changes
    (folder / MANIFEST).write_text(json.dumps(manifest | {"sha256": _digest_of(manifest)}))


# What is not the run's own -------------------------------------------------------------------------------------------


def test_checkpoints_that_the_run_has_not_written_are_never_removed(tmp_path, capsys):
    """The user's own folders of such names, and another run's checkpoint; also where the run saves at that very step."""
    make(tmp_path / "other")[2].save(TrainState(step=2))
    (tmp_path / "run").mkdir()
    _lock(tmp_path / "run")
    _, _, saver = make(tmp_path / "run", save_total_limit=1)
    saver.save(TrainState(step=1))
    theirs = [tmp_path / "run" / name for name in ("checkpoint-1", "checkpoint-000003", "checkpoint-000004")]
    for folder in theirs:
        folder.mkdir()
        (folder / "thesis.txt").write_text("mine")
    (tmp_path / "other" / "checkpoint-000002").rename(tmp_path / "run" / "checkpoint-000002")
    theirs.append(tmp_path / "run" / "checkpoint-000002")
    before = {folder: files_of(folder) for folder in theirs}
    _, _, saver = make(tmp_path / "run", save_total_limit=1)
    assert saver.resume().step == 1
    assert "checkpoint-000002: another run has written it; the one before it is used" in capsys.readouterr().err
    for step in range(2, 7):
        saver.save(TrainState(step=step))
    moved = [tmp_path / "run" / name for name in os.listdir(tmp_path / "run") if name.startswith("other-")]
    assert sorted(p.name.rpartition("-")[0] for p in moved) == [f"other-checkpoint-00000{n}" for n in (2, 3, 4)]
    kept = {p.name.split("-")[2]: files_of(p) for p in moved} | {"1": files_of(theirs[0])}
    assert kept == {folder.name.split("-")[1]: content for folder, content in before.items()}
    own = sorted(p.name for p in (tmp_path / "run").glob("checkpoint-0*"))
    assert own == ["checkpoint-000006"]


def test_a_checkpoint_under_another_ones_name_is_damage(tmp_path, capsys):
    _, _, saver = make(tmp_path / "run", save_total_limit=9)
    for step in (1, 2, 3):
        saver.save(TrainState(step=step))
    one, two = (tmp_path / "run" / f"checkpoint-00000{n}" for n in (2, 3))
    one.rename(tmp_path / "x"), two.rename(one), (tmp_path / "x").rename(two)
    assert make(tmp_path / "run")[2].resume().step == 1
    assert "checkpoint-000003: holds step 2: was it renamed?; the one before it is used" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="holds step 3: was it renamed"):
        make(tmp_path / "new", resume_from_checkpoint=one)[2].resume()


@pytest.mark.parametrize(
    "name", ["config.yaml", "metrics.jsonl", "summary.txt", "curves.png", "final/model.safetensors", ".lock"]
)
def test_files_of_the_user_are_not_overwritten(name, tmp_path, tiny_model, text_file):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True)
    (folder / name).write_text(f"train_file: {text_file}\nmodel_name_or_path: {tiny_model}\nmax_steps: 1\n")
    before = files_of(folder)
    flags = ["--config", folder / name] if name == "config.yaml" else []
    with pytest.raises(ConfigError, match=f"holds {name.split('/')[0]}, which the run would overwrite.*another folder"):
        run_here("pretrain", "--max_steps", 1, "--output_dir", folder, *flags)
    assert files_of(folder) == before


def test_a_run_writes_nothing_but_what_it_is_known_to_write(tmp_path, image_folder, architectures):
    """Else the list of files that a run refuses to overwrite would not be true."""
    flags = ["--train_dir", image_folder, "--config_name", architectures / "convnext", "--image_size", 16, "--audit_data"]
    flags += ["--global_batch_size", 4, "--per_device_train_batch_size", 4, "--max_steps", 2, "--dataloader_num_workers", 0]
    run_here("image_classification", *flags, "--output_dir", tmp_path / "run", "--report_to", "none", "--profile")
    names = {p.name for p in (tmp_path / "run").iterdir() if not p.name.startswith((".", "checkpoint-"))}
    assert names <= {*FILES, *MODELS} and len(names) > 6


# Links ---------------------------------------------------------------------------------------------------------------


def test_no_link_is_followed_where_a_run_writes(tmp_path, image_folder, architectures):
    """A link in the place of a lock or of a temporary folder leaves its target alone."""
    folder, target, victim = tmp_path / "run", tmp_path / "target", tmp_path / "victim.txt"
    folder.mkdir(), target.mkdir()
    victim.write_text("precious"), (target / "precious.txt").write_text("precious")
    (folder / ".lock").symlink_to(victim)
    flags = ["--train_dir", image_folder, "--config_name", architectures / "convnext", "--image_size", 16, "--save_steps", 1]
    flags += ["--global_batch_size", 4, "--per_device_train_batch_size", 4, "--max_steps", 2, "--dataloader_num_workers", 0]
    flags += ["--output_dir", folder, "--report_to", "none"]
    with pytest.raises(ConfigError, match=r"holds \.lock"):
        run_here("image_classification", *flags)
    (folder / ".lock").unlink()
    for name in (
        ".tmp-checkpoint-000001",
        ".tmp-checkpoint-000002",
        ".tmp-final",
        ".old-final",
        ".tmp-gone-checkpoint-000001",
    ):
        (folder / name).symlink_to(target)
    run_here("image_classification", *flags)
    assert victim.read_text() == "precious" and files_of(target) == {"precious.txt": b"precious"}
    assert (folder / "final" / "model.safetensors").is_file() and not (folder / "final").is_symlink()


def test_a_folder_is_made_whole(tmp_path):
    with whole_folder(tmp_path / "made") as made:
        (made / "x").write_text("x")
    assert files_of(tmp_path / "made") == {"x": b"x"}


def test_a_checkpoint_reads_its_own_files_alone(tmp_path):
    """A manifest that names shards of elsewhere, with hashes that are right."""
    _, _, saver = make(tmp_path / "run")
    saver.save(TrainState(step=1))
    saver.save(TrainState(step=2))
    one, two = (tmp_path / "run" / f"checkpoint-00000{n}" for n in (1, 2))
    rewrite(two, files={f"../{one.name}/{path.name}": digest(path) for path in one.iterdir() if path.name != MANIFEST})
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors is not of this checkpoint"):
        verify(two)
