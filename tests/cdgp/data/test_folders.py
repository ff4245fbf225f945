"""The table of folders: what is read, what is told, and which layouts are recognised."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from tests.helpers import DATA, noise_image, save_image, two_bins
from tests.refused import rows

from cdgp.data import layouts
from cdgp.errors import DataError
from cdgp.workflows import check_data
from cdgp_bench.fake_trees import ksdd2_tree, mvtec_ad2_tree, mvtec_ad_tree, visa_tree
from cdgp_bench.studies.refused import Row

TOLD = (
    "not_read", "not_used", "no_images", "labels_as_masks", "named_like_labels", "orphan_masks",
    "no_defective",
)  # fmt: skip
"""Kinds of findings that account for what is found."""


class Made(NamedTuple):
    """An input, and what of it must be used."""

    data: Path
    used: tuple[int, int] | None = None
    """(good, defective) over all splits; None where it is refused."""
    masks: int = 0
    """How many images must have a mask."""


PHOTOS = iter(range(1_000_000))


def photo(path: Path) -> Path:
    """An image that is like no other."""
    return noise_image(path, seed=next(PHOTOS))


def photos(folder: Path, count: int) -> None:
    for i in range(count):
        photo(folder / f"{folder.name[0]}{i}.png")


def bins(folder: Path, good: int = 4, defective: int = 3) -> Path:
    for name, count in (("good", good), ("defective", defective)):
        for i in range(count):
            photo(folder / name / f"{i}.png")
    return folder


def label(path: Path, marked: bool = True) -> Path:
    """A label file, of two colours where it marks something."""
    values = np.zeros((40, 40), np.uint8)
    values[4:9, 4:9] = 255 * marked
    return save_image(path, values)


def link(place: Path, target: Path) -> None:
    try:
        place.symlink_to(target, target_is_directory=True)
    except OSError:
        pytest.skip("no symbolic links here")


def good_alone(root: Path) -> Made:
    return Made(bins(root, defective=0), (4, 0))


def empty_defective(root: Path) -> Made:
    (bins(root, defective=0) / "defective").mkdir()
    return Made(root, (4, 0))


def third_bin(root: Path) -> Made:
    photos(bins(root) / "scratch", 5)
    return Made(root, (4, 3))


def validation_part(root: Path) -> Made:
    for part, count in (("train", 4), ("test", 2), ("val", 2)):
        bins(root / part, count, 2)
    return Made(root, (6, 4))


def parts_beside_bins(root: Path) -> Made:
    bins(root)
    bins(root / "train", 2, 2)
    bins(root / "test", 1, 1)
    return Made(root, (4, 3))


def loose_files(root: Path) -> Made:
    bins(root)
    for name in ("x0.png", "x1.png"):
        photo(root / name)
    return Made(root, (4, 3))


def masks_by_another_name(root: Path) -> Made:
    label(bins(root) / "Labels/0.png")
    return Made(root, (4, 3))


def nested_bin(root: Path) -> Made:
    bins(root / "train")
    bins(root / "test")
    photos(root / "train/extra", 3)
    return Made(root, (8, 6))


def linked_third_bin(root: Path) -> Made:
    photos(root / "elsewhere", 3)
    link(bins(root / "data") / "more", root / "elsewhere")
    return Made(root / "data", (4, 3))


def unlisted(root: Path, name: str = "manifest.csv") -> Path:
    bins(root)
    lines = [f"good/{i}.png,good" for i in range(4)] + ["defective/0.png,defective"]
    (root / name).write_text("\n".join(["image,label", *lines]) + "\n")
    return root


def labels_beside(root: Path) -> Made:
    for name, defective in (("good", False), ("defective", True)):
        for i in range(3):
            photo(root / name / f"part{i}.jpg")
            label(root / name / f"part{i}_label.bmp", marked=defective)
    return Made(root, (3, 3), masks=6)


def beside(*names: str) -> Callable[[Path], Made]:
    """Label files beside the images of the defective bin; each image has one at most."""

    def make(root: Path) -> Made:
        bins(root)
        for name in names:
            label(root / "defective" / name)
        owners = {re.sub(r"\D.*", "", Path(name).name) for name in names}
        return Made(root, (4, 3), masks=len(owners))

    return make


def labels_of_one_name(root: Path) -> Made:
    bins(root)
    for i in range(2):
        (root / f"defective/{i}.png").unlink()
        photo(root / f"defective/{i}.jpg")
        label(root / f"defective/{i}.png")
    return Made(root, (4, 3), masks=2)


def photographs_of_one_name(root: Path) -> Made:
    photo(bins(root) / "good/0.jpg")
    return Made(root, (5, 3))


def label_word_in_front(root: Path) -> Made:
    bins(root, defective=1)
    for i in (7, 8):
        photo(root / f"defective/image_{i}.png")
        label(root / f"defective/mask_{i}.png")
    return Made(root, (4, 3), masks=2)


def photographs_of_labels(root: Path) -> Made:
    photos(bins(root) / "defective/label", 2)
    return Made(root, (4, 5))


def orphan_of_one_name(root: Path) -> Made:
    made = labels_of_one_name(root)
    label(root / "defective/9.png")
    return made


def all_named_so(root: Path) -> Made:
    for name, count in (("good", 4), ("defective", 3)):
        for i in range(count):
            photo(root / name / f"{i}_mask.png")
    return Made(root, (4, 3))


def with_photo(name: str, used: tuple[int, int] | None) -> Callable[[Path], Made]:
    def make(root: Path) -> Made:
        photo(bins(root) / name)
        return Made(root, used)

    return make


def label_of_two_images(root: Path) -> Made:
    photo(bins(root) / "defective/0.jpg")
    label(root / "defective/0_mask.bmp")
    return Made(root)


def no_suffix(root: Path) -> Made:
    bins(root)
    for name in ("IMG_0001", "scan.1", "frame.data"):
        photo(root / "good/x.png").rename(root / "good" / name)
    return Made(root, (7, 3))


def files(*names: str, used: tuple[int, int] | None = (4, 3)) -> Callable[[Path], Made]:
    """Files that are no images, in or beside two bins."""

    def make(root: Path) -> Made:
        bins(root)
        for name in names:
            (root / name).write_bytes(b"nothing to see")
        return Made(root, used)

    return make


def backup(root: Path) -> Made:
    bins(root)
    (root / "good/0.png.bak").write_bytes((root / "good/0.png").read_bytes())
    return Made(root, (4, 3))


def hidden_folders(root: Path) -> Made:
    bins(root)
    for name in ("good/.cache", "good/@eaDir", ".ipynb_checkpoints"):
        photos(root / name, 3)
    return Made(root, (4, 3))


def linked(name: str, target: str, good: int = 4) -> Callable[[Path], Made]:
    """A link in the folder of two bins; three images lie elsewhere."""

    def make(root: Path) -> Made:
        photos(root / "elsewhere", 3)
        link(bins(root / "data") / name, root / target)
        return Made(root / "data", (good, 3))

    return make


def linked_twice(root: Path) -> Made:
    made = linked("good/one", "elsewhere", 7)(root)
    link(root / "data/good/two", root / "elsewhere")
    return made


def broken_image(root: Path) -> Made:
    link(bins(root) / "good/gone.png", root / "gone.png")
    return Made(root)


def pipe(root: Path) -> Made:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no named pipes here")
    os.mkfifo(bins(root) / "good/pipe.png")
    return Made(root, (4, 3))


def bins_in_one_another(root: Path) -> Made:
    photos(root / "real/defective", 3)
    photos(root / "real", 3)
    link(root / "good", root / "real")
    link(root / "defective", root / "real/defective")
    return Made(root)


def bins_linked_to_one_folder(root: Path) -> Made:
    photos(root / "real", 3)
    link(root / "good", root / "real")
    link(root / "defective", root / "real")
    return Made(root)


def empty_bin(root: Path) -> Made:
    photos(root / "good", 3)
    (root / "defective").mkdir()
    (root / "defective/a.mp4").write_bytes(b"frames")
    return Made(root)


def tree(*names: str, given: str = ".") -> Callable[[Path], Made]:
    """Images by name, or other files; what is given lies among them."""

    def make(root: Path) -> Made:
        for name in names:
            if name.endswith((".png", ".jpg")):
                photo(root / name)
            else:
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text("x")
        return Made(root / given)

    return make


def whole_set(write: Callable[[Path], None]) -> Callable[[Path], Made]:
    """A public set as it unpacks."""

    def make(root: Path) -> Made:
        write(root)
        return Made(root)

    return make


def kolektor_sdd(root: Path) -> Made:
    for i in range(2):
        photo(root / f"kos01/Part{i}.jpg")
        label(root / f"kos01/Part{i}_label.bmp")
    return Made(root)


MAKERS: dict[str, Callable[[Path], Made]] = {
    "third-bin": third_bin,
    "validation-part": validation_part,
    "parts-beside-bins": parts_beside_bins,
    "loose-files": loose_files,
    "masks-by-another-name": masks_by_another_name,
    "nested-bin": nested_bin,
    "linked-third-bin": linked_third_bin,
    "unlisted": lambda root: Made(unlisted(root), (4, 1)),
    "listed-elsewhere": lambda root: Made(unlisted(root, "some.csv") / "some.csv", (4, 1)),
    "labels-beside": labels_beside,
    "labels-numbered": beside("0-MASK_1.png", "0-MASK_2.png"),
    "labels-of-one-name": labels_of_one_name,
    "photographs-of-one-name": photographs_of_one_name,
    "label-word-in-front": label_word_in_front,
    "label-of-another-word": beside("0_scratch.png", "1_scratch.png"),
    "label-folder": beside("masks/0.png", "masks/1_GT.png"),
    "label-files-apart": beside("other/0_gt.png", "other/1_gt.png"),
    "photographs-of-labels": photographs_of_labels,
    "orphan-label": lambda root: beside("0_mask.png", "9_mask.png")(root)._replace(masks=1),
    "orphan-of-one-name": orphan_of_one_name,
    "all-named-so": all_named_so,
    "named-like-a-label": with_photo("good/cap_label.png", (5, 3)),
    "label-of-two-images": label_of_two_images,
    "no-suffix": no_suffix,
    "unreadable-format": files("good/7.heic", used=None),
    "archive-in-a-bin": files("good/a.zip", "good/b.MP4", "good/c.pdf"),
    "archive-beside-bins": files("more.tar.gz"),
    "data-files": files("good/0.json", "good/0.png.xml", "good/0.txt"),
    "notes": files("good/Thumbs.db", "good/notes.txt"),
    "backup": backup,
    "hidden-folders": hidden_folders,
    "linked-folder": linked("good/more", "elsewhere", 7),
    "link-loop": linked("good/loop", "data/good"),
    "link-to-the-other-bin": linked("good/wrong", "data/defective"),
    "link-above": linked("good/up", "data"),
    "linked-twice": linked_twice,
    "broken-link": linked("good/gone", "nowhere"),
    "broken-link-of-an-image": broken_image,
    "pipe": pipe,
    "bins-in-one-another": bins_in_one_another,
    "bins-linked-to-one-folder": bins_linked_to_one_folder,
    "empty-bin": empty_bin,
    "good-by-another-name": tree(
        "train/good/1.png", "train/dent/2.png", "test/ok/3.png", "ground_truth/dent/readme.txt"
    ),
    "other-names": tree("Good/1.png", "Defects/2.png"),
    "ok-and-ng": tree("train/OK/1.png", "train/NG/2.png", "test/OK/3.png", "test/NG/4.png"),
    "too-high": tree("parts/good/1.png", "parts/defective/2.png"),
    "one-bin": tree("parts/good/1.png", "parts/defective/2.png", given="parts/good"),
    "mvtec-ad": whole_set(lambda root: mvtec_ad_tree(root, ("bottle", "cable"), 3, 2)),
    "mvtec-no-masks": tree(
        "train/good/1.png", "test/good/2.png", "test/dent/3.png", "test/scratch/4.png"
    ),
    "btad": tree("01/train/ok/1.png", "01/test/ok/2.png", "01/test/ko/3.png", "02/train/ok/4.png"),
    "mvtec-ad2": whole_set(lambda root: mvtec_ad2_tree(root, ("can",), 4, 2)),
    "visa": whole_set(lambda root: visa_tree(root, ("candle",), 3, 2)),
    "kolektor-sdd": kolektor_sdd,
    "kolektor-sdd2": whole_set(lambda root: ksdd2_tree(root, 3, 3)),
    "real-iad": tree(
        *(f"{kind}/{name}/S0001/1.png" for kind in ("audiojack", "zipper") for name in ("OK", "NG"))
    ),
    "yolo": tree("images/1.png", "labels/1.txt", "data.yaml"),
    "coco": tree("images/1.png", "annotations/instances.json"),
    "three-classes": tree("fine/1.png", "dent/2.png", "scratch/3.png"),
    "good-alone": good_alone,
    "empty-defective": empty_defective,
    "good-alone-by-another-name": tree("OK/1.png", "OK/2.png"),
    "defective-by-another-name": tree("good/1.png", "good/2.png", "scratched/3.png"),
    "parts-in-capitals": tree(
        *(f"{p}/{b}/1.png" for p in ("Train", "Test") for b in ("good", "defective"))
    ),
    "train-and-val": tree(*(f"{p}/{b}/1.png" for p in ("train", "val") for b in ("a", "b"))),
    "loose-alone": tree("1.png", "2.png"),
    "table-by-another-name": tree("labels.csv", "images/1.png"),
    "packed": tree("set.zip"),
}


@rows("folders", MAKERS)
def test_folders(row: Row, tmp_path: Path) -> None:
    made = MAKERS[row.id](tmp_path)
    if row.result == "refused":
        assert made.used is None
        try:
            text = "\n".join(f.text for f in check_data(made.data).audit.of("error"))
        except DataError as error:
            text = str(error)
        assert row.says in text
        return
    found = check_data(made.data).audit
    assert not found.of("error")
    used = [sum(counts) for counts in zip(*found.counts.values(), strict=True)]
    assert tuple(used) == made.used
    told = [f.text for f in found.findings if f.kind in TOLD]
    if row.result == "read":
        assert not told
    else:
        assert any(row.says in text for text in told), told
    samples = layouts.find(made.data, DATA.good, DATA.defective)[0].samples
    assert sum(bool(sample.masks) for sample in samples) == made.masks


def test_two_bins_alone_have_nothing_to_tell(tmp_path: Path) -> None:
    found = check_data(two_bins(tmp_path / "data")).audit
    assert not [f for f in found.findings if f.kind in TOLD]
