"""The files of tensors in a checkpoint: pieces of ranks, written once, read whole, also by PyTorch's own reader."""

import itertools
import json
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import _TYPES

from shared.process.files import digest
from shared.run.checkpoint_files import MANIFEST, CheckpointError
from shared.run.tensors import Piece, TensorReader, pieces_of, read_tensors, share_out, write


def finish(folder):
    (folder / MANIFEST).write_text(json.dumps({"files": {path.name: digest(path) for path in folder.iterdir()}}))


def test_all_types_and_shapes_are_the_same_bits_after_it(tmp_path):
    tensors = {
        f"of {code}": torch.randn(3, 5).mul(9).to(dtype)
        for code, dtype in _TYPES.items()
        if not re.search("U[136]|FNUZ", code)
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "part": torch.randn(9)[2:5]}
    tensors |= {"turned": torch.randn(2, 3).T, "column": torch.randn(5, 4)[:, 1:2]}
    fact = write(tmp_path / "rank-0.safetensors", tensors, share_out([pieces_of(tensors)])[0])
    assert fact == digest(tmp_path / "rank-0.safetensors")
    finish(tmp_path)
    theirs = {name: torch.empty_like(value) for name, value in tensors.items()}
    dcp.load(theirs, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for found in (read_tensors(tmp_path), theirs):
        assert found.keys() == tensors.keys()
        for name, value in tensors.items():
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert found[name].contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("cuts", [(1, 1), (3, 1), (1, 4), (2, 3), (7, 5)])
def test_pieces_of_any_number_of_ranks_make_the_whole(tmp_path, cuts):
    """Cut in both dimensions, each piece on two ranks, as under HSDP; more ranks than rows leave some with nothing."""
    whole = torch.randn(5, 4)
    rows, columns = ([min(size, i * -(-size // n)) for i in range(n + 1)] for size, n in zip((5, 4), cuts, strict=True))
    boxes = itertools.product(itertools.pairwise(rows), itertools.pairwise(columns))
    pieces = [Piece(torch.float32, (5, 4), (a, c), (b - a, d - c)) for (a, b), (c, d) in boxes]
    shares = share_out([{"x": piece} for piece in pieces * 2])
    assert sum(piece.bytes for share in shares for piece in share.values()) == whole.nbytes
    for rank, share in enumerate(shares):
        mine = {name: whole[tuple(map(slice, piece.offset, piece.end))] for name, piece in share.items()}
        write(tmp_path / f"rank-{rank}.safetensors", mine, share)
    finish(tmp_path)
    assert read_tensors(tmp_path)["x"].equal(whole)
    if len(shares) > 2:
        (tmp_path / "rank-0.safetensors").unlink(), (tmp_path / MANIFEST).unlink()
        finish(tmp_path)
        with pytest.raises(ValueError, match="it does not have the whole of x"):
            read_tensors(tmp_path)


def test_what_ranks_hold_alike_is_written_once_and_evenly():
    held = {f"x{n}": Piece(torch.float32, (n + 1, 10), (0, 0), (n + 1, 10)) for n in range(20)}
    shares = share_out([held | {f"own{rank}": Piece(torch.uint8, (), (), ())} for rank in range(4)])
    assert sorted(name for share in shares for name in share) == sorted([*held, *(f"own{rank}" for rank in range(4))])
    sizes = [sum(piece.bytes for piece in share.values()) for share in shares]
    assert max(sizes) < 1.1 * min(sizes)


def test_nothing_is_filled_where_one_tensor_does_not_fit(tmp_path):
    tensors = {"a": torch.ones(3), "b": torch.ones(3)}
    write(tmp_path / "rank-0.safetensors", tensors, pieces_of(tensors))
    finish(tmp_path)
    for other, message in (
        ({"b": torch.zeros(4)}, r"b has the shape \[3\] there, but \[4\] in this run"),
        ({"c": torch.zeros(3)}, "it has no c"),
    ):
        target = torch.zeros(3)
        with pytest.raises(ValueError, match=message):
            TensorReader(tmp_path).read({"a": target} | other)
        assert not target.any()


@pytest.mark.parametrize("content", [b"", b"\xff" * 99, b"\x02" + bytes(7) + b"{}", b"\x05" + bytes(7) + b'"abc"'])
def test_a_file_of_something_else_is_named(tmp_path, content):
    (tmp_path / "rank-0.safetensors").write_bytes(content)
    finish(tmp_path)
    with pytest.raises(CheckpointError, match=r"rank-0\.safetensors: cannot be read"):
        TensorReader(tmp_path)
