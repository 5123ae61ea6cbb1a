"""What is made of the data once is whole or not there, and the same by any number of processes."""

import datetime
import errno
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from shared.data import prepared
from shared.data.loader import parallel_map
from shared.process.errors import ConfigError
from shared.process.files import cache_dir
from tests.conftest import LAUNCHER
from tests.security.conftest import flip


def left(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.suffix != ".lock"]


def test_the_fingerprint_changes_with_anything_that_counts(tmp_path):
    def of(name="a", content="one", time=10**18, number=1):
        (tmp_path / name).write_text(content)
        os.utime(tmp_path / name, ns=(time, time))
        return prepared.fingerprint(files=[tmp_path / name], settings=[number, None, "x"])

    first = of()
    assert len(first) == 16 and of() == prepared.fingerprint(settings=[1, None, "x"], files=[tmp_path / "a"]) == first
    assert len({first, of(number=2), of(time=10**18 + 1), of(content="longer"), of("b")}) == 5


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "t"))
    assert cache_dir() == tmp_path / "t"
    monkeypatch.delenv("TEMPLATES_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x" / "accelerate-templates"


@pytest.mark.parametrize("error", [ConfigError, KeyboardInterrupt])
def test_a_folder_is_built_beside_its_place_once_and_a_build_that_fails_can_be_repeated(tmp_path, error):
    def fail(folder):
        (folder / "half").write_text("x")
        raise error("x")

    folder, built = tmp_path / "deep" / "a", []
    with pytest.raises(error):
        prepared.build_once(folder, fail)
    assert left(folder.parent) == ([] if error is ConfigError else [".a.new"])
    for _ in range(3):
        assert prepared.build_once(folder, lambda at: built.append(at) or (at / "x").touch()) == folder
    (beside,) = built
    assert beside.parent == folder.parent and beside != folder
    assert (folder / "x").exists() and not (folder / "half").exists() and left(folder.parent) == ["a"]


@pytest.mark.parametrize("when", ["at first", "while it is built", "at the end"])
def test_a_disk_that_is_full_or_closed_says_what_to_set(tmp_path, monkeypatch, when):
    def refuse(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if when != "while it is built":
        monkeypatch.setattr(Path, "mkdir" if when == "at first" else "rename", refuse)
    message = f"^{tmp_path}: prepared data cannot be written .*No space left.* set TEMPLATES_CACHE to a writable folder"
    with pytest.raises(ConfigError, match=message):
        prepared.build_once(tmp_path / "a", refuse if when == "while it is built" else lambda folder: None)
    assert not left(tmp_path)


DAMAGE = {
    "a bit": lambda folder: flip(folder / "part/x", 2**20 * 8 + 5),
    "its length": lambda folder: os.truncate(folder / "part/x", 2**20),
    "a file more": lambda folder: (folder / "part/z").write_text(""),
    "a file less": lambda folder: (folder / "y").unlink(),
    "its checksums": lambda folder: (flip(folder / "checksums.json", 9), (folder / ".verified").unlink()),
    "no checksums": lambda folder: ((folder / "checksums.json").unlink(), (folder / ".verified").unlink()),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_folder_is_prepared_again(tmp_path, capsys, how):
    content, folder = os.urandom(5 * 2**19), tmp_path / "a"

    def build(folder):
        (folder / "part").mkdir()
        (folder / "part" / "x").write_bytes(content)
        (folder / "y").write_text("")

    prepared.build_once(folder, build)
    with (folder / "part" / "x").open("rb") as another_run_reads:
        DAMAGE[how](folder)
        prepared.build_once(folder, build)
        assert another_run_reads.read(1)
    said = capsys.readouterr().err
    assert said == f"warning: {folder}: prepared data is damaged, so it is prepared again\n"
    assert (folder / "part" / "x").read_bytes() == content and not (folder / "part" / "z").exists()
    prepared.build_once(folder, lambda _: pytest.fail("built"))
    assert left(tmp_path) == ["a"]


def test_files_that_have_not_changed_are_read_once_a_day(tmp_path, monkeypatch):
    read, checksums = [], prepared._checksums
    monkeypatch.setattr(prepared, "_checksums", lambda folder: read.append(folder) or checksums(folder))
    folder = tmp_path / "a"
    for day in (1, 1, 2, 2):
        monkeypatch.setattr(prepared, "date", type("Day", (), {"today": lambda day=day: datetime.date(2026, 1, day)}))
        prepared.build_once(folder, lambda folder: (folder / "x").write_text("x"))
    assert len(read) == 2  # when it was built, and on the second day
    os.utime(folder / "x")
    assert prepared.usable(folder) and len(read) == 3


def test_another_rank_waits_for_the_folder_and_builds_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    waiting = threading.Thread(target=prepared.build_once, args=(tmp_path / "a", pytest.fail), daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    (tmp_path / "a").mkdir()
    waiting.join(5)
    assert not waiting.is_alive() and left(tmp_path) == ["a"]


@pytest.mark.parametrize(("processes", "shared_memory"), [(1, True), (2, True), (None, True), (2, False)])
def test_results_come_in_the_order_of_the_items_and_few_are_read_ahead(monkeypatch, processes, shared_memory):
    monkeypatch.setattr(os.path, "isdir", lambda path: shared_memory if path == "/dev/shm" else Path(path).is_dir())
    monkeypatch.setattr("shared.data.loader.cores", lambda: 2)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    taken = []
    items = (taken.append(by) or f"1000 // {by}, __import__('os').getpid()" for by in range(1, 200))
    results = parallel_map(eval, items, processes)
    found = [next(results)]
    assert len(taken) < 20
    found += results
    assert [result for result, _ in found] == [1000 // by for by in range(1, 200)]
    workers = {process for _, process in found}
    assert workers == {os.getpid()} if processes == 1 or not shared_memory else os.getpid() not in workers
    assert os.environ.get("TOKENIZERS_PARALLELISM") == (None if processes == 1 else "false")


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_that_a_user_can_act_on_arrives_as_it_was_raised(processes):
    items = ["pass", "from shared.process.errors import ConfigError as E; raise E('line 7: no text')", "pass"]
    results = parallel_map(exec, items, processes)
    assert next(results) is None
    with pytest.raises(ConfigError, match=r"^line 7: no text$"):
        next(results)

    def fail():
        yield "pass"
        raise ConfigError("line 8: no text")

    with pytest.raises(ConfigError, match=r"^line 8: no text$"):
        list(parallel_map(exec, fail(), processes))


def test_a_process_that_dies_ends_the_work():
    with pytest.raises(ConfigError, match="choose fewer with --preprocessing_num_workers"):
        list(parallel_map(exec, ["import os; os._exit(1)"] * 50, 2))


OUTLIVED = """
import time
from torch.utils.data._utils import worker
from shared.data.loader import parallel_map

worker.MP_STATUS_CHECK_INTERVAL = 0.1  # PyTorch's processes look for their parent so often
for process in parallel_map(eval, ["__import__('os').getpid()"] * 99, 2):
    print(process, flush=True)
    time.sleep(0.2)
"""


def test_processes_do_not_outlive_a_run_that_is_killed():
    reading, writing = os.pipe()
    with open(reading) as lines, open(writing, "w") as stdout, open(os.devnull, "w") as unread:
        run = LAUNCHER.start(("-c", OUTLIVED), stdout, unread)
        workers = [psutil.Process(number) for number in {int(lines.readline()) for _ in range(3)}]
        run.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(workers, 20)
    assert workers and not alive


def test_a_stop_signal_is_for_the_training_process_and_a_reading_one_goes_on():
    results = parallel_map(eval, iter(["__import__('os').getpid()"] * 200), 2)
    found = [next(results)]
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(found[0], number)
    found += results
    assert len(found) == 200 and os.getpid() not in found
