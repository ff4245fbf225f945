"""The single checks of a data set: files, masks, shortcuts, balance, and the split."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import numpy as np
from scipy.stats import mannwhitneyu
from sklearn.metrics import roc_auc_score

from cdgp.audit.types import Finding, Severity, Shortcut, count
from cdgp.data.groups import group_members
from cdgp.data.images import INVERTED, fitting_white_level
from cdgp.data.manifest import Manifest
from cdgp.data.scan import ImageStats, Scan
from cdgp.data.splits import CLASSES, needed_labels, needed_splits, split
from cdgp.errors import DataError
from cdgp.presets import DataSettings, settings

SHORTCUT = 0.9
"""A trivial fact with an AUROC above this is a warning."""
CHANCE = 0.01
"""Its Mann-Whitney p-value must be below this: a few images are separable by luck."""
COPIED_TOGETHER = 3600.0
"""Files that all changed within so many seconds were copied together: their times mean nothing."""
POLARITY = 0.1
"""The way round of inks that fits a set must be nearer to its brightness by at least this."""
FEW = {False: 20, True: 10}
"""With fewer groups of a class than this, probabilities and thresholds are coarse."""
TOO_FEW = 3
"""With fewer groups of a class than this, none can be set aside for both calibration and test."""
SHOWN = 5
NAMED = 20
TIME = "time of change"

MASKS: dict[str, tuple[Severity, str]] = {
    "mask_missing": ("note", "defective without a mask: used for the image metrics alone"),
    "mask_empty": ("warning", "defective with an empty mask: used for the image metrics alone"),
    "mask_on_good": ("warning", "good with a mask that marks something: the label is used"),
    "mask_inverted": ("warning", "with a mask that marks nearly all of it; cdgp inverts no mask"),
    "mask_unusable": ("warning", "with a mask that cannot be used: no pixel metrics of them"),
    "mask_grey": ("warning", "with a mask that was blurred or compressed"),
    "mask_values": ("note", "with a mask of several values"),
    "mask_union": ("note", "with several masks, which are joined"),
}


def unreadable(scan: Scan) -> Iterable[Finding]:
    """Images that cannot be used, with the reasons."""
    if scan.unreadable:
        yield Finding(
            "broken", "error",
            f"{count(len(scan.unreadable), 'image')} cannot be used: "
            + "; ".join(str(error) for _, error in scan.unreadable),
            tuple((scan.manifest.name(sample.image),) for sample, _ in scan.unreadable),
        )  # fmt: skip


def files(manifest: Manifest, stats: Sequence[ImageStats], white_level: int) -> Iterable[Finding]:
    """Transparency, and the scale of 16-bit values."""
    clear = [s for s in stats if s.file.transparent]
    if clear:
        yield Finding(
            "transparent", "warning",
            f"{count(len(clear), 'image')} with transparent pixels, which are shown over black",
            _names(manifest, clear),
        )  # fmt: skip
    deep = [s for s in stats if s.file.bits == 16]
    largest = max((s.file.largest for s in deep), default=white_level)
    fitting = fitting_white_level(largest)
    if fitting < white_level:
        yield Finding(
            "dark_16_bit", "warning",
            f"none of the {count(len(deep), '16-bit image')} exceeds {largest}, so they are nearly "
            f"black while {white_level} means white; if the camera has fewer bits, set "
            f"data.white_level={fitting}",
            _names(manifest, deep),
        )  # fmt: skip


def content(manifest: Manifest, stats: Sequence[ImageStats]) -> Iterable[Finding]:
    """Images that hold nothing to see: black frames, lens caps, alpha 0 everywhere."""
    empty = [s for s in stats if s.nothing]
    if empty:
        every = " (every image: is the set right?)" if len(empty) == len(stats) else ""
        yield Finding(
            "no_content", "warning",
            f"{count(len(empty), 'image')} with nothing to see, constant or nearly so{every}; "
            "remove them, or they are learnt as parts: "
            + _shortened([manifest.name(s.sample.image) for s in empty]),
            _names(manifest, empty),
        )  # fmt: skip


def colours(manifest: Manifest, stats: Sequence[ImageStats]) -> Iterable[Finding]:
    """Colour spaces that differ within the set, or that are in doubt."""
    foreign = [s for s in stats if s.file.profile]
    others = len(stats) - len(foreign)
    if foreign and others:
        names = ", ".join(sorted({s.file.profile for s in foreign}))
        yield Finding(
            "mixed_colours", "warning",
            f"{count(len(foreign), 'image')} with a colour profile other than sRGB ({names}), "
            f"which were converted to sRGB; {count(others, 'image')} without. Values without a "
            "profile are taken as sRGB: if they are of the same kind, give all images the profile",
            _names(manifest, foreign),
        )  # fmt: skip
    for text in sorted({text for s in stats for text in s.file.warnings}):
        doubtful = [s for s in stats if text in s.file.warnings]
        listed = _shortened([manifest.name(s.sample.image) for s in doubtful])
        yield Finding(
            "colours", "warning", f"{count(len(doubtful), 'image')}: {text}: {listed}",
            _names(manifest, doubtful),
        )  # fmt: skip
    usual = [s.brightness for s in stats if s.file.swapped is None and not s.nothing]
    for s in stats:
        if s.file.swapped is not None:
            yield _polarity(manifest.name(s.sample.image), s, s.file.swapped, usual)


def _polarity(name: str, s: ImageStats, swapped: float, usual: Sequence[float]) -> Finding:
    """Which way round the inks of a CMYK file fit the brightness of the other images."""
    text = f"{name}: mean brightness {s.brightness:.2f} as read, {swapped:.2f} the other way round"
    if not usual:
        fits = "there is no other image to compare with"
    else:
        middle = float(np.median(usual))
        nearer = abs(swapped - middle) - abs(s.brightness - middle)
        text += f", {middle:.2f} in the middle of the others"
        fits = "neither fits better"
        if abs(nearer) >= POLARITY:
            fits = "as read fits" if nearer > 0 else "the other way round fits: it is read inverted"
    return Finding("cmyk", "warning", f"{text}: {fits}. Save it as RGB", ((name,),))


def _names(manifest: Manifest, stats: Iterable[ImageStats]) -> tuple[tuple[str, ...], ...]:
    return tuple((manifest.name(s.sample.image),) for s in stats)


def _shortened(texts: Sequence[str]) -> str:
    more = [f"and {len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return ", ".join([*texts[:NAMED], *more])


def masks(manifest: Manifest, stats: Sequence[ImageStats]) -> Iterable[Finding]:
    """Masks that contradict the label, mark too much, or are stored in an odd way."""
    found: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    details: dict[str, list[str]] = defaultdict(list)
    any_mask = any(s.sample.masks for s in stats)
    for s in stats:
        names = tuple(manifest.name(path) for path in (s.sample.image, *s.sample.masks))
        for kind, detail in _odd_masks(s, names[1:]) if s.sample.masks else ():
            found[kind].append(names)
            details[kind] += [detail] if detail else []
        if any_mask and s.sample.defective and not s.sample.masks:
            found["mask_missing"].append(names)
    for kind, (severity, text) in MASKS.items():
        if found[kind]:
            most = NAMED if kind == "mask_unusable" else SHOWN
            listed = details[kind][:most] + ["…"] * (len(details[kind]) > most)
            more = f" ({'; '.join(listed)})" if listed else ""
            counted = count(len(found[kind]), "image")
            yield Finding(kind, severity, f"{counted} {text}{more}", tuple(found[kind]))


def _odd_masks(s: ImageStats, names: Sequence[str]) -> Iterable[tuple[str, str]]:
    """(kind, detail) of what is odd about the masks of one image."""
    if s.mask_problem:
        yield "mask_unusable", s.mask_problem
        return
    for name, facts in zip(names, s.masks, strict=True):
        if facts.told:
            yield "mask_grey" if facts.cut else "mask_values", f"{name}: {facts.told}"
    if s.sample.defective and not s.marked_share:
        yield "mask_empty", ""
    if not s.sample.defective and s.marked_share:
        yield "mask_on_good", ""
    if s.marked_share >= INVERTED:
        share = f"{100 * s.marked_share:.0f} %"
        yield "mask_inverted", f"{names[0]}: {share} of the image is marked, inverted?"
    if len(s.masks) > 1:
        yield "mask_union", ""


def shortcuts(stats: Sequence[ImageStats]) -> list[Shortcut]:
    """How well each trivial fact predicts the label, the strongest first.

    Facts that do not vary are left out. Exact duplicates count once: repeated, they would make a
    difference of one image look certain.
    """
    stats = list({s.sample.pixel_sha256: s for s in stats}.values())
    defective = np.array([s.sample.defective for s in stats], np.bool_)
    if not 0 < defective.sum() < len(defective):
        return []
    found = []
    for fact, listed in _facts(stats).items():
        values = np.array(listed, np.float64)
        if values.min() == values.max():
            continue
        auroc = float(roc_auc_score(defective, values))
        of_good, of_defective = values[~defective], values[defective]
        found.append(Shortcut(
            fact,
            max(auroc, 1 - auroc),
            float(mannwhitneyu(of_good, of_defective).pvalue),
            float(np.median(of_good)),
            float(np.median(of_defective)),
        ))  # fmt: skip
    return sorted(found, key=lambda s: -s.auroc)


def _facts(stats: Sequence[ImageStats]) -> dict[str, list[float]]:
    """Facts that have nothing to do with the part, each with its value by image."""
    facts: dict[str, list[float]] = {
        "brightness": [s.brightness for s in stats],
        "contrast": [s.contrast for s in stats],
        "saturation": [s.saturation for s in stats],
        "width": [s.width for s in stats],
        "height": [s.height for s in stats],
        "aspect ratio": [s.width / s.height for s in stats],
        "file size": [s.file_bytes for s in stats],
        "bits a channel": [s.file.bits for s in stats],
    }
    for kind in sorted({s.file.format for s in stats}):
        facts[f"file type {kind}"] = [float(s.file.format == kind) for s in stats]
    modified = [s.modified for s in stats]
    if max(modified) - min(modified) > COPIED_TOGETHER:
        facts[TIME] = modified
    return facts


def shortcut_findings(found: Iterable[Shortcut]) -> Iterable[Finding]:
    """A warning for each fact that predicts the label, and not by chance."""
    for s in found:
        if s.auroc > SHORTCUT and s.p_value < CHANCE:
            yield Finding(
                "shortcut", "warning",
                f"{s.fact} alone distinguishes good from defective (AUROC {s.auroc:.3f}; median "
                f"{format_value(s.fact, s.good)} of good, {format_value(s.fact, s.defective)} of "
                "defective images): a model would learn that instead of the defect. Take the "
                "images of both bins in the same way, or make them equal in this",
            )  # fmt: skip


def format_value(fact: str, value: float) -> str:
    """A value of a fact for reading: times as dates."""
    if fact == TIME:
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M} UTC"
    return f"{value:.4g}"


def balance(manifest: Manifest, joined: Manifest) -> Iterable[Finding]:
    """Whether there are enough groups of each class to train, calibrate and test on.

    ``joined`` is the manifest with near duplicates in one group; a bound on false rejects counts
    those, and splits do not.
    """
    for label, word in CLASSES.items():
        samples = [s for s in manifest.samples if s.defective == label and s.split != "test"]
        groups = len({s.group or s.pixel_sha256 for s in samples})
        if not samples and not label:
            continue
        if groups < TOO_FEW:
            yield _too_few(groups, label, bool(joined.of("test")))
        elif groups < FEW[label]:
            yield Finding(
                "few", "note",
                f"{count(groups, 'group')} of {word} images outside test: below {FEW[label]} "
                "probabilities and thresholds are coarse",
            )  # fmt: skip
        if not label and groups >= TOO_FEW and "calibration" not in manifest.counts():
            yield _least_budget(joined)


def _too_few(groups: int, label: bool, tested: bool) -> Finding:
    """What a model rests on, and cannot show, with so few groups of a class."""
    if label and not groups:
        return Finding(
            "no_defective", "warning",
            "no defective image: the model rests on good images alone and gives p-values; it gets "
            "better with every defective image you add",
        )  # fmt: skip
    text = f"{count(groups, 'group')} of {CLASSES[label]} images outside test: "
    if label and groups == 1:
        text += (
            "it is learnt from, and none is left to calibrate with, so preset lite gives p-values "
            "and no probabilities"
        )
    else:
        text += "too few to set some aside for all of fit, calibration and test"
    untested = "" if tested else ", and how well it works on new ones cannot be tested"
    return Finding("too_few", "warning", f"{text}{untested}. Add images of other parts")


def _least_budget(joined: Manifest) -> Finding:
    """The least bound on false rejects that the good parts outside test allow."""
    data = DataSettings()
    kept = 1 if joined.of("test") else 1 - data.test_fraction
    good = [s for s in joined.samples if not s.defective and s.split != "test"]
    parts = len(group_members(joined, good))
    calibrating = max(1, round(parts * kept * data.calibration_fraction))
    return Finding(
        "false_reject_budget", "note",
        f"with the default fractions about {calibrating} of {parts} good parts (groups: images of "
        "one part, equal images and near duplicates count once) are set aside for calibration: "
        f"--max-false-rejects can be {1 / (calibrating + 1):.2g} or more",
    )  # fmt: skip


def unusable_split(manifest: Manifest) -> Iterable[Finding]:
    """An error where training with the default settings could not use the labels and splits."""
    chosen = settings()
    data = chosen.data
    try:
        split(
            manifest, 0, data.test_fraction, data.calibration_fraction,
            needed_splits(manifest, chosen), needed_labels(chosen),
        )  # fmt: skip
    except DataError as error:
        yield Finding("no_split", "error", str(error).removeprefix(f"{manifest.root}: "))
