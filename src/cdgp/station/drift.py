r"""Drift of a line: light and optics, image scores, features, and the mix of products.

**The rule.** The parts of one lot and product make a *window*: their first ``WINDOW`` ones. Parts
without a lot make windows of as many consecutive parts of a product. A window has a value for each
statistic: the mean image score, brightness, contrast and sharpness, and the distance of its mean
feature from the reference. Each value is ranked among those of all earlier windows of the same
product, the reference's included. As long as the windows of a product are exchangeable, these ranks
are independent and uniform (Vovk et al., "Algorithmic Learning in a Random World", 2005), so a bet
on high or low ranks is a fair game: its factor
:math:`\epsilon p^{\epsilon - 1}` has a mean of one. Every *day* each of the ``BETS`` games gets one
unit of capital, most of it for the day's first windows, and it alarms when its capital reaches
``BETS * days``; then it is emptied, and gets nothing more on that day.

**The bound.** Capital is only added by days, never by parts. With R the capital of a game and N its
alarms so far, ``R + BETS * days * N`` less the number of days is a supermartingale, so all games
together give at most D / ``days`` alarms in D days on average, *whatever the number of parts*, and
more than one with a probability of at most D / (2 ``days``). With the default of 600 days: 0.05
alarms in 30 days, and more than one in at most 2.5 % of such months.

**What it rests on.** Windows must be exchangeable, parts need not be: those of a lot may resemble
each other as much as they like, since a lot counts once, however long it is. So a change is found
after so many lots, or so many times ``WINDOW`` parts where no lots are known; a lot of fewer parts
counts for nothing. Where the reference's windows of a product are still correlated with the next
ones, only every second, third, ... window counts, as far apart as the correlation reaches. That is
an estimate: the bound is exact where lots, or windows, are exchangeable indeed. Ranks are taken
within a product, and the bound of these games holds for any sequence of products: more of one and
less of another moves no game but that of the mix. That one counts a lot once; where parts have none
and the reference's products come in batches, it counts a batch once.
"""

from bisect import bisect_left, bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import laplace

from cdgp.errors import DataError, SettingsError

Array = NDArray[np.float64]
Kind = Literal["light", "appearance", "mix"]

WINDOW = 5
"""Parts of a window."""
LEAST = 20
"""Windows that a reference needs; with fewer, no rank is rare enough to tell a change soon."""
DAYS = 600
"""Days for each of which one false alarm is allowed on average."""
STATISTICS = ("brightness", "contrast", "sharpness", "score", "features")
GAMES = tuple(
    (name, way) for name in STATISTICS for way in ("higher", "lower") if way == "higher" or
    name != "features"
)  # fmt: skip
"""What is bet on; nearer to the reference than the reference is no drift."""
BETS = len(GAMES) + 1
"""These and the mix of products."""
LIGHT = frozenset({"brightness", "contrast", "sharpness"})
STAKES = np.array([0.2, 0.5, 0.8])
"""The exponents that each game's capital is divided among: bold bets to cautious ones."""
RECENT = 60
"""Windows, or parts for the mix, among which the causes of an alarm are sought."""
OPEN = 1000
"""Lots and products that may be incomplete at one time."""
SHOWN = 50
"""Most images that an alarm names."""
OTHER = "(a product without reference)"


class ImageStatistics(NamedTuple):
    """What light and optics do to an image, each by a number of its own.

    Contrast and sharpness are ratios, so that exposure moves the brightness alone.
    """

    brightness: float
    """Mean of grey, in [0, 1]; grey is the mean of the three channels."""
    contrast: float
    """Standard deviation of grey over its mean."""
    sharpness: float
    """Mean absolute Laplacian of grey over its standard deviation; 0 for a flat image."""


@dataclass(frozen=True)
class Part:
    """One scored image, as the monitor needs it."""

    image: str
    """Its name or number, which an alarm tells."""
    day: date
    """Of production."""
    score: float
    """Image score, finite, of any range: log-odds spread better than probabilities."""
    statistics: ImageStatistics
    features: NDArray[np.floating[Any]]
    """(D,) the frozen teacher's features, averaged over the image."""
    product: str = ""
    lot: str | None = None
    """Parts that resemble each other: one lot, tray or hour."""


class Move(NamedTuple):
    """A statistic that has moved within products."""

    statistic: str
    way: str
    """``higher`` or ``lower``."""


@dataclass(frozen=True)
class Alarm:
    """What has moved, in which images."""

    kind: Kind
    """``light``: brightness, contrast or sharpness of known products; ``appearance``: scores or
    features of known products, and no light; ``mix``: the shares of products, and nothing else."""
    moves: tuple[Move, ...]
    """The strongest first; none of a mix."""
    text: str
    images: tuple[str, ...]
    """At most ``SHOWN`` of those that it rests on, the newest first; a window in which the change
    began is among them as a whole."""
    day: date


def image_statistics(pixels: NDArray[np.floating[Any]]) -> ImageStatistics:
    """Brightness, contrast and sharpness of an image, (H, W, 3) in [0, 1]."""
    grey = np.asarray(pixels, dtype=np.float32).mean(axis=2)
    mean, spread = float(grey.mean()), float(grey.std())
    edges = float(np.abs(laplace(grey)).mean())
    return ImageStatistics(mean, spread / max(mean, 1e-6), edges / spread if spread > 1e-6 else 0.0)


class Monitor:
    """Watches the parts of one camera of one line under one model; see the module for the rule.

    It is a function of its arguments and of the parts in their order: after a restart, give it the
    same parts again.

    Args:
        reference: parts of stable production in their order, at least ``LEAST`` windows of them;
            taken as production is, so audit images or the first days, and no queue of suspects.
        days: so many days a false alarm on average; at least 1.
        seed: of the random numbers that break ties between ranks.

    Raises:
        DataError: too few windows, or a part whose numbers are not finite or of unlike lengths.
        SettingsError: ``days`` below 1.
    """

    def __init__(self, reference: Sequence[Part], days: float = DAYS, seed: int = 0) -> None:
        if not days >= 1:
            raise SettingsError(f"days = {days}: give at least 1, for example {DAYS}")
        self._limit = BETS * days
        self._rng = np.random.default_rng(seed)
        self._width = len(reference[0].features) if reference else 0
        self._windows = _Windows()
        self._past: dict[tuple[str, str], list[float]] = {}
        """Sorted values of the earlier windows, by product and statistic."""
        whole = [w for part in reference if (w := self._windows.add(self._checked(part)))]
        self._gap = _correlated_for(whole)
        self._completed: Counter[str] = Counter()
        found = [window for window in whole if self._counts(window)]
        if len(found) < LEAST:
            raise DataError(
                f"the reference of the drift has {len(found)} independent windows, and at least "
                f"{LEAST} are needed: {WINDOW} parts each, of one lot and product"
                + (f", every {self._gap}th since they are correlated" if self._gap > 1 else "")
                + "; give more parts or lots"
            )
        self._features = _FeatureDistance(found)
        for window in found:
            self._remember(window, self._values(window))
        self._capital = np.zeros((len(GAMES), len(STAKES)))
        self._budget = np.zeros(len(GAMES))
        self._betting = 0  # windows of today
        self._recent: deque[tuple[_Window, Array]] = deque(maxlen=RECENT)
        self._mix = _Mix(reference, self._limit)
        self._day: date | None = None

    def add(self, part: Part) -> Alarm | None:
        """Take the next part; an alarm where it completes the evidence for one."""
        self._checked(part)
        if self._day is None or part.day > self._day:
            self._day, self._betting = part.day, 0
            self._budget[:] = 1
            self._mix.new_day()
        shares = self._mix.add(part, float(self._rng.random()))
        window = self._windows.add(part)
        moves = self._bet(window) if window and self._counts(window) else ()
        if moves:
            alarm = self._drift(moves, part.day)
            return replace(alarm, text=f"{alarm.text}; {shares.text}") if shares else alarm
        return self._changed_mix(shares, part.day) if shares else None

    def _counts(self, window: "_Window") -> bool:
        """Whether a window is far enough from the last one of its product that counted."""
        self._completed[window.product] += 1
        return (self._completed[window.product] - 1) % self._gap == 0

    def _bet(self, window: "_Window") -> tuple[int, ...]:
        """Play all games on a window; the ones that alarm, the richest first.

        What the boldest bet has won tells the windows that have caused an alarm from those before.
        """
        values = self._values(window)
        highs = {s: self._p_value(window.product, s, v) for s, v in values.items()}
        self._remember(window, values)
        self._betting += 1
        share = self._budget / (self._betting * (self._betting + 1))
        p = np.array([_one_way(highs.get(s), way) for s, way in GAMES])
        factors = _factors(p)
        self._capital = (self._capital + share[:, None] / len(STAKES)) * factors
        self._recent.append((window, factors[:, 0]))
        total = self._capital.sum(1)
        moved = tuple(int(g) for g in np.argsort(-total) if total[g] >= self._limit)
        for game in moved:
            self._capital[game], self._budget[game] = 0, 0
        return moved

    def _p_value(self, product: str, statistic: str, value: float) -> float:
        """Small where a value is high among the earlier ones; uniform where it is one of them."""
        past = self._past.get((product, statistic), [])
        above = len(past) - bisect_right(past, value)
        equal = len(past) - above - bisect_left(past, value) + 1
        return float((above + (1 - self._rng.random()) * equal) / (len(past) + 1))

    def _values(self, window: "_Window") -> dict[str, float]:
        """The window's statistics; no distance where the reference's map was fitted to it."""
        means = window.means()
        distance = self._features.of(window)
        return means if distance is None else means | {"features": distance}

    def _remember(self, window: "_Window", values: dict[str, float]) -> None:
        for statistic, value in values.items():
            insort(self._past.setdefault((window.product, statistic), []), value)

    def _checked(self, part: Part) -> Part:
        if part.features.shape != (self._width,):
            raise DataError(
                f"{part.image}: features of shape {part.features.shape}, the reference has "
                f"({self._width},)"
            )
        if (
            not np.isfinite([part.score, *part.statistics]).all()
            or not np.isfinite(part.features).all()
        ):
            raise DataError(f"{part.image}: a score, statistic or feature is not finite")
        return part

    def _drift(self, games: tuple[int, ...], day: date) -> Alarm:
        moves = tuple(Move(*GAMES[game]) for game in games)
        kind: Kind = "light" if any(m.statistic in LIGHT for m in moves) else "appearance"
        windows = _evidence([(w, float(f[games[0]])) for w, f in self._recent])
        images = tuple(part.image for window in windows for part in reversed(window.parts))[:SHOWN]
        said = ", ".join(f"{m.statistic} {m.way}" for m in moves)
        products = sorted({w.product for w in windows} - {""})
        of = f" of {', '.join(products)}" if products else ""
        cause = "light or optics" if kind == "light" else "parts or material"
        text = f"{cause}: {said} than before, in {len(windows)} recent windows{of}"
        return Alarm(kind, moves, text, images, day)

    def _changed_mix(self, shares: "_Shares", day: date) -> Alarm:
        capital = self._capital.sum(1)
        game = int(np.argmax(capital))
        within = "within the products nothing moved"
        if capital[game] >= 1:  # as much as a whole day's stake: not calm
            statistic, way = GAMES[game]
            within = f"within the products watch {statistic}, which may be {way}"
        text = f"{shares.text}; {within}"
        return Alarm("mix", (), text, shares.images, day)


class _Window(NamedTuple):
    """As many parts as every other one, of one product."""

    product: str
    parts: tuple[Part, ...]

    def means(self) -> dict[str, float]:
        rows = np.mean([(*part.statistics, part.score) for part in self.parts], axis=0)
        return dict(zip(STATISTICS[:4], rows.tolist(), strict=True))

    def features(self) -> Array:
        mean: Array = np.mean([part.features for part in self.parts], axis=0, dtype=np.float64)
        return mean


class _Windows:
    """Collects parts into windows."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str | None], list[Part]] = {}
        self._counted: set[tuple[str, str | None]] = set()

    def add(self, part: Part) -> _Window | None:
        """The window that a part completes."""
        key = part.product, part.lot
        if key in self._counted:
            return None
        parts = self._open.setdefault(key, [])
        parts.append(part)
        if len(parts) < WINDOW:
            if len(self._open) > OPEN:  # lots that ended with fewer parts
                del self._open[next(iter(self._open))]
            return None
        del self._open[key]
        if part.lot is not None:
            self._counted.add(key)
        return _Window(part.product, tuple(parts))


class _FeatureDistance:
    """Mean squared distance from the reference, in variances of its windows, over D features.

    Fitted to every second window of each product, which are ranked with none: a distance from
    one's own centre is smaller than that of a new window.
    """

    def __init__(self, windows: Sequence[_Window]) -> None:
        seen: Counter[str] = Counter()
        fitted: dict[str, list[_Window]] = {}
        for window in windows:
            seen[window.product] += 1
            if seen[window.product] % 2:
                fitted.setdefault(window.product, []).append(window)
        self._own = {id(window) for own in fitted.values() for window in own}
        self._windows = windows  # keeps the ids theirs
        rows = {p: np.array([w.features() for w in own]) for p, own in fitted.items()}
        self._centres = {product: values.mean(0) for product, values in rows.items()}
        self._centre = np.concatenate(list(rows.values())).mean(0)
        spread = np.concatenate([rows[p] - self._centres[p] for p in rows])
        freedom = max(1, len(spread) - len(rows))
        variance = np.square(spread).sum(0) / freedom
        self._variance = variance + max(1e-2 * float(variance.mean()), 1e-12)

    def of(self, window: _Window) -> float | None:
        if id(window) in self._own:
            return None
        centre = self._centres.get(window.product, self._centre)
        return float((np.square(window.features() - centre) / self._variance).mean())


class _Shares(NamedTuple):
    """A product whose share has grown."""

    product: str
    before: float
    now: float
    unit: str
    images: tuple[str, ...]

    @property
    def text(self) -> str:
        return (
            f"mix of products: {self.product} is {100 * self.now:.0f} % of the recent {self.unit}, "
            f"{100 * self.before:.0f} % before"
        )


class _Mix:
    """The game on the sequence of products: a lot counts once, or a batch, or a part."""

    def __init__(self, reference: Sequence[Part], limit: float) -> None:
        self._products = [*sorted({part.product for part in reference}), OTHER]
        self._limit = limit
        self._seen: set[str] = set()
        self._last: str | None = None
        self._batches = _in_batches([part.product for part in reference if part.lot is None])
        self._counts = np.zeros(len(self._products))
        for index, _ in self._entries(reference):
            self._counts[index] += 1
        self._before = self._counts / self._counts.sum()
        self._capital = np.zeros((len(self._products), len(STAKES)))
        self._budget, self._betting = 0.0, 0
        self._recent: deque[tuple[tuple[int, Part], Array]] = deque(maxlen=RECENT)

    def new_day(self) -> None:
        self._budget, self._betting = 1.0, 0

    def add(self, part: Part, tie: float) -> _Shares | None:
        """Bet that each product has become more frequent; the one that alarms."""
        for index, _ in self._entries([part]):
            counts, total = self._counts, self._counts.sum() + 1
            p = (counts + (1 - tie) * (total - counts)) / total
            p[index] = (1 - tie) * (counts[index] + 1) / total
            counts[index] += 1
            self._betting += 1
            share = self._budget / (self._betting * (self._betting + 1))
            factors = _factors(p)
            self._capital = (self._capital + share / self._capital.size) * factors
            self._recent.append(((index, part), factors[:, 0]))
            if self._capital.sum() >= self._limit:
                grown = int(self._capital.sum(1).argmax())
                self._capital[:], self._budget = 0, 0
                return self._shares(grown)
        return None

    def _entries(self, parts: Sequence[Part]) -> Iterator[tuple[int, Part]]:
        for part in parts:
            if part.lot is not None:
                if part.lot in self._seen:
                    continue
                self._seen.add(part.lot)
            else:
                going_on, self._last = part.product == self._last, part.product
                if going_on and self._batches:
                    continue
            known = part.product in self._products
            yield self._products.index(part.product if known else OTHER), part

    def _shares(self, grown: int) -> _Shares:
        since = _suffix([float(f[grown]) for _, f in self._recent])
        entries = [entry for entry, _ in self._recent][since:]
        causes = [part for index, part in entries if index == grown]
        product = causes[-1].product if causes else self._products[grown]
        unit = "lots" if causes and causes[-1].lot is not None else "parts"
        images = tuple(part.image for part in reversed(causes))[:SHOWN]
        return _Shares(
            product or "(no product)", float(self._before[grown]), len(causes) / len(entries),
            unit, images,
        )  # fmt: skip


def _correlated_for(windows: Sequence[_Window]) -> int:
    """The least distance at which no statistic of a product's windows is correlated, at least 1."""
    by_product: dict[str, list[_Window]] = {}
    for window in windows:
        by_product.setdefault(window.product, []).append(window)
    series = []
    for own in by_product.values():
        features = np.array([window.features() for window in own])
        distance = np.square(features - features.mean(0)).mean(1)
        values = np.column_stack([[list(w.means().values()) for w in own], distance])
        spread = values.std(0)
        series.append((values - values.mean(0)) / np.where(spread > 0, spread, 1))
    count = len(windows)
    for lag in range(1, count // 4):
        found = sum((rows[lag:] * rows[:-lag]).sum(0) for rows in series if len(rows) > lag)
        if np.max(found) < 2.5 * np.sqrt(count):
            return lag
    return max(1, count // 4)


def _in_batches(products: Sequence[str]) -> bool:
    """Whether neighbours are of one product far more often than in a random order."""
    shares = np.array(list(Counter(products).values())) / max(1, len(products))
    changes = sum(a != b for a, b in pairwise(products))
    return changes < 0.7 * (len(products) - 1) * (1 - float(np.square(shares).sum()))


def _one_way(high: float | None, way: str) -> float:
    """The p-value of a game; NaN where the window has no such statistic."""
    if high is None:
        return float("nan")
    return high if way == "higher" else 1 - high


def _factors(p: Array) -> Array:
    """(n, 3) what one unit of capital becomes; 1 where there is no p-value."""
    bounded = np.maximum(p, 1e-12)[:, None]
    factors: Array = STAKES * bounded ** (STAKES - 1)
    return np.where(np.isnan(factors), 1.0, factors)


def _suffix(factors: Sequence[float]) -> int:
    """Where the run of evidence begins: the start whose product up to the end is largest."""
    sums = np.cumsum(np.log(factors)[::-1])
    return len(factors) - 1 - int(sums.argmax())


def _evidence(recent: Sequence[tuple[_Window, float]]) -> list[_Window]:
    """The windows of the run of evidence that speak for it, the newest first."""
    run = recent[_suffix([factor for _, factor in recent]) :]
    return [window for window, factor in reversed(run) if factor > 1]
