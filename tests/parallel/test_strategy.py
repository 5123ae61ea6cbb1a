"""What a step asks of a strategy: clipping, a verdict of all ranks, an update or none, gradients however they are cut."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shared.config.options import OptimConfig
from shared.data.order import seed_all
from shared.parallel import sharding
from shared.parallel.gradients import end_step, gradient_norm, keeps_gradients, reshard
from shared.parallel.strategy import Strategy
from shared.process import ranks
from shared.run import launch
from shared.training import optim


def build(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    return model, optim.build(model, OptimConfig(optim=name, weight_decay=0.1, learning_rate=3e-4))


def state_of(model, optimizers):
    """Copies of all tensors that an update could change."""
    tensors = dict(model.named_parameters())
    for i, optimizer in enumerate(optimizers):
        for j, values in optimizer.state_dict()["state"].items():
            tensors |= {f"{i}.{j}.{key}": value for key, value in values.items() if torch.is_tensor(value)}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_a_skipped_update_changes_nothing(name, bad_at=2):
    strategy = Strategy(launch.start(0))
    (model, optimizers), (other, others) = build(name), build(name)
    inputs = torch.randn(5, 4, 8)

    def train(model, optimizers, batch, *, finite=True):
        model(batch).square().mean().backward()
        if not finite:
            for parameter in model.parameters():
                parameter.grad.fill_(torch.nan)
        strategy.update(optimizers, torch.tensor(finite), torch.tensor(1.0))
        assert all(parameter.grad is None for parameter in model.parameters())

    for i, batch in enumerate(inputs):
        if i == bad_at:
            before = state_of(model, optimizers)
            train(model, optimizers, batch, finite=False)
            torch.testing.assert_close(state_of(model, optimizers), before, rtol=0, atol=0)
            assert len(before) > 6  # the optimizer's state, too
        else:
            train(model, optimizers, batch)
            train(other, others, batch)
    torch.testing.assert_close(state_of(model, optimizers), state_of(other, others), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd", "adamw, not fused"])
def test_only_an_optimizer_that_cannot_skip_by_itself_makes_the_host_wait(name):
    model, optimizers = build(name.split(",")[0])
    if "fused" in name:
        optimizers = [torch.optim.AdamW(model.parameters())]
    elif name == "adamw":  # also of a single parameter
        optimizers = [torch.optim.AdamW([p], fused=True) for p in model.parameters()]
    model(torch.randn(4, 8)).square().mean().backward()
    before, read = state_of(model, []), []

    class Verdict(torch.Tensor):
        def __bool__(self):
            read.append(True)
            return False

    Strategy(launch.start(0)).update(optimizers, torch.tensor(False).as_subclass(Verdict), torch.tensor(1.0))
    assert bool(read) is (name in ("sgd", "adamw, not fused"))
    assert all(torch.equal(value, before[key]) for key, value in state_of(model, []).items())
    assert not any(hasattr(optimizer, "found_inf") for optimizer in optimizers)


def test_with_fp16_all_optimizers_step_or_none_and_the_scale_follows(monkeypatch):
    accelerator = launch.start(0)
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1))
    model, optimizers = build("muon")
    strategy = Strategy(accelerator)
    for bad, scale in ((True, 4.0), (False, 8.0)):
        loss = model(torch.randn(4, 8)).square().mean()
        plain = nn.utils.get_total_norm(torch.autograd.grad(loss, [*model.parameters()], retain_graph=True))
        strategy.backward(loss, 0.5)
        if bad:
            model[0].weight.grad[0, 0] = torch.inf  # of Muon's parameters; AdamW's gradients are finite
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for optimizer in optimizers:
            accelerator.scaler.unscale_(optimizer)
        norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(norm, torch.tensor(torch.inf) if bad else plain / 2)
        strategy.update(optimizers, torch.tensor(True), norm)
        same = [torch.equal(parameter, was) for parameter, was in zip(model.parameters(), before, strict=True)]
        assert same == [bad] * 6
        assert accelerator.scaler.get_scale() == scale


def test_a_loss_is_scaled_and_gradients_are_clipped_as_by_hand():
    strategy, (model, _), batch = Strategy(launch.start(0)), build("adamw"), torch.randn(4, 8)
    model[2].bias.requires_grad_(False)  # no gradient
    plain = copy.deepcopy(model)
    (plain(batch).square().sum() * 0.25).backward()
    gradients = [p.grad for p in plain.parameters() if p.grad is not None]
    expected = nn.utils.get_total_norm(gradients)
    for max_norm in (0, expected * 2, expected / 2):  # turned off; large enough; too small
        model.zero_grad()
        strategy.backward(model(batch).square().sum(), 0.25)
        assert strategy.clip([model], float(max_norm)) == pytest.approx(expected.item(), rel=1e-6)
        shrink = 0.5 if max_norm == expected / 2 else 1.0
        ours = [p.grad for p in model.parameters() if p.grad is not None]
        torch.testing.assert_close(ours, [gradient * shrink for gradient in gradients])
    assert strategy.clip([nn.Linear(2, 2)], 1.0) == 0  # nothing has a gradient
    small = nn.Linear(1, 1, bias=False)  # a single gradient, which is itself differentiated, as in a gradient penalty
    (1e-6 * small(torch.ones(1, 1)).square() / small.weight.detach()).sum().backward(create_graph=True)
    norm = strategy.clip([small], 1e-6)
    assert not norm.requires_grad and norm == pytest.approx(2e-6)
    assert small.weight.grad.item() == pytest.approx(2e-6 / 3)  # 1e-6 is added to what divides


@pytest.mark.parametrize("kind", ["MULTI_CPU", "MULTI_GPU", "FSDP", "NO"])
@pytest.mark.parametrize("tensor_parallel", [None, False, True])
def test_only_ddp_alone_keeps_its_gradients(kind, tensor_parallel):
    """They are views of its buckets."""
    sizes = None if tensor_parallel is None else SimpleNamespace(tp_enabled=tensor_parallel)
    accelerator = SimpleNamespace(distributed_type=DistributedType[kind], parallelism_config=sizes)
    assert keeps_gradients(accelerator) is (kind.startswith("MULTI") and not tensor_parallel)


@pytest.fixture
def four_ranks():
    """The first of four ranks, whose collectives leave its own values."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield SimpleNamespace(num_processes=4, device=torch.device("cpu"))
    dist.destroy_process_group()


def test_the_norm_counts_what_several_ranks_hold_once(four_ranks, monkeypatch):
    flat, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    whole = torch.randn(8, 4)
    cuts = ((2, flat, [Shard(0)]), (4, square, [Replicate(), Shard(0)]), (8, flat, [Replicate()]))
    quarter, half, everywhere = (DTensor.from_local(whole[:n], mesh, how, run_check=False) for n, mesh, how in cuts)
    squares = {rows: whole[:rows].square().sum().item() for rows in (2, 4, 8)}
    norm = gradient_norm(four_ranks, [quarter, quarter, half, everywhere, whole])
    share = 2 * squares[2] + squares[4] / 2 + 2 * squares[8] / 4  # for all ranks to add
    assert norm.square().item() == pytest.approx(share)
    assert gradient_norm(four_ranks, [whole, everywhere]).square().item() == pytest.approx(2 * squares[8])
    pair = dist.new_group([0, 1])  # that shares the model
    assert gradient_norm(four_ranks, [whole], pair).square().item() == pytest.approx(squares[8])
    monkeypatch.setattr(ranks, "_pipeline_ranks", 2)  # a stage's gradients are on two ranks
    assert gradient_norm(four_ranks, [whole]).square().item() == pytest.approx(squares[8] / 2)


def test_the_verdict_is_that_of_all_ranks(four_ranks, monkeypatch):
    reduced = []
    monkeypatch.setattr(dist, "all_reduce", lambda value, operation, group: reduced.append((value.item(), operation, group)))
    strategy = Strategy(four_ranks)
    strategy.group = dist.new_group([0, 1])
    for finite in (True, False):
        assert strategy.everywhere(torch.tensor(finite)).item() is finite
    assert reduced == [(number, dist.ReduceOp.MIN, strategy.group) for number in (1, 0)]
    four_ranks.num_processes = 1
    assert strategy.everywhere(torch.tensor(True)).item() and len(reduced) == 2


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_in_a_pass_fsdp_computes_as_before_it(one_rank, where):
    model, _ = build("adamw")
    plain, batch = copy.deepcopy(model), torch.randn(4, 8)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    fail = Mock(side_effect=MemoryError)
    hook = model[2].register_forward_hook(fail) if where == "forward" else model[0].register_full_backward_pre_hook(fail)
    with pytest.raises(MemoryError):
        (model(batch).square().sum() * 0.0).backward()  # as a rehearsal tries a batch
    hook.remove()
    end_step(model)
    model.zero_grad()
    assert not any(state_is_unsharded(module) for module in model.modules())
    for _ in range(2):
        model(batch).square().sum().backward()
        plain(batch).square().sum().backward()
    torch.testing.assert_close([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in plain.parameters()])


def state_is_unsharded(module):
    """Whether FSDP holds the whole weights of a module."""
    return any(not isinstance(p, DTensor) for p in module.parameters(recurse=False))


def test_weights_that_a_forward_gathered_are_dropped(one_rank):
    model, _ = build("adamw")
    fully_shard(model, reshard_after_forward=False)
    with torch.no_grad():
        model(torch.randn(4, 8))
    assert state_is_unsharded(model[0])
    reshard(model)
    assert not state_is_unsharded(model[0])


@pytest.mark.parametrize(
    ("readers", "of_a_row", "noises"), [(4, 1, [0, 1, 2, 3]), (2, 1, [0, 0, 1, 1]), (2, 2, [0, 1, 2, 3]), (1, 1, [0] * 4)]
)
def test_ranks_of_other_tokens_draw_other_noise_and_those_of_one_model_the_same(monkeypatch, readers, of_a_row, noises):
    """DDP, tensor parallelism, ranks that share rows; all four hold one model."""
    monkeypatch.setattr(ranks, "data_parallel_size", lambda: readers)
    monkeypatch.setattr(ranks, "sequence_ranks", lambda: of_a_row)
    masks = []
    for rank in range(4):
        accelerator = SimpleNamespace(process_index=rank, num_processes=4)
        seed_all(0, 5, sharding.draws_rank(accelerator))
        masks.append(nn.functional.dropout(torch.ones(64)))
    for one in range(4):
        for other in range(4):
            assert masks[one].equal(masks[other]) == (noises[one] == noises[other])
