"""The tensors of a checkpoint: one safetensors file a rank, to be read by any number of ranks,
however they shard.

Of a sharded tensor each piece is written once, by one of the ranks that hold it. The header of a
file says where its pieces lie in the whole tensors, in the words of PyTorch's distributed
checkpoint (DCP), which reads them. DCP's own writer takes 0.4 ms for each tensor, ten times as
long, and holds a second copy of all.
"""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from shared.process.files import digest, fsync


class Piece(NamedTuple):
    """A part of a tensor: all of it, or the box of `sizes` at `offset` that a rank holds."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    bytes: int


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
        found[name] = Piece(shape, offset, sizes, math.prod(sizes) * tensor.itemsize)
    return found


def share_out(held: Sequence[Mapping[str, Piece]]) -> list[dict[str, Piece]]:
    """The pieces that each rank writes, of those that each holds: every piece once, and about as
    many bytes on each rank.

    Raises:
        ValueError: a part of a tensor is on no rank, or in two pieces.
    """
    holders: dict[tuple[str, Piece], list[int]] = {}
    for rank, pieces in enumerate(held):
        for name, piece in pieces.items():
            if math.prod(piece.sizes) or not math.prod(piece.shape):
                holders.setdefault((name, piece), []).append(rank)
    missing = {name: math.prod(piece.shape) for name, piece in holders}
    written: list[dict[str, Piece]] = [{} for _ in held]
    load = [0] * len(held)
    for name, piece in sorted(holders, key=lambda part: (-part[1].bytes, part)):
        rank = min(holders[name, piece], key=load.__getitem__)
        written[rank][name] = piece
        load[rank] += piece.bytes
        missing[name] -= math.prod(piece.sizes)
    if wrong := [*filter(missing.get, missing)]:
        raise ValueError(f"{wrong[0]}: the ranks' pieces do not make the whole of it")
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

    Raises:
        OSError: it cannot be written.
    """
    places = {name: {"saved_offsets": piece.offset} for name, piece in pieces.items()}
    metadata = {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places)}
    try:
        save_file({name: tensors[name].contiguous() for name in pieces}, path, metadata)
    except SafetensorError as error:  # "Error while serializing: I/O error: No space left ..."
        raise OSError(str(error).rpartition("error: ")[2]) from None
    fsync(path)
    return digest(path)


def saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Type and size of each tensor of a checkpoint."""
    metadata: Any = dcp.HuggingFaceStorageReader(str(folder)).read_metadata()
    return metadata.state_dict_metadata


def read(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Fill tensors in place: whole ones, and what this rank holds of sharded ones. If one does not
    fit, none is filled.

    Raises:
        RuntimeError, ValueError: the checkpoint does not have one of them, or has it with another
            shape.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that each rank reads for itself
        try:
            reader = dcp.HuggingFaceStorageReader(str(folder))
            dcp.load(tensors, storage_reader=reader, no_dist=True)
        except dcp.CheckpointException as error:
            ((cause, _),) = error.failures.values()
            raise cause from None


def read_tensors(folder: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose names begin with `prefix`, whole, on the CPU. Call on one
    rank.
    """
    tensors = {
        name: torch.empty(saved.size, dtype=saved.properties.dtype)
        for name, saved in saved_tensors(folder).items()
        if name.startswith(prefix)
    }
    read(folder, tensors)
    return tensors


def read_weights(folder: Path, *, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's tensors in a checkpoint by their own names, whole, on the CPU. Call on one
    rank.
    """
    return {
        name.removeprefix("model."): value.to(dtype) if value.is_floating_point() else value
        for name, value in read_tensors(folder, "model.").items()
    }
