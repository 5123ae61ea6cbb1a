"""shared/steps.py: a skipped update, and a step that waits for nothing (faults and signals: tests/test_faults.py)."""

import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared import launch, metrics, optim, steps
from shared.options import OptimConfig
from tests.conftest import Run, forget_accelerators, run_here

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


def build(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    return model, optim.build(model, OptimConfig(optim=name, weight_decay=0.1))


def state_of(model, optimizers):
    """Copies of all tensors that an update could change."""
    tensors = dict(model.named_parameters())
    for i, optimizer in enumerate(optimizers):
        for j, values in optimizer.state_dict()["state"].items():
            tensors |= {f"{i}.{j}.{key}": value for key, value in values.items() if torch.is_tensor(value)}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("bad_at", [0, 2])
def test_a_skipped_update_changes_nothing(name, bad_at):
    accelerator = launch.start(0)
    (model, optimizers), (other, others) = build(name), build(name)
    inputs = torch.randn(5, 4, 8)

    def step(model, optimizers, batch, *, finite=True):
        model(batch).square().mean().backward()
        if not finite:
            for parameter in model.parameters():
                parameter.grad.fill_(torch.nan)
        steps.update(accelerator, optimizers, torch.tensor(finite), torch.tensor(1.0))
        assert all(parameter.grad is None for parameter in model.parameters())

    for i, batch in enumerate(inputs):
        if i == bad_at:
            before = state_of(model, optimizers)
            step(model, optimizers, batch, finite=False)
            after = state_of(model, optimizers)
            for key, value in before.items():
                assert torch.equal(value, after[key]), key
            assert bad_at == 0 or len(before) > 6  # the optimizer's state, too
        else:
            step(model, optimizers, batch)
            step(other, others, batch)
    for (key, one), two in zip(state_of(model, optimizers).items(), state_of(other, others).values(), strict=True):
        assert torch.equal(one, two), key


class CountCasts(TorchDispatchMode):
    """How often weights, which are the matrices here, are cast to bf16."""

    casts = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        to_bf16 = function is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") is torch.bfloat16
        self.casts += to_bf16 and args[0].shape == (8, 8)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def in_bf16(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    forget_accelerators()
    accelerator = launch.start(0)
    assert accelerator.mixed_precision == "bf16"
    yield accelerator
    forget_accelerators()


def test_weights_are_cast_once_a_window_and_learn_the_same(in_bf16):
    accelerator = in_bf16
    (model, optimizers), (plain, plain_optimizers) = build("adamw"), build("adamw")
    model, *optimizers = accelerator.prepare(model, *optimizers)
    for number in range(3):
        micro_batches = [{"x": x} for x in torch.randn(4, 4, 8)]
        with CountCasts() as counted:
            for batch in steps.accumulate(accelerator, model, micro_batches):
                steps.backward(accelerator, model(batch["x"]).square().sum(), 0.5)
        assert counted.casts == 2  # weights
        norm = steps.clip_gradients(accelerator, model, 1.0)
        steps.update(accelerator, optimizers, torch.tensor(True), norm)

        with CountCasts() as counted:
            for batch in micro_batches:
                with torch.autocast("cpu", torch.bfloat16):
                    out = plain(batch["x"]).float()
                (out.square().sum() * 0.5).backward()
        assert counted.casts == 2 * 4
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in plain_optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(norm, plain_norm), number
        for one, two in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, two), number


def test_a_window_that_ends_early_leaves_no_cast_weights_behind(in_bf16):
    accelerator = in_bf16
    model = accelerator.prepare(nn.Linear(8, 8))
    batch = {"x": torch.ones(1, 8)}
    with pytest.raises(RuntimeError, match="in the middle"):
        for inputs in steps.accumulate(accelerator, model, [batch, batch]):
            model(inputs["x"])
            raise RuntimeError("in the middle")
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    assert model(batch["x"]).count_nonzero() == 0


TUNED = ("--max_train_samples", 200, "--seq_length", 256)


@pytest.mark.parametrize(
    ("template", "given"),
    [
        ("pretrain", ("--vocab_size", 300, "--seq_length", 16)),
        ("lora_finetune", (*TUNED, "--packing")),
        ("lora_finetune", (*TUNED, "--no_packing")),
        ("image_classification", ()),
    ],
)
def test_nothing_in_a_step_waits_for_the_device(template, given, monkeypatch, tmp_path, text_file, tiny_model):
    """From the seeds to the stop signal no value is read but the verdict of the step before."""
    files = {"pretrain": ("--train_file", text_file), "lora_finetune": ("--model_name_or_path", tiny_model)}
    given += files.get(template, ())
    inside, found = [False], []

    def watched(original):
        def read(tensor, *args, **kwargs):
            frame = sys._getframe(1)
            if inside[0] and frame.f_code is not steps._OnItsWay.read.__code__:
                found.append(f"{original.__name__}: {frame.f_code.co_filename}:{frame.f_lineno}")
            return original(tensor, *args, **kwargs)

        return read

    def switching(function, on):
        def call(*args, **kwargs):
            inside[0] = on
            return function(*args, **kwargs)

        return call

    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name)))
    monkeypatch.setattr(launch, "seed_step", switching(launch.seed_step, True))
    monkeypatch.setattr(steps.Guard, "stop_if_asked", switching(steps.Guard.stop_if_asked, False))
    rows = ("--global_batch_size", 8, "--per_device_train_batch_size", 4, "--dataloader_num_workers", 0)
    never = ("--max_steps", 4, "--logging_steps", 100, "--eval_steps", 100, "--save_steps", 100)
    run_here(template, *rows, *never, *given, "--output_dir", tmp_path / "run")
    logged = [line for line in found if "shared/metrics.py" in line]
    assert logged  # the last step is, so that the watch is seen to work
    assert found == logged


def test_a_logged_loss_is_the_mean_however_often_losses_are_fetched(monkeypatch, tmp_path, text_file):
    given = ("--train_file", text_file, "--vocab_size", 300, "--seq_length", 16, "--global_batch_size", 8)
    given += ("--max_steps", 6, "--eval_steps", 100, "--save_steps", 100)
    run_here("pretrain", *given, "--logging_steps", 1, "--output_dir", tmp_path / "each")
    each = list(Run(tmp_path / "each", 0, "").losses.values())
    run_here("pretrain", *given, "--logging_steps", 6, "--output_dir", tmp_path / "once")
    monkeypatch.setattr(metrics, "UNREAD", 2)
    run_here("pretrain", *given, "--logging_steps", 6, "--output_dir", tmp_path / "often")
    for folder in ("once", "often"):
        assert Run(tmp_path / folder, 0, "").losses == {6: pytest.approx(sum(each) / 6, rel=1e-6)}
