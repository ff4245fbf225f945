"""Folders of good and defective images, or a CSV file -> manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdgp.data.decode import EXTENSIONS
from cdgp.data.foreign import missing_folder, sounds_good
from cdgp.data.manifest import Manifest, Sample, read_csv
from cdgp.data.pairing import only, pair_masks
from cdgp.data.unread import unread
from cdgp.data.walk import Notice, Search, Unused, first_names, is_junk_folder, tell, walk_images
from cdgp.errors import DataError, OutputError
from cdgp.files import absolute, is_same, lies_in

BESIDE = ("holder", "broken", "above", "locked", "hidden")
"""What is told of entries beside the bins; a README there is nobody's image."""


def load(data: Path, good: str, defective: str) -> Manifest:
    """`find`, with what it has to tell as log warnings."""
    manifest, notices = find(data, good, defective)
    tell(notices)
    return manifest


def find(data: Path, good: str, defective: str) -> tuple[Manifest, list[Notice]]:
    """Reads which images there are, with their labels and masks.

    ```
    data.csv                     a table, see `manifest.read_csv`
    data/manifest.csv            the same; where there is one, the sub-folders are not read
    data/good/**                 images without a defect
    data/defective/**            images with one; may be empty or missing
    data/masks/**                optional; paired by name, defective/a/7.png has masks/a/7.*,
                                 a/7_mask.*, a/7_GT.*, numbered ones (a/7_mask_2.*) and all in
                                 a/7/; several masks of one image are joined
    data/{train,test}/...        the same two bins in each: a split of the user's own
    data/{train,test}/good/**    beside data/ground_truth, as in MVTec AD: all other folders of
                                 train and test hold defective images
    ```

    Good images alone are enough. Where the folder of defective ones is missing, no other folder of
    images may lie beside that of the good ones: it could be the missing one by another name.

    Sub-folders are searched, linked ones too, none twice. Label files beside the images, see
    `labels`, are masks of theirs. Everything else that is found is told, with its reason.

    Arguments:
        data: A folder or a CSV file.
        good: Name of the sub-folder of good images.
        defective: Name of the sub-folder of defective images.

    Returns:
        The manifest, and what was found and is not used, or was used in a way to know of.

    Raises:
        DataError: The images are not there; the message says what was expected and found.
    """
    root = absolute(data)
    if root.is_file():
        if root.suffix.lower() != ".csv":
            raise DataError(f"{data}: is a file but not a .csv; give a folder or a CSV manifest")
        manifest = read_csv(root)
        # Who gives a table has chosen; and it may lie in a large folder of anything.
        left, _ = unread(manifest, [], f"are not listed in {root.name}", peek=False)
        return manifest, [notice._replace(severity="note") for notice in left]
    if not root.is_dir():
        raise DataError(f"{data}: there is no such folder or file; check the path")
    if (root / "manifest.csv").is_file():
        return _beside_bins(root, good, defective)
    if absolute(root / good) == absolute(root / defective):
        raise DataError(f"{data}: good and defective name the same folder {good!r}; give two names")
    if not is_parted(root, good, defective):
        manifest, reading = _two_bins(root, ("",), good, defective)
    elif (root / "ground_truth").is_dir():
        manifest, reading = _mvtec(root, good)
    else:
        manifest, reading = _two_bins(root, ("train", "test"), good, defective)
    left, unused = unread(manifest, reading.places, "are not read")
    reading.search.unused.merge(unused, BESIDE)
    return manifest, [*reading.all_notices(), *left]


def is_parted(root: Path, good: str, defective: str) -> bool:
    """Whether a folder holds train and test, and no bin of its own."""
    parted = all((root / name).is_dir() for name in ("train", "test"))
    return parted and not any((root / name).is_dir() for name in (good, defective))


def _beside_bins(root: Path, good: str, defective: str) -> tuple[Manifest, list[Notice]]:
    """The table of a folder; images below the folder that it does not list are told."""
    table = root / "manifest.csv"
    manifest = read_csv(table)
    notices, unused = unread(manifest, [], "are not listed in manifest.csv")
    beside = Unused()
    beside.merge(unused, BESIDE)
    notices += beside.notices(root)
    if (root / good).is_dir() or (root / defective).is_dir():
        text = f"{table}: is used; the folders beside it are not read"
        notices.append(Notice("reading", "note", text))
    return manifest, notices


class _Reading:
    """The search of a layout: which places it has read, the label files found, what to tell."""

    def __init__(self, root: Path, folders: Sequence[Path]) -> None:
        self.root, self.search = root, Search(folders, root)
        self.places: list[Path] = []
        self.notices: list[Notice] = []
        self._masks: dict[Path, list[Path]] = defaultdict(list)
        self._labels: list[Path] = []

    def images(self, folder: Path) -> list[Path]:
        """The images of a bin, sorted; label files among them become masks."""
        self.places.append(folder)
        images: list[Path] = []
        for told in self.search.folders(folder):
            images += told.images
            for label, owners in told.labels.items():
                self._masks[only(label, owners)].append(label)
                self._labels.append(label)
            if told.named:
                text = (
                    f"{told.named[0].parent}: {len(told.named)} files are named like label files "
                    "of images that are not there, and are used as images: "
                    f"{first_names(told.named)}"
                )
                self.notices.append(Notice("named_like_labels", "warning", text))
        for place in self.search.label_folders:
            self._pair(place, images)
        self.search.label_folders.clear()
        return sorted(images)

    def _pair(self, place: Path, images: Sequence[Path]) -> None:
        """The label files of a sub-folder, which belong to images beside it or in folders there."""
        near = [path for path in images if path.is_relative_to(place.parent)]
        beside: dict[Path, list[Path]] = defaultdict(list)
        for path in near:
            beside[place.parent / path.relative_to(place.parent).parts[0]].append(path)
        folders = {folder: paths for folder, paths in beside.items() if folder not in near}
        pairs = pair_masks([{place.parent: near}, folders], place, self.notices)
        for image, labels in pairs.items():
            self._masks[image] += labels
            self._labels += labels

    def masks(self, image: Path, others: Sequence[Path]) -> tuple[Path, ...]:
        """The masks of an image: those of a folder of masks, and label files beside it."""
        return (*others, *sorted(self._masks.get(image, ())))

    def all_notices(self) -> list[Notice]:
        """What the search had to tell, with how many label files became masks."""
        notices = [*self.notices, *self.search.unused.notices(self.root)]
        if not self._labels:
            return notices
        text = (
            f"{len(self._labels)} label files beside the images are used as their masks, and not "
            f"as images: {first_names(self._labels)}"
        )
        return [*notices, Notice("labels_as_masks", "note", text)]


def mvtec_category(base: Path, good: str) -> Manifest:
    """One category laid out like MVTec AD: ``{train,test}/good`` and ``{train,test}/DEFECT``.

    Masks of the test part lie under ``ground_truth/DEFECT``; the parts are the stated split.
    """
    manifest, reading = _mvtec(base, good)
    tell(reading.all_notices())
    return manifest


def _mvtec(base: Path, good: str) -> tuple[Manifest, _Reading]:
    folders = [
        (part, folder)
        for part in ("train", "test")
        for folder in sorted((base / part).iterdir())
        if folder.is_dir() and not is_junk_folder(folder.name)
    ]
    if not (base / "train" / good).is_dir():
        raise DataError(missing_folder(base / "train", good, "good"))
    for _, folder in folders:
        if folder.name != good and sounds_good(folder.name):
            raise DataError(
                f"{folder}: would be read as a kind of defect, but its name says good; name the "
                f"folders of good images alike, {good!r}, or with --good NAME"
            )
    reading = _Reading(base, [folder for _, folder in folders if not folder.is_symlink()])
    samples: list[Sample] = []
    for part, folder in sorted(folders, key=lambda each: each[1].is_symlink()):
        if folder.is_symlink() and not reading.search.leads_elsewhere(folder):
            continue
        images, truth = reading.images(folder), base / "ground_truth" / folder.name
        pairs: Mapping[Path, tuple[Path, ...]] = {}
        if part == "test":
            pairs = pair_masks([{folder: images}], truth, reading.notices)
            reading.places.append(truth)
        samples += [
            Sample(p, folder.name != good, reading.masks(p, pairs.get(p, ())), split=part)
            for p in images
        ]
    return Manifest(base, tuple(samples)), reading


def _two_bins(
    root: Path, parts: Sequence[str], good: str, defective: str
) -> tuple[Manifest, _Reading]:
    """The images of both bins of each part, with their masks; the part "" is the root itself."""
    for part in parts:
        if not (root / part / good).is_dir():
            raise DataError(missing_folder(root / part, good, "good"))
        if not (root / part / defective).is_dir() and _may_be_defective(root / part, good):
            raise DataError(missing_folder(root / part, defective, "defective"))
    folders = {
        (part, name): root / part / name
        for part in parts
        for name in (good, defective)
        if (root / part / name).is_dir()
    }
    _check_apart(list(folders.values()))
    reading = _Reading(root, list(folders.values()))
    found = {key: reading.images(folder) for key, folder in folders.items()}
    for (part, name), images in found.items():
        if not images and (name == good or _holds(folders[part, name])):
            raise DataError(_no_images(folders[part, name]))
    # Where a good and a defective image have one name, the mask belongs to the defective one.
    places = [root, *(root / part for part in parts if part)]
    masks: dict[Path, tuple[Path, ...]] = {}
    for place in places:
        within = parts if place == root else [place.name]
        bins = [{root / p / name: found.get((p, name), []) for p in within}
                for name in (defective, good)]  # fmt: skip
        masks |= pair_masks(bins, place / "masks", reading.notices)
        reading.places.append(place / "masks")
    manifest = Manifest(root, tuple(
        Sample(image, name == defective, reading.masks(image, masks.get(image, ())),
               split=part or None)
        for (part, name), images in found.items()
        for image in images
    ))  # fmt: skip
    return manifest, reading


def _check_apart(folders: Sequence[Path]) -> None:
    """Raises DataError where a bin lies in another one: its images would have two labels."""
    real = {folder: folder.resolve() for folder in folders}
    for folder in folders:
        for other in folders:
            if other != folder and real[folder].is_relative_to(real[other]):
                raise DataError(
                    f"{folder}: is, or lies in, {other}, so that its images would be in two bins; "
                    "separate the folders"
                )


def _may_be_defective(place: Path, good: str) -> bool:
    """Whether a folder with images lies beside the good ones, and is none of masks."""
    others = [
        folder for folder in place.iterdir()
        if folder.is_dir() and not is_junk_folder(folder.name) and folder.name != "masks"
        and not is_same(folder, place / Path(good).parts[0])
    ]  # fmt: skip
    return any(True for folder in others for _ in walk_images(folder, Search([folder], folder)))


def _holds(folder: Path) -> list[str]:
    """What a folder without images holds, in words."""
    search = Search([folder], folder)
    list(walk_images(folder, search))
    return [notice.text.partition("not used: ")[2] for notice in search.unused.notices(folder)]


def _no_images(folder: Path) -> str:
    held = _holds(folder)
    also = f" ({'; '.join(held)})" if held else ""
    return f"{folder}: holds no images{also}; put files ending in {', '.join(EXTENSIONS)} there"


def check_outside(folder: Path, data: Path, good: str, defective: str) -> None:
    """Checks that results do not land among the images, the masks or beside the manifest.

    Raises:
        OutputError: The output folder is the data's, or lies where images or masks are read.
    """
    source = absolute(data)
    home = source.parent if source.suffix.lower() == ".csv" else source
    layout = ("masks", "train", "test", "ground_truth")
    taken = [good, defective, *(name for name in layout if (home / name).is_dir())]
    if is_same(folder, home) or any(lies_in(folder, home / name) for name in taken):
        raise OutputError(f"{folder}: lies in the data that is read; choose another --out")
