"""The page of a check: the verdict, and that an image in several findings is decoded once."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.helpers import WHITE, audited, load_folder, save_image, surface, two_bins

from cdgp.audit.findings import Finding
from cdgp.data.images import read_image
from cdgp.report import check
from cdgp.report.check import verdict, write_check


def test_verdicts() -> None:
    assert verdict([]) == "Clean: nothing was found."
    note = Finding("few", "note", "few")
    assert verdict([note, note]) == "Usable: 2 notes."
    assert verdict([Finding("x", "error", "x"), note]).startswith("Unusable as it is: 1 error")


def test_an_image_in_several_findings_is_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = two_bins(tmp_path / "data")
    for name in ("good/a.png", "good/b.bmp", "good/c.tif"):
        save_image(data / name, surface(3))
    save_image(data / "defective/d.jpg", surface(3), quality=80)
    manifest = load_folder(data)
    found = audited(manifest)
    shown = Counter(name for f in found.findings for group in f.images for name in group)
    assert max(shown.values()) > 1
    decoded: Counter[Path] = Counter()

    def counted(path: Path, white_level: int, first_page: bool) -> NDArray[np.float32]:
        decoded[path] += 1
        return read_image(path, white_level, first_page)

    monkeypatch.setattr(check, "read_image", counted)
    paths = {manifest.name(path): path for path in manifest.paths()}
    write_check(tmp_path / "check.html", "Check", found, paths, WHITE)
    assert decoded == Counter({paths[name]: 1 for name in shown})
    page = (tmp_path / "check.html").read_text()
    assert page.count("data:image/jpeg") == sum(shown.values())
