"""Each template learns 20 samples by heart: nothing between the file and the weights gets lost."""

import json
import random

import pytest

from tests.conftest import paint, run, sentence

pytestmark = pytest.mark.slow
COUNT, STEPS = 20, 300


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    """20 records for each kind of task, by name of the file."""
    folder, rng = tmp_path_factory.mktemp("samples"), random.Random(7)
    questions = [sentence(rng, 6) for _ in range(COUNT)]
    kinds = {
        "texts": [{"text": q, "label": str(rng.randint(0, 2))} for q in questions],
        "chats": [{"prompt": q, "completion": sentence(rng, 5)} for q in questions],
        "pairs": [{"prompt": q, "chosen": sentence(rng, 5), "rejected": sentence(rng, 5)} for q in questions],
        "corpus": [{"text": sentence(rng, 12)} for _ in questions],
    }
    for name, records in kinds.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for number in range(COUNT):
        paint(folder / f"images/class-{number % 3}/{number}.png", number % 3, number, (16, 16))
    return folder


SHORT = ("--seq_length", 64, "--show_answers", 0, "--packing", "off")
LORA = ("--lora_r", 64, "--lora_alpha", 64, "--learning_rate", 2e-3)
NO_CROPS = ("--crop_min_scale", 1.0, "--horizontal_flip", 0, "--label_smoothing", 0, "--dataloader_num_workers", 0)
WIDE = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"
FROM_SCRATCH = (
    "--config_overrides",
    WIDE,
    "--vocab_size",
    320,
    "--seq_length",
    32,
    "--global_batch_size",
    4,
    "--learning_rate",
    1e-2,
)


@pytest.mark.parametrize(
    ("template", "kind", "flags", "processes", "loss"),
    [
        ("lora_finetune", "chats", (*LORA, *SHORT), 1, 0.1),
        ("full_finetune", "chats", ("--learning_rate", 5e-3, *SHORT), 1, 0.1),
        ("dpo", "pairs", (*LORA, *SHORT), 1, 0.05),
        ("text_classification", "texts", ("--learning_rate", 2e-3), 1, 0.05),
        ("image_classification", "images", ("--image_size", 16, "--learning_rate", 3e-3, *NO_CROPS), 1, 0.05),
        ("pretrain", "corpus", FROM_SCRATCH, 1, 0.3),
        ("pretrain_pipeline", "corpus", FROM_SCRATCH, 2, 0.3),
    ],
)
def test_learns_20_samples_by_heart(tiny_model, samples, tmp_path, template, kind, flags, processes, loss):
    where = ("--train_file", samples / f"{kind}.jsonl", "--validation_file", samples / f"{kind}.jsonl")
    if kind == "images":
        where = ("--train_dir", samples / "images", "--validation_dir", samples / "images")
    # Adapters leave a random model's small embeddings as they are: they get the demo's, which is trained.
    model = ("--model_name_or_path", tiny_model) if template in ("full_finetune", "text_classification") else ()
    budget = ("--max_steps", STEPS, "--eval_steps", STEPS, "--weight_decay", 0)
    batch = () if kind == "corpus" else ("--global_batch_size", 10)
    done = run(template, tmp_path, *where, *model, *batch, *budget, *flags, processes=processes)
    if processes > 1:
        assert done.manifest(STEPS)["world_size"] == processes
    assert done.last("eval_loss") < loss, done.output[-1500:]
