"""The search through folders: every file is accounted for, no folder is entered twice."""

import os
from pathlib import Path

import numpy as np
import pytest
from tests.helpers import noise_image, two_bins

from cdgp.data.layouts import find
from cdgp.data.walk import Search, Unused, walk_images
from cdgp.errors import DataError

NAMES = ("{}.png", "{}_mask.png", "{}.JPG", "{}", "{}.txt", "{}.zip", "{}.json", "{}.png.bak")


@pytest.mark.parametrize("seed", range(10))
def test_every_file_is_an_image_or_counted(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    folders = [tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "masks", tmp_path / "c"]
    for number in range(40):
        folder = folders[rng.integers(len(folders))]
        path = folder / NAMES[rng.integers(len(NAMES))].format(number // 4)
        if path.suffix.lower() in (".png", ".jpg"):
            noise_image(path, seed=number)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text("no image")
    search = Search([tmp_path], tmp_path)
    found = list(walk_images(tmp_path, search))
    every = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(found) == len(set(found)) and set(found) <= set(every)
    assert len(found) + search.unused.counts.total() == len(every)


def test_a_link_that_leads_to_itself(tmp_path: Path) -> None:
    noise_image(tmp_path / "1.png")
    (tmp_path / "self").symlink_to(tmp_path / "self")
    search = Search([tmp_path], tmp_path)
    assert [path.name for path in walk_images(tmp_path, search)] == ["1.png"]
    assert search.unused.counts == {"broken": 1}


def test_links_among_linked_folders_end(tmp_path: Path) -> None:
    """Two folders outside that link to each other, reached from both sides."""
    for name in ("x", "y"):
        noise_image(tmp_path / name / f"{name}.png")
    (tmp_path / "x/to_y").symlink_to(tmp_path / "y", target_is_directory=True)
    (tmp_path / "y/to_x").symlink_to(tmp_path / "x", target_is_directory=True)
    (tmp_path / "in").mkdir()
    for name in ("x", "y"):
        (tmp_path / "in" / name).symlink_to(tmp_path / name, target_is_directory=True)
    search = Search([tmp_path / "in"], tmp_path)
    found = [path.name for path in walk_images(tmp_path / "in", search)]
    assert sorted(found) == ["x.png", "y.png"]
    assert search.unused.counts == {"repeated": 2}, "y/to_x inside x/to_y, and in/y"


def test_one_folder_is_held_at_a_time(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/2.png"):
        noise_image(tmp_path / name)
    walk = walk_images(tmp_path)
    assert next(walk).name == "1.png"
    (tmp_path / "b/2.png").rename(tmp_path / "b/3.png")
    assert [path.name for path in walk] == ["3.png"], "b was not looked at before"


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="gone: cannot be read"):
        list(walk_images(tmp_path / "gone"))


def test_a_folder_beside_the_bins_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops nothing, since nothing of it is used."""
    bins, scandir = two_bins(tmp_path), os.scandir
    (tmp_path / "private").mkdir()

    def refuse(place: Path) -> object:
        if Path(place).name == "private":
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    monkeypatch.setattr(os, "scandir", refuse)
    _, notices = find(bins, "good", "defective")
    assert [notice.kind for notice in notices] == ["not_used"]
    assert "folders that cannot be read: 1 (private)" in notices[0].text


def test_the_first_names_stand_for_many(tmp_path: Path) -> None:
    unused = Unused()
    for number in range(1000):
        unused.add("no_image", f"{number}.txt")
    (notice,) = unused.notices(tmp_path)
    assert notice.text == (
        f"{tmp_path}: 1000 entries are not used: "
        "no images: 1000 (0.txt, 1.txt, 2.txt, 3.txt, 4.txt, …)"
    )
    more = Unused()
    more.merge(unused, ["no_image"])
    assert more.notices(tmp_path) == [notice]


def test_results_among_images_are_not_scored(tmp_path: Path) -> None:
    noise_image(tmp_path / "run/overlays/1.png.png")
    assert [path.name for path in walk_images(tmp_path)] == ["1.png.png"], "a folder of that name"
    (tmp_path / "run/scores.csv").write_text("image\n")
    (tmp_path / "run/maps").mkdir()
    (tmp_path / "run/maps/1.png.npy").touch()
    search = Search([tmp_path], tmp_path)
    assert not list(walk_images(tmp_path, search))
    assert search.unused.counts == {"results": 2, "no_image": 1}, "and no warning of arrays"
