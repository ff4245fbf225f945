"""Holes in image files: what the study finds in our reader, and in one that fills holes."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cdgp.data.images import read_image
from cdgp.errors import ImageError
from cdgp_bench.studies import holes

CHECKED = ("PNG, 8 bits", "PNG, 16 bits", "TIFF, deflate", "TIFF, 16 bits, deflate")
"""Formats with checksums: every damage must show."""


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    return holes.study(35)


def test_both_decoders_agree_on_what_is_read(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert not row["the two decoders differ"], row
        assert not row["the second decoder refuses"], row
        assert sum(int(str(row[name])) for name in holes.OUTCOMES) == row["inputs"]
    assert {row["format"] for row in rows} == set(holes.seeds())


def test_no_damage_gets_through_a_checksum(rows: list[dict[str, object]]) -> None:
    for row in rows:
        if row["format"] in CHECKED or row["damage"] == "cut":
            assert row["refused"] == row["inputs"], row
        if str(row["format"]).startswith("JPEG, seq") and row["damage"] != "one bit flipped":
            assert row["damage"] == "bytes dropped" or row["refused"] == row["inputs"], row


def test_a_reader_that_fills_holes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow alone, as most programs read JPEG."""

    def filled(path: Path, white_level: int) -> NDArray[np.float64]:
        try:
            with Image.open(path) as image:
                return np.asarray(image.convert("RGB")) / 255
        except OSError as error:
            raise ImageError(str(error)) from error

    data = holes.seeds()["JPEG, sequential"]
    whole = read_image(_written(tmp_path / "whole", data), holes.WHITE)
    damaged = holes.cut_with_end(data, np.random.default_rng(0))
    assert holes.judged(damaged, tmp_path / "file", whole) == "refused"
    monkeypatch.setattr(holes, "read_image", filled)
    assert holes.judged(damaged, tmp_path / "file", whole) == "damage that both see"


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path
