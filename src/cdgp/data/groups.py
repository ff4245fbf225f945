"""Which samples belong together: positions connected by pairs, and the groups of a manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cdgp.errors import DataError

if TYPE_CHECKING:
    from cdgp.data.manifest import Manifest, Sample


def connected(count: int, pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The connected components of the positions 0..count - 1, single positions included.

    Each is in ascending order, and they are sorted by their first position.

    Example:
        >>> connected(5, [(3, 1), (4, 3)])
        [[0], [1, 3, 4], [2]]
    """
    # Not at the top: predictions import this module and need no graphs.
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if count == 0:
        return []
    edges = np.array(list(pairs), np.int64).reshape(-1, 2)
    graph = coo_array((np.ones(len(edges)), (edges[:, 0], edges[:, 1])), shape=(count, count))
    _, component = connected_components(graph, directed=False)
    members: dict[int, list[int]] = {}
    for position, number in enumerate(component.tolist()):
        members.setdefault(number, []).append(position)
    return list(members.values())


def group_members(manifest: Manifest, samples: Sequence[Sample]) -> list[list[int]]:
    """Positions of the samples that must stay on one side: of one group, or with equal pixels."""
    first: dict[tuple[str, str], int] = {}
    pairs: list[tuple[int, int]] = []
    for i, sample in enumerate(samples):
        pairs.append((first.setdefault(("pixels", pixels_of(manifest, sample)), i), i))
        if sample.group is not None:
            pairs.append((first.setdefault(("group", sample.group), i), i))
    return connected(len(samples), pairs)


def ordered_groups(manifest: Manifest, samples: Sequence[Sample], seed: int) -> list[list[int]]:
    """``group_members`` in an order that only the seed and the pixels decide."""

    def order(members: list[int]) -> str:
        least = min(pixels_of(manifest, samples[i]) for i in members)
        return hashlib.sha256(f"{seed}:{least}".encode()).hexdigest()

    return sorted(group_members(manifest, samples), key=order)


def group_numbers(manifest: Manifest, samples: Sequence[Sample]) -> NDArray[np.int64]:
    """(n,) the number of each sample's group; samples that must stay on one side share it.

    The numbers follow from the pixels alone, so that folds drawn by them do not depend on names.
    """
    numbers = np.empty(len(samples), np.int64)
    for number, members in enumerate(ordered_groups(manifest, samples, seed=0)):
        numbers[members] = number
    return numbers


def pixels_of(manifest: Manifest, sample: Sample) -> str:
    """The pixel digest of a sample; DataError where it has none."""
    if sample.pixel_sha256 is None:
        name = manifest.name(sample.image)
        raise DataError(f"{name}: has no pixel digest; call cdgp.data.scan.digested first")
    return sample.pixel_sha256
