"""Network inputs of the training images, and the deterministic stream of batches."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import WeakSample

CACHE_BYTES = 2**30
"""Inputs up to this total stay in memory; those beyond it are decoded on every visit."""


class WeakDataset:
    """Weakly labelled images at the network's input size, or at their own where they are tiled.

    Args:
        samples: what training may see: images and their labels.
        size: (H, W) of the network's input, that is, of the windows of a tiled image.
        white_level: of 16-bit files.
        tile: whether images are cut into windows, not resized.
    """

    def __init__(
        self,
        samples: Sequence[WeakSample],
        size: tuple[int, int],
        white_level: int,
        tile: bool = False,
    ) -> None:
        self.samples = tuple(samples)
        self.size = size
        self.white_level = white_level
        self.tile = tile
        self.defective = torch.tensor([s.defective for s in samples], dtype=torch.bool)
        self._room = CACHE_BYTES
        self._cache: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.samples)

    def input(self, index: int) -> Tensor:
        """(3, H, W) float32 RGB in [0, 1] of one image."""
        if index in self._cache:
            return self._cache[index]
        pixels = read_image(self.samples[index].image, self.white_level)
        if self.tile:
            image = torch.from_numpy(pixels).permute(2, 0, 1)
        else:
            image = to_input(pixels, self.size)
        if image.nbytes <= self._room:
            self._room -= image.nbytes
            self._cache[index] = image
        return image

    def batch(self, indices: Sequence[int]) -> Tensor:
        """(B, 3, H, W) float32 RGB in [0, 1]."""
        return torch.stack([self.input(i) for i in indices])

    def indices(self, defective: bool) -> list[int]:
        """Positions of the images of one label."""
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
