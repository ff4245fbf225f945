"""Addresses, numbers of workers, and what is scored after a worker ended."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.helpers import cdgp, noise_image, plain, raised

from cdgp import run_folder
from cdgp.cluster import job
from cdgp.cluster.engine import after_kill, check_address, is_culprit, workers_of
from cdgp.cluster.job import WHOLE, check_folder, gaps, settled
from cdgp.cluster.scorer import Piece, part_name
from cdgp.cluster.store import Store
from cdgp.errors import OutputError, SettingsError
from cdgp.streaming import Threads

SHARD = 32 * "a"


def kills_of(number: int, guilty: int) -> tuple[list[Piece], int]:
    """The pieces that are left of a shard of so many images, one of which ends every worker."""
    waiting, left, kills = [Piece(SHARD, 0, [str(i) for i in range(number)], whole=True)], [], 0
    while waiting:
        piece = waiting.pop()
        if str(guilty) not in piece.places or is_culprit(piece):
            left.append(piece)
        else:
            kills += 1
            waiting += after_kill(piece)
    return sorted(left, key=lambda piece: piece.start), kills


@pytest.mark.parametrize(("number", "guilty"), [(1, 0), (2, 1), (3, 0), (256, 100), (1000, 999)])
def test_shard_is_halved_until_the_culprit_is_alone(number: int, guilty: int) -> None:
    left, kills = kills_of(number, guilty)
    assert [place for piece in left for place in piece.places] == [str(i) for i in range(number)]
    assert all(piece.places[0] == str(piece.start) for piece in left)
    assert [piece.places for piece in left if is_culprit(piece)] == [[str(guilty)]]
    assert len({piece.name for piece in left}) == len(left)
    assert kills <= 3 + 2 + number.bit_length()


def test_shard_that_lost_its_worker_by_chance_stays_whole() -> None:
    piece = Piece(SHARD, 0, ["a", "b"], whole=True)
    (once,) = after_kill(piece)
    (twice,) = after_kill(once)
    assert twice == piece._replace(kills=2) and twice.name == part_name(SHARD, None)
    assert len(after_kill(twice)) == 2


def test_what_has_no_rows_is_scored() -> None:
    assert list(gaps([], 9)) == [(0, 9)]
    assert list(gaps([WHOLE], 9)) == []
    assert list(gaps([(2, 4), (4, 5)], 9)) == [(0, 2), (5, 9)]
    assert list(gaps([(0, 4), (6, 9)], 9)) == [(4, 6)]


def test_parts_of_what_was_written_whole_are_removed(tmp_path: Path) -> None:
    other = 32 * "b"
    names = [
        *(part_name(SHARD, part) for part in (None, (0, 4), (4, 9))),
        *(part_name(other, part) for part in ((4, 9), (4, 6), (0, 4))),
    ]
    for name in (*names, "mine.parquet", f".{names[0]}.0123abcd.parquet"):
        (tmp_path / name).touch()
    ranges, kept = settled(Store(str(tmp_path)))
    assert ranges == {SHARD: [WHOLE], other: [(0, 4), (4, 9)]}
    assert set(kept) == {names[0], names[3], names[5]}
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "mine.parquet"}


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "nothing answers there"),
        ("no-such-host.invalid:6379", "nothing answers there"),
        ("127.0.0.1:99999", "nothing answers there"),
        ("ray://127.0.0.1:10001", "is no address of a Ray cluster"),
        ("parts.onnx", "is no address of a Ray cluster"),
    ],
)
def test_addresses_where_no_cluster_is(address: str, words: str) -> None:
    raised(lambda: check_address(address), f"--ray {address}", words, error=SettingsError)


def test_number_of_workers() -> None:
    def of(processors: int, wanted: int | None = None) -> tuple[int, float]:
        ray = SimpleNamespace(cluster_resources=lambda: {"CPU": processors} if processors else {})
        return workers_of(ray, Threads(2, 1), wanted)

    assert of(64) == (32, 2) and of(64, 3) == (3, 2)
    assert of(2) == (1, 2) and of(2, 2) == (2, 0.5) and of(1) == (1, 0.5)
    raised(lambda: of(64, 0), "--actors 0", error=SettingsError)
    raised(lambda: of(0), "no processors", error=SettingsError)


@pytest.fixture
def refused(tmp_path: Path) -> list[object]:
    """A command on two images; its model is none, which is found out later than all else."""
    noise_image(tmp_path / "images/a.png")
    (tmp_path / "a.onnx").write_bytes(b"no model")
    given = [tmp_path / "a.onnx", tmp_path / "images"]
    return ["predict", *given, "--out", tmp_path / "out", "--quiet", "--ray"]


def test_no_such_address_by_the_command(refused: list[object], tmp_path: Path) -> None:
    result = cdgp(*refused, "127.0.0.1:1")
    assert result.exit_code == 2 and "127.0.0.1:1: nothing answers there" in plain(result)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("package", ["ray", "pyarrow", "fsspec"])
def test_package_that_is_not_installed(
    refused: list[object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = cdgp(*refused)
    assert result.exit_code == 2
    assert f"this needs {package}, which is not installed: pip install 'cdgp[ray]'" in plain(result)


@pytest.mark.parametrize("out", ["/proc/out", "/dev/null/out"])
def test_place_that_cannot_be_written(refused: list[object], out: str) -> None:
    refused[4] = out
    result = cdgp(*refused)
    assert result.exit_code == 1 and f"{out}: cannot be written" in plain(result)


def test_second_job_in_one_folder(refused: list[object], tmp_path: Path) -> None:
    with run_folder.lock(tmp_path / "out", "predict --ray"):
        result = cdgp(*refused)
    assert result.exit_code == 1
    assert "another process is writing there (cdgp predict --ray" in plain(result)


def test_folder_that_holds_something_else(refused: list[object], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "holds no job" in plain(cdgp(*refused, "--resume"))
    out.mkdir()
    (out / job.JOB).write_text('{"format": "other"}')
    assert "is not ours" in plain(cdgp(*refused, "--overwrite"))
    (out / job.JOB).rename(out / "mine.json")
    for option in ([], ["--overwrite"]):
        assert "is not empty, and holds no job" in plain(cdgp(*refused, *option))
    assert [path.name for path in out.iterdir()] == ["mine.json"]
    raised(lambda: check_folder(Store(str(out)), {}, resume=True, overwrite=False),
           "holds no job", error=OutputError)  # fmt: skip


def test_urls_need_ray(refused: list[object]) -> None:
    for url in (["s3://bucket/a"], ["--out", "s3://bucket/b"]):
        result = cdgp(*refused[:-1], *url)
        assert result.exit_code == 2 and f"{url[-1]}: URLs are read" in plain(result)


def test_model_that_is_not_there(refused: list[object], tmp_path: Path) -> None:
    (tmp_path / "a.onnx").unlink()
    result = cdgp(*refused)
    assert result.exit_code == 1 and "a.onnx: cannot be read: No such file" in plain(result)
