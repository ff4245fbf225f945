"""The curves of the paired comparison are those of the row in the tables."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.cdgp_bench.helpers import tiny_variant_settings

from cdgp.progress import Quiet
from cdgp_bench.curves import check_curves
from cdgp_bench.grid import Run, Variant
from cdgp_bench.protocol import Prepared
from cdgp_bench.rows import IDENTITY
from cdgp_bench.scoring import METRICS, metrics_of, scores_of
from cdgp_bench.studies.paired import pairs, profiled


def without_first_mask(prepared: Prepared) -> Prepared:
    """The same split, but one defective test image has no mask."""
    samples = list(prepared.manifest.samples)
    first = next(i for i, s in enumerate(samples) if s.split == "test" and s.masks)
    samples[first] = replace(samples[first], masks=())
    return replace(prepared, manifest=replace(prepared.manifest, samples=tuple(samples)))


def test_curves_give_the_metrics_of_the_row(prepared: Prepared, tmp_path: Path) -> None:
    variant = Variant("", "static_max")
    run = Run("surfaces", "surfaces", variant, 0, None, tiny_variant_settings(variant))
    part = without_first_mask(prepared)
    fitted = run.fit(part.weak, tmp_path, Quiet())
    scored = scores_of(fitted, part.manifest, None, False, Quiet())
    row = metrics_of(scored, part.manifest, None, fitted.probability, details=False)
    assert len(row["notes"]["defective_without_mask"]) == 1
    found = profiled(run, part, None, tmp_path, Quiet())
    row |= dict(zip(IDENTITY, run.identity, strict=True))
    check_curves(found, row)
    for metric in METRICS:
        with pytest.raises(SystemExit, match=metric):
            check_curves(found, row | {metric: row[metric] + 0.01})
    rows = pairs(run.split_key, {"cdgp": found, "padim": found}, part)
    assert {r["metric"] for r in rows} == set(METRICS)
    assert {(r["first"], r["second"]) for r in rows} == {("cdgp", "padim")}
    assert all((r["value"], r["low"], r["high"]) == (0, 0, 0) for r in rows)
