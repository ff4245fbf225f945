"""How far one runtime's numbers are from another's: the one comparison of runtimes.

Export compares a file's runtime with torch, training compares a faster precision or mode with
float32. Both judge the ``Parity`` that ``compare`` returns.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from cdgp.artifact import Model
from cdgp.method.score import image_score
from cdgp.runtimes.base import Array, Outputs, Runtime

COMPARED = ("fused", "pooled", "pred_score", "surprisal")


@dataclass(frozen=True)
class Parity:
    """How far a runtime is from a reference, over all compared images and batches.

    Where a runtime returns a value that is not a number, its difference is infinite.
    """

    images: int
    fused: float
    """Largest difference of U, in standard deviations of the normal branches."""
    pooled: float
    pred_score: float
    surprisal: float
    """Largest difference of the surprisal in nats; one rank at the end of the tail is log 2."""
    ranks: float
    """Share of map pixels that are more than one rank off among the normal scores."""
    changed: tuple[int, ...]
    """Positions of the images whose decision differs in a batch of any size."""
    expected_scores: tuple[float, ...]
    """Probability of each image by the reference, at equal numbers of good and defective parts:
    what decides."""
    scores: tuple[float, ...]
    """Probability of each image by the runtime, in its batch of the first size."""

    @property
    def worst(self) -> float:
        """The largest difference of U, the image evidence and the image score."""
        return max(self.fused, self.pooled, self.pred_score)

    def record(self) -> dict[str, float]:
        """The numbers under the keys that an exported file stores them by."""
        return {
            "pictures": self.images,  # images had this name when the format was made
            **{name: getattr(self, name) for name in COMPARED},
            "ranks": self.ranks,
            "labels": len(self.changed),
        }


def compare(
    reference: Runtime,
    runtime: Runtime,
    inputs: Iterable[Array],
    model: Model,
    batches: Sequence[int],
    advance: Callable[[], object] | None = None,
) -> Parity:
    """Run two runtimes on the same images: the reference on one at a time, the other in batches.

    Args:
        reference: gives the expected numbers.
        runtime: is compared with it.
        inputs: (3, H, W) float32 RGB in [0, 1]; read once, and only a few are held at a time.
        model: that both run; its calibration and its threshold count.
        batches: sizes of batch, each of which all images go through.
        advance: called for each image in each size of batch.
    """
    threshold, normals = model.decision.balanced, len(model.calibration.tail.scores)
    largest = dict.fromkeys(COMPARED, 0.0)
    off = pixels = 0
    changed: set[int] = set()
    scores: dict[int, tuple[float, float]] = {}
    for first, expected, outputs in _batches(reference, runtime, inputs, batches):
        for name in COMPARED:
            difference = _largest_difference(getattr(outputs, name), getattr(expected, name))
            largest[name] = max(largest[name], difference)
        ranks = _ranks(outputs.surprisal, normals)
        ranks -= _ranks(expected.surprisal, normals)
        off, pixels = off + int((np.abs(ranks) > 1).sum()), pixels + ranks.size
        image = model.calibration.image
        both = (image_score(o.pooled, image).tolist() for o in (expected, outputs))
        for position, (a, b) in enumerate(zip(*both, strict=True), start=first):
            scores.setdefault(position, (a, b))
            if (a > threshold) != (b > threshold):
                changed.add(position)
            if advance:
                advance()
    return Parity(
        images=len(scores),
        **largest,
        ranks=off / max(1, pixels),
        changed=tuple(sorted(changed)),
        expected_scores=tuple(a for a, _ in scores.values()),
        scores=tuple(b for _, b in scores.values()),
    )


def _batches(
    reference: Runtime, runtime: Runtime, inputs: Iterable[Array], sizes: Sequence[int]
) -> Iterator[tuple[int, Outputs, Outputs]]:
    """(position of the first image, outputs of the reference, of the runtime), batch by batch."""
    unread, done = iter(inputs), 0
    while images := list(islice(unread, math.lcm(*sizes))):
        alone = [reference.run(image[None]) for image in images]
        for size in sizes:
            for first in range(0, len(images), size):
                part = slice(first, first + size)
                expected = Outputs(*map(np.concatenate, zip(*alone[part], strict=True)))
                yield done + first, expected, runtime.run(np.stack(images[part]))
        done += len(images)


def _largest_difference(a: Array, b: Array) -> float:
    return float(np.nan_to_num(np.abs(a - b).max(), nan=math.inf, posinf=math.inf))


def _ranks(surprisal: Array, normals: int) -> NDArray[np.float64]:
    """Ranks among the normal scores, as whole numbers; the surprisal is linear between them."""
    found: NDArray[np.float64] = np.rint(np.exp(-surprisal.astype(np.float64)) * (normals + 1))
    return found
