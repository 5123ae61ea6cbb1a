"""The order of samples, and each rank's share of every global batch.

The order depends only on (seed, epoch, step). The world size only decides how ranks share a global
batch. So a run can resume at any step, on any number of processes, without reading earlier samples,
and sees the same samples.
"""

import contextlib
import hashlib
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset

from shared.process.errors import ConfigError

IGNORED = -100  # the label that the loss ignores, as in PyTorch and transformers
DRAWN_AT_ONCE = 4096  # positions of an epoch, at least: many cost little more than one


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijective scramble of 64-bit
    words.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Apply a keyed pseudo-random permutation of range(size) to each entry of `index`.

    A balanced Feistel network permutes the next power of two with an even exponent. It is applied
    again until the result is inside the range (cycle walking: Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). The cost does not depend on the size, and no table is stored.

    Args:
        index: [n], integers in range(size).
        size: number of samples, at most 2**62.
        key: integers that choose the permutation, (seed, epoch).

    Returns:
        [n] int64.
    """
    half = max(1, (int(size - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(8, np.uint64)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left = x >> np.uint64(half)
        right = x & mask
        for round_key in round_keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        return (left << np.uint64(half)) | right

    with np.errstate(over="ignore"):
        result = encrypt(np.asarray(index, dtype=np.uint64))
        while (outside := result >= np.uint64(size)).any():
            result[outside] = encrypt(result[outside])
    return result.astype(np.int64)


@lru_cache(maxsize=8)
def permuted(size: int, key: tuple[int, ...], start: int, stop: int) -> np.ndarray:
    """`permute` of range(start, stop), read-only and cached for the steps that share it."""
    result = permute(np.arange(start, stop), size, key)
    result.flags.writeable = False
    return result


def is_validation(numbers: np.ndarray, percent: float, part: float = 1.0) -> np.ndarray:
    """Which documents, by their number in the source, belong to the validation split: bool, the
    shape of `numbers`.

    A hash of the number alone decides, so the split does not depend on seed or world size. `part`:
    only so much of it.
    """
    with np.errstate(over="ignore"):
        hashed = _mix(np.asarray(numbers, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    share = hashed % np.uint64(10_000)
    rest = hashed // np.uint64(10_000)
    return (share < np.uint64(round(percent * 100))) & (rest <= np.uint64(part * (2**64 // 10_000)))


def near_share(held_out: float, share: float) -> bool:
    """Whether `held_out`, a share of samples or tokens, is at least half and at most twice the
    wanted `share`.
    """
    return share / 2 <= held_out <= 2 * share


@dataclass(frozen=True)
class Order:
    """Which samples make up each global batch. The last batch of an epoch may be smaller."""

    num_samples: int
    global_batch_size: int
    seed: int
    shuffle: bool = True
    # drop the smaller last batch; with shuffling, each epoch drops other samples
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_samples, self.global_batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, samples of it before) optimizer step `step`."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        return epoch, batch * self.global_batch_size

    @property
    def samples_per_epoch(self) -> int:
        return min(self.num_samples, self.steps_per_epoch * self.global_batch_size)

    def indices(self, step: int) -> np.ndarray:
        """The samples of optimizer step `step`, counted from 0 over all epochs: [<=
        global_batch_size] int64. A function of the step alone, which each rank asks more than once.
        """
        epoch, first = self.position(step)
        last = min(first + self.global_batch_size, self.num_samples)
        if not self.shuffle:
            return np.arange(first, last)
        drawn = self.global_batch_size * math.ceil(DRAWN_AT_ONCE / self.global_batch_size)
        start = first // drawn * drawn
        stop = min(start + drawn, self.num_samples)
        stretch = permuted(self.num_samples, (self.seed, epoch), start, stop)
        return stretch[first - start : last - start]

    def keys(self, step: int) -> np.ndarray:
        """(sample, epoch that it is used in) for `indices`: [<= global_batch_size, 2] int64."""
        indices = self.indices(step)
        return np.stack([indices, np.full_like(indices, self.position(step)[0])], axis=1)

    def used(self, step: int) -> dict[str, tuple[int, int]]:
        """(its samples, how many were drawn of it in all until `step` steps are done) for each
        source of a mixture.
        """
        return {}


@dataclass(frozen=True)
class GroupedOrder(Order):
    """Global batches of similar lengths, for little padding: sorted within stretches of `GROUP`
    batches.
    """

    lengths: np.ndarray = field(kw_only=True)
    GROUP = 32

    def indices(self, step: int) -> np.ndarray:
        epoch, first = self.position(step)
        stretch, batch = divmod(first // self.global_batch_size, self.GROUP)
        size = self.GROUP * self.global_batch_size
        stop = min((stretch + 1) * size, self.num_samples)
        chosen = permuted(self.num_samples, (self.seed, epoch), stretch * size, stop)
        chosen = chosen[np.argsort(-self.lengths[chosen], kind="stable")]
        full = len(chosen) // self.global_batch_size  # a ragged last batch of the epoch stays last
        if batch < full:
            batch = int(permuted(full, (self.seed, epoch, stretch), 0, full)[batch])
        return chosen[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]


def micro_batches(indices: np.ndarray, rank: int, world_size: int, per_device: int) -> np.ndarray:
    """One rank's micro-batches of a global batch: [micro-batches, per_device] sample indices.

    All ranks get the same number of micro-batches, because their collectives must match. A smaller
    batch is padded with -1: rows without targets. Over all ranks, each index appears exactly once.
    A rank's rows are neighbours, so that which they are does not depend on `per_device`.
    """
    share = math.ceil(len(indices) / world_size)
    # mixup mixes pairs, which are the same on any number of ranks
    share += share % 2 if per_device % 2 == 0 else 0
    own = indices[rank * share : (rank + 1) * share]
    padded = np.full(math.ceil(share / per_device) * per_device, -1, dtype=np.int64)
    padded[: len(own)] = own
    return padded.reshape(-1, per_device)


Row = Mapping[str, Any]
Batch = dict[str, torch.Tensor]


class Samples(Protocol):
    """A map-style dataset that knows the number of targets (tokens or images) of any samples,
    without communication.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...

    def num_targets(self, indices: np.ndarray) -> int: ...


class EvenSubset(Subset):
    """`count` samples, evenly spaced over `samples`, or all of them if there are fewer: for
    evaluation.
    """

    dataset: Any
    indices: Any  # [count] int64

    def __init__(self, samples: Any, count: int) -> None:
        places = np.linspace(0, len(samples) - 1, min(count, len(samples))).round()
        super().__init__(samples, places.astype(np.int64))  # type: ignore[arg-type]

    def num_targets(self, indices: np.ndarray) -> int:
        return self.dataset.num_targets(self.indices[indices])


def seed_all(*key: int, devices: bool = True) -> None:
    """Seed the generators of torch (only the CPU's without `devices`), Python and NumPy with a hash
    of `key`.

    `torch.manual_seed` goes through every type of device and takes 50 times as long.
    """
    text = ",".join(map(str, key))
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
    torch.default_generator.manual_seed(seed)
    if devices and (device := _accelerator()) is not None:
        device.manual_seed(seed)
    random.seed(seed)
    # the upper half: torch uses the lower half, for the same generator on the CPU
    np.random.seed(seed >> 32)


@contextlib.contextmanager
def draws_kept() -> Iterator[None]:
    """Take back what is drawn or seeded in this block from the generators of torch (the CPU's),
    Python and NumPy.
    """
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@cache
def _accelerator() -> Any:
    """The module of the accelerator, for example torch.cuda. None without an accelerator."""
    return torch.get_device_module() if torch.accelerator.is_available() else None


class Mixed(ConcatDataset):
    """Several sources as one data set, one after the other: `order.Samples`."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        super().__init__(parts.values())
        self.sources = {name: len(part) for name, part in parts.items()}

    def num_targets(self, indices: np.ndarray) -> int:
        stops = self.cumulative_sizes
        bounds: Any = zip(self.datasets, [0, *stops], stops, strict=False)
        return sum(
            part.num_targets(indices[(indices >= a) & (indices < b)] - a) for part, a, b in bounds
        )


def training_order(
    samples: Any, batch: Any, options: Any, *, is_padded: bool = False, **rest: Any
) -> Order:
    """The order of training, as --order and --mix_weights say.

    Args:
        samples: with weights, they have `sources`.
        batch: a BatchConfig.
        options: a DataConfig.
        is_padded: rows differ in their `lengths`: by default, batches have similar ones.
        rest: of `Order`.

    Raises:
        ConfigError: --order length, and the rows do not differ.
    """
    order = options.order or ("length" if is_padded else "shuffled")
    if order == "length" and not is_padded:
        raise ConfigError("--order length is for rows of different lengths; these have one")
    rest["shuffle"] = order != "file"
    if order == "length":
        rest["lengths"] = samples.lengths
    if options.mix_weights:
        from shared.extras.mixture import mixture_of

        return mixture_of(samples, batch.size, batch.seed, options.mix_weights, **rest)
    kind: Any = GroupedOrder if order == "length" else Order
    return kind(len(samples), batch.size, batch.seed, **rest)
