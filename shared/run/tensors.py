"""The tensors of a checkpoint: one safetensors file a rank, to be read by any number of ranks,
however they shard.

Of a sharded tensor each piece is written once, by one of the ranks that hold it. The header of a
file says where its pieces lie in the whole tensors, in the words of PyTorch's distributed
checkpoint (DCP): its `HuggingFaceStorageReader` reads these files, too. Its own writer takes 0.4 ms
for each tensor, ten times as long.
"""

import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, save_file
from torch.distributed.tensor import DTensor

from shared.parallel.gradients import local_part
from shared.process.files import digest
from shared.run.checkpoint_files import MANIFEST, CheckpointError


class Piece(NamedTuple):
    """A part of a tensor: all of it, or the box of `sizes` at `offset` that a rank holds."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.offset, self.sizes))

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
    """What this rank holds of each tensor; nothing of one that is sharded over other ranks
    alone.
    """
    found = {}
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        offset = (0,) * len(shape)
        sizes = shape
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is None:
                continue
            (chunk,) = tensor.__create_chunk_list__()
            offset = tuple(chunk.offsets)
            sizes = tuple(chunk.sizes)
        found[name] = Piece(tensor.dtype, shape, offset, sizes)
    return found


def share_out(held: Sequence[Mapping[str, Piece]]) -> list[dict[str, Piece]]:
    """The pieces that each rank writes, of those that each holds: every piece once, and about as
    many bytes on each rank.
    """
    holders: dict[tuple[str, Piece], list[int]] = {}
    for rank, pieces in enumerate(held):
        for name, piece in pieces.items():
            if math.prod(piece.sizes) or not math.prod(piece.shape):
                holders.setdefault((name, piece), []).append(rank)
    written: list[dict[str, Piece]] = [{} for _ in held]
    load = [0] * len(held)
    for name, piece in sorted(holders, key=lambda part: (-part[1].bytes, part[0], part[1].offset)):
        rank = min(holders[name, piece], key=load.__getitem__)
        written[rank][name] = piece
        load[rank] += piece.bytes
    return written


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]
) -> dict[str, Any]:
    """Write this rank's part of a checkpoint. The host holds a copy of what lies on a GPU.

    Args:
        tensors: what this rank holds of them.
        pieces: what is to be written, and where it lies in the whole tensors.

    Returns:
        checksum and size of the file, as `files.digest` gives them.
    """
    places = {name: {"saved_offsets": piece.offset} for name, piece in pieces.items()}
    metadata = {
        "format": "pt",
        "DCP_SHARDING_INFO": json.dumps(places),
        "DCP_VERSION": "1.0",
        "shapes": json.dumps({name: piece.shape for name, piece in pieces.items()}),
    }
    save_file({name: tensors[name].contiguous() for name in pieces}, path, metadata)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return digest(path)


class TensorReader:
    """Reads the tensors of a checkpoint.

    Attributes:
        manifest: of the checkpoint.
        pieces: by the tensors' names, (file, piece) of each part.

    Raises:
        CheckpointError: a file is not one of tensors.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pieces: dict[str, list[tuple[str, Piece]]] = {}
        self.manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        for file in (name for name in self.manifest["files"] if name.endswith(".safetensors")):
            try:
                with safe_open(folder / file, "pt") as opened:
                    places = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
                    shapes = json.loads(opened.metadata()["shapes"])
                    for name in opened.keys():  # noqa: SIM118
                        there = opened.get_slice(name)
                        box = (shapes[name], places[name]["saved_offsets"], there.get_shape())
                        piece = Piece(_TYPES[there.get_dtype()], *map(tuple, box))
                        self.pieces.setdefault(name, []).append((file, piece))
            except Exception as error:  # of a file of something else, nearly any
                raise CheckpointError(
                    f"{folder / file}: cannot be read ({type(error).__name__})"
                ) from None

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill tensors in place: whole ones, and what this rank holds of sharded ones. If one does
        not fit, none is filled.

        Raises:
            ValueError: the checkpoint does not have one of them, or has it with another shape.
        """
        parts: dict[str, list[tuple[str, tuple[slice, ...], torch.Tensor]]] = {}
        for name, mine in pieces_of(tensors).items():
            saved = self.pieces.get(name)
            if saved is None:
                raise ValueError(f"it has no {name}")
            missing = math.prod(mine.sizes)
            local = local_part(tensors[name]).detach()
            for file, piece in saved:
                if piece.shape != mine.shape:
                    raise ValueError(
                        f"{name} has the shape {list(piece.shape)} there, "
                        f"but {list(mine.shape)} in this run"
                    )
                begin = tuple(map(max, piece.offset, mine.offset))
                end = tuple(map(min, piece.end, mine.end))
                if all(map(operator.lt, begin, end)):
                    target = local[_box(begin, end, mine)]
                    parts.setdefault(file, []).append((name, _box(begin, end, piece), target))
                    missing -= target.numel()
            if missing:
                raise ValueError(f"it does not have the whole of {name}")
        for file, wanted in parts.items():
            with safe_open(self.folder / file, "pt") as opened:
                for name, there, target in wanted:
                    target.copy_(opened.get_slice(name)[there])


def _box(begin: tuple[int, ...], end: tuple[int, ...], piece: Piece) -> tuple[slice, ...]:
    """Where a box of the whole tensor is in a piece of it."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, piece.offset, strict=True))


def read_tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with `prefix`, whole, on the CPU. Call on one
    rank.
    """
    reader = TensorReader(folder)
    tensors = {
        name: torch.empty(piece.shape, dtype=piece.dtype)
        for name, ((_, piece), *_) in reader.pieces.items()
        if name.startswith(prefix)
    }
    reader.read(tensors)
    return tensors


def read_weights(folder: Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint by their own names, whole, on the CPU. Call on one
    rank.
    """
    return {
        name.removeprefix("model."): value.to(dtype) if value.is_floating_point() else value
        for name, value in read_tensors(folder, "model.").items()
    }
