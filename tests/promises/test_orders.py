"""--order: the samples of each step, in each template."""

import random

import pytest

from shared.data.order import Order
from tests.conftest import SHAPE, learn_here, refusal, run, sentence, with_fault, write_lines
from tools import audit


@pytest.fixture(scope="module")
def flags_of(tiny_model, text_file, chat_file, image_folder, architectures, tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("orders"), random.Random(2)
    pairs = [{"prompt": f"Say {n}", "chosen": sentence(rng, 3), "rejected": sentence(rng, 4)} for n in range(14)]
    texts = [{"text": sentence(rng, 1 + n % 7), "label": "ab"[n % 2]} for n in range(14)]
    tiny = ("--model_name_or_path", tiny_model, "--seq_length", 96)
    both = ("--train_file", write_lines(folder / "texts.jsonl", texts), "--validation_file", folder / "texts.jsonl")
    return {
        "pretrain": ("--train_file", text_file, "--vocab_size", 300, "--seq_length", 64, "--config_overrides", SHAPE),
        "lora_finetune": (*tiny, "--train_file", chat_file, "--validation_file", chat_file, "--show_answers", 0),
        "dpo": (*tiny, "--train_file", write_lines(folder / "pairs.jsonl", pairs), "--show_answers", 0),
        "text_classification": (*tiny, *both),
        "image_classification": ("--train_dir", image_folder, "--config_name", architectures / "vit", "--image_size", 16),
    }


STEPS = ("--global_batch_size", 4, "--num_train_epochs", 2, "--audit_data")


def steps_of(folder):
    """(samples of each step, how many there are)."""
    records = audit.records_of_steps(folder)
    count = records[1][1]
    return [sorted(samples) for _, _, samples in records.values()], count


def as_they_stand(count, seed=None):
    order = Order(count, 4, seed or 0, shuffle=seed is not None)
    return [sorted(order.indices(step).tolist()) for step in range(2 * order.steps_per_epoch)]


@pytest.mark.parametrize("template", ["pretrain", "lora_finetune", "dpo", "text_classification", "image_classification"])
def test_samples_come_as_they_stand(template, flags_of, tmp_path):
    learn_here(template, tmp_path / "run", *flags_of[template], *STEPS, "--order", "file")
    steps, count = steps_of(tmp_path / "run")
    assert count > 10 and steps == as_they_stand(count) != as_they_stand(count, 0)


@pytest.mark.slow
def test_they_do_after_a_kill_and_on_any_number_of_ranks(flags_of, tmp_path):
    flags = (*flags_of["lora_finetune"], *STEPS, "--order", "file", "--save_steps", 3)
    whole = learn_here("lora_finetune", tmp_path / "whole", *flags)
    assert with_fault("lora_finetune", tmp_path / "run", "update:kill@5", *flags, processes=4).returncode
    again = run("lora_finetune", tmp_path / "run", *flags, processes=2)
    assert "at step 3" in again.output and again.losses == pytest.approx(whole.losses, rel=1e-5)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "whole") == (as_they_stand(23), 23)
    changed = (*flags[:-3], "shuffled", "--output_dir", tmp_path / "run")
    assert "--order cannot change within a run" in refusal("lora_finetune", *changed)


def test_rows_are_shuffled_or_of_similar_lengths(flags_of, tmp_path):
    flags = (*flags_of["lora_finetune"], *STEPS, "--seed", 3)
    learn_here("lora_finetune", tmp_path / "shuffled", *flags, "--packing", "off", "--order", "shuffled")
    steps, count = steps_of(tmp_path / "shuffled")
    assert steps == as_they_stand(count, 3)
    learn_here("lora_finetune", tmp_path / "length", *flags, "--order", "length")  # packing gives way
    learn_here("lora_finetune", tmp_path / "default", *flags, "--packing", "off")
    assert steps_of(tmp_path / "length") == steps_of(tmp_path / "default") != steps_of(tmp_path / "shuffled")


def test_a_mixture_takes_each_source_as_it_stands(flags_of, chat_file, tmp_path):
    rows = [{"prompt": f"Say {n}", "completion": str(n)} for n in range(9)]
    flags = [*flags_of["lora_finetune"], *STEPS, "--order", "file", "--mix_weights", 2, 3]
    flags[flags.index(chat_file) + 1 : flags.index(chat_file) + 1] = [write_lines(tmp_path / "b.jsonl", rows)]
    learn_here("lora_finetune", tmp_path / "run", *flags)
    records = audit.records_of_steps(tmp_path / "run")
    drawn = [0, 0]  # of each source
    for _, _, samples in records.values():
        for source, (first, size) in enumerate([(0, 23), (23, 9)]):
            of_source = [sample for sample in samples if first <= sample < first + size]
            expected = [first + (drawn[source] + n) % size for n in range(len(of_source))]
            assert sorted(of_source) == sorted(expected)
            drawn[source] += len(of_source)
    assert drawn == [26, 38]  # two fifths and three, of 64


def test_what_has_no_order_of_its_own_is_refused(flags_of):
    images, chats, text = (flags_of[name] for name in ("image_classification", "lora_finetune", "pretrain"))
    assert "--order length is for rows of different lengths" in refusal("image_classification", *images, "--order", "length")
    packed = (*chats, "--order", "file", "--packing", "on")
    assert "--packing on: --order file takes a sample a row" in refusal("lora_finetune", *packed)
    assert "--streaming does not work with --order" in refusal("pretrain", *text, "--streaming", "--order", "file")
