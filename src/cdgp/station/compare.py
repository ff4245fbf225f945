"""Live model against candidate on the same held-out images, and what two thresholds would do.

Rates carry 95 % intervals over groups of images, see `cdgp.metrics.reliability.rate_interval`;
differences carry those of a paired bootstrap over groups, see `cdgp.metrics.resampling`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cdgp.errors import DataError, SettingsError
from cdgp.metrics.ranking import Measure, checked_scores, image_auroc
from cdgp.metrics.reliability import (
    Interval,
    false_reject_threshold,
    group_members,
    rate_interval,
)
from cdgp.metrics.resampling import (
    Array,
    Difference,
    difference_of,
    drawn_auroc,
    drawn_rate,
    group_draws,
)

Bools = NDArray[np.bool_]


class Policy(Protocol):
    """What decides on an image score."""

    def decide(self, score: float) -> str:
        """``accept``, ``reject``, or ``unsure``: a person is asked."""
        ...


class Thresholds(NamedTuple):
    """Two thresholds, and what they promise of a new good part."""

    accept_below: float
    """Scores below are accepted; where it equals ``reject_above``, so are those equal to it."""
    reject_above: float
    reject_bound: float
    """P(an image of a new good part is rejected) is at most this."""
    doubt_bound: float
    """P(an image of a new good part is not accepted) is at most this."""
    groups: int
    """Groups of good images that both rest on."""


class Share(NamedTuple):
    """So many of so many images, and a 95 % interval for the rate; None for both without images."""

    images: int
    of: int
    interval: Interval | None

    @property
    def rate(self) -> float | None:
        """``images`` over ``of``."""
        return self.images / self.of if self.of else None


class Outcome(NamedTuple):
    """What a policy does, or would have done, to images."""

    accepted: Share
    unsure: Share
    rejected: Share
    overkill: Share
    """Good images rejected, of those known to be good."""
    escape: Share
    """Defective images accepted, of those known to be defective."""


class Change(NamedTuple):
    """An image that the candidate decides otherwise than the live model."""

    image: str
    before: str
    after: str
    defective: bool
    score_before: float
    score_after: float


class Side(NamedTuple):
    """A model on the held-out images, under its policy."""

    scores: ArrayLike
    """(n,) image scores, finite."""
    policy: Policy


class Comparison(NamedTuple):
    """Candidate beside live model. Differences are candidate minus live; None where undefined."""

    images: int
    groups: int
    live_auroc: Measure
    candidate_auroc: Measure
    live: Outcome
    candidate: Outcome
    auroc: Difference | None
    overkill: Difference | None
    escape: Difference | None
    unsure: Difference | None
    changes: tuple[Change, ...]
    """In the order of the images."""


def choose_thresholds(
    scores: ArrayLike,
    labels: ArrayLike,
    groups: ArrayLike | None = None,
    max_false_rejects: float = 0.01,
    max_doubts: float = 0.05,
) -> Thresholds:
    """Two thresholds from budgets on good parts, by held-out images as production makes them.

    A part is rejected, or not accepted, where one of its images is. Both bounds are those of
    `cdgp.metrics.reliability.false_reject_threshold`, each by itself. Nothing is promised of
    defective parts: see the escapes of `outcome`.

    Args:
        scores: (n,) finite, of images that took no part in training.
        labels: (n,) bool, True = defective; those are not used.
        groups: (n,) group of each image, as numbers or names; each is its own where None.
        max_false_rejects: share of good parts that may be rejected.
        max_doubts: share of good parts that may be rejected or asked about; at least the other.

    Raises:
        SettingsError: impossible budgets, or too few groups of good images for them.
        DataError: scores that are not finite, or unlike lengths.
    """
    if not max_false_rejects <= max_doubts:
        raise SettingsError(
            f"good parts that are asked about or rejected, at most {max_doubts}: cannot be fewer "
            f"than those rejected, at most {max_false_rejects}"
        )
    values, defective = checked_scores(scores, labels)
    good = values[~defective]
    members = group_members(groups, len(values))[~defective]
    reject = false_reject_threshold(good, max_false_rejects, members)
    doubt = false_reject_threshold(good, max_doubts, members)
    # The bound is on scores above the threshold: one that equals it is accepted.
    accept = min(math.nextafter(doubt.threshold, math.inf), reject.threshold)
    return Thresholds(accept, reject.threshold, reject.bound, doubt.bound, reject.groups)


def outcome(
    scores: ArrayLike,
    policy: Policy,
    labels: Sequence[bool | None] | None = None,
    groups: ArrayLike | None = None,
) -> Outcome:
    """What a policy does to images: for a slider, on held-out images or on yesterday's.

    Args:
        scores: (n,) finite.
        policy: that decides.
        labels: (n,) True = defective, None = not known; of none where None.
        groups: (n,) group of each image, as numbers or names; each is its own where None.

    Raises:
        DataError: scores that are not finite, or unlike lengths.
    """
    values, _ = checked_scores(scores, np.zeros(np.shape(scores)))
    known = [None] * len(values) if labels is None else list(labels)
    if len(known) != len(values):
        raise DataError(f"{len(values)} scores but {len(known)} labels")
    decisions, members = _decisions(values, policy), group_members(groups, len(values))
    every = np.ones(len(values), dtype=np.bool_)
    good, bad = (np.array([label is side for label in known], np.bool_) for side in (False, True))
    return Outcome(
        accepted=_share(decisions == "accept", every, members),
        unsure=_share(decisions == "unsure", every, members),
        rejected=_share(decisions == "reject", every, members),
        overkill=_share(decisions == "reject", good, members),
        escape=_share(decisions == "accept", bad, members),
    )


def compare(
    images: Sequence[str],
    labels: ArrayLike,
    live: Side,
    candidate: Side,
    groups: ArrayLike | None = None,
    seed: int = 0,
) -> Comparison:
    """Compare two models on the same images, which neither has been trained on.

    Intervals tell which images were drawn, not another training. Where no decision of a class has
    changed, a bootstrap knows nothing but zero: then the interval is that of a rate of none.

    Args:
        images: (n,) names, at least one.
        labels: (n,) bool, True = defective.
        live: the model in use.
        candidate: the one that may replace it.
        groups: (n,) group of each image, as numbers or names; each is its own where None.
        seed: of the draws.

    Raises:
        DataError: no image, scores that are not finite, or unlike lengths.
    """
    before, defective = checked_scores(live.scores, labels, images)
    after, _ = checked_scores(candidate.scores, labels, images)
    if not len(images) == len(before) > 0:
        raise DataError(f"{len(images)} images but {len(before)} scores; at least one is needed")
    members = group_members(groups, len(before))
    weights = group_draws(members.tolist(), seed=seed)
    every = np.ones(len(before), dtype=np.bool_)
    first, second = _decisions(before, live.policy), _decisions(after, candidate.policy)

    def change_of(word: str, among: Bools) -> Difference | None:
        return _rate_difference(first == word, second == word, among, members, weights)

    aurocs = image_auroc(before, defective), image_auroc(after, defective)
    spread = drawn_auroc(after, defective, weights) - drawn_auroc(before, defective, weights)
    gain = [math.nan if one.value is None else one.value for one in aurocs]
    known = defective.tolist()
    return Comparison(
        images=len(images),
        groups=int(members.max()) + 1,
        live_auroc=aurocs[0],
        candidate_auroc=aurocs[1],
        live=outcome(before, live.policy, known, members),
        candidate=outcome(after, candidate.policy, known, members),
        auroc=difference_of(gain[1] - gain[0], spread),
        overkill=change_of("reject", ~defective),
        escape=change_of("accept", defective),
        unsure=change_of("unsure", every),
        changes=tuple(
            Change(images[i], str(first[i]), str(second[i]), known[i], before[i], after[i])
            for i in np.flatnonzero(first != second).tolist()
        ),
    )


def _rate_difference(
    first: Bools, second: Bools, among: Bools, members: NDArray[np.int64], weights: Array
) -> Difference | None:
    """The second rate of an event minus the first; None without an image among which to count."""
    if not among.any():
        return None
    if (first == second)[among].all():
        _, high = rate_interval(np.zeros(np.count_nonzero(among)), members[among])
        return Difference(0.0, -high, high, len(weights))
    value = float(second[among].mean() - first[among].mean())
    spread = drawn_rate(second, among, weights) - drawn_rate(first, among, weights)
    return difference_of(value, spread)


def _share(events: Bools, among: Bools, members: NDArray[np.int64]) -> Share:
    count = int(np.count_nonzero(among))
    interval = rate_interval(events[among], members[among]) if count else None
    return Share(int(np.count_nonzero(events & among)), count, interval)


def _decisions(scores: Array, policy: Policy) -> NDArray[np.str_]:
    return np.array([policy.decide(score) for score in scores.tolist()], dtype=np.str_)
