"""The audit as a whole: a clean set, exit codes, check.json and the page."""

import json
import os
from pathlib import Path

from tests.helpers import audited, load_folder, save_image, surface, two_bins
from typer.testing import CliRunner, Result

from cdgp.cli.main import app


def cdgp(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"})


def test_a_clean_set_has_no_warning(tmp_path: Path) -> None:
    found = audited(load_folder(two_bins(tmp_path)))
    assert not found.of("error") and not found.of("warning"), found.findings
    assert found.counts == {"unsplit": (12, 6)} and found.sizes == {"64 × 60": 18}


def test_exit_codes_json_and_page(tmp_path: Path) -> None:
    data = two_bins(tmp_path / "data & <b>parts</b>")
    out = tmp_path / "out"
    assert cdgp("check", data, "--quiet").exit_code == 0
    save_image(data / "good/<i>x.jpg", surface(3), quality=80)
    assert cdgp("check", data, "--quiet").exit_code == 0
    assert cdgp("check", data, "--quiet", "--strict", "--out", out).exit_code == 1
    (data / "good/bad.png").write_bytes(b"no image")
    again = cdgp("check", data, "--quiet", "--out", out)
    assert again.exit_code == 2 and "--overwrite" in again.output
    last = cdgp("check", data, "--quiet", "--out", out, "--overwrite", "--strict")
    assert last.exit_code == 3 and "bad.png" in last.output and "Unusable" in last.output
    assert cdgp("check", tmp_path / "gone").exit_code == 3
    assert cdgp("check", data, "--out", data / "good").exit_code == 1
    record = json.loads((out / "check.json").read_text())
    assert record["counts"] == {"unsplit": [13, 6]}
    assert {f["kind"] for f in record["findings"]} >= {"broken", "near_duplicates"}
    page = (out / "check.html").read_text()
    assert "<i>x" not in page and "&lt;i&gt;x.jpg" in page and page.count("data:image/jpeg") == 2
    assert "Not shown: is not a JPEG" in page


def test_names_of_odd_bytes_reach_json_and_page(tmp_path: Path) -> None:
    two_bins(tmp_path / "data")
    odd = os.fsdecode(b"old_\xff.png")
    (tmp_path / "data/good" / odd).write_bytes((tmp_path / "data/good/00.png").read_bytes())
    result = cdgp("check", tmp_path / "data", "--out", tmp_path / "out", "--quiet")
    assert result.exit_code == 0, result.output
    assert "old_\\\\udcff.png" in (tmp_path / "out/check.json").read_text()
