"""How the cost of each piece of work grows with its size: at n, 4 n and 16 n, beside a peer.

    python benchmarks/growth.py                                      # writes benchmarks/growth.json
    python benchmarks/growth.py --rounds 3 --works packing --sizes 100000 1000000 10000000 --output results.json

Tokenising and packing go through all samples, once, so they grow with their number; so do the tables of lengths that
prepared conversations keep in memory. The order of samples is a function of (seed, epoch, step) that holds no table, so
starting, drawing a step and resuming at any step cost the same whatever has been consumed. (They do differ with the
number of samples by up to a small factor that does not grow: a permutation of the next power of four is walked until
it lands inside, which takes between one and four tries in the mean.)

- tokenising text: `store.prepare_sources` of documents of 20 words, one process, and two, beside `datasets.map` with
  two; tokenising conversations: `chat.open_samples` of 20 words each.
- finding the answers of one conversation of n turns.
- packing: `packing.Packed` of log-normal lengths into rows of 512, the first time, and from its files.
- opening prepared conversations: `chat.Conversations`, the files mapped, the tables read; 8 tokens a sample.
- starting: an `Order`, a `Loader`, and the window of step 0, of 16 samples that are computed when they are asked for.
- drawing a step: `Order.indices` alone, and `chat.GroupedOrder.indices`, which sorts by length within 32 batches.
- resuming: the first window of a new `Loader` at a step after the start, in the middle of the first epoch, and in the
  eleventh; its samples have to be those that a run draws there which began 20 steps before.
- accumulating: 512 micro-batches, n in each optimizer step, beside a plain DataLoader: two workers need 8 ms to read one,
  and the step 5 ms to compute it, both asleep, so this row's time is the clock's.
- saving tensors: a checkpoint of n tensors of a model and its AdamW, beside torch.save of the same.
- opening known images: `images.prepare` of n small pictures in 100 class folders that were checked before, beside
  torchvision's `ImageFolder`, which checks nothing.

Every cell is a process of its own. Time is that of the processor, of child processes, too; memory is how much the
process's peak rises; disk is what the work left. The shape compares the largest size with the smallest. What the size
before says would take over --limit seconds or over 4 GB more memory is not run.
"""

import argparse
import importlib
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import rounds
from rounds import Row

from shared import demo

BATCH, MEMORY = 16, 4e9
REPEATED = ("drawing", "starting", "resuming")


class Computed:
    """Samples that exist when they are asked for: `shared.data.order.Samples` of any number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": np.full(8, index), "labels": np.full(8, index)}

    def num_targets(self, indices: np.ndarray) -> int:
        return 8 * len(indices)


# What is measured: each makes what it needs and returns what is to be timed --------------------------------------------


def sentences(file: Path, count: int, record: Callable[[str], Any]) -> None:
    rng, words = (
        np.random.default_rng(0),
        ["the", "model", "reads", "a", "line", "of", "text", "and", "says", "what", "comes"],
    )
    texts = [" ".join(rng.choice(words, 20)) for _ in range(1000)]
    with file.open("w") as lines:
        for number in range(count):
            lines.write(json.dumps(record(f"{texts[number % 1000]} {number}")) + "\n")


def tokenise_text(options: argparse.Namespace, processes: int = 1) -> Callable[[], Any]:
    from transformers import AutoTokenizer

    from shared.data.store import prepare_sources
    from shared.text import corpus
    from shared.text.options import CorpusConfig

    file = Path(options.folder, "text.jsonl")
    sentences(file, options.size, lambda text: {"text": text})
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    config = CorpusConfig(train_file=(str(file),), preprocessing_num_workers=processes)
    encode = corpus.EncodeDocuments(tokenizer, "text")
    return lambda: prepare_sources(config, encode)


def tokenise_by_datasets(options: argparse.Namespace) -> Callable[[], Any]:
    import datasets
    from transformers import AutoTokenizer

    file = Path(options.folder, "text.jsonl")
    sentences(file, options.size, lambda text: {"text": text})
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)

    def ids(rows: Any) -> Any:
        return {"ids": [[*each, tokenizer.eos_token_id] for each in tokenizer(rows["text"])["input_ids"]]}

    def work() -> Any:
        data = datasets.load_dataset("json", data_files=str(file), cache_dir=options.folder, split="train")
        return data.map(ids, batched=True, num_proc=2, remove_columns=["text"])

    return work


def many_turns(options: argparse.Namespace) -> Callable[[], Any]:
    from transformers import AutoTokenizer

    from shared.text.encoder import Encoder
    from shared.text.forms import Example

    encode = Encoder(AutoTokenizer.from_pretrained(demo.MODEL), "assistant")
    turn = [
        {"role": role, "content": "the model reads a line of text and says what comes"} for role in ("user", "assistant")
    ]
    example = Example(turn * (options.size // 2))
    return lambda: encode(example, "here")


def tokenise_chats(options: argparse.Namespace) -> Callable[[], Any]:
    from transformers import AutoTokenizer

    from shared.text import chat
    from shared.text.options import ChatConfig

    file = Path(options.folder, "chats.jsonl")
    sentences(file, options.size, lambda text: {"prompt": text[:40], "completion": text[40:]})
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    return lambda: chat.open_samples(ChatConfig(train_file=(str(file),)), tokenizer)


def lengths_of(count: int) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(4.3, 0.8, count)).clip(8, 512).astype(np.int16)


def pack(options: argparse.Namespace, *, again: bool = False) -> Callable[[], Any]:
    from shared.text.packing import Packed

    samples = SimpleNamespace(lengths=lengths_of(options.size))
    if again:
        Packed(samples, 512)
    return lambda: Packed(samples, 512)


def open_chats(options: argparse.Namespace) -> Callable[[], Any]:
    from shared.data.store import Store
    from shared.text.chat import Conversations

    folder = Path(options.folder)
    arrays: dict[str, list[Any]] = {"ids": ["int32", []], "learned": ["bool", []], "ends": ["int64", []]}
    arrays["targets"] = ["int32", []]
    state = {"source": "data", "counts": {}, "first": {}, "arrays": arrays}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "checksums.json").write_text(json.dumps({f"{name}.bin": [] for name in arrays}))
    for name, size in (("ids", 4 * 8), ("learned", 8)):  # empty files, which take no room on most disks
        with (folder / f"{name}.bin").open("wb") as file:
            file.truncate(size * options.size)
    (8 + 8 * np.arange(options.size)).tofile(folder / "ends.bin")
    np.full(options.size, 7, np.int32).tofile(folder / "targets.bin")
    chosen = [np.arange(options.size)]
    return lambda: Conversations({"": Store(folder)}, chosen, None, "").lengths


def start(options: argparse.Namespace, step: int = 0) -> Callable[[], Any]:
    import torch

    from shared.data.loader import Loader, Share
    from shared.data.order import Order

    def collate(rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}

    def first_window(ahead: int = 0) -> list[int]:
        """The samples of `step`, of a run that began so many steps before it."""
        ahead = min(ahead, step)
        share = Share(0, 1, torch.device("cpu"))
        order = Order(options.size, BATCH, 0)
        loader = Loader(Computed(options.size), collate, order, share, per_device=BATCH)
        windows = loader.windows(step - ahead, step + 1)
        return next(islice(windows, ahead, None)).indices.ravel().tolist()

    return first_window


def steps_per_epoch(options: argparse.Namespace) -> int:
    return -(-options.size // BATCH)


def resume_early(options: argparse.Namespace) -> Callable[[], Any]:
    return start(options, 100)


def resume_middle(options: argparse.Namespace) -> Callable[[], Any]:
    return start(options, steps_per_epoch(options) // 2)


def resume_late(options: argparse.Namespace) -> Callable[[], Any]:
    return start(options, 10 * steps_per_epoch(options) + steps_per_epoch(options) // 2)


def draw(options: argparse.Namespace) -> Callable[[], Any]:
    from shared.data.order import Order

    order = Order(options.size, BATCH, 0)
    return lambda: order.indices(steps_per_epoch(options) // 2)


def draw_grouped(options: argparse.Namespace) -> Callable[[], Any]:
    from shared.data.order import GroupedOrder

    order = GroupedOrder(options.size, BATCH, 0, lengths=lengths_of(options.size))
    return lambda: order.indices(steps_per_epoch(options) // 2)


MICRO_BATCHES = 512


class Slow(Computed):
    """Samples that take 2 ms each to read."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        time.sleep(0.002)
        return super().__getitem__(index)


def accumulate(options: argparse.Namespace) -> Callable[[], Any]:
    import torch
    from torch.utils.data import default_collate

    from shared.data.loader import Loader, Share
    from shared.data.order import Order

    share = Share(0, 1, torch.device("cpu"))
    order = Order(10**6, 4 * options.size, 0)
    loader = Loader(Slow(10**6), default_collate, order, share, per_device=4, num_workers=2)

    def train() -> None:
        for window in loader.windows(0, MICRO_BATCHES // options.size):
            for _ in window.micro_batches:
                time.sleep(0.005)

    return train


def accumulate_plainly(options: argparse.Namespace) -> Callable[[], Any]:
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(Slow(4 * MICRO_BATCHES), 4, num_workers=2, prefetch_factor=4)  # type: ignore[arg-type]

    def train() -> None:
        for _ in loader:
            time.sleep(0.005)

    return train


def trained(options: argparse.Namespace) -> tuple[Any, Any]:
    """A model and its AdamW: n tensors in all."""
    import torch
    from torch import nn

    from shared.training.optim import fill_state

    model = nn.ParameterDict({f"layer_{n}": nn.Parameter(torch.randn(1000)) for n in range(options.size // 4)})
    optimizer = torch.optim.AdamW(model.parameters())
    fill_state(optimizer)
    return model, optimizer


def save(options: argparse.Namespace) -> Callable[[], Any]:
    from accelerate import Accelerator

    from shared.parallel.strategy import Strategy
    from shared.run.checkpoint import Checkpointer
    from shared.run.prepared import Prepared
    from shared.run.state import TrainState

    config: Any = importlib.import_module("templates.pretrain").Config()
    run_dir = Path(options.folder, "run")
    run_dir.mkdir()
    model, optimizer = trained(options)
    accelerator = Accelerator(cpu=True)
    run = Prepared(config, "pretrain", "tokens", accelerator, Strategy(accelerator), run_dir)
    run.models["model"], run.optimizers = model, [optimizer]
    saver = Checkpointer(run, "")
    saver.save(TrainState(step=1))
    return lambda: saver.save(TrainState(step=2))


def save_plainly(options: argparse.Namespace) -> Callable[[], Any]:
    import torch

    model, optimizer = trained(options)

    def write() -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], Path(options.folder, "checkpoint.pt"))

    write()
    return write


def pictures(options: argparse.Namespace) -> Path:
    """Hard links, in class folders."""
    from shared.images.digits import write_digits

    digits, root = Path(options.folder, "digits"), Path(options.folder, "pictures")
    digits.mkdir()
    write_digits(digits)
    files = sorted(digits.rglob("*.png"))
    for label in range(100):
        (root / f"class-{label:02d}").mkdir(parents=True)
    for number in range(options.size):
        (root / f"class-{number % 100:02d}" / f"{number:08d}.png").hardlink_to(files[number % len(files)])
    return root


def open_images(options: argparse.Namespace) -> Callable[[], Any]:
    from shared.images import files
    from shared.images.options import ImageConfig

    config: Any = ImageConfig(train_dir=(pictures(options),))
    files._look = lambda found: ([], np.zeros(len(found), files.LOOKS))  # type: ignore[assignment]  # the check itself is not measured
    files.prepare(config)
    return lambda: files.prepare(config)


def open_images_plainly(options: argparse.Namespace) -> Callable[[], Any]:
    from torchvision.datasets import ImageFolder

    root = pictures(options)
    return lambda: ImageFolder(str(root))


WORK: dict[str, Callable[[argparse.Namespace], Callable[[], Any]]] = {
    "tokenising text": tokenise_text,
    "tokenising text, two processes": partial(tokenise_text, processes=2),
    "tokenising text, two processes of datasets.map": tokenise_by_datasets,
    "tokenising conversations": tokenise_chats,
    "finding the answers of a long conversation": many_turns,
    "packing": pack,
    "packing, from its files": partial(pack, again=True),
    "opening prepared conversations": open_chats,
    "starting": start,
    "drawing a step": draw,
    "drawing a step, grouped by length": draw_grouped,
    "resuming at step 100": resume_early,
    "resuming in the middle of an epoch": resume_middle,
    "resuming in the eleventh epoch": resume_late,
    "accumulating": accumulate,
    "accumulating, DataLoader": accumulate_plainly,
    "saving tensors": save,
    "saving tensors, torch.save": save_plainly,
    "opening known images": open_images,
    "opening known images, ImageFolder": open_images_plainly,
}
# The smallest size, by the first words of a line; the others are 4 and 16 times as large.
SMALLEST = {
    "tokenising": 20_000,
    "finding": 16,
    "packing": 100_000,
    "accumulating": 16,
    "saving": 400,
    "opening known": 20_000,
    "": 1_000_000,
}
CLOCK = "accumulating"  # that sleeps


def peak() -> int:
    """Most bytes that this process has held in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def used() -> float:
    """Processor seconds of this process and of its children that have ended."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(time.ru_utime + time.ru_stime for time in times)


def written(folder: str) -> int:
    """Bytes on disk in a folder."""
    return sum(512 * path.stat().st_blocks for path in Path(folder).rglob("*") if path.is_file())


def measured(options: argparse.Namespace) -> Row:
    """Seconds and bytes of one piece of work; what takes no time is repeated, since the first time is cold."""
    work: Any = WORK[options.work](options)
    clock = time.perf_counter if options.work.startswith(CLOCK) else used
    disk, before, started = written(options.folder), peak(), clock()
    result = work()
    seconds, memory = clock() - started, peak() - before
    disk = written(options.folder) - disk
    if options.work.startswith(REPEATED):
        times = []
        for _ in range(options.steps):
            started = time.process_time()
            work()
            times.append(time.process_time() - started)
        seconds = statistics.median(times)
    if options.work.startswith("resuming") and result != work(20):
        sys.exit(f"{options.work}: drew other samples than a run that began 20 steps before")
    return {"seconds": seconds, "memory": memory, "disk": disk}


def shape(rows: Sequence[Row]) -> str:
    """How the time grows from the smallest size to the largest, as the power of the size that explains it."""
    (small, first), (large, last) = ((row["size"], row["milliseconds"]) for row in (rows[0], rows[-1]))
    if large == small or first <= 0 or last <= 0:
        return "-"
    power = math.log(last / first) / math.log(large / small)
    return "flat" if power < 0.25 or last < 1 else f"n^{power:.1f}"


def lines_of(rows: Sequence[Row]) -> str:
    """A Markdown table with a line for each work: medians at all of its sizes."""
    lines = ["| what | samples | time, ms | memory, MB | disk, MB | time grows as |", "|---|---|---|---|---|---|"]
    for work in dict.fromkeys(row["work"] for row in rows):
        cells: dict[int, list[Row]] = {}
        for row in (row for row in rows if row["work"] == work):
            cells.setdefault(row["size"], []).append(row)
        ran = {size: found for size, found in cells.items() if "absent" not in found[0]}
        middle = [
            {key: statistics.median(row[key] for row in found) for key in ("size", "milliseconds", "megabytes", "disk")}
            for found in ran.values()
        ]
        told = [found[0]["absent"] for size, found in cells.items() if size not in ran]
        figures = [
            " / ".join([*(f"{row[key]:,.0f}" if row[key] >= 100 else f"{row[key]:.2g}" for row in middle), *more])
            for key, more in (("milliseconds", told), ("megabytes", []), ("disk", []))
        ]
        sizes = " / ".join(f"{size:,}" for size in cells)
        lines.append(f"| {' | '.join([work, sizes, *figures, shape(middle) if middle else '-'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = rounds.parser(__doc__, __file__, rounds=3, steps=200, least=1, counts="repetitions of what takes no time")
    parser.add_argument("--sizes", type=int, nargs="+", help="numbers of samples")
    parser.add_argument("--limit", type=float, default=120, help="seconds that a cell may take")
    parser.add_argument("--works", nargs="+", choices=list(WORK), default=list(WORK), help="lines of the table")
    options = rounds.parse(parser, dict.fromkeys(WORK, measured))
    seen: dict[tuple[str, int], Row] = {}

    def sizes(work: str) -> list[int]:
        least = next(size for name, size in SMALLEST.items() if work.startswith(name))
        return sorted(options.sizes or (least, 4 * least, 16 * least))

    def too_much(work: str, size: int) -> str:
        smaller = [other for other in sizes(work) if other < size]
        if not smaller or work.startswith(REPEATED):
            return ""
        last = seen.get((work, smaller[-1]), {"seconds": math.inf, "memory": math.inf})
        factor = size / smaller[-1]
        if last["seconds"] > 0.05 and last["seconds"] * factor > options.limit:
            return f"not run, over {options.limit:g} s"
        if last["memory"] > 2e6 and last["memory"] * factor > MEMORY:
            return f"not run, over {MEMORY / 1e9:g} GB"
        return ""

    def measure(contender: str, number: int) -> Row:
        work, size = contender.split(" | ")[0], int(contender.split(" | ")[1].replace(",", ""))
        why = too_much(work, size)
        if why:
            return {"work": work, "size": size, "absent": why}
        with rounds.folder(options) as environment:
            found = rounds.worker(__file__, work, options, environment, size=size)
        seen.setdefault((work, size), found)
        figures = {"milliseconds": 1e3 * found["seconds"], "megabytes": found["memory"] / 1e6, "disk": found["disk"] / 1e6}
        return {"work": work, "size": size, **figures}

    names = [f"{work} | {size:,}" for work in options.works for size in sizes(work)]
    rows = rounds.alternate(names, options.rounds, measure)
    notes = [f'Medians of {options.rounds} rounds. Time is the processor\'s, but for "{CLOCK}", which sleeps.']
    rounds.report(options, rows, lines_of(rows), notes)


if __name__ == "__main__":
    main()
