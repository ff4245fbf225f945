"""Network inputs of weakly labelled images, and the deterministic stream of batches."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from cdgp.data.images import read_image, to_input
from cdgp.data.manifest import WeakSample
from cdgp.method.build import seeded
from cdgp.presets import Settings

CACHE_BYTES = 2**30
"""Inputs up to this total stay in memory; those beyond it are decoded on every visit."""


class InputCache:
    """Network inputs by the image's path, each decoded once while there is room.

    ``size`` is (H, W) of the network's input: of the windows where images are cut (``tile``).
    """

    def __init__(
        self, size: tuple[int, int], white_level: int, tile: bool, first_page: bool = False
    ) -> None:
        self.size, self.tile = size, tile
        self.white_level, self.first_page = white_level, first_page
        self._room = CACHE_BYTES
        self._kept: dict[Path, Tensor] = {}

    def input(self, path: Path) -> Tensor:
        """(3, H, W) float32 RGB in [0, 1]: of ``size``, or the image's own where it is tiled."""
        if path in self._kept:
            return self._kept[path]
        pixels = read_image(path, self.white_level, self.first_page)
        if self.tile:
            found = torch.from_numpy(pixels).permute(2, 0, 1)
        else:
            found = torch.from_numpy(to_input(pixels, self.size))
        if found.nbytes <= self._room:
            self._room -= found.nbytes
            self._kept[path] = found
        return found


class WeakDataset:
    """Weakly labelled images as the network takes them; datasets of one run share their inputs."""

    def __init__(self, samples: Sequence[WeakSample], inputs: InputCache) -> None:
        self.samples = tuple(samples)
        self.inputs = inputs
        self.defective = torch.tensor([s.defective for s in samples], dtype=torch.bool)

    @property
    def size(self) -> tuple[int, int]:
        """(H, W) of the network's input, or of the windows of a tiled image."""
        return self.inputs.size

    @property
    def tile(self) -> bool:
        """Whether images are cut into windows."""
        return self.inputs.tile

    def __len__(self) -> int:
        return len(self.samples)

    def input(self, index: int) -> Tensor:
        """(3, H, W) float32 RGB in [0, 1] of one image."""
        return self.inputs.input(self.samples[index].image)

    def batch(self, indices: Sequence[int]) -> Tensor:
        """(B, 3, H, W) float32 RGB in [0, 1]."""
        return torch.stack([self.input(i) for i in indices])

    def indices(self, defective: bool) -> list[int]:
        """Positions of the images of one label."""
        return torch.nonzero(self.defective == defective).flatten().tolist()


def new_inputs(settings: Settings) -> InputCache:
    """An empty cache for a run."""
    data = settings.data
    return InputCache(settings.input_size, data.white_level, settings.tile, data.first_page)


def shuffled_stream(items: Sequence[int], start: int, count: int, seed: int, key: str) -> list[int]:
    """``count`` items from position ``start`` of an endless walk through shuffled epochs."""
    chosen: list[int] = []
    while len(chosen) < count:
        epoch, offset = divmod(start + len(chosen), len(items))
        order = torch.randperm(len(items), generator=seeded(seed, key, epoch)).tolist()
        chosen += [items[i] for i in order[offset : offset + count - len(chosen)]]
    return chosen
