"""Label budgets from zero: what training receives, which rows there are, table and figure."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import helpers
from tests.cdgp_bench.helpers import run_cli, tiny_options, tiny_variant_settings, written

from cdgp.data.manifest import Manifest, WeakSplit
from cdgp.errors import DataError
from cdgp.presets import DataSettings
from cdgp.progress import Quiet
from cdgp_bench import grid
from cdgp_bench.grid import Run, Variant
from cdgp_bench.methods import Fitted
from cdgp_bench.protocol import prepare
from cdgp_bench.rows import ROWS, read_rows


def test_a_budget_of_zero_leaves_good_images_and_the_test_part(surfaces: Manifest) -> None:
    images = helpers.digested(surfaces)
    full = prepare("d", "c", images, DataSettings(), 0)
    none = prepare("d", "c", images, DataSettings(), 0, 0)
    assert none.selected == ()
    assert none.facts()["effective_budget"] == 0
    assert none.manifest.of("test") == full.manifest.of("test")
    assert any(s.defective for s in none.manifest.of("test"))
    for part in ("fit", "calibration", "train"):
        good = [s for s in full.manifest.of(part) if not s.defective]
        assert list(none.manifest.of(part)) == good, part
    weak = none.weak
    assert not any(s.defective for s in (*weak.fit, *weak.calibration, *weak.train))
    assert weak.own_calibration, "good images are still set aside for the calibration"
    assert not {s.image for s in weak.fit} & {s.image for s in weak.calibration}
    assert weak.good_fit_sha256 == full.weak.good_fit_sha256, "the student is shared"
    assert weak.sha256 != full.weak.sha256
    assert len(weak.calibration_groups) == len(weak.calibration)


def test_labels_are_still_needed_where_a_budget_allows_them(surfaces: Manifest) -> None:
    """Zero is a budget of a set with defects, not a set without any."""
    images = helpers.digested(surfaces)
    good = Manifest(images.root, tuple(s for s in images.samples if not s.defective))
    with pytest.raises(DataError, match="has no defective image"):
        prepare("d", "c", good, DataSettings(), 0, 0)


def test_a_method_of_good_images_is_the_same_at_zero(surfaces: Manifest, tmp_path: Path) -> None:
    """PaDiM trained with no defective image, and with all of them in reach."""
    variant = Variant("PaDiM", "padim")
    chosen, own = tiny_variant_settings(variant), tiny_options("padim", tmp_path)
    images = helpers.digested(surfaces)
    found = []
    for budget in (0, None):
        part = prepare("surfaces", "surfaces", images, chosen.data, 0, budget)
        run = Run("surfaces", "surfaces", variant, 0, budget, chosen, own)
        paths = [s.image for s in part.manifest.of("test")]
        found.append(list(run.fit(part.weak, tmp_path, Quiet()).score(paths)))
    for none, full in zip(*found, strict=True):
        np.testing.assert_array_equal(none.anomaly_map, full.anomaly_map)
        assert none.image_score == full.image_score


def test_a_curve_has_each_result_once(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Methods of good images once, others from their least number on; a stub stands for CDGP."""
    file = written(
        tmp_path, surfaces.root,
        ('"static_max", "cdgp"]', '"padim", "static_max", "cdgp"]\nbudgets = [0, 1, 4]'),
        ("main =", "budget_curve ="),
        ("[datasets", "[options.padim]\nfeatures = 4\n[datasets"),
    )  # fmt: skip
    stub, seen = grid.METHODS["static_max"], []

    def fit(data: WeakSplit, *rest: Any) -> Fitted:
        seen.append(sum(s.defective for s in data.train))
        part = prepare("surfaces", "surfaces", helpers.digested(surfaces), DataSettings(), 0)
        return stub.fit(part.weak, *rest)

    cdgp = grid.METHODS["cdgp"]
    monkeypatch.setitem(grid.METHODS, "cdgp", cdgp._replace(fit=fit))
    code, output = run_cli(file, "--out", tmp_path / "out", "--quiet")
    assert code == 0, output
    rows = read_rows(tmp_path / "out" / ROWS)
    budgets = {
        m: [r["budget"] for r in rows if r["method"] == m] for m in ("padim", "static_max", "cdgp")
    }
    assert budgets == {"padim": [None], "static_max": [4, None], "cdgp": [0, 1, 4, None]}
    every = next(r for r in rows if r["method"] == "cdgp" and r["budget"] is None)
    assert seen == [0, 1, 4, every["effective_budget"]]
    assert {r["parts"]["test"][1] for r in rows} == {every["parts"]["test"][1]}
    page = (tmp_path / "out" / "evidence.md").read_text()
    labels = ("PaDiM: any", "Static max similarity: 4", "Static max similarity: Full",
              "CDGP: 0", "CDGP: 1", "CDGP: 4", "CDGP: Full")  # fmt: skip
    section = page.split("Label budgets by method\n")[1].split("## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == list(labels)
    assert all("–" not in line for line in lines)
    assert (tmp_path / "out" / "figures" / "budget_curve-surfaces.png").stat().st_size > 5000
    assert (tmp_path / "out" / "manifests" / "surfaces-surfaces-seed0-k0.json").is_file()
