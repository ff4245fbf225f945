"""The charts count every image, and on the right side of the threshold."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdgp.metrics.reliability import reliability_curve
from cdgp.report import charts


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
    st.lists(st.floats(0, 1), max_size=60),
    st.one_of(st.floats(1e-9, 1 - 1e-9), st.sampled_from([0.5, 1e-4])),
)
def test_histogram_counts_everything_on_its_side_of_the_threshold(
    good: list[float], defective: list[float], threshold: float
) -> None:
    scores = [*good, threshold]  # exactly at the threshold: called good
    found = charts.histogram({"good": scores, "defective": defective}, threshold)
    assert sum(found.counts["good"]) == len(scores)
    assert sum(found.counts["defective"]) == len(defective)
    edge = int(np.argmin(np.abs(np.array(found.edges) - charts.log_odds(threshold))))
    assert found.edges[edge] == pytest.approx(float(charts.log_odds(threshold)), abs=1e-9)
    above = charts.log_odds(scores) > charts.log_odds(threshold)
    assert sum(found.counts["good"][edge:]) == above.sum()
    assert len(found.edges) == len(found.counts["good"]) + 1 <= 200


def test_histogram_bars_carry_the_counts() -> None:
    groups = {"good": [0.1, 0.1, 0.2, 0.7], "defective": [0.99, 1.0]}
    chart = charts.histogram_chart(charts.histogram(groups, 0.5), 0.5, "0.5", "1 - p")
    assert "1 - p, log-odds scale" in chart
    for name, scores in groups.items():
        bars = re.findall(rf'class="bar {name}" data-count="(\d+)"', chart)
        assert sum(map(int, bars)) == len(scores)


def test_reliability_chart_has_a_dot_for_every_bin_with_images() -> None:
    chart = charts.reliability_chart(reliability_curve([0.05, 0.06, 0.5, 1.0], [0, 0, 1, 1]))
    assert chart.count("<circle") == 3
