"""Rows that Ray computes are those of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cdgp_bench.helpers import run_cli, written

from cdgp.data.manifest import Manifest
from cdgp.errors import SettingsError
from cdgp_bench.on_ray import check_room
from cdgp_bench.rows import ROWS, read_rows

MEASURED = ("seconds", "evaluation_seconds", "machine", "facts")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k not in MEASURED} for r in read_rows(folder / ROWS)]


@pytest.mark.slow
def test_rows_on_ray_are_those_of_one_process(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # One method that cannot be run on either side.
    plan = written(tmp_path, surfaces.root, ('"static_max"', '"static_max", "efficientad"'))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        code, output = run_cli(plan, "--out", tmp_path / "alone", "--quiet")
        assert code == 0, output
        code, output = run_cli(plan, "--out", tmp_path / "ray", "--quiet", "--ray", "local")
        assert code == 0, output
        expected = rows_of(tmp_path / "alone")
        assert len(expected) >= 3 and {r["status"] for r in expected} == {"ok", "not run"}
        assert rows_of(tmp_path / "ray") == expected
    finally:
        torch.set_num_threads(threads)


def test_rows_that_no_machine_has_room_for_are_refused() -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 2.0}},
        {"Alive": False, "Resources": {"CPU": 64.0}},
    ]
    check_room(nodes, 2, 0)
    with pytest.raises(SettingsError, match=r"takes 4 threads.* more than 2 processors"):
        check_room(nodes, 4, 0)
    with pytest.raises(SettingsError, match="no machine of the cluster has one"):
        check_room(nodes, 2, 1)
    check_room([{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 1.0}}], 2, 1)


def test_a_cluster_that_is_not_there(tmp_path: Path, surfaces: Manifest) -> None:
    plan = written(tmp_path, surfaces.root)
    code, output = run_cli(plan, "--out", tmp_path / "out", "--ray", "127.0.0.1:1")
    assert code == 2 and "--ray 127.0.0.1:1: nothing answers there" in output
