"""How far one runtime's numbers are from another's: the one comparison of runtimes.

Export compares a file's runtime with torch, training compares a faster precision or mode with
float32. Both judge the ``Parity`` that ``compare`` returns.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from cdgp.artifact import Model
from cdgp.method.calibration import image_probability
from cdgp.method.network import Outputs
from cdgp.runtimes.base import Runtime

COMPARED = ("fused", "pooled", "pred_score", "surprisal")
"""The outputs whose largest difference is kept."""


@dataclass(frozen=True)
class Parity:
    """How far a runtime is from a reference, over all compared images and batches.

    Where a runtime returns a value that is not a number, its difference is infinite.
    """

    images: int
    fused: float
    """Largest difference of U, in standard deviations of the normal branches."""
    pooled: float
    """Largest difference of a(x)."""
    pred_score: float
    """Largest difference of the probability."""
    surprisal: float
    """Largest difference of the surprisal in nats; one rank at the end of the tail is log 2."""
    ranks: float
    """Share of map pixels that are more than one rank off among the normal scores."""
    changed: tuple[int, ...]
    """Positions of the images whose decision differs in a batch of any size."""
    expected_scores: tuple[float, ...]
    """Probability of each image by the reference."""
    scores: tuple[float, ...]
    """Probability of each image by the runtime, in its batch of the first size."""

    @property
    def worst(self) -> float:
        """The largest difference of U, a(x) and the probability."""
        return max(self.fused, self.pooled, self.pred_score)

    def record(self) -> dict[str, float]:
        """The numbers under the keys that an exported file stores them by."""
        return {
            "pictures": self.images,  # images had this name when the format was made
            "fused": self.fused,
            "pooled": self.pooled,
            "pred_score": self.pred_score,
            "surprisal": self.surprisal,
            "ranks": self.ranks,
            "labels": len(self.changed),
        }


def compare(
    reference: Runtime,
    runtime: Runtime,
    inputs: Iterable[Tensor],
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
    tally = _Tally(model)
    unread = iter(inputs)
    done = 0
    while images := list(islice(unread, math.lcm(*batches))):
        expected = [reference.run(image[None]) for image in images]
        for size in batches:
            for first in range(0, len(images), size):
                part = slice(first, first + size)
                outputs = runtime.run(torch.stack(images[part]))
                tally.add(outputs, _joined(expected[part]), done + first)
                for _ in images[part]:
                    if advance:
                        advance()
        done += len(images)
    return tally.parity()


class _Tally:
    """Differences of the batches so far."""

    def __init__(self, model: Model) -> None:
        self.image = model.calibration.image
        self.normals = len(model.calibration.tail.scores)
        self.threshold = model.decision.threshold
        self.largest = dict.fromkeys(COMPARED, 0.0)
        self.off = self.pixels = 0
        self.changed: set[int] = set()
        self.scores: dict[int, tuple[float, float]] = {}

    def add(self, outputs: Outputs, expected: Outputs, first: int) -> None:
        """Count a batch whose first image has a position among all images."""
        for name in COMPARED:
            difference = _largest_difference(getattr(outputs, name), getattr(expected, name))
            self.largest[name] = max(self.largest[name], difference)
        ranks = _ranks(outputs.surprisal, self.normals)
        off = ranks.sub_(_ranks(expected.surprisal, self.normals)).abs_() > 1
        self.off += int(off.sum())
        self.pixels += off.numel()
        both = (image_probability(o.pooled, self.image).tolist() for o in (expected, outputs))
        for position, (a, b) in enumerate(zip(*both, strict=True), start=first):
            self.scores.setdefault(position, (a, b))
            if (a > self.threshold) != (b > self.threshold):
                self.changed.add(position)

    def parity(self) -> Parity:
        return Parity(
            images=len(self.scores),
            **self.largest,
            ranks=self.off / max(1, self.pixels),
            changed=tuple(sorted(self.changed)),
            expected_scores=tuple(a for a, _ in self.scores.values()),
            scores=tuple(b for _, b in self.scores.values()),
        )


def _largest_difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max().nan_to_num(math.inf, math.inf))


def _ranks(surprisal: Tensor, normals: int) -> Tensor:
    """Ranks among the normal scores, as whole numbers; the surprisal is linear between them."""
    probability = surprisal.to(torch.float64, copy=True).neg_().exp_()
    return probability.mul_(normals + 1).round_()


def _joined(outputs: Sequence[Outputs]) -> Outputs:
    """Outputs of single images as those of one batch."""
    return Outputs(*(torch.cat(parts) for parts in zip(*outputs, strict=True)))
