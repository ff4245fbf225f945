"""Inducing sets against brute force from the sentences of Section 3.2."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from cdgp.errors import TrainingError
from cdgp.method.inducing import farthest_points, hard_candidates, inducing_sets


def unit_tokens(count: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(count, dim, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(tokens, dim=1)


def lattice_tokens(count: int, seed: int) -> Tensor:
    """Unit tokens in four dimensions of which every dot product is exact, with many repeats."""
    generator = torch.Generator().manual_seed(seed)
    axes = torch.cat([torch.eye(4), -torch.eye(4)])
    halves = torch.cartesian_prod(*[torch.tensor([0.5, -0.5])] * 4)
    vectors = torch.cat([axes, halves])
    return vectors[torch.randint(len(vectors), (count,), generator=generator)]


def slow_farthest_points(tokens: Tensor, count: int) -> list[int]:
    """Greedy, in exact arithmetic: each time the least of the largest similarities to the chosen.

    Starts at the token least similar to the mean. Of equal ones the first in order is taken, and
    none twice.
    """
    rows = [[Fraction(value) for value in row] for row in tokens.tolist()]

    def similarity(a: list[Fraction], b: list[Fraction]) -> Fraction:
        return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))

    mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
    chosen = [min(range(len(rows)), key=lambda i: similarity(rows[i], mean))]
    while len(chosen) < count:
        left = [i for i in range(len(rows)) if i not in chosen]
        chosen.append(min(left, key=lambda i: max(similarity(rows[i], rows[j]) for j in chosen)))
    return chosen


@pytest.mark.parametrize("seed", range(6))
def test_farthest_points_is_the_greedy_loop(seed: int) -> None:
    tokens = unit_tokens(25 + seed, 3 + seed, seed)
    expected = slow_farthest_points(tokens, 12)
    assert farthest_points(tokens, 12).tolist() == expected
    assert farthest_points(tokens.float(), 12).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_farthest_points_takes_the_first_of_ties(seed: int) -> None:
    tokens = lattice_tokens(16, seed)  # a power of two, so that the mean is exact
    assert farthest_points(tokens, 16).tolist() == slow_farthest_points(tokens, 16)


def test_farthest_points_of_equal_tokens_repeats_none() -> None:
    tokens = torch.tensor([[1.0, 0.0]]).repeat(5, 1)
    assert farthest_points(tokens, 5).tolist() == [0, 1, 2, 3, 4]


def test_farthest_points_takes_what_is_new_before_a_duplicate() -> None:
    e = torch.eye(3)
    tokens = torch.stack([e[0], e[0], e[0], e[1], e[1], e[2]])
    assert farthest_points(tokens, 3).tolist() == [5, 0, 3]


def test_farthest_points_of_all_tokens_is_a_permutation() -> None:
    assert sorted(farthest_points(unit_tokens(9, 4, 0), 9).tolist()) == list(range(9))


def test_farthest_points_leaves_the_tokens_as_they_are() -> None:
    tokens = unit_tokens(20, 4, 0)
    before = tokens.clone()
    farthest_points(tokens, 10)
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("count", [0, 3])
def test_too_few_tokens_are_refused_with_both_numbers(count: int) -> None:
    message = f"4 inducing tokens asked for, but only {count} candidates"
    with pytest.raises(TrainingError, match=message):
        farthest_points(unit_tokens(count, 8, 0), 4)


@pytest.mark.parametrize("fraction", [0.01, 0.2, 0.37, 1.0])
def test_hard_candidates_are_the_farthest_share(fraction: float) -> None:
    """Eq. 2 in loops, then a sort."""
    tokens, points = unit_tokens(47, 6, 0), unit_tokens(5, 6, 1)
    t, Z = tokens.numpy(), points.numpy()
    distances = [1 - max(float(np.dot(row, point)) for point in Z) for row in t]
    order = sorted(range(len(t)), key=lambda i: -distances[i])
    expected = tokens[order[: max(1, round(fraction * 47))]]
    found = hard_candidates(tokens, points, fraction)
    assert torch.equal(found, expected)


def test_hard_candidates_of_equal_distance_keep_their_order() -> None:
    e = torch.eye(4)
    tokens = torch.stack([e[0], e[1], e[2], e[0], e[3]])
    found = hard_candidates(tokens, e[:1], 0.6)
    assert torch.equal(found, e[[1, 2, 3]])


@pytest.mark.parametrize(("count", "kept"), [(100, 20), (14, 3), (11, 2), (3, 1), (1, 1)])
def test_a_fifth_of_the_tokens_is_kept_and_at_least_one(count: int, kept: int) -> None:
    assert len(hard_candidates(unit_tokens(count, 4, 0), unit_tokens(2, 4, 1), 0.2)) == kept


def test_inducing_sets_have_the_budgets_and_come_from_their_images() -> None:
    normal, defective = unit_tokens(200, 16, 0), unit_tokens(150, 16, 1)
    Zn, Za = inducing_sets(normal, defective, 32, 16, 0.2)
    assert Zn.shape == (32, 16)
    assert Za.shape == (16, 16)
    assert bool((Zn[:, None] == normal).all(-1).any(1).all())
    pool = hard_candidates(defective, Zn, 0.2)
    assert len(pool) == 30
    assert bool((Za[:, None] == pool).all(-1).any(1).all())
    expected = slow_farthest_points(pool, 16)
    assert torch.equal(Za, pool[expected])


def test_anomaly_points_are_not_background() -> None:
    """Defective images of nine tenths background: no anomaly point lies on it."""
    generator = torch.Generator().manual_seed(0)
    background, defect = torch.eye(16, dtype=torch.float64)[:2]

    def around(centre: Tensor, count: int) -> Tensor:
        noise = 0.05 * torch.randn(count, 16, generator=generator, dtype=torch.float64)
        return torch.nn.functional.normalize(centre + noise, dim=1)

    defective = torch.cat([around(background, 270), around(defect, 30)])
    _, Za = inducing_sets(around(background, 300), defective, 8, 8, 0.1)
    assert bool((Za @ defect > 0.9).all())


def test_a_pool_smaller_than_the_budget_is_refused() -> None:
    with pytest.raises(TrainingError, match="16 inducing tokens asked for, but only 10 candidates"):
        inducing_sets(unit_tokens(100, 8, 0), unit_tokens(50, 8, 1), 32, 16, 0.2)
