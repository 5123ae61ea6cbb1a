"""Work that outlives its machine: what a run leaves at another place, and that the same command continues from there."""

import importlib.util
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.commands.verify_resume import compare
from shared.config.options import CheckpointConfig
from shared.extras.mirror import mirror as mirrors
from shared.extras.mirror import place as places
from shared.extras.mirror.mirror import Mirror
from shared.extras.mirror.place import Place, Thing, fetched
from shared.process.errors import ConfigError, NotNow
from shared.run import exits
from shared.run.checkpoint_files import MANIFEST, CheckpointError, run_folder, write_manifest
from shared.run.state import TrainState
from tests.conftest import LAUNCHER, ROOT, exit_of, free_port, run, shown, with_fault
from tests.object_store import ObjectStore
from tests.security.test_secrets import files_with

STEPS = 8


@pytest.fixture(scope="module")
def object_store(tmp_path_factory):
    if importlib.util.find_spec("moto") is None:
        pytest.skip("the S3 server is not installed: pip install -r tests/requirements.txt")
    store = ObjectStore((free_port(), free_port()), tmp_path_factory.mktemp("store") / "log")
    yield store
    store.close()


@pytest.fixture(params=["folder", "s3"])
def url(request, tmp_path, monkeypatch):
    """An empty place, of each kind."""
    if request.param == "folder":
        return str(tmp_path / "place")
    store = request.getfixturevalue("object_store")
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(mirrors, "LEASE", 1.5)
    monkeypatch.setattr(mirrors, "SETTLE", 0.3)
    monkeypatch.setattr(mirrors, "LOOK", 0.05)
    monkeypatch.setattr(places, "PAUSES", (0.0, 0.01))


def save(run_dir: Path, step: int, *, best: int = 0, size: int = 3000, content: str = "") -> Path:
    """A checkpoint of a run."""
    from shared.process.files import digest, whole_folder

    with whole_folder(run_dir / f"checkpoint-{step:06d}") as folder:
        for rank in range(2):
            text = f"{content or step} {rank} "
            (folder / f"rank-{rank}.safetensors").write_text((text * size)[:size])
        files = {path.name: digest(path) for path in sorted(folder.iterdir())}
        state = TrainState(step=step, best_step=best)
        write_manifest(folder, {"step": step, "state": vars(state), "files": files})
    return run_dir / f"checkpoint-{step:06d}"


def machine(tmp_path: Path, name: str, url: str, **options) -> Mirror:
    """A run's folder, and what mirrors it."""
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    return Mirror(folder, CheckpointConfig(mirror_to=url, **{"mirror_timeout": 30.0} | options))


def end(mirror: Mirror) -> None:
    exits._last = []
    mirror.finish()


def die(mirror: Mirror) -> None:
    """As a machine does: it neither sends anything any more nor lets go of the lease."""
    exits._last = []
    mirror.over.set()
    mirror.wake.set()
    for thread in mirror.threads:
        thread.join()


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def files_of(url: str) -> dict[str, int]:
    return {path: info.size for path, info in Place(url).look().items() if info.is_file}


def whole(url: str, tmp_path: Path) -> list[str]:
    """Names of what is whole there, without hashes; each is read and compared with its hashes."""
    place, names = Place(url), []
    for path, name in place.whole().items():
        names.append(name)
        place.fetch(path, tmp_path / "read" / name)
    return sorted(names)


# What is sent --------------------------------------------------------------------------------------------------------


def test_a_thing_is_whole_or_not_there_and_nothing_is_sent_twice(url, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "PART", 1000)
    place, thing = Place(url), Thing(save(tmp_path, 7, size=2500))
    sent = []
    put = place.put
    monkeypatch.setattr(place, "put", lambda path, content: (sent.append(path.split("/")[-1]), put(path, content)))
    left = [4]

    def breaks():
        left[0] -= 1
        if not left[0]:
            raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        place.send(thing, "writer-000001-a-b", breaks)
    assert sent == [f"rank-0.safetensors.0000{n}" for n in range(3)] and place.whole() == {}
    shutil.move(thing.folder, tmp_path / "gone")  # deleted by the run meanwhile
    place.send(thing, "writer-000001-a-b", lambda: None)
    assert sent[3:] == [*(f"rank-1.safetensors.0000{n}" for n in range(3)), MANIFEST]
    place.send(thing, "writer-000001-a-b", lambda: None)
    place.send(thing, "writer-000002-a-c", lambda: None)  # the store copies its own parts
    assert sent[7:] == [MANIFEST]
    (path,) = place.whole("writer-000002-a-c")
    place.fetch(path, tmp_path / "other")
    assert (tmp_path / "other/rank-1.safetensors").read_bytes() == (tmp_path / "gone/rank-1.safetensors").read_bytes()
    place.delete("writer-000001-a-b")
    assert place.writers() == ["writer-000002-a-c"]
    put(f"{path}/rank-1.safetensors.00001", b"x" * 1000)
    with pytest.raises(CheckpointError, match=r"rank-1\.safetensors is damaged"):
        place.fetch(path, tmp_path / "other")
    put(f"writer-000002-a-c/evil/{MANIFEST}", json.dumps({"files": {"../../x": {"size": 1}}}).encode())
    with pytest.raises(CheckpointError, match="is not below it"):
        place.fetch("writer-000002-a-c/evil", tmp_path / "other")


def test_a_run_is_mirrored_pruned_and_continued_by_another_machine(url, tmp_path):
    first = machine(tmp_path, "one", url).open()
    (first.dir / "metrics.jsonl").write_text("1\n")
    first.start()
    for step in range(1, 7):
        save(first.dir, step, best=2)
        if step > 4:
            shutil.rmtree(first.dir / f"checkpoint-{step - 2:06d}", ignore_errors=True)
        first.wait()
    assert whole(url, tmp_path) == ["checkpoint-000002", "checkpoint-000005", "checkpoint-000006", "logs"]
    die(first)
    began = time.monotonic()
    second = machine(tmp_path, "two", url).open()
    assert time.monotonic() - began > 1 and second.writer > first.writer
    assert sorted(p.name for p in second.dir.glob("[!.]*")) == ["checkpoint-000002", "checkpoint-000006", "metrics.jsonl"]
    second.start()
    second.wait()
    assert whole(url, tmp_path) == ["checkpoint-000002", "checkpoint-000006", "logs"]  # its own copies
    assert {path.split("/")[0] for path in files_of(url)} == {second.writer}
    end(second)
    end(machine(tmp_path, "two", url).open())  # at once: its folder is locked by nobody else, and it has let go
    assert "lease" not in "".join(files_of(url))


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(url, tmp_path, capsys):
    first = machine(tmp_path, "one", url).open()
    first.start()
    for step in (1, 2):
        save(first.dir, step)
        first.wait()
    end(first)
    place = Place(url)
    (newest,) = [path for path in files_of(url) if path.endswith("rank-1.safetensors") and "checkpoint-000002-" in path]
    place.put(newest, b"x" * 3000)
    second = machine(tmp_path, "two", url).open()
    assert [p.name for p in second.dir.glob("checkpoint-*")] == ["checkpoint-000001"]
    assert "rank-1.safetensors is damaged; the one before it is used" in capsys.readouterr().err
    end(second)
    (oldest,) = [path for path in files_of(url) if path.endswith("rank-1.safetensors") and "checkpoint-000001-" in path]
    place.put(oldest, b"x" * 3000)
    with pytest.raises(CheckpointError, match="is damaged"):
        machine(tmp_path, "three", url).open()
    exits._last.pop()()


def test_a_local_checkpoint_as_new_is_used_and_another_runs_place_is_refused(tmp_path):
    url = str(tmp_path / "place")
    first = machine(tmp_path, "one", url).open()
    first.start()
    save(first.dir, 3, content="first")
    first.wait()
    end(first)
    save(first.dir, 4, content="later")
    again = machine(tmp_path, "one", url).open()
    assert (again.dir / "checkpoint-000004").is_dir()
    end(again)
    (first.dir / "checkpoint-000004/rank-0.safetensors").write_text("damaged")
    shutil.rmtree(first.dir / "checkpoint-000003")
    end(machine(tmp_path, "one", url).open())
    assert (first.dir / "checkpoint-000003/rank-0.safetensors").read_text().startswith("first")
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", 9)
    with pytest.raises(ConfigError, match="holds another run than --output_dir"):
        machine(tmp_path, "other", url).open()
    with pytest.raises(ConfigError, match="expected a folder, or a URL by s3"):
        Place("hf://buckets/me/x")


# A store that fails --------------------------------------------------------------------------------------------------


def test_a_store_that_dies_stops_nothing_and_gets_the_rest_later(tmp_path, object_store, monkeypatch, capsys):
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    mirror = machine(tmp_path, "one", "s3://bucket/dies", mirror_timeout=3.0).open()
    mirror.start()
    save(mirror.dir, 1)
    mirror.wait()
    object_store.kill()
    save(mirror.dir, 2)
    monkeypatch.setattr(mirrors, "SAID", 0.0)
    wait_until(lambda: mirror.problem)
    end(mirror)
    said = capsys.readouterr().err
    assert "warning: --mirror_to s3://bucket/dies lacks checkpoint-000002 (When" in said and "Could not connect" in said
    object_store.start(fail=0.2, latency=0.02, rate=1e6)
    again = machine(tmp_path, "one", "s3://bucket/dies", mirror_timeout=60.0).open()
    again.start()
    again.wait()
    end(again)
    object_store.kill()
    object_store.start()
    assert whole("s3://bucket/dies", tmp_path) == ["checkpoint-000001", "checkpoint-000002", "logs"]


def test_a_slow_store_gets_whole_checkpoints_of_a_run_that_saves_faster(tmp_path, monkeypatch):
    mirror = machine(tmp_path, "one", str(tmp_path / "place"))
    monkeypatch.setattr(mirror, "_go_on", lambda: time.sleep(0.2))
    (mirror.open().dir / "metrics.jsonl").write_text("1\n")
    mirror.start()
    for step in range(1, 13):
        save(mirror.dir, step)
        shutil.rmtree(mirror.dir / f"checkpoint-{step - 2:06d}", ignore_errors=True)
        time.sleep(0.15)
    place = Place(str(tmp_path / "place"))
    seen = [name for name in place.whole().values() if name.startswith("checkpoint-")]
    assert seen and seen[0] < "checkpoint-000011" and not mirror.problem
    end(mirror)
    assert "checkpoint-000012" in whole(str(tmp_path / "place"), tmp_path)


def test_an_old_checkpoint_makes_room_only_if_the_latest_is_mirrored(tmp_path, monkeypatch):
    mirror = machine(tmp_path, "one", str(tmp_path / "place"), mirror_timeout=0.5).open()
    free = [10**9]
    monkeypatch.setattr(mirrors.shutil, "disk_usage", lambda _: SimpleNamespace(free=free[0]))
    for step in (1, 2, 3):
        save(mirror.dir, step, best=1)
    latest = mirror.dir / "checkpoint-000003"
    mirror.make_room(latest)
    free[0] = 100
    mirror._begin(lambda: mirror.over.wait())  # a store that answers nothing
    mirror.make_room(latest)
    assert len(list(mirror.dir.glob("checkpoint-*"))) == 3
    mirror.threads.pop()
    mirror.start()
    mirror.options = CheckpointConfig(mirror_to="x", mirror_timeout=30.0)
    mirror.make_room(latest)
    assert [p.name for p in mirror.dir.glob("checkpoint-*")] == ["checkpoint-000001"]  # the best
    end(mirror)
    assert "checkpoint-000003" in whole(str(tmp_path / "place"), tmp_path)


# Leases --------------------------------------------------------------------------------------------------------------


def race(folder: Path, url: str) -> None:
    mirrors.LEASE, mirrors.SETTLE = 12.0, 3.0  # on a busy machine
    folder.mkdir()
    mirror = Mirror(folder, CheckpointConfig(mirror_to=url))
    wait_until((folder.parent / "go").exists)
    try:
        mirror.open()
    except NotNow as error:
        print(error)
        return
    mirror.start()
    save(folder, 1, content=folder.name)
    mirror.wait()
    wait_until((folder.parent / "over").exists)  # the others have seen that it lives
    mirror.finish()


RACE = "import pathlib, sys; from tests.extras.test_mirror import race; race(pathlib.Path(sys.argv[1]), sys.argv[2])"


def test_of_four_machines_that_begin_at_once_one_trains(url, tmp_path):
    folders = [tmp_path / f"m{n}" for n in range(4)]
    racers = []
    for folder in folders:
        with folder.with_suffix(".txt").open("w") as said:
            racers.append(LAUNCHER.start(("-c", RACE, folder, url), said, sys.__stderr__))
    wait_until(lambda: all(folder.exists() for folder in folders))
    (tmp_path / "go").touch()
    wait_until(lambda: sum(racer.poll() is None for racer in racers) < 2)
    (tmp_path / "over").touch()
    assert [racer.wait(120) for racer in racers] == [0] * 4
    ends = {folder.name: folder.with_suffix(".txt").read_text() for folder in folders}
    (winner,) = [name for name, said in ends.items() if not said]
    assert all("trains this run: wait for it, stop it, or choose another place" in said for said in ends.values() if said)
    assert whole(url, tmp_path) == ["checkpoint-000001", "logs"]
    assert (tmp_path / "read/checkpoint-000001/rank-0.safetensors").read_text().startswith(winner)


def test_a_writer_that_lost_its_lease_damages_nothing(url, tmp_path, capsys, monkeypatch):
    """One that was asleep, as a machine that is moved, while another took over."""
    sleeping, asleep, awake = machine(tmp_path, "one", url), threading.Event(), threading.Event()
    renew = sleeping._renew
    monkeypatch.setattr(sleeping, "_renew", lambda: None if asleep.is_set() and not awake.is_set() else renew())
    monkeypatch.setattr(sleeping, "_go_on", lambda: asleep.is_set() and awake.wait())
    sleeping.open().start()
    save(sleeping.dir, 1)
    sleeping.wait()
    monkeypatch.setattr(sleeping, "_beat", lambda: None)
    asleep.set()
    time.sleep(mirrors.LEASE)
    other = machine(tmp_path, "two", url)
    other.open().start()
    save(other.dir, 2, content="other")
    other.wait()
    before = files_of(url)
    for step in (2, 3):
        save(sleeping.dir, step, content="sleeper")
    awake.set()
    wait_until(lambda: sleeping.lost)
    sleeping.wait()
    end(sleeping)
    assert "another machine continues this run" in capsys.readouterr().err
    assert {pair for pair in before.items() if pair[0].startswith(other.writer)} <= {*files_of(url).items()}
    save(other.dir, 4, content="other")
    other.wait()
    end(other)
    third = machine(tmp_path, "three", url).open()
    assert {p.name for p in third.dir.glob("checkpoint-*")} == {"checkpoint-000004"}
    end(third)


# Runs ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(text_file, tiny_model):
    return (
        *("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", 32, "--max_steps", STEPS),
        *("--save_steps", 2, "--eval_steps", 3, "--eval_samples", 4, "--global_batch_size", 8, "--audit_data"),
        *("--per_device_train_batch_size", 2),
    )


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    return run("pretrain", tmp_path_factory.mktemp("straight") / "run", *flags, processes=2)


@pytest.mark.parametrize("url", ["s3" if importlib.util.find_spec("moto") else "folder"], indirect=True)
def test_a_killed_run_continues_on_an_empty_disk(url, flags, straight, tmp_path, request):
    """Two processes, killed while a checkpoint is sent; stopped by a signal; each time with nothing left on the disk."""
    flags = (*flags, "--mirror_to", url)
    killed = with_fault("pretrain", tmp_path / "run", "mirror.part:kill@9#0", *flags, processes=2)
    assert killed.returncode
    whole(url, tmp_path)
    shutil.rmtree(killed.folder)
    stopped = with_fault("pretrain", tmp_path / "run", "micro_batch:term@6", *flags, processes=2)
    assert exit_of(stopped.folder)["exit_code"] == 143, stopped.output
    step = exit_of(stopped.folder)["step"]
    assert f"checkpoint-{step:06d}" in whole(url, tmp_path) and not any(p.endswith("lease") for p in files_of(url))
    shutil.rmtree(stopped.folder)
    done = run("pretrain", tmp_path / "run", *flags, processes=2)
    assert f"at step {step}" in done.output
    assert set(compare(straight.folder, done.folder).values()) == {""}
    shutil.rmtree(done.folder)
    again = run("pretrain", tmp_path / "run", *flags, processes=2)
    assert "is finished" in again.output and (again.folder / "final").is_dir()
    assert set(compare(straight.folder, again.folder).values()) == {""}
    if url.startswith("s3"):
        (tmp_path / "console.txt").write_text(killed.output + stopped.output + done.output + again.output)
        store = request.getfixturevalue("object_store")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            assert files_with(store.environment[name], tmp_path) == []
    place = Path(url) if "://" not in url else url
    folder = run_folder(str(place))
    assert (folder / f"checkpoint-{STEPS:06d}").is_dir() and (folder / "config.yaml").is_file()


def test_a_run_ends_although_its_store_has_died(flags, straight, tmp_path, object_store, monkeypatch):
    """It trains as it would alone, says what is missing, and keeps its key to itself."""
    for name, value in object_store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wr0ng" + "k7" * 18)
    folder = tmp_path / "run"

    def cut():
        wait_until(lambda: [*folder.glob("checkpoint-*")])
        object_store.kill()

    watch = threading.Thread(target=cut)
    watch.start()
    done = run("pretrain", folder, *flags, "--mirror_to", "s3://bucket/cut", "--mirror_timeout", 4, processes=2)
    watch.join()
    object_store.start()
    assert set(compare(straight.folder, folder).values()) == {""}
    assert "warning: --mirror_to s3://bucket/cut lacks checkpoint-" in done.output and "final" in done.output
    assert exit_of(folder)["cause"] == "finished"
    again = run("pretrain", folder, *flags, "--mirror_to", "s3://bucket/cut", processes=2)
    assert "is finished" in again.output
    assert {f"checkpoint-{STEPS:06d}", "final", "logs"} <= set(whole("s3://bucket/cut", tmp_path))


@pytest.mark.slow
def test_commands_read_a_place_and_write_nothing_there(tmp_path, chat_file, tiny_model, url, own_cache):
    flags = ("--train_file", chat_file, "--model_name_or_path", tiny_model, "--seq_length", 64, "--max_steps", 4)
    flags += ("--save_steps", 2, "--global_batch_size", 4, "--show_answers", 0, "--mirror_to", url)
    done = run("lora_finetune", tmp_path / "run", *flags)
    shutil.rmtree(done.folder)
    before = files_of(url)
    launch = ("--", *(sys.executable, "-m", "accelerate.commands.launch"), ROOT / "templates/lora_finetune.py")
    assert shown(tmp_path, "ask", url, "What?", "--max_new_tokens", 2)
    assert not [*(tmp_path / "cache/mirrors").glob("*/*/checkpoint-*")]  # which ask needs none of
    assert "loss" in shown(tmp_path, "evaluate", url, "--test_file", chat_file, *launch)
    # of a place, the newest checkpoint is there, and others if they were the newest when it was looked at
    changed = ("--learning_rate", 1e-3, "--max_steps", 6, "--report_to", "none")
    shown(tmp_path, "fork", url, "--step", 4, "--output_dir", "fork", *launch, *changed)
    assert "learning_rate" in shown(tmp_path, "compare", url, "fork")
    shown(tmp_path, "replay", url, "--step", 3, "--from_start", *launch)
    assert files_of(url) == before
    with pytest.raises(ConfigError, match="no run is mirrored there"):
        fetched(f"{url}/nothing", with_checkpoints=True)
