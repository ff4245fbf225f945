"""The data of a plan, prepared before anything is trained."""

import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.cdgp_bench.helpers import here, run_cli, written

from cdgp.data.manifest import Manifest
from cdgp_bench.fake_trees import ksdd2_tree
from cdgp_bench.plan import read_plan
from cdgp_bench.rows import ROWS, read_rows
from cdgp_bench.run import run_plan
from cdgp_bench.synthetic import make_dataset


def test_sets_without_masks_are_measured_by_image(tmp_path: Path) -> None:
    made = make_dataset(tmp_path / "data", good=24, defective=14)
    (made.root / "manifest.csv").unlink()
    shutil.rmtree(made.root / "masks")
    plan = written(tmp_path, made.root, (', "cdgp"', ""))
    code, output = run_cli(plan, "--out", tmp_path / "out")
    assert code == 0, output
    assert "surfaces/surfaces: no masks" in output
    (row,) = read_rows(tmp_path / "out" / ROWS)
    assert row["image_auroc"] is not None
    assert row["pixel_auroc"] is None
    assert row["notes"] == {}


def test_images_without_masks_are_counted(tmp_path: Path) -> None:
    """Pixel metrics use the masks that there are, and the page says how many are missing."""
    made = make_dataset(tmp_path / "data", good=24, defective=14)
    masks = sorted((tmp_path / "data" / "masks").iterdir())
    (tmp_path / "data" / "manifest.csv").unlink()
    for mask in masks[::2]:
        mask.unlink()
    plan = written(tmp_path, made.root, (', "cdgp"', ""))
    code, output = run_cli(plan, "--out", tmp_path / "out")
    assert code == 0, output
    assert "surfaces/surfaces: 7 of 14 defective images have a mask" in output
    (row,) = read_rows(tmp_path / "out" / ROWS)
    without = len(row["notes"]["defective_without_mask"])
    good, defective = row["parts"]["test"]
    assert 0 < without < defective
    assert row["pictures_with_pixels"] == good + defective - without
    assert f"{without} × defective without mask" in (tmp_path / "out" / "evidence.md").read_text()


def test_half_a_generated_data_set_is_never_used(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan(str(written(
        tmp_path, surfaces.root, (f'path = "{surfaces.root}"', "layout = 'visa'\ngenerated = true"),
        (', "cdgp"', ""),
    )))  # fmt: skip
    out = tmp_path / "out"

    def stopped(layout: str, root: Path) -> None:
        (root / "candle").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("cdgp_bench.prepare.generate", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_plan(plan, here(out))
    assert not (out / "data" / "surfaces").exists()
    found = run_plan(plan, here(out))
    assert [r["category"] for r in found.rows] == ["candle", "pcb1"]


def test_a_category_without_defects_stops_the_plan(tmp_path: Path) -> None:
    ksdd2_tree(tmp_path / "data", good=12, bad=6)
    for mask in (tmp_path / "data" / "train").glob("*_GT.png"):
        Image.new("L", Image.open(mask).size).save(mask)
    plan = written(tmp_path, tmp_path / "data", ("input_size", "layout = 'ksdd2'\ninput_size"))
    code, output = run_cli(plan, "--out", tmp_path / "out", "--quiet")
    assert code == 3
    assert "fit has no defective image" in output
    assert not (tmp_path / "out" / ROWS).exists()
