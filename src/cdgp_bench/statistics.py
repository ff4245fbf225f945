"""From rows to statements: means over seeds or folds, and paired comparisons over categories.

The unit of the paired analysis is the category, after averaging over seeds (Section S1.1 of the
paper): a percentile bootstrap of the mean difference, an exact sign-flip test, Holm's adjustment.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

RESAMPLES = 100_000
CONFIDENCE = 0.95


class Repeats(NamedTuple):
    """How often a plan measures each method."""

    number: int
    word: Literal["seeds", "folds"]


class Summary(NamedTuple):
    """Mean and spread over seeds or folds of the mean over categories."""

    mean: float
    std: float | None
    """Sample standard deviation (n - 1); None for one seed or fold."""
    repeats: int
    """The number of seeds or folds."""


def summarise(values: Mapping[Any, Mapping[str, float | None]]) -> Summary | None:
    """Category mean within each seed or fold, then mean and standard deviation over them, if any.

    One counts only where every category that any has is there, since a mean over fewer categories
    is another quantity.

    >>> summarise({0: {"a": 0.25, "b": 0.5}, 1: {"a": 0.5, "b": 0.75}})
    Summary(mean=0.5, std=0.1767766952966369, repeats=2)
    """
    categories = {name for of_repeat in values.values() for name in of_repeat}
    means = []
    for of_repeat in values.values():
        found = [of_repeat.get(name) for name in sorted(categories)]
        if found and all(v is not None for v in found):
            means.append(float(np.mean([v for v in found if v is not None])))
    if not means:
        return None
    spread = float(np.std(means, ddof=1)) if len(means) > 1 else None
    return Summary(float(np.mean(means)), spread, len(means))


class Contrast(NamedTuple):
    """One method minus another, over categories."""

    difference: float
    low: float | None
    """Ends of the 95 % bootstrap interval; None for fewer than two categories."""
    high: float | None
    p: float
    """Two-sided sign-flip p-value, before any adjustment."""
    categories: int


def paired_contrast(differences: Sequence[float], seed: int = 0) -> Contrast:
    """The paired analysis of one metric: first minus second, one value a category, at least one."""
    values = np.asarray(differences, dtype=np.float64)
    low, high = category_bootstrap(values, seed) if len(values) > 1 else (None, None)
    return Contrast(float(values.mean()), low, high, sign_flip(values), len(values))


def category_bootstrap(
    differences: Sequence[float] | np.ndarray, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Percentile bootstrap interval (95 %) of the mean over two or more categories."""
    values = np.asarray(differences, dtype=np.float64)
    if np.ptp(values) == 0:
        return float(values[0]), float(values[0])
    interval = stats.bootstrap(
        (values,), np.mean, n_resamples=resamples, batch=10_000, vectorized=True,
        confidence_level=CONFIDENCE, method="percentile", random_state=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    return float(interval.low), float(interval.high)


def sign_flip(differences: Sequence[float] | np.ndarray) -> float:
    """Exact two-sided sign-flip test of a zero mean.

    The share of all 2^n assignments of signs whose mean lies at least as far from zero; up to 20
    differences are enumerated, beyond that 10^6 assignments are drawn.

    >>> sign_flip([0.1] * 8) == 2 / 256
    True
    >>> sign_flip([0.0, 0.0, 0.0])
    1.0
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) == 1:
        return 1.0  # both assignments lie equally far; scipy wants two observations
    exact = len(values) <= 20
    scale = float(np.abs(values).max()) or 1.0

    def mean(signed: NDArray[np.float64], axis: int) -> Any:
        """Rounded, so that means which are equal but for the order of their sum tie."""
        return np.round(np.mean(signed, axis=axis) / scale, 12)

    found = stats.permutation_test(
        (values,), mean, permutation_type="samples", vectorized=True, batch=10_000,
        n_resamples=np.inf if exact else 1_000_000, rng=np.random.default_rng(0),
    )  # fmt: skip
    return float(min(1.0, found.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of the p-values of one family.

    >>> [round(p, 4) for p in holm([0.01, 0.04, 0.03])]
    [0.03, 0.06, 0.06]
    """
    from statsmodels.stats.multitest import multipletests  # only benchmarks have it installed

    if not p_values:
        return []
    return [float(p) for p in multipletests(p_values, method="holm")[1]]
