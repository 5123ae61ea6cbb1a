"""--streaming of conversations: the samples of the prepared data, in any file, from any step, on any number of ranks."""

import gzip
import json
import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shared.config.options import BatchConfig
from shared.data.loader import Share
from shared.data.order import IGNORED, permute
from shared.extras.streaming.chats import read_stream
from shared.models.tokenizers import load_tokenizer
from shared.text import chat
from shared.text.options import ChatConfig
from tests.conftest import continued, learn_here, refusal, run, sentence, slow, write_lines

HELD_OUT = 5


@pytest.fixture(scope="module")
def rows():
    rng = random.Random(4)
    asked = [{"role": "user", "content": f"Question {n}"} for n in range(61)]
    return [[each, {"role": "assistant", "content": sentence(rng, 1 + n % 30)}] for n, each in enumerate(asked)]


@pytest.fixture(scope="module")
def files(rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    records = [{"messages": each} for each in rows]
    lines = write_lines(folder / "chats.jsonl", records)
    with gzip.open(folder / "chats.jsonl.gz", "wt") as file:
        file.write(lines.read_text())
    table = pa.table({"messages": [json.dumps(each) for each in rows]})
    pq.write_table(table, folder / "chats.parquet", row_group_size=7)
    (folder / "parts").mkdir()
    for n in range(3):
        write_lines(folder / f"parts/{n}.jsonl", records[n * 21 : n * 21 + 21])
    packed = {"gzip": folder / "chats.jsonl.gz", "parquet": folder / "chats.parquet"}
    return {"lines": lines, "folder": folder / "parts"} | packed


def opened(file, tokenizer, share=None, **options):
    """(the stream, whole rows of the prepared data after those that are held out)."""
    given = {"train_file": (str(file),), "seq_length": 64, "preprocessing_num_workers": 0, "eval_samples": HELD_OUT}
    config = ChatConfig(**given, streaming=True, **options)
    train, held_out = read_stream(SimpleNamespace(data=config), tokenizer)
    batch = BatchConfig(global_batch_size=8, per_device_train_batch_size=2)
    stream = train.stream(batch, share or Share(0, 1, torch.device("cpu")))
    plain = ChatConfig(**given, validation_split_percentage=2.0)
    whole = chat.open_samples(plain, tokenizer)
    store = whole[0].stores[0]
    everything = chat.Conversations({"": store}, [np.arange(len(store))], None, "")
    assert len(held_out) == HELD_OUT and np.array_equal(held_out.tokens(2)[0], everything.tokens(2)[0])
    return stream, [everything[n] for n in range(HELD_OUT, len(store))]


def seen(stream, start, stop):
    """Of each step: (targets, the learned and read tokens of its rows, in order)."""
    steps = []
    for window in stream.windows(start, stop):
        rows = []
        for batch in window.micro_batches:
            for ids, labels, filled in zip(batch["input_ids"], batch["labels"], batch["filled"], strict=True):
                rows.append((ids[:filled].tolist(), labels[:filled].tolist()))
        steps.append((window.num_targets, rows, window.place))
    return steps


@pytest.mark.parametrize("kind", ["lines", "gzip", "parquet", "folder"])
@pytest.mark.parametrize("window", [0, 16])
def test_the_samples_are_those_of_the_prepared_data_from_any_step_on(files, tiny_model, kind, window):
    tokenizer = load_tokenizer(str(tiny_model))
    stream, expected = opened(files[kind], tokenizer, shuffle_window=window)
    whole = seen(stream, 0, 16)  # 56 samples: seven steps an epoch
    for step, (targets, rows, _) in enumerate(whole):
        epoch, first = step // 7, step % 7 * 8
        numbers = np.arange(first, first + 8)
        if window:
            start = first // 16 * 16
            size = min(16, 56 - start)
            numbers = start + permute(np.arange(size), size, (0, epoch, start // 16))[first - start : first - start + 8]
        wanted = [expected[n] for n in numbers]
        assert rows == [(row["input_ids"].tolist(), row["labels"].tolist()) for row in wanted]
        assert targets == sum(int((row["labels"] != IGNORED).sum()) for row in wanted)
    for step in (1, 5, 7, 9):
        again, _ = opened(files[kind], tokenizer, shuffle_window=window)
        again.place = json.loads(json.dumps(whole[step - 1][2]))
        assert seen(again, step, 16) == whole[step:]


def test_two_ranks_share_each_step(files, tiny_model):
    tokenizer = load_tokenizer(str(tiny_model))
    (one, _), *both = (opened(files["lines"], tokenizer, Share(*at, torch.device("cpu"))) for at in ((0, 1), (0, 2), (1, 2)))
    for alone, first, second in zip(seen(one, 0, 7), *(seen(stream, 0, 7) for stream, _ in both), strict=True):
        assert alone[1] == first[1] + second[1] and alone[0] == first[0] == second[0]


def flags_of(file, model):
    flags = ("--model_name_or_path", model, "--train_file", file, "--streaming", "--seq_length", 64, "--show_answers", 0)
    return (*flags, "--eval_samples", HELD_OUT, "--shuffle_window", 16, "--global_batch_size", 4, "--max_steps", 8)


@pytest.mark.parametrize("template", [slow("lora_finetune"), slow("full_finetune")])
def test_a_killed_run_continues_and_ranks_learn_the_same(template, files, tiny_model, tmp_path):
    flags = (*flags_of(files["folder"], tiny_model), "--save_steps", 3, "--eval_steps", 4)
    whole = run(template, tmp_path / "whole", *flags, processes=2)
    alone = learn_here(template, tmp_path / "alone", *flags)
    assert alone.losses == pytest.approx(whole.losses, rel=1e-5)
    again = continued(template, tmp_path / "run", "update:kill@6", *flags, processes=2)
    assert "read from document" in again.output and again.losses == whole.losses
    for name, weight in whole.weights().items():
        assert torch.equal(weight, again.weights()[name])


def test_what_a_stream_cannot_do_is_one_line(files, tiny_model, tmp_path):
    flags = flags_of(files["lines"], tiny_model)
    for more, said in {
        ("--order", "file"): "--streaming does not work with --order",
        ("--preprocess_only", "--fail_on", "cut"): "--streaming does not work with --preprocess_only and --fail_on",
        ("--packing", "on"): "--packing on: a stream is not packed",
    }.items():
        assert said in refusal("lora_finetune", *flags, *more, "--output_dir", tmp_path / "run")
    assert "give the budget as --max_steps" in refusal("lora_finetune", *flags[:-2], "--output_dir", tmp_path / "run")
    write_lines(tmp_path / "images.jsonl", [{"messages": [], "images": ["a.png"]}])
    said = refusal("lora_finetune", *flags_of(tmp_path / "images.jsonl", tiny_model), "--output_dir", tmp_path / "run")
    assert "--streaming does not work with images" in said
