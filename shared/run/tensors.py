"""The tensors of a checkpoint: one safetensors file a rank, to be read by any number of ranks,
however they shard.

Of a sharded tensor each piece is written once, by one of the ranks that hold it. The header of a
file says where its pieces lie in the whole tensors, in the words of PyTorch's distributed
checkpoint (DCP): its `HuggingFaceStorageReader` reads these files, too. Its own writer takes 0.4 ms
for each tensor, ten times as long, and holds a second copy of all.
"""

import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from safetensors import safe_open
from torch.distributed.tensor import DTensor

from shared.parallel.gradients import local_part
from shared.run.checkpoint_files import MANIFEST, CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# Bytes. The allocator keeps blocks of this size and gives them again; for larger ones the system
# makes new pages each time, which takes four times as long as the copy.
CHUNK = 2**24


class Piece(NamedTuple):
    """A part of a tensor: all of it, or the box of `sizes` at `offset` that a rank holds."""

    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def end(self) -> tuple[int, ...]:
        return tuple(map(operator.add, self.offset, self.sizes))

    @property
    def bytes(self) -> int:
        return math.prod(self.sizes) * _DTYPES[self.dtype].itemsize


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
        found[name] = Piece(_CODES[tensor.dtype], shape, offset, sizes)
    return found


def share_out(held: Sequence[Mapping[str, Piece]]) -> list[dict[str, Piece]]:
    """The pieces that each rank writes, of those that each holds: every piece once, and about as
    many bytes on each rank.

    Raises:
        ValueError: a part of a tensor is on no rank.
    """
    holders: dict[tuple[str, Piece], list[int]] = {}
    for rank, pieces in enumerate(held):
        for name, piece in pieces.items():
            if math.prod(piece.sizes) or not math.prod(piece.shape):
                holders.setdefault((name, piece), []).append(rank)
    missing = {name: math.prod(piece.shape) for name, piece in holders}
    written: list[dict[str, Piece]] = [{} for _ in held]
    load = [0] * len(held)
    for (name, piece), ranks in sorted(
        holders.items(), key=lambda item: (-item[0][1].bytes, item[0])
    ):
        rank = min(ranks, key=load.__getitem__)
        written[rank][name] = piece
        load[rank] += piece.bytes
        missing[name] -= math.prod(piece.sizes)
    if wrong := [name for name, values in missing.items() if values]:
        raise ValueError(f"{wrong[0]}: the ranks' pieces do not make the whole of it")
    return written


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]
) -> dict[str, Any]:
    """Write this rank's part of `tensors`. While a chunk from a GPU is written, the next is copied
    and hashed: the host holds these two.

    Args:
        pieces: what is to be written, of what `pieces_of` found here.

    Returns:
        checksum and size of the file, as `files.digest` gives them.
    """
    # The widest first: then each begins at a multiple of its width.
    pieces = dict(sorted(pieces.items(), key=lambda item: -_DTYPES[item[1].dtype].itemsize))
    header: dict[str, Any] = {}
    end = 0
    for name, piece in pieces.items():
        begin = end
        end += piece.bytes
        header[name] = {"dtype": piece.dtype, "shape": piece.sizes, "data_offsets": [begin, end]}
    places = {name: {"saved_offsets": piece.offset} for name, piece in pieces.items()}
    header["__metadata__"] = {
        "format": "pt",
        "DCP_SHARDING_INFO": json.dumps(places),
        "DCP_VERSION": "1.0",
        "shapes": json.dumps({name: piece.shape for name, piece in pieces.items()}),
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    checksum = xxhash.xxh3_128(head)
    with path.open("xb") as file, ThreadPoolExecutor(1) as writer:
        file.write(head)
        written: Future[int] | None = None
        for name in pieces:
            whole = local_part(tensors[name]).detach().contiguous().view(-1)
            for chunk in whole.view(torch.uint8).split(CHUNK):
                data = chunk.cpu().numpy().data
                checksum.update(data)
                if written:
                    written.result()
                if chunk.is_cuda:
                    written = writer.submit(file.write, data)
                else:  # perhaps in the background, where Python's end allows no new thread
                    file.write(data)
        if written:
            written.result()
        file.flush()
        os.fsync(file.fileno())
    return {"xxh3_128": checksum.hexdigest(), "size": len(head) + end}


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
                with (folder / file).open("rb") as opened:
                    header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
                told = header.pop("__metadata__")
                places = json.loads(told["DCP_SHARDING_INFO"])
                shapes = json.loads(told["shapes"])
                for name, entry in header.items():
                    box = (shapes[name], places[name]["saved_offsets"], entry["shape"])
                    self.pieces.setdefault(name, []).append(
                        (file, Piece(entry["dtype"], *map(tuple, box)))
                    )
            except Exception as error:  # what is not JSON of this form can raise nearly anything
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
        name: torch.empty(piece.shape, dtype=_DTYPES[piece.dtype])
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
