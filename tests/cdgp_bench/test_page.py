"""The rendered page of a plan that has not finished."""

from pathlib import Path

from tests.cdgp_bench.helpers import row

from cdgp_bench.page import render
from cdgp_bench.plan import Plan


def test_a_half_finished_plan_renders(plan: Plan, tmp_path: Path) -> None:
    """What is not there yet is a dash or a missing table, never an error or a zero."""
    rows = [row("cdgp", "can", 0, 0.5), row("grad_cam", "can", 0, 0.4, status="failed", reason="r")]
    page = render(plan, rows, [], tmp_path, rows[1:]).read_text()
    assert "| CDGP | 50.0 (1 of 3 seeds) |" in page.replace("**", "")
    assert "| Classifier + Grad-CAM | – |" in page
    assert "- mvtec_ad2/can grad_cam default seed 0: r" in page
    assert render(plan, [], [], tmp_path / "none").exists()
