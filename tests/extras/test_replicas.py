"""Replicas that train apart and agree now and then: equal to a simulation in one plain process, and resumed bit for bit."""

import copy
import os

import pytest
import torch
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.commands.verify_resume import compare
from shared.data.loader import Loader, Share
from shared.data.order import Order
from shared.text import corpus
from shared.text.options import CorpusConfig
from tests.conftest import LAUNCHER, ROOT, run, slow

STEPS, BATCH, LENGTH = 20, 8, 32


@pytest.fixture(scope="module")
def flags(text_file, tiny_model):
    return (
        *("--train_file", text_file, "--model_name_or_path", tiny_model, "--seq_length", LENGTH, "--eval_samples", 7),
        *("--global_batch_size", BATCH, "--per_device_train_batch_size", 2, "--max_steps", STEPS, "--logging_steps", 1),
        *("--learning_rate", 1e-3, "--weight_decay", 0, "--lr_scheduler_type", "constant", "--warmup_steps", 0),
        *("--adam_beta2", 0.999, "--max_grad_norm", 0.5, "--eval_steps", 5, "--audit_data", "--report_to", "none"),
    )


def simulated(text_file, tiny_model, *, replicas, processes, every, delay=0, alpha=0.0, parts=1, rate=0.7, momentum=0.9):
    """The agreed weights after all steps, by plain tensors: each replica with its own AdamW, one after the other."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    data = corpus.open_corpus(CorpusConfig(train_file=(str(text_file),)), tokenizer, LENGTH)
    order = Order(len(data.train), BATCH, 0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    models = [copy.deepcopy(model) for _ in range(replicas)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0) for m in models]
    shares = [Share(rank, processes, torch.device("cpu")) for rank in range(processes)]
    rows = BATCH // processes
    readers = [Loader(data.train, default_collate, order, s, per_device=rows).windows(0, STEPS) for s in shares]
    of_one = processes // replicas
    agreed = [p.detach().clone() for p in model.parameters()]
    moments = [torch.zeros_like(p) for p in agreed]
    sizes, middle = [p.numel() for p in agreed], []
    for size in sizes:
        middle.append((sum(sizes[: len(middle)]) + size // 2) * parts // sum(sizes))
    sent = {}

    def apply(part, alpha):
        for i, moved in sent.pop(part).items():
            moments[i] = momentum * moments[i] + moved
            agreed[i] = agreed[i] - rate * (moved + momentum * moments[i])
            for m in models:
                own = list(m.parameters())[i].data
                own.copy_(alpha * own + (1 - alpha) * agreed[i])

    def send(part):
        mine = [i for i, where in enumerate(middle) if min(where, parts - 1) == part]
        with torch.no_grad():
            sent[part] = {i: sum(agreed[i] - list(m.parameters())[i] for m in models) / replicas for i in mine}

    due = {}
    for step in range(1, STEPS + 1):
        for i, (m, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            windows = [next(reader) for reader in readers[i * of_one : (i + 1) * of_one]]
            for batch in (batch for window in windows for batch in window.micro_batches):
                logits = m(input_ids=batch["input_ids"]).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                (loss * replicas / windows[0].num_targets).backward()
            torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        for part in due.pop(step, []):
            apply(part, alpha)
        if step == STEPS:
            for part in sorted(sent):
                apply(part, alpha)
            for part in range(parts):
                send(part)
                apply(part, 0.0)
        else:
            for part in range(parts):
                if (step + part * every // parts) % every == 0:
                    send(part)
                    if delay:
                        due.setdefault(step + delay, []).append(part)
                    else:
                        apply(part, 0.0)
    return dict(zip((name for name, _ in model.named_parameters()), agreed, strict=True))


WAYS = {
    "diloco": {"every": 5},
    "local-sgd": {"every": 3, "rate": 1.0, "momentum": 0.0},
    "streaming": {"every": 6, "delay": 2, "alpha": 0.5, "parts": 3},
    "late": {"every": 5, "delay": 4, "alpha": 0.25, "parts": 2, "momentum": 0.5},
}


def given(way):
    names = {"every": "sync_every", "delay": "sync_delay", "alpha": "sync_alpha", "parts": "sync_fragments"}
    names |= {"rate": "outer_learning_rate", "momentum": "outer_momentum"}
    return [token for key, value in WAYS[way].items() for token in (f"--{names[key]}", value)]


@pytest.mark.parametrize(
    ("way", "config", "processes"),
    [("diloco", "ddp", 2), ("streaming", "ddp", 2), slow("local-sgd", "ddp", 4), slow("late", "hsdp", 4)],
)
def test_equals_a_simulation_in_one_process(flags, text_file, tiny_model, tmp_path, way, config, processes):
    ours = run("pretrain", tmp_path / "run", *flags, *given(way), config=config, processes=processes)
    replicas = 2 if config == "hsdp" else processes
    expected = simulated(text_file, tiny_model, replicas=replicas, processes=processes, **WAYS[way])
    found = ours.weights()
    torch.testing.assert_close({name: found[name] for name in expected}, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("way", "config", "processes"), [slow("late", "ddp", 2), slow("streaming", "hsdp", 4)])
def test_a_killed_run_continues_bit_for_bit(flags, tmp_path, way, config, processes):
    """Killed between agreements, and while one is on its way; saved at other steps than the run left alone."""
    flags = (*flags, *given(way), "--save_steps", 1, "--async_save")
    straight = run("pretrain", tmp_path / "straight", *flags, "--save_steps", STEPS, config=config, processes=processes)
    how = {"config": config, "processes": processes}
    for place in ("micro_batch:kill@15#1", "update:kill@4"):
        fault = {"TEMPLATES_FAULT": place}
        assert run("pretrain", tmp_path / "killed", *flags, **how, check=False, env=fault).returncode
    ended = run("pretrain", tmp_path / "killed", *flags, **how)
    assert set(compare(straight.folder, ended.folder).values()) == {""}
    assert {k: v.tolist() for k, v in straight.weights().items()} == {k: v.tolist() for k, v in ended.weights().items()}
    if config == "hsdp":
        other = run("pretrain", ended.folder, *flags, "--max_steps", STEPS + 5, "--allow_changed", "max_steps", check=False)
        assert f"2 replicas in {processes} processes that train apart, and this launch has 1 replicas" in other.output


@pytest.mark.slow
def test_a_signal_stops_all_replicas_after_the_same_step(flags, tmp_path):
    """Between meetings, where one replica has paused. Each is of two processes."""
    flags, how = (*flags, "--sync_every", 18, "--sync_delay", 1), {"config": "hsdp", "processes": 4}
    straight = run("pretrain", tmp_path / "straight", *flags, **how)
    fault = {"TEMPLATES_FAULT": "update:pause@2#3,update:term@7#0"}
    stopped = run("pretrain", tmp_path / "run", *flags, **how, check=False, env=fault)
    assert "stopped by SIGTERM at step" in stopped.output
    (checkpoint,) = stopped.folder.glob("checkpoint-*")
    assert 7 <= int(checkpoint.name[-6:]) < 18
    ended = run("pretrain", tmp_path / "run", *flags, **how)
    assert set(compare(straight.folder, ended.folder).values()) == {""}


@pytest.mark.slow
def test_a_replica_skips_alone_and_all_count_it(flags, tmp_path):
    flags = (*flags, "--sync_every", 6, "--logging_steps", 3, "--save_steps", 8)
    fault = {"TEMPLATES_FAULT": "micro_batch:nan@14#1"}
    done = run("pretrain", tmp_path / "run", *flags, processes=2, env=fault)
    assert done.output.count("warning: step 7: loss or gradient is not finite (gradient norm nan; samples of rank 1, ") == 1
    steps = [row["step"] for row in done.rows if "skipped_steps" in row]
    assert done.last("skipped_steps") == 1 and steps == [9, 12, 15, 18, 20]
    assert sorted(int(path.name[-6:]) for path in done.folder.glob("checkpoint-*"))[-1] == STEPS
    ended = run(*("pretrain", tmp_path / "other", *flags, "--max_skipped_steps", 0), processes=2, env=fault, check=False)
    assert "error: step 7: loss or gradient is not finite" in ended.output and not list(ended.folder.glob("checkpoint-*8"))


@pytest.mark.parametrize(
    ("template", "config", "flags", "said"),
    [
        ("pretrain", "fsdp2", (), "all ranks of fsdp2.yaml share one model: use hsdp.yaml"),
        slow("pretrain", "tensor_parallel", (), "--sync_every works in bf16 or fp32 with ddp.yaml and hsdp.yaml"),
        slow("pretrain", "ddp", ("--ema_decay", 0.9), "--ema_decay does not work with --sync_every"),
        slow("full_finetune", "ddp", (), "--sync_every"),  # which only pretrain.py has
    ],
)
def test_what_has_no_replicas_is_refused(tiny_model, text_file, chat_file, tmp_path, template, config, flags, said):
    file = chat_file if template == "full_finetune" else text_file
    flags = (*flags, "--train_file", file, "--model_name_or_path", tiny_model, "--seq_length", 64, "--sync_every", 5)
    ended = run(template, tmp_path / "run", *flags, "--max_steps", 6, processes=2, config=config, check=False)
    assert ended.returncode and said in ended.output


OWN_LOOP = """
import copy, os, torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from shared.training.options import SyncConfig
from shared.extras.replicas import Replicas

accelerator = Accelerator()
rank, world = accelerator.process_index, accelerator.num_processes
assert world == 2 and accelerator.distributed_type == "MULTI_CPU"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.3), nn.Tanh(), nn.Linear(8, 1))
copies = {every: copy.deepcopy(model) for every in (0, 1, 5)}
copies[0] = DistributedDataParallel(copies[0], broadcast_buffers=False)
options = {every: SyncConfig(sync_every=5, outer_learning_rate=1.0, outer_momentum=0.0) for every in (1, 5)}
object.__setattr__(options[1], "sync_every", 1)  # a run would agree on gradients then
replicas = {every: Replicas(accelerator, options[every]) for every in (1, 5)}
for every in (1, 5):
    replicas[every].begin(copies[every])
optimizers = {every: torch.optim.SGD(each.parameters(), lr=0.1) for every, each in copies.items()}
torch.manual_seed(1 + rank)
for step in range(1, 21):
    x = torch.randn(16, 4)
    for every, each in copies.items():
        (each(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizers[every].step()
        optimizers[every].zero_grad()
        if every:
            before = accelerator.gather(each[1].running_mean[None])
            replicas[every].after(step, 20)
            expected = before.mean(0) if step % every == 0 else before[rank]
            torch.testing.assert_close(each[1].running_mean, expected)
for ddp, every_step in zip(copies[0].module.parameters(), copies[1].parameters()):
    torch.testing.assert_close(every_step, ddp, rtol=1e-6, atol=1e-6)
away = [(a - b).abs().max() for a, b in zip(copies[5].parameters(), copies[1].parameters())]
assert max(away) > 1e-4  # replicas that train apart learn something else
for value in copies[5].state_dict().values():
    both = accelerator.gather(value.float()[None])
    torch.testing.assert_close(both[0], both[1], rtol=0, atol=0)
print("equal")
"""


def test_agreeing_after_each_step_of_sgd_equals_ddp(tmp_path):
    """With outer rate 1 and momentum 0. Statistics of BatchNorm are averaged at each agreement, and only there."""
    script = tmp_path / "loop.py"
    script.write_text(OWN_LOOP)
    launch = ["--config_file", str(ROOT / "accelerate_configs/ddp.yaml"), "--num_processes", "2", "--mixed_precision", "no"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    code, output = LAUNCHER.run([*launch, "--main_process_port", "0", str(script)], environment)
    assert code == 0 and output.count("equal") == 2, output
