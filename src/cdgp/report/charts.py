"""The report's charts as inline SVG; their colours are classes of the page's style sheet."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike, NDArray

from cdgp.metrics.reliability import ReliabilityCurve
from cdgp.report.overlay import heat

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 14, 30, 46
"""Margins around the plotted area, with room for the axes' labels and the legend."""
BINS = 30
MOST_LOG_ODDS = 9.2
"""Probabilities beyond 0.0001 and 0.9999 are drawn there."""
PROBABILITY_TICKS = (
    0.5, 0.1, 0.9, 0.01, 0.99, 0.001, 0.999, 0.0001, 0.9999, 0.2, 0.8, 0.05, 0.95, 0.3, 0.7,
)  # fmt: skip
"""Drawn in this order where they lie within the chart and at least `TICK_ROOM` apart."""
TICK_ROOM = 46

Points = Sequence[tuple[float, float]]


def log_odds(probabilities: ArrayLike) -> NDArray[np.float64]:
    """log(p / (1 - p)), finite at 0 and 1."""
    p = np.clip(np.asarray(probabilities, np.float64), 1e-12, 1 - 1e-12)
    return np.asarray(np.log(p) - np.log1p(-p))


@dataclass(frozen=True)
class Histogram:
    """Counts of several groups in common bins of equal width in log-odds.

    A bin holds its upper edge, and the threshold is an edge: what is called defective lies right of
    it, as the decision is "above".
    """

    edges: tuple[float, ...]
    counts: dict[str, tuple[int, ...]]


def histogram(groups: Mapping[str, Sequence[float]], threshold: float) -> Histogram:
    """Bins over all probabilities, in log-odds, one of which ends at the threshold."""
    middle = float(log_odds(threshold))
    limit = max(MOST_LOG_ODDS, abs(middle) + 1)
    values = {name: np.clip(log_odds(group), -limit, limit) for name, group in groups.items()}
    everything = np.concatenate([*values.values(), [middle]])
    bin_width = max(float(np.ptp(everything)), 3.0) / BINS
    places = {
        name: np.ceil((group - middle) / bin_width).astype(int) - 1
        for name, group in values.items()
    }
    first = min(-1, *(int(place.min()) for place in places.values() if len(place)))
    last = max(0, *(int(place.max()) for place in places.values() if len(place)))
    size = last - first + 1
    return Histogram(
        tuple(middle + bin_width * (first + i) for i in range(size + 1)),
        {
            name: tuple(np.bincount(place - first, minlength=size).tolist())
            for name, place in places.items()
        },
    )


def histogram_chart(
    found: Histogram, threshold: float, threshold_text: str, score_name: str
) -> Markup:
    """Bars of one group upwards and of a second one downwards, heights as square roots.

    ``threshold_text`` is the threshold as the legend shows it, ``score_name`` what the scores are.
    """
    names = list(found.counts)
    direction = dict(zip(names, (1, -1), strict=False))
    roots = {n: float(np.sqrt(max(c, default=0))) for n, c in found.counts.items()}
    top, bottom = max(roots[names[0]], 1), roots[names[1]] if len(names) > 1 else 0.0
    plot = _Plot((found.edges[0], found.edges[-1]), (-bottom * 1.04, top * 1.04))
    for up, largest in ((1, top), (-1, bottom)):
        for count in _count_ticks(largest, plot.pixels_per_y):
            plot.y_tick(up * float(np.sqrt(count)), f"{count}")
    taken: list[float] = []
    for p in PROBABILITY_TICKS:
        x = plot.x(float(log_odds(p)))
        if all(abs(x - other) >= TICK_ROOM for other in taken):
            plot.x_tick(float(log_odds(p)), f"{p:g}")
            taken.append(x)
    for name, counts in found.counts.items():
        for left, right, count in zip(found.edges, found.edges[1:], counts, strict=False):
            if count:
                tip = f"{_p(left)} to {_p(right)}: {count} {name}"
                plot.bar(left, right, direction[name] * float(np.sqrt(count)), name, count, tip)
    plot.line([(found.edges[0], 0), (found.edges[-1], 0)], "axis")
    middle = float(log_odds(threshold))
    plot.line([(middle, plot.y_range[0]), (middle, plot.y_range[1])], "threshold")
    plot.legend([*((name, name) for name in names), ("threshold", f"threshold {threshold_text}")])
    total = ", ".join(f"{sum(counts)} {name}" for name, counts in found.counts.items())
    return plot.svg(
        f"Score histogram of {total}", f"{score_name}, log-odds scale", "images, square-root scale"
    )


def reliability_chart(curve: ReliabilityCurve) -> Markup:
    """Observed against predicted rate of defects; the area of a dot grows with its images."""
    plot = _Plot((0, 1), (0, 1))
    for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
        plot.x_tick(tick, f"{tick:g}")
        plot.y_tick(tick, f"{tick:g}")
    plot.line([(0, 0), (1, 1)], "diagonal")
    dots = [
        (mean, rate, count)
        for mean, rate, count in zip(
            curve.mean_probability, curve.observed_rate, curve.counts, strict=True
        )
        if mean is not None and rate is not None
    ]
    plot.line([(mean, rate) for mean, rate, _ in dots], "accent")
    for mean, rate, count in dots:
        radius = 3 + 6 * float(np.sqrt(count / max(curve.counts)))
        tip = f"predicted {mean:.3f}, observed {rate:.3f}, {count} images"
        plot.dot(mean, rate, radius, "accent", tip)
    plot.legend([("accent", "this model"), ("diagonal", "perfect")])
    return plot.svg(
        "Reliability: observed share of defective images against predicted probability",
        "predicted P(defective)",
        "share that is defective",
    )


def line_chart(title: str, y_label: str, series: Mapping[str, tuple[str, Points]]) -> Markup:
    """Curves over training steps; ``series`` maps a style class to (legend, points)."""
    points = [point for _, curve in series.values() for point in curve]
    steps, values = [x for x, _ in points], [y for _, y in points]
    spread = max(max(values) - min(values), 1e-9)
    plot = _Plot(
        (min(steps), max(max(steps), min(steps) + 1)),
        (min(values) - 0.05 * spread, max(values) + 0.05 * spread),
    )
    for tick in _round_ticks(*plot.x_range):
        plot.x_tick(tick, f"{tick:g}")
    for tick in _round_ticks(*plot.y_range):
        plot.y_tick(tick, f"{tick:.6g}")
    for name, (_, curve) in series.items():
        plot.line(curve, name)
    plot.legend([(name, label) for name, (label, _) in series.items()])
    return plot.svg(title, "step", y_label)


def colour_bar(scale: tuple[float, float], region_level: float) -> Markup:
    """The one scale of all maps, with the level at which regions begin."""
    low, high = scale
    span = max(high - low, 1e-12)
    colours = heat(np.linspace(low, high, 25, dtype=np.float32)[None], scale)[0].tolist()
    stops = "".join(
        f'<stop offset="{i / 24:.4f}" stop-color="#{r:02x}{g:02x}{b:02x}"/>'
        for i, (r, g, b) in enumerate(colours)
    )
    ticks = [(value, "34v4", 51, f"{value:g}") for value in _round_ticks(low, high)]
    if low <= region_level <= high:
        ticks.append((region_level, "14v20", 10, f"regions from {region_level:.1f}"))
    drawn = ""
    for value, stroke, y, text in ticks:
        x = f"{10 + 300 * (value - low) / span:.1f}"
        drawn += f'<path class="axis" d="M{x} {stroke}"/>'
        drawn += f'<text x="{x}" y="{y}" text-anchor="middle">{text}</text>'
    label = f"Colour scale from {low:g} to {high:.3g} nats, dark to light"
    return Markup(
        f'<svg class="colour-bar" viewBox="0 0 350 56" role="img" aria-label="{label}">'
        f'<defs><linearGradient id="heat">{stops}</linearGradient></defs>'
        '<rect x="10" y="16" width="300" height="18" rx="2" fill="url(#heat)"/>'
        f'{drawn}<text x="317" y="30">nats</text></svg>'
    )


class _Plot:
    """Collects SVG elements in data coordinates; y grows upwards."""

    def __init__(self, x_range: tuple[float, float], y_range: tuple[float, float]) -> None:
        self.x_range, self.y_range = x_range, y_range
        self.pixels_per_x = (WIDTH - LEFT - RIGHT) / (x_range[1] - x_range[0])
        self.pixels_per_y = (HEIGHT - TOP - BOTTOM) / (y_range[1] - y_range[0])
        self._grid: list[str] = []
        self._marks: list[str] = []

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_range[0]) * self.pixels_per_x

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y_range[0]) * self.pixels_per_y

    def x_tick(self, value: float, text: str) -> None:
        if self.x_range[0] <= value <= self.x_range[1]:
            x, bottom = self.x(value), HEIGHT - BOTTOM
            self._grid.append(f'<path class="grid" d="M{x:.1f} {TOP}V{bottom}"/>')
            self._grid.append(
                f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{text}</text>'
            )

    def y_tick(self, value: float, text: str) -> None:
        y = self.y(value)
        self._grid.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        self._grid.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')

    def bar(
        self, left: float, right: float, height: float, style: str, count: int, tip: str
    ) -> None:
        x, width = self.x(left) + 0.5, (right - left) * self.pixels_per_x - 1
        ends = sorted((self.y(0), self.y(height)))
        self._marks.append(
            f'<rect class="bar {style}" data-count="{count}" x="{x:.1f}" y="{ends[0]:.1f}" '
            f'width="{width:.1f}" height="{ends[1] - ends[0]:.1f}"><title>{tip}</title></rect>'
        )

    def line(self, points: Points, style: str) -> None:
        path = "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
        self._marks.append(f'<path class="line {style}" d="M{path}"/>' if path else "")

    def dot(self, x: float, y: float, radius: float, style: str, tip: str) -> None:
        self._marks.append(
            f'<circle class="dot {style}" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" '
            f'r="{radius:.1f}"><title>{tip}</title></circle>'
        )

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        x = float(LEFT)
        for style, text in entries:
            self._marks.append(f'<path class="key {style}" d="M{x:.1f} 13h16"/>')
            self._marks.append(f'<text x="{x + 22:.1f}" y="17">{escape(text)}</text>')
            x += 22 + 7 * len(text) + 16

    def svg(self, title: str, x_label: str, y_label: str) -> Markup:
        middle_x, middle_y = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
        return Markup(
            f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(title)}">{"".join(self._grid)}{"".join(self._marks)}'
            f'<text class="label" x="{middle_x}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{escape(x_label)}</text>"
            f'<text class="label" transform="translate(13 {middle_y}) rotate(-90)" '
            f'text-anchor="middle">{escape(y_label)}</text></svg>'
        )


def _count_ticks(largest_root: float, pixels_per_root: float) -> list[int]:
    """Round counts up to the largest, at least 16 pixels apart on the square-root scale."""
    ticks: list[int] = [0]
    for count in (factor * 10**power for power in range(8) for factor in (1, 2, 5)):
        root = float(np.sqrt(count))
        if root <= largest_root and (root - np.sqrt(ticks[-1])) * pixels_per_root >= 16:
            ticks.append(count)
    return ticks


def _round_ticks(low: float, high: float) -> list[float]:
    """Four to nine multiples of 1, 2 or 5 times a power of ten within the range."""
    power = 10.0 ** np.floor(np.log10((high - low) / 4))
    step = max(f * power for f in (1, 2, 5) if f * power <= (high - low) / 4)
    first, last = int(np.ceil(low / step)), int(np.floor(high / step))
    return [round(i * step, 12) for i in range(first, last + 1)]


def _p(value: float) -> str:
    """A log-odds as a probability, in few digits."""
    probability = 1 / (1 + np.exp(-value))
    return f"{probability:.2g}" if probability < 0.9 else f"{1 - float(f'{1 - probability:.2g}'):g}"
