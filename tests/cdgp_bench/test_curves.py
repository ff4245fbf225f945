"""Curves on disk: the same when read back, one file for rows that hold the same numbers."""

from pathlib import Path

import numpy as np
import pytest
from tests.helpers import random_maps

from cdgp_bench.curves import curves_file, read_curves, write_curves
from cdgp_bench.resampling import profile


def test_curves_are_read_as_they_were_written(tmp_path: Path) -> None:
    maps, masks = random_maps(0, 10)
    written = profile(maps, masks, [0.1, 0.2, 0.3, 0.4], [True, True, True, False])
    file = curves_file(tmp_path, "set", "cdgp", ("a", "b", "c", "native"))
    write_curves(file, written)
    for one, other in zip(read_curves(file), written, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
    assert [p.name for p in file.parent.iterdir()] == [file.name], "no file half written"


@pytest.mark.parametrize("place", range(4))
def test_whatever_decides_a_row_decides_the_file(place: int, tmp_path: Path) -> None:
    base = ["a", "b", "c", "native"]
    other = [*base[:place], "x", *base[place + 1 :]]
    assert curves_file(tmp_path, "s", "m", base) == curves_file(tmp_path, "s", "m", tuple(base))
    assert curves_file(tmp_path, "s", "m", base) != curves_file(tmp_path, "s", "m", other)
