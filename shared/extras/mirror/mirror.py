"""--mirror_to: a run's checkpoints and results are copied to another place while it trains, and the
same command continues from there on a machine that has nothing.

Two threads of the main rank do the work: one renews the lease, the other copies what is new in the
run's folder. Neither ever stops a step.
"""

import contextlib
import json
import math
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from shared.config.options import CheckpointConfig
from shared.data.prepared import fingerprint
from shared.extras.mirror.place import FAILURES, Place, Thing
from shared.process import faults
from shared.process.collectives import on_main, wait_for_main
from shared.process.errors import CleanExit, ConfigError, NotNow, first_line
from shared.process.files import remove
from shared.process.printing import print_main
from shared.process.ranks import is_main_rank
from shared.run import exits
from shared.run.checkpoint_files import MANIFEST, CheckpointError, checkpoints, verify
from shared.run.folder import FILES, MODELS

LEASE = 30.0  # seconds without a renewal, after which a writer counts as dead
SETTLE = 2.0  # seconds in which machines that begin at once see each other
LOOK = 1.0  # seconds between two looks at the run's folder
SAID = 60.0  # seconds between two lines about a store that fails
ID = ".mirror"  # names the run, wherever its folder goes


class Mirror:
    """One run's copy at a place. The main rank alone acts.

    Args:
        run_dir: the run's folder, locked by this process.
        options: with --mirror_to.
    """

    def __init__(self, run_dir: Path, options: CheckpointConfig) -> None:
        self.dir = run_dir
        self.options = options
        self.writer = ""  # this machine's folder there
        self.sent: set[str] = set()  # names of things that are there
        self.problem = ""  # the last one
        self.lost = False
        self.asked: threading.Event | None = None  # to be set once everything is sent
        self.wake, self.over = threading.Event(), threading.Event()
        self.threads: list[threading.Thread] = []
        self._things: dict[tuple[Path, int, int], Thing] = {}

    # Begin ----------------------------------------------------------------------------------------

    def open(self) -> "Mirror":
        """Take the lease and fetch what is newer there than here. Every rank calls this.

        Raises:
            NotNow: another machine trains this run, or the place does not answer.
            ConfigError: it holds another run, or is no place.
            CheckpointError: none of its checkpoints is whole, and there is none here.
        """
        problem: CleanExit | None = None
        if is_main_rank():
            try:
                self.place = Place(str(self.options.mirror_to))
                self._claim()
                exits.at_the_end(self.finish)
                self._begin(self._beat)
                self._fetch()
            except FAILURES as error:
                problem = NotNow(f"--mirror_to {self.place.name}: {first_line(error)}")
            except CleanExit as error:
                problem = error
        wait_for_main("the mirror is read")  # which may take longer than a collective waits
        on_main(lambda: problem)  # which raises it on all ranks
        return self

    def start(self) -> None:
        """From now on, copy what this run saves. Every rank calls this."""
        if is_main_rank():
            self._begin(self._copy)

    def _begin(self, work: Callable[[], None]) -> None:
        self.threads.append(threading.Thread(target=work, daemon=True))
        self.threads[-1].start()

    def _claim(self) -> None:
        """Become the place's writer, once the one before has let go or has died."""
        place = self.place
        boot = ""
        with contextlib.suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        # another start of this folder on this machine is over: it held the folder's lock
        own = fingerprint(boot=boot, host=socket.gethostname(), folder=str(self.dir))[:8]
        newest = max(place.writers(), default="writer-000000-")
        run = newest.split("-")[2] or secrets.token_hex(4)
        mark = self.dir / ID
        before = mark.read_text() if mark.exists() else ""
        if run != before and checkpoints(self.dir) and place.whole():
            raise ConfigError(
                f"--mirror_to {place.name} holds another run than --output_dir {self.dir}: choose "
                "another place, or an empty folder to continue that run"
            )
        if newest.endswith(own):
            self.writer = newest
            self._renew()
        else:
            self._wait_for(newest)
            self.writer = f"writer-{int(newest.split('-')[1]) + 1:06d}-{run}-{own}"
            self._renew()
            time.sleep(SETTLE)
            if (holder := max(place.writers())) != self.writer:
                place.delete(self.writer)
                raise self._refused(place.read(f"{holder}/lease"))
        mark.write_text(run)

    def _wait_for(self, writer: str) -> None:
        """Return if this writer's lease is free, or not renewed while it is watched."""
        seen = b""
        until = math.inf
        with contextlib.suppress(FileNotFoundError):  # it is free
            while time.monotonic() < until:
                lease = self.place.read(f"{writer}/lease")
                if not seen:
                    seen, until = lease, time.monotonic() + LEASE
                    print_main(f"waiting up to {LEASE:g} s: does another machine train this run?")
                elif lease != seen:
                    raise self._refused(lease)
                time.sleep(LEASE / 30)

    def _refused(self, lease: bytes) -> NotNow:
        return NotNow(
            f"--mirror_to {self.place.name}: {lease.decode(errors='replace')} trains this run: "
            "wait for it, stop it, or choose another place"
        )

    def _fetch(self) -> None:
        """Put the newest whole checkpoint into the run's folder, if there is none as new, with the
        best one that it knows of, logs and models.
        """
        place = self.place
        whole = place.whole()
        newest = {name: path for path, name in whole.items()}
        problem: CheckpointError | None = None
        for path, name in reversed(whole.items()):
            if not name.startswith("checkpoint-"):
                continue
            for folder in checkpoints(self.dir):
                with contextlib.suppress(CheckpointError):
                    if _step(folder) >= _step(name) and verify(folder):
                        return
            print_main(f"fetching {name} from {place.name}")
            try:
                best = json.loads(place.read(f"{path}/{MANIFEST}"))["state"]["best_step"]
                newest[name] = path
                if "logs" in newest:
                    place.fetch_logs(newest["logs"], self.dir)
                # models last: they are refused in a folder without a checkpoint
                for each in dict.fromkeys((f"checkpoint-{best:06d}", name, *MODELS)):
                    if each in newest:
                        place.fetch(newest[each], self.dir / each)
                return
            except CheckpointError as error:
                problem = error
                print_main(f"warning: {error}; the one before it is used")
        if problem and not checkpoints(self.dir):
            raise problem

    # Meanwhile ------------------------------------------------------------------------------------

    def _renew(self) -> None:
        by = f"process {os.getpid()} on {socket.gethostname()} (seen {datetime.now()})"
        self.place.put(f"{self.writer}/lease", by.encode())

    def _beat(self) -> None:
        """Renew the lease until the end, or until another machine has taken over."""
        while not self.over.wait(LEASE / 3):
            with contextlib.suppress(*FAILURES):  # which the other thread tells of
                if max(self.place.writers(), default="") > self.writer:
                    self.lost = True
                    self.wake.set()
                    print_main(
                        f"warning: another machine continues this run at {self.place.name}: this "
                        "one trains on, but copies nothing there any more"
                    )
                    return
                self._renew()

    def _go_on(self) -> None:
        faults.point("mirror.part")
        if self.lost or self.over.is_set():
            raise ConnectionAbortedError("the lease is lost")

    def _copy(self) -> None:
        """Send what is new until the end."""
        tries = 0
        said = -math.inf
        while not (self.lost or self.over.is_set()):
            asked = self.asked
            everything = asked is not None and not asked.is_set()
            pause = LOOK
            try:
                self._send_new(everything=everything)
                tries, self.problem = 0, ""
                if asked:
                    asked.set()
            except FAILURES as error:
                # the run may have deleted what was to be sent: a second failure is the store's
                tries += 1
                self.problem = first_line(error)
                if tries > 1 and time.monotonic() - said > SAID and not self.lost:
                    said = time.monotonic()
                    print_main(f"warning: --mirror_to {self.place.name}: {self.problem}; trying on")
                pause = min(60, 2 ** (tries - 2))
            self.wake.wait(pause)
            self.wake.clear()

    def _wanted(self) -> list[Thing]:
        """What the place should have: the newest checkpoint, before it the best, and models."""
        own = [folder for folder in checkpoints(self.dir) if (folder / MANIFEST).exists()]
        folders = own[-1:]
        if own:
            best = json.loads((own[-1] / MANIFEST).read_text())["state"]["best_step"]
            folders = [folder for folder in own[:-1] if _step(folder) == best] + folders
        wanted: dict[tuple[Path, int, int], Thing] = {}
        for folder in folders + [self.dir / name for name in MODELS]:
            if folder.is_dir():
                stat = folder.stat()
                key = folder, stat.st_ino, stat.st_mtime_ns
                wanted[key] = self._things.get(key) or Thing(folder)
        self._things = wanted
        return [*wanted.values()]

    def _send_new(self, *, everything: bool) -> None:
        wanted = self._wanted()
        if not everything and all(thing.name in self.sent for thing in wanted):
            return
        with tempfile.TemporaryDirectory() as temporary:
            # the small files change while they are sent
            own, logs = str(self.dir), Path(temporary, "logs")
            others = lambda at, names: {*names} - {*FILES} if at == own else ()  # noqa: E731
            shutil.copytree(own, logs, ignore=others)
            # first, so that the log has the lines up to the checkpoint's step
            things = [Thing(logs), *wanted]
            for thing in things:
                if thing.name not in self.sent:
                    self.place.send(thing, self.writer, self._go_on)
                    self.sent.add(thing.name)
        self._prune({thing.name for thing in things})

    def _prune(self, current: set[str]) -> None:
        """Delete as `Checkpointer` does; and what earlier writers have left, once it is not
        needed.
        """
        found = self.place.whole(self.writer).items()
        own = [path for path, name in found if name.startswith("checkpoint-")]
        keep = {f"{self.writer}/{name}" for name in ("lease", ".tmp-lease", *current)}
        keep |= {*own[-self.options.save_total_limit :]}
        old = [writer for writer in self.place.writers() if own and writer < self.writer]
        for path in [*self.place.look(self.writer, deep=False).keys() - keep, *old]:
            self.place.delete(path)

    # Waiting --------------------------------------------------------------------------------------

    def wait(self) -> bool:
        """Whether everything is sent within --mirror_timeout seconds. The main rank calls this."""
        self.asked = event = threading.Event()
        self.wake.set()
        seconds = self.options.mirror_timeout
        until = time.monotonic() + seconds
        if not event.wait(min(3, seconds)) and not self.lost:
            print_main(f"waiting for --mirror_to {self.place.name}: up to {seconds:g} s")
        while not (self.lost or event.wait(LOOK)) and time.monotonic() < until:
            pass
        return event.is_set() and not self.lost

    def make_room(self, latest: Path | None) -> None:
        """Before a save: if the disk has no room for another checkpoint, older ones go first, but
        only once the place has the latest. The main rank acts.
        """
        if not (latest and is_main_rank() and (latest / MANIFEST).exists()):
            return
        thing = Thing(latest)
        need = sum(file["size"] for file in thing.manifest["files"].values())
        best = thing.manifest["state"]["best_step"]
        old = [p for p in checkpoints(self.dir) if _step(p) != best or p == latest]
        while old and shutil.disk_usage(self.dir).free < need:
            if thing.name not in self.sent and not self.wait():
                return  # the save may find room, or says that there is none
            print_main(f"{self.dir}: no room for the next checkpoint: {old[0].name} is removed")
            remove(old.pop(0))

    def finish(self) -> None:
        """Send what is left, say what is missing, and let go of the lease. The main rank calls
        this when the run has ended.
        """
        is_done = len(self.threads) < 2  # nothing was to be sent
        with contextlib.suppress(BaseException):  # a second signal: the run has ended anyway
            is_done = is_done or self.wait()
            if not (is_done or self.lost):
                missing = [t.folder.name for t in self._wanted() if t.name not in self.sent]
                print_main(
                    f"warning: --mirror_to {self.place.name} lacks "
                    f"{', '.join(missing) or 'the last lines of the logs'} "
                    f"({self.problem or 'it does not answer'}): the "
                    "same command sends the rest, as long as this folder is there"
                )
        self.over.set()
        self.threads[0].join(5)
        with contextlib.suppress(*FAILURES):
            if is_done:
                self.place.files.delete_file(f"{self.writer}/lease")


def _step(checkpoint: Path | str) -> int:
    return int(Path(checkpoint).name.split("-")[1])
