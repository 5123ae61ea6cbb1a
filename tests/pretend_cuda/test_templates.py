"""Each template on a pretend GPU: it trains, evaluates, saves and resumes; and what its steps cost the host."""

import pytest
import torch

from shared.run.tensors import read_tensors
from tests.conftest import save_classifier, slow

COMMON = ["--global_batch_size", 8, "--per_device_train_batch_size", 4, "--max_steps", 6, "--save_steps", 3]
COMMON += ["--eval_steps", 6, "--logging_steps", 2]
SHAPE = "hidden_size=32,num_hidden_layers=2,num_attention_heads=2,num_key_value_heads=2,intermediate_size=64"
PRETRAIN = ["--vocab_size", 300, "--seq_length", 32, "--config_overrides", SHAPE, "--eval_samples", 4]


# What the summary says of the kernels that were chosen, and the kernels of attention that ran.
CHOSEN = {
    "pretrain": ("fused with the head", {"flash"}),
    "distill": ("fused with the head", {"variable lengths", "flash", "efficient with a mask"}),
    "lora_finetune": ("of variable lengths, without a mask", {"variable lengths", "flash", "efficient with a mask"}),
    "image_classification": ("channels last", set()),
    "text_classification": ("single_label", {"efficient with a mask", "flash"}),
    "pretrain_pipeline": ("PP 2 x DDP 1", {"flash"}),
}


@pytest.fixture(
    params=[
        "pretrain",
        "lora_finetune",
        *map(slow, ("distill", "image_classification", "text_classification", "pretrain_pipeline")),
    ]
)
def case(request, text_file, chat_file, tiny_model, image_folder, architectures, tmp_path_factory):
    """(template, flags, processes, launch config, precision)"""
    template, alone = request.param, (1, "single_gpu", "bf16")
    if template == "pretrain":
        return template, [*PRETRAIN, "--train_file", text_file, *COMMON], *alone
    if template == "pretrain_pipeline":
        return template, [*PRETRAIN, "--train_file", text_file, *COMMON], 2, "ddp", "bf16"
    if template in ("lora_finetune", "distill"):
        flags = ["--train_file", chat_file, "--model_name_or_path", tiny_model, "--seq_length", 64, "--max_new_tokens", 2]
        flags += ["--teacher_name_or_path", tiny_model] if template == "distill" else []
        return template, [*flags, *COMMON], *alone
    if template == "text_classification":
        return template, ["--seq_length", 64, "--dataloader_num_workers", 1, *COMMON], *alone
    model = save_classifier(architectures / "resnet", tmp_path_factory.mktemp("resnet"))
    flags = ["--train_dir", image_folder, "--model_name_or_path", model]
    return template, [*flags, "--image_size", 16, "--dataloader_num_workers", 1, *COMMON], *alone


def test_a_template_trains_and_resumes_bit_for_bit(case, on_cuda, tmp_path):
    template, flags, processes, config, precision = case
    launch = {"processes": processes, "config": config, "precision": precision}
    straight = on_cuda(template, tmp_path / "straight", *flags, "--deterministic", **launch)
    kind = {1: "1 process", 2: "PP 2 x DDP 1"}[processes]
    strategy = f"{kind} on cuda: NVIDIA H100 80GB HBM3, bf16, deterministic"
    assert strategy in straight.summary and straight.manifest(6)["strategy"] == strategy
    assert straight.manifest(6)["world_size"] == processes
    assert straight.manifest(6)["settings"]["torch_compile"] is False  # so few steps

    words, kernels = CHOSEN[template]
    assert words in straight.summary
    assert {name.removeprefix("kernel ") for name in straight.counts() if name.startswith("kernel")} == kernels

    # A step that neither logs nor saves: batches come from pinned memory beside the computation, and the host waits for
    # nothing.
    (allowed,) = {what for what in straight.at(5) if what.startswith("copy ")}
    assert allowed.startswith("copy loader.py")
    assert not [what for what in straight.at(5) if what != allowed and "collective" not in what]
    # One that logs reads all values together, and whether updates were skipped; one that saves waits for each tensor's copy.
    logged = {what: n for what, n in straight.at(4).items() if "read" in what}
    assert [sum(n for what, n in logged.items() if file in what) for file in ("guard.py", "metrics.py", "")] == [1, 1, 2]
    assert sum(n for what, n in straight.at(3).items() if "read metrics.py" in what) == 1
    saved = [n for what, n in straight.at(3).items() if what.startswith(("read tensors.py", "wait for stream"))]
    held = len(read_tensors(straight.folder / "checkpoint-000003"))
    assert saved == [held] if processes == 1 else len(saved) == 1

    memory = straight.last("peak_memory_gb")
    assert 0 < memory < 1, "the allocator's peak, not the process's"
    start = ("--resume_from_checkpoint", straight.folder / "checkpoint-000003")
    resumed = on_cuda(template, tmp_path / "resumed", *flags, "--deterministic", *start, **launch)
    # from the first line that is of steps after the checkpoint alone
    again, before = ([row for row in comparable(r) if row["step"] > 4] for r in (resumed, straight))
    assert again == before
    ours, theirs = (read_tensors(r.folder / "checkpoint-000006") for r in (resumed, straight))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert any((straight.folder / "final").glob("*.safetensors"))


def comparable(result):
    timed = ("per_second", "memory", "data_wait", "mfu")
    return [{key: value for key, value in row.items() if not any(word in key for word in timed)} for row in result.rows]
