"""The files of tensors in a checkpoint: pieces of ranks, written once, read whole, also by PyTorch's own reader."""

import itertools
import re
from operator import add
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import _TYPES

from shared.process.files import digest
from shared.run import tensors
from shared.run.tensors import Piece, pieces_of, read, read_tensors, read_weights, share_out, write


def test_all_types_and_shapes_are_the_same_bits_after_it(tmp_path):
    types = {code: dtype for code, dtype in _TYPES.items() if not re.search("U[136]|FNUZ", code)}
    held = {f"of {code}": torch.randn(3, 5).mul(9).to(dtype) for code, dtype in types.items()}
    held |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "part": torch.randn(9)[2:5]}
    held |= {"turned": torch.randn(2, 3).T, "column": torch.randn(5, 4)[:, 1:2]}
    assert pieces_of(held)["of F64"] == Piece((3, 5), (0, 0), (3, 5), 120)
    fact = write(tmp_path / "rank-0.safetensors", held, share_out([pieces_of(held)])[0])
    assert fact == digest(tmp_path / "rank-0.safetensors")
    theirs = {name: torch.empty_like(value) for name, value in held.items()}
    dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for found in (read_tensors(tmp_path), theirs):
        assert found.keys() == held.keys()
        for name, value in held.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert found[name].contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("cuts", [(1, 1), (3, 1), (1, 4), (2, 3), (7, 5)])
def test_pieces_of_any_number_of_ranks_make_the_whole(tmp_path, cuts):
    """Cut in both dimensions, each piece on two ranks, as under HSDP; more ranks than rows leave some with nothing."""
    whole = torch.randn(5, 4)
    rows, columns = ([min(size, i * -(-size // n)) for i in range(n + 1)] for size, n in zip((5, 4), cuts, strict=True))
    boxes = itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    pieces = [Piece((5, 4), (a, c), (b - a, d - c), 4 * (b - a) * (d - c)) for (a, b), (c, d) in boxes]
    shares = share_out([{"x": piece} for piece in pieces * 2])
    assert sum(piece.bytes for share in shares for piece in share.values()) == whole.nbytes
    for rank, share in enumerate(shares):
        places = {name: [*map(slice, p.offset, map(add, p.offset, p.sizes))] for name, p in share.items()}
        mine = {name: whole[tuple(place)] for name, place in places.items()}
        write(tmp_path / f"rank-{rank}.safetensors", mine, share)
    assert read_tensors(tmp_path)["x"].equal(whole)


def test_what_ranks_hold_alike_is_written_once_and_evenly():
    held = {f"x{n}": Piece((n + 1, 10), (0, 0), (n + 1, 10), 40 * (n + 1)) for n in range(20)}
    shares = share_out([held | {f"own{rank}": Piece((), (), (), 1)} for rank in range(4)])
    assert sorted(name for share in shares for name in share) == sorted([*held, *(f"own{rank}" for rank in range(4))])
    sizes = [sum(piece.bytes for piece in share.values()) for share in shares]
    assert max(sizes) < 1.1 * min(sizes)


def test_what_no_rank_holds_is_not_left_out_and_what_cannot_be_written_is_said_as_the_system_says_it(tmp_path):
    parts = {"x": Piece((4, 3), (2, 0), (2, 3), 24), "y": Piece((4,), (2,), (2,), 8), "z": Piece((2,), (0,), (2,), 8)}
    with pytest.raises(ValueError, match="x: the ranks' pieces do not make the whole of it"):
        share_out([parts])
    with pytest.raises(OSError, match=r"^No such file or directory \(os error 2\)"):
        write(tmp_path / "none" / "rank-0.safetensors", {}, {})


def test_what_lies_on_other_ranks_alone_is_left_to_them(monkeypatch):
    elsewhere = SimpleNamespace(shape=(4,), device_mesh=SimpleNamespace(get_coordinate=lambda: None))
    monkeypatch.setattr(tensors, "DTensor", SimpleNamespace)
    assert [*pieces_of({"elsewhere": elsewhere, "here": torch.ones(2)})] == ["here"]


def test_weights_have_their_own_names_and_the_precision_asked_for(tmp_path):
    of_run = {"model.a": torch.ones(2), "model.n": torch.ones(2, dtype=torch.int64), "optimizer.a.exp_avg": torch.ones(2)}
    write(tmp_path / "rank-0.safetensors", of_run, pieces_of(of_run))
    weights = read_weights(tmp_path, dtype=torch.bfloat16)
    assert {name: value.dtype for name, value in weights.items()} == {"a": torch.bfloat16, "n": torch.int64}


def test_nothing_is_filled_where_one_tensor_does_not_fit(tmp_path):
    held = {"a": torch.ones(3), "b": torch.ones(3)}
    write(tmp_path / "rank-0.safetensors", held, pieces_of(held))
    for other, message in (
        ({"b": torch.zeros(4)}, r"Size mismatch between saved torch.Size\(\[3\]\) and current: torch.Size\(\[4\]\) for b"),
        ({"c": torch.zeros(3)}, "Missing key in checkpoint state_dict: c"),
    ):
        target = torch.zeros(3)
        with pytest.raises((ValueError, RuntimeError), match=message):
            read(tmp_path, {"a": target} | other)
        assert not target.any()
