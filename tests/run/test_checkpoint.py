"""Checkpoints: whole or not there, and nothing in them runs."""

import errno
import json
import pickle
import shutil
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from shared.commands import verify_resume
from shared.config import parse as configs
from shared.config.options import FullSpeedConfig, OptimConfig
from shared.config.types import Free
from shared.parallel import sharding
from shared.parallel.strategy import Strategy
from shared.process.errors import ConfigError, NotNow
from shared.process.files import digest
from shared.run import checkpoint, checkpoint_files
from shared.run.checkpoint import Checkpointer
from shared.run.checkpoint_files import CheckpointError, checkpoints, find, verify
from shared.run.folder import _lock
from shared.run.prepared import Prepared
from shared.run.state import TrainState
from shared.run.tensors import read_tensors, saved_tensors
from shared.training import optim
from tests.conftest import SmallConfig
from tests.security.conftest import Payload


class Saver(Checkpointer):
    def resume(self):
        return super().resume(find(self.run_dir, self.config.checkpoint.resume_from_checkpoint))


@pytest.fixture
def saver(tmp_path):
    return make(tmp_path / "run")[2]


@pytest.fixture
def saved(saver):
    """With a checkpoint of step 1."""
    saver.save(TrainState(step=1))
    return saver


@dataclass(frozen=True)
class OfABase(SmallConfig):
    model_name_or_path: Free[str] = "org/base"


def make(folder, *, optim_name="adamw", data="abc", config=None, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].bias.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3))  # it never has a gradient, and so no state
    accelerator = Accelerator(cpu=True)
    optimizers = optim.build(model, OptimConfig(optim=optim_name, learning_rate=3e-4))
    model, optimizers = sharding.prepare(accelerator, model, optimizers)
    folder.mkdir(exist_ok=True)
    train(model, optimizers, 0, 1)  # the optimizers have state from the first step on
    config = configs.replace(config or SmallConfig(), **settings)
    return model, optimizers, Saver(setup_of(accelerator, model, optimizers, folder, config), data)


def setup_of(accelerator, model, optimizers, folder, config, **more):
    """What a Checkpointer looks at."""
    parts = {"models": {"model": model}, "optimizers": optimizers, "dir": folder}
    return Prepared(config, "x", "tokens", accelerator, Strategy(accelerator), **parts | more)


def train(model, optimizers, first, last):
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optim_name", ["adamw", "muon", "adamw_8bit"])
def test_resumes_bit_for_bit_buffers_and_optimizer_included(tmp_path, optim_name):
    model, optimizers, saver = make(tmp_path / "run", optim_name=optim_name)
    train(model, optimizers, 1, 3)
    saver.save(TrainState(step=3, targets=7, notes={"before": {"eval_loss": 1.5}, "by": {2: "b", 10: "a"}}))
    expected = train(model, optimizers, 3, 6)
    model, optimizers, saver = make(tmp_path / "run", optim_name=optim_name)
    state = saver.resume()
    assert (state.step, state.targets, state.notes) == (3, 7, {"before": {"eval_loss": 1.5}, "by": {"2": "b", "10": "a"}})
    assert train(model, optimizers, 3, 6) == expected


def test_a_step_is_saved_once_and_no_command_takes_a_run_back_again_and_again(saver, tmp_path, capsys):
    first = saver.run_dir / "checkpoint-000001"
    saver.save(TrainState())  # nothing is learned yet
    assert checkpoints(tmp_path / "run") == []
    saver.save(TrainState(step=1, targets=1))
    saver.save(TrainState(step=1, targets=2))
    assert saver.resume().targets == 1 and not [name for name in saved_tensors(first) if name.startswith("rank")]
    capsys.readouterr()
    saver.save(TrainState(step=2, targets=2, best_step=1))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-000001", "checkpoint-000002"]
    assert capsys.readouterr().err == "saved checkpoint-000002\n"
    with pytest.raises(ConfigError, match="is this run's own: to go back to it, delete the later ones"):
        find(tmp_path / "run", first)
    shutil.rmtree(saver.run_dir / "checkpoint-000002")
    assert saver.resume().targets == 1
    (tmp_path / "new" / "final").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds final, which the run would overwrite, but no checkpoint"):
        _lock(tmp_path / "new")


def test_the_newest_and_the_best_are_kept(saver, capsys, monkeypatch):
    for step in range(1, 6):
        saver.save(TrainState(step=step, best_step=min(2, step)))
    assert [p.name[-1] for p in checkpoints(saver.run_dir)] == ["2", "4", "5"]
    assert capsys.readouterr().err.count(", the best so far\n") == 2
    monkeypatch.setattr(checkpoint, "remove", Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy")))
    saver.save(TrainState(step=6))
    said = capsys.readouterr().err
    assert "warning: checkpoint-000006 is saved, but an older one could not be removed" in said and "busy" in said
    assert saver.resume().step == 6


@pytest.mark.parametrize("part", ["write", "write_manifest"])
def test_a_save_that_fails_names_the_rank_and_leaves_nothing(saver, monkeypatch, part):
    monkeypatch.setattr(checkpoint, part, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"^checkpoint-000001 could not be saved: rank 0: .*No space left") as caught:
        saver.save(TrainState(step=1))
    assert caught.value.exit_code == 3 and not [*saver.run_dir.iterdir()]


def test_a_save_in_the_background_holds_what_was_then(tmp_path, monkeypatch):
    trained, write = threading.Event(), checkpoint.write

    def late(*args):
        assert threading.current_thread() is not threading.main_thread()
        trained.wait()
        return write(*args)

    monkeypatch.setattr(checkpoint, "write", late)
    model, optimizers, saver = make(tmp_path / "run", config=SmallConfig(speed=FullSpeedConfig(async_save=True)))
    weights = model[2].weight.detach().clone()
    saver.save(TrainState(step=1))
    train(model, optimizers, 1, 3)
    trained.set()
    saver.wait()
    assert read_tensors(saver.run_dir / "checkpoint-000001")["model.2.weight"].equal(weights)
    assert not model[2].weight.equal(weights)


@pytest.mark.parametrize("ranks", [2, 1])
def test_each_rank_goes_on_with_its_own_statistics_and_any_other_number_with_the_mean(tmp_path, monkeypatch, ranks):
    """The first of two ranks, of which the other's are greater by 2."""
    monkeypatch.setattr(checkpoint, "average_buffers", lambda _, mean: [value.add_(1) for value in mean.values()])
    model, _, saver = make(tmp_path / "run")
    saver.accelerator = SimpleNamespace(num_processes=2, process_index=0, is_main_process=True, scaler=None)
    saver.facts["world_size"] = 2
    own = model[1].running_mean.clone()
    saver.save(TrainState(step=1))
    assert model[1].running_mean.equal(own)
    model[1].running_mean.zero_()
    saver.accelerator.num_processes = ranks
    assert saver.resume().step == 1
    torch.testing.assert_close(model[1].running_mean, own + (ranks == 1), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["MANIFEST.json", "rank-0.safetensors"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "delete"])
def test_any_damage_is_found_and_the_one_before_is_used(saved, tmp_path, name, damage, capsys):
    saved.save(TrainState(step=2))
    newest = saved.run_dir / "checkpoint-000002"
    path = newest / name
    content = path.read_bytes()
    if damage == "delete":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(content[: len(content) // 2])
    else:
        place = len(content) // 2 if name != "MANIFEST.json" else content.index(b'"targets": ') + 11
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert saved.resume().step == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "checkpoint-000002" in said and "; the one before it is used" in said
    with pytest.raises(CheckpointError, match="checkpoint-000002"):
        make(tmp_path / "new", resume_from_checkpoint=newest)[2].resume()
    shutil.rmtree(tmp_path / "run" / "checkpoint-000001")
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints is complete"):
        saved.resume()
    assert "the one before" not in capsys.readouterr().err


def test_a_manifest_that_is_none_or_of_another_format_is_refused(tmp_path):
    damaged = ("{}", "[]", '{"format": 7, "step": 1, "files": []}', '{"format": 7, "step": 1}')
    contents = dict.fromkeys(damaged, r"MANIFEST\.json is damaged")
    for content, said in (contents | {'{"format": 2}': "format 2, but this version reads only 7"}).items():
        (tmp_path / "MANIFEST.json").write_text(content)
        with pytest.raises(CheckpointError, match=said):
            verify(tmp_path)


def test_the_loss_scale_of_fp16_is_restored(tmp_path):
    for scale in (4.0, 64.0):
        _, _, saver = make(tmp_path / "run")
        saver.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        saver.accelerator.scaler.scale(torch.tensor(1.0))  # which makes its scale
        if scale == 4.0:
            saver.save(TrainState(step=1))
        else:
            saver.resume()
            assert saver.accelerator.scaler.get_scale() == 4.0
        saver.accelerator.scaler = None
    assert saver.resume().step == 1  # in fp32


@pytest.mark.parametrize(
    ("part", "name"), [("weights", "model.0.weight"), ("optimizer's state", "optimizer.2.weight.exp_avg"), (None, None)]
)
def test_verify_resume_sees_a_single_bit(tmp_path, part, name):
    for run in ("one", "other"):
        model, optimizers, saver = make(tmp_path / run)
        if run == "other" and part:
            value = model[0].weight if part == "weights" else optimizers[0].state[model[2].weight]["exp_avg"]
            with torch.no_grad():
                flat = value.view(-1)
                flat[0] = torch.nextafter(flat[0], torch.tensor(torch.inf))
        saver.save(TrainState(step=1))
        (tmp_path / run / "audit").mkdir()
        for file in ("metrics.jsonl", "audit/rank-0.jsonl"):
            (tmp_path / run / file).write_text("")
    found = verify_resume.compare(tmp_path / "one", tmp_path / "other")
    for kind in ("weights", "optimizer's state", "averages and others"):
        assert bool(found[kind]) == (kind == part), kind
    assert part is None or (found[part].startswith("1 of ") and found[part].endswith(f" tensors, first {name}"))


def test_another_model_and_files_of_another_checkpoint_are_refused(saved):
    """Such as of more ranks, copied to the same place: its tensors would be taken for this one's."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(3, 3)
    model, optimizers = sharding.prepare(accelerator, model, optim.build(model, OptimConfig(learning_rate=3e-4)))
    other = Saver(setup_of(accelerator, model, optimizers, saved.run_dir, SmallConfig()), "abc")
    with pytest.raises(CheckpointError, match="does not fit this model"):
        other.resume()
    folder = saved.run_dir / "checkpoint-000001"
    shutil.copy(folder / "rank-0.safetensors", folder / "rank-1.safetensors")
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is of another checkpoint: remove it"):
        verify(folder)


def test_other_settings_are_refused_by_name(saved, tmp_path, capsys):
    make(tmp_path / "run", per_device_train_batch_size=4, eval_steps=7)[2].resume()
    said = capsys.readouterr().err
    assert "per_device_train_batch_size was 2, now 4" in said and "eval_steps was 5, now 7" in said  # told, and allowed
    with pytest.raises(ConfigError, match="belongs to a run on other data"):
        make(tmp_path / "run", data="xyz")[2].resume()
    with pytest.raises(ConfigError, match=r"learns something else \(seed was 0, now 1\): .* --allow_changed seed"):
        make(tmp_path / "run", seed=1)[2].resume()
    assert make(tmp_path / "run", seed=1, allow_changed=("seed",))[2].resume().step == 1


def test_other_frozen_weights_and_other_replicas_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "identity_of_frozen", lambda name, _: f"of {name}")
    _, _, saver = make(tmp_path / "run", config=OfABase())
    saver.save(TrainState(step=1))
    with pytest.raises(ConfigError, match="belongs to a run on other base weights"):
        make(tmp_path / "run")[2].resume()
    assert make(tmp_path / "run", allow_changed=("base",))[2].resume().step == 1
    saver.facts["replicas"] = "2 replicas in 2 processes"
    with pytest.raises(ConfigError, match="is of no replicas that train apart, and this launch has 2 replicas in 2 proc"):
        saver.resume()
    saver.save(TrainState(step=2))
    saver.facts["replicas"] = ""
    with pytest.raises(ConfigError, match="is of 2 replicas in 2 processes that train apart, and this launch has none"):
        saver.resume()


@pytest.mark.parametrize("name", ["rank-0.safetensors", "MANIFEST.json", "rank-1.pickle"])
def test_a_pickle_in_place_of_any_file_runs_nothing(saved, tmp_path, name):
    folder, content = saved.run_dir / "checkpoint-000001", pickle.dumps(Payload(str(tmp_path / "ran")))
    (folder / name).write_bytes(content)
    if name != "MANIFEST.json":  # with one that agrees: who can write one file can write them all
        manifest = json.loads((folder / "MANIFEST.json").read_text())
        del manifest["sha256"]
        manifest["files"][name] = digest(folder / name)
        (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    if name == "rank-1.pickle":  # a stray one, which nothing asks for
        assert saved.resume().step == 1
    else:
        with pytest.raises((CheckpointError, SafetensorError)):
            saved.resume()
    assert not (tmp_path / "ran").exists()


def test_a_best_one_that_is_damaged_leaves_the_last_weights(tmp_path, capsys):
    model, optimizers, saver = make(tmp_path / "run")
    saver.save(TrainState(step=1))
    before = model[0].weight.detach().clone()
    train(model, optimizers, 1, 2)
    assert saver.load_best(1) and model[0].weight.equal(before)
    (saver.run_dir / "checkpoint-000001" / "rank-0.safetensors").write_bytes(b"")
    train(model, optimizers, 1, 2)
    before = model[0].weight.detach().clone()
    assert not saver.load_best(1) and model[0].weight.equal(before)
    assert "is damaged; final/ holds the last weights, not the best" in capsys.readouterr().err


def test_a_file_system_that_gives_an_error_has_nothing_passed_over(saved, monkeypatch):
    saved.save(TrainState(step=2))

    def digest(path):
        if path.parent.name == "checkpoint-000002":
            raise OSError(errno.ESTALE, "Stale file handle")
        return {"xxh3_128": "", "size": 0}

    monkeypatch.setattr(checkpoint_files, "digest", digest)
    with pytest.raises(NotNow, match=r"checkpoint-000002: cannot be read \(Stale file handle\)"):
        saved.resume()


def test_one_that_was_found_damaged_stays_until_its_step_is_due(saved, tmp_path):
    saved.save(TrainState(step=3))
    (saved.run_dir / "checkpoint-000003" / "rank-0.safetensors").write_bytes(b"")
    _, _, saver = make(tmp_path / "run")
    assert saver.resume().step == 1
    saver.save(TrainState(step=2))
    assert [p.name[-1] for p in checkpoints(saver.run_dir)] == ["1", "2", "3"]  # it is of a later step
    saver.save(TrainState(step=3))
    assert [p.name[-1] for p in checkpoints(saver.run_dir)] == ["2", "3"]
    assert saver.resume().step == 3


def test_a_copy_of_a_run_s_folder_or_of_its_checkpoint_is_another_run_to_the_tracker(tmp_path, capsys):
    """And so is a run that starts from it, which goes on from its own."""
    make(tmp_path / "one")[2].save(TrainState(step=1, tracker_run_id="abc", best_step=1))
    shutil.copytree(tmp_path / "one", tmp_path / "whole")
    shutil.copytree(tmp_path / "one" / "checkpoint-000001", tmp_path / "part" / "checkpoint-000001")
    for name in ("whole", "part"):
        state = make(tmp_path / name)[2].resume()
        assert (state.tracker_run_id, state.best_step) == ("", 1)
        assert f"was saved in {tmp_path}/one: the tracker gets another run" in capsys.readouterr().err
    assert make(tmp_path / "one")[2].resume().tracker_run_id == "abc"
    _, _, saver = make(tmp_path / "two", resume_from_checkpoint=tmp_path / "one/checkpoint-000001")
    state = saver.resume()
    assert (state.step, state.tracker_run_id) == (1, "")
    saver.save(TrainState(step=2))
    assert saver.resume().step == 2
    assert f"resumed from {tmp_path / 'two/checkpoint-000002'} at step 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["000004", "000001"])
def test_a_checkpoint_under_another_step_s_name_is_not_used(saver, tmp_path, capsys, name):
    """Otherwise its step would not be saved, or each start would go back."""
    saver.save(TrainState(step=2))
    saver.save(TrainState(step=3))
    (saver.run_dir / "checkpoint-000003").rename(saver.run_dir / f"checkpoint-{name}")
    _, _, saver = make(tmp_path / "run")
    assert saver.resume().step == 2
    assert (f"checkpoint-{name}: holds step 3: was it renamed?" in capsys.readouterr().err) is (name == "000004")
    saver.save(TrainState(step=4))
    assert saver.resume().step == 4
    with pytest.raises(CheckpointError, match="holds step 4: was it renamed"):
        shutil.move(saver.run_dir / "checkpoint-000004", tmp_path / "checkpoint-000005")
        make(tmp_path / "new", resume_from_checkpoint=tmp_path / "checkpoint-000005")[2].resume()


def test_verify_resume_hands_on_a_file_of_settings_as_it_is_written(tmp_path):
    given = "seed: 010\nmax-steps: 9\nlr: 1e-4\nvalidation_file: ~\nnames: [on, 'on', 1_0]\nsave_steps: 2\n"
    (tmp_path / "given.yaml").write_text(given)
    kept = verify_resume.without_ours(["train.py", f"--config={tmp_path}/given.yaml", "--no-deterministic"], tmp_path)
    assert kept == ["train.py", "--config", f"{tmp_path}/config.yaml"]
    expected = "seed: 010\nlr: 1e-4\nvalidation_file: ~\nnames: [on, 'on', 1_0]\n"
    assert (tmp_path / "config.yaml").read_text() == expected
