"""Network inputs of the training pictures, and the deterministic stream of batches."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from cdgp.data.images import read_picture, to_input
from cdgp.data.manifest import WeakSample

CACHE_BYTES = 2**30
"""Inputs up to this total stay in memory; those beyond it are decoded on every visit."""


class Pictures:
    """Weakly labelled pictures at the network's input size.

    Args:
        samples: what training may see: pictures and their labels.
        size: (H, W) of the input.
        white_level: of 16-bit files.
    """

    def __init__(
        self, samples: Sequence[WeakSample], size: tuple[int, int], white_level: int
    ) -> None:
        self.samples = tuple(samples)
        self.size = size
        self.white_level = white_level
        self.defective = torch.tensor([s.defective for s in samples], dtype=torch.bool)
        self._room = CACHE_BYTES // (3 * size[0] * size[1] * 4)
        self._cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def input(self, index: int) -> Tensor:
        """(3, H, W) float32 RGB in [0, 1] of one picture."""
        if index in self._cache:
            return self._cache[index]
        picture = to_input(read_picture(self.samples[index].image, self.white_level), self.size)
        if len(self._cache) < self._room:
            self._cache[index] = picture
        return picture

    def batch(self, indices: Sequence[int]) -> Tensor:
        """(B, 3, H, W) float32 RGB in [0, 1]."""
        return torch.stack([self.input(i) for i in indices])

    def indices(self, defective: bool) -> list[int]:
        """Positions of the pictures of one label."""
        return torch.nonzero(self.defective == defective).flatten().tolist()


def seeded(seed: int, *key: object) -> torch.Generator:
    """A generator that depends on the seed and the key alone, so that any step can be redone."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def shuffled_stream(items: Sequence[int], start: int, count: int, seed: int, key: str) -> list[int]:
    """``count`` items from position ``start`` of an endless walk through shuffled epochs."""
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, offset = divmod(start + len(chosen), len(items))
        order = torch.randperm(len(items), generator=seeded(seed, key, epoch)).tolist()
        chosen += [items[i] for i in order[offset : offset + count - len(chosen)]]
    return chosen


def evenly(items: Sequence[int], count: int) -> list[int]:
    """At most ``count`` of the items, evenly spaced."""
    if len(items) <= count:
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]
