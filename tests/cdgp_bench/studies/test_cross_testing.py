"""Who is first over all folds, by how much, and how surely."""

from typing import Any

from cdgp_bench.studies.cross_testing import leaders_table, page, pairs_table


def pair(first: str, second: str, means: tuple[float, float], half: float) -> dict[str, Any]:
    """A row of AUROC-I with a symmetric interval."""
    value = means[0] - means[1]
    return {
        "kind": "folds", "dataset": "ksdd", "category": "ksdd", "first": first, "second": second,
        "metric": "image_auroc", "first_mean": means[0], "second_mean": means[1], "value": value,
        "low": value - half, "high": value + half, "draws": 2000, "folds": 5, "groups": 48,
        "images": 399,
    }  # fmt: skip


ROWS = [
    pair("padim", "classifier_cam", (0.80, 0.90), 0.03),
    pair("padim", "cdgp", (0.80, 0.97), 0.02),
    pair("classifier_cam", "cdgp", (0.90, 0.97), 0.04),
]


def cells(table: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]]


def test_the_best_is_compared_with_the_second() -> None:
    """The pair is in the rows the other way round, so its interval changes sides."""
    assert cells(leaders_table(ROWS)) == [
        ["ksdd", "AUROC-I", "CDGP", "97.0", "Classifier + CAM", "90.0", "+7.0", "[+3.0, +11.0]",
         "yes"],
    ]  # fmt: skip
    wide = [*ROWS[:2], pair("classifier_cam", "cdgp", (0.90, 0.97), 0.08)]
    assert cells(leaders_table(wide))[0][-2:] == ["[-1.0, +15.0]", "no"]


def test_a_tie_is_not_ahead() -> None:
    tie = [pair("padim", "cdgp", (1.0, 1.0), 0.0)]
    assert cells(leaders_table(tie))[0][2:] == [
        "PaDiM", "100.0", "CDGP", "100.0", "+0.0", "[+0.0, +0.0]", "no",
    ]  # fmt: skip


def test_every_pair_is_shown_and_the_page_names_its_command() -> None:
    found = cells(pairs_table(ROWS))
    assert [row[1:3] for row in found] == [
        ["PaDiM", "Classifier + CAM"], ["PaDiM", "CDGP"], ["Classifier + CAM", "CDGP"],
    ]  # fmt: skip
    assert found[0][3:6] == ["399", "48", "-10.0 [-13.0, -7.0]"]
    assert found[0][6:] == ["–", "–", "–"], "metrics that are undefined"
    text = page(ROWS, "in-house-cv")
    assert "--plan in-house-cv" in text and "2,000" in text
    assert leaders_table(ROWS) in text and pairs_table(ROWS) in text
