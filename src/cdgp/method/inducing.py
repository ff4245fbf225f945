"""Inducing sets: farthest-point sampling, and the pool of hard candidates (Section 3.2)."""

import torch
from torch import Tensor

from cdgp.errors import TrainingError


def farthest_points(tokens: Tensor, count: int) -> Tensor:
    """Greedy farthest-point sampling under cosine similarity.

    Starts at the token least similar to the mean token, then adds the token whose largest
    similarity to the chosen ones is smallest. Deterministic: ties go to the lowest index.

    Args:
        tokens: (N, D), each of norm 1.
        count: how many to choose.

    Returns:
        (count,) indices into ``tokens``, in the order of choice.

    Raises:
        TrainingError: fewer tokens than asked for.
    """
    if len(tokens) < count:
        raise TrainingError(
            f"{count} inducing tokens asked for, but only {len(tokens)} candidates: "
            "use larger images, more images, or smaller inducing budgets"
        )
    chosen = [int((tokens @ tokens.mean(0)).argmin())]
    closest = tokens @ tokens[chosen[0]]
    while len(chosen) < count:
        closest[chosen[-1]] = torch.inf  # never the same token twice, even among equals
        chosen.append(int(closest.argmin()))
        closest = torch.maximum(closest, tokens @ tokens[chosen[-1]])
    return torch.tensor(chosen)


def hard_candidates(tokens: Tensor, normal_points: Tensor, fraction: float) -> Tensor:
    """The share of defective-image tokens that is farthest from the normal set (Eq. 2).

    Of tokens (N, D) and normal points (M_N, D), each of norm 1, the max(1, round(fraction * N))
    tokens with the largest distance, hardest first.
    """
    distance = 1 - (tokens @ normal_points.mT).amax(1)
    keep = max(1, round(fraction * len(tokens)))
    order = torch.argsort(distance, descending=True, stable=True)
    return tokens[order[:keep]]


def inducing_sets(
    normal_tokens: Tensor, defective_tokens: Tensor, normal: int, anomaly: int, fraction: float
) -> tuple[Tensor, Tensor]:
    """Z_N (normal, D) and Z_A (anomaly, D) from the tokens of both classes of images."""
    Zn = normal_tokens[farthest_points(normal_tokens, normal)]
    pool = hard_candidates(defective_tokens, Zn, fraction)
    return Zn, pool[farthest_points(pool, anomaly)]
