"""Splits by group: shares, seeds, few groups, stated splits, leaks."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers import digested, divided, raised

from cdgp.data import splits
from cdgp.data.manifest import Manifest, Sample
from cdgp.errors import DataError, LeakError, SettingsError
from cdgp_bench.synthetic import make_dataset


def fake(
    good: int, defective: int, per_group: int = 1, root: str = "/data", grouped: bool = True
) -> Manifest:
    """A manifest without files; every image has pixels of its own."""
    rows = []
    for i in range(good + defective):
        bad = i >= good
        group = f"{bad}{i // per_group}" if grouped else None
        image = Path(root, f"{i:04d}.png")
        rows.append(Sample(image, bad, group=group, sha256=f"f{i}", pixel_sha256=f"p{i}"))
    return Manifest(Path(root), tuple(rows))


def sides(made: Manifest) -> dict[str | None, str | None]:
    return {s.pixel_sha256: s.split for s in made.samples}


def test_shares_and_class_ratio() -> None:
    for seed in range(5):
        done = divided(fake(400, 100, 3), seed)
        counts = done.counts()
        for name, share in (("fit", 0.64), ("calibration", 0.16), ("test", 0.2)):
            good, defective = counts[name]
            assert abs(good + defective - 500 * share) <= 6
            assert abs(defective - 100 * share) <= 3


def test_seed_decides() -> None:
    made = fake(60, 20)
    assert divided(made, 1) == divided(made, 1)
    assert sides(divided(made, 1)) != sides(divided(made, 2))


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(order=st.permutations(range(40)), seed=st.integers(0, 10))
def test_order_names_and_folder_do_not_matter(order: list[int], seed: int) -> None:
    made = fake(30, 10, 2)
    renamed = tuple(
        dataclasses.replace(made.samples[i], image=Path(f"/other/{place}.bmp"), group=f"n{i // 2}")
        for place, i in enumerate(order)
    )
    shuffled = Manifest(Path("/other"), renamed)
    assert sides(divided(shuffled, seed)) == sides(divided(made, seed))


def test_same_images_in_another_folder(tmp_path: Path) -> None:
    first = divided(digested(make_dataset(tmp_path / "a", 12, 6)), 0)
    second = divided(digested(make_dataset(tmp_path / "b", 12, 6)), 0)
    assert first.sha256 == second.sha256 and sides(first) == sides(second)


@settings(deadline=None, max_examples=40)
@given(
    groups=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 5)).filter(any), min_size=1, max_size=14
    ),
    twins=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=6),
    seed=st.integers(0, 99),
)
def test_no_group_on_two_sides(
    groups: list[tuple[int, int]], twins: list[tuple[int, int]], seed: int
) -> None:
    rows = [
        (bad, f"g{g}")
        for g, (good, defective) in enumerate(groups)
        for bad in [False] * good + [True] * defective
    ]
    pixels = list(range(len(rows)))
    for a, b in twins:  # equal pixels in two groups join them, where the labels agree
        a, b = a % len(rows), b % len(rows)
        if all(rows[i][0] == rows[b][0] for i in range(len(rows)) if pixels[i] == pixels[a]):
            pixels = [pixels[b] if p == pixels[a] else p for p in pixels]
    made = Manifest(
        Path("/r"),
        tuple(
            Sample(Path(f"/r/{i:03d}"), bad, group=g, sha256=f"{i}", pixel_sha256=f"p{pixels[i]}")
            for i, (bad, g) in enumerate(rows)
        ),
    )
    joined = splits._groups(made, made.samples, 0)
    enough = all(sum(label in g.classes for g in joined) >= 2 for label in (False, True))
    try:
        done = divided(made, seed)
    except DataError as error:
        assert "2 are the least" in str(error)
        assert not enough
        return
    assert enough
    splits.check_leaks(done)
    for name in ("fit", "calibration"):
        assert {s.defective for s in done.of(name)} == {False, True}


@pytest.mark.parametrize(("good", "defective"), [(2, 2), (3, 2), (40, 2), (2, 40), (5, 3), (40, 4)])
def test_few_groups(good: int, defective: int) -> None:
    for seed in range(8):
        counts = divided(fake(good, defective), seed).counts()
        for part in (0, 1):
            assert counts["fit"][part] >= 1 and counts["calibration"][part] >= 1
            test = counts.get("test", (0, 0))[part]
            assert (test > 0) == ((good, defective)[part] > 2)


@pytest.mark.parametrize(("good", "defective"), [(1, 1), (20, 1), (1, 20), (20, 0), (0, 20)])
def test_too_few_groups(good: int, defective: int) -> None:
    for seed in range(4):
        word = "good" if good < 2 else "defective"
        having = min(good, defective)
        groups = "is 1 group" if having == 1 else f"are {having} groups"
        raised(
            functools.partial(divided, fake(good, defective), seed),
            f"no {word} image",
            f"there {groups} of {word} images",
            "2 are the least",
        )


def test_one_group_of_each_class_says_groups() -> None:
    raised(lambda: divided(fake(9, 9, per_group=9), 0), "there is 1 group of")


@pytest.mark.parametrize("defective", [0, 1])
def test_good_images_alone_divide_where_no_more_is_needed(defective: int) -> None:
    """A single defective image is always in fit."""
    for seed in range(4):
        made = fake(20, defective)
        found = splits.split(made, seed, 0.2, 0.2, ("fit", "calibration"), labels=(False,))
        counts = found.counts()
        assert all(counts[name][0] for name in ("fit", "calibration", "test"))
        assert [counts[name][1] for name in ("fit", "calibration", "test")] == [defective, 0, 0]
    raised(
        lambda: splits.split(fake(1, 20), 0, 0.2, 0.2, ("fit", "calibration"), labels=(False,)),
        "calibration has no good image", "there is 1 group", "add images of other parts",
    )  # fmt: skip


def test_the_largest_group_is_not_always_in_test() -> None:
    made = fake(60, 20)
    big = tuple(
        dataclasses.replace(s, group="big") if i < 8 else s for i, s in enumerate(made.samples)
    )
    found = {divided(Manifest(made.root, big), seed).samples[0].split for seed in range(20)}
    assert {"test", "fit"} <= found


def test_duplicates_are_one_group() -> None:
    made = fake(40, 20, grouped=False)
    rows = [
        dataclasses.replace(s, pixel_sha256=f"p{i % 10 + (40 if s.defective else 0)}")
        for i, s in enumerate(made.samples)
    ]
    for seed in range(5):
        done = divided(Manifest(made.root, tuple(rows)), seed)
        where: dict[str | None, set[str | None]] = {}
        for sample in done.samples:
            where.setdefault(sample.pixel_sha256, set()).add(sample.split)
        assert all(len(found) == 1 for found in where.values())


def test_equal_images_with_two_labels() -> None:
    made = fake(10, 10)
    rows = [dataclasses.replace(s, pixel_sha256=f"p{i % 10}") for i, s in enumerate(made.samples)]
    raised(
        lambda: divided(Manifest(made.root, tuple(rows)), 0),
        "10 pairs",
        "0003.png and 0013.png",
        "keep one of each",
    )


def test_no_test_part() -> None:
    counts = splits.split(fake(40, 20), 0, 0.0, 0.2, ("fit", "calibration")).counts()
    assert set(counts) == {"fit", "calibration"} and counts["calibration"] == (8, 4)


@pytest.mark.parametrize("fractions", [(-0.1, 0.2), (0.6, 0.2), (0.2, 0), (0.2, 0.51)])
def test_refused_fractions(fractions: tuple[float, float]) -> None:
    raised(
        lambda: splits.split(fake(9, 9), 0, *fractions, ("fit",)),
        "fraction is",
        error=SettingsError,
    )


def test_digests_are_needed() -> None:
    made = Manifest(Path("/r"), (Sample(Path("/r/a.png"), False),))
    raised(lambda: divided(made, 0), "a.png", "digested")


def stated(made: Manifest, *cycle: str | None) -> Manifest:
    return Manifest(
        made.root,
        tuple(
            dataclasses.replace(s, split=cycle[i % len(cycle)]) for i, s in enumerate(made.samples)
        ),
    )


def test_stated_test_is_kept() -> None:
    for word in ("train", None):
        before = stated(fake(40, 20), "test", word, word, word)
        after = divided(before, 3)
        assert after.counts()["test"] == (10, 5)
        assert {s.image for s in after.of("test")} == {s.image for s in before.of("test")}
        assert "train" not in after.counts() and "unsplit" not in after.counts()
    whole = divided(stated(fake(40, 20), "train"), 3)
    assert set(whole.counts()) == {"fit", "calibration"}


def test_stated_fit_and_calibration_are_kept() -> None:
    before = stated(fake(40, 20), "fit", "calibration", "test")
    assert divided(before, 3) == before
    for word in ("train", None):
        mixed = stated(fake(40, 20), "fit", "calibration", word)
        raised(functools.partial(divided, mixed, 3), "for all of them")
    raised(lambda: divided(stated(fake(40, 20), "fit", "test"), 3), "calibration has no good")


def test_stated_splits_that_leak() -> None:
    raised(
        lambda: divided(stated(fake(40, 20, per_group=2), "test", "train"), 0),
        "same group",
        "0000.png (test)",
        error=LeakError,
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"image": Path("/data/0000.png")}, "same file"),
        ({"sha256": "f0"}, "same bytes"),
        ({"pixel_sha256": "p0"}, "same pixels"),
        ({"group": "False0"}, "same group"),
    ],
)
def test_audit_names_each_pair(change: dict[str, object], what: str) -> None:
    made = stated(fake(3, 0), "fit", "calibration", "test")
    splits.check_leaks(made)
    rows = list(made.samples)
    rows[2] = dataclasses.replace(rows[2], **change)  # type: ignore[arg-type]
    name = "0000.png" if what == "same file" else "0002.png"
    raised(
        lambda: splits.check_leaks(Manifest(made.root, tuple(rows))),
        "1 pairs",
        f"0000.png (fit) and {name} (test): {what}",
        error=LeakError,
    )


def test_audit_lists_twenty_and_allows_what_is_unsplit() -> None:
    made = fake(60, 0, per_group=60)
    splits.check_leaks(made)
    raised(
        lambda: splits.check_leaks(stated(made, "fit", "test")),
        "30 pairs",
        "and 10 more",
        error=LeakError,
    )


def test_a_seed_gives_the_same_split_in_every_version() -> None:
    rows = tuple(
        Sample(
            Path(f"/r/{i:03d}.png"),
            i % 7 == 0,
            group=None if i % 5 == 0 else f"g{i // 3 if i % 2 else i // 4}",
            sha256=f"{i}",
            pixel_sha256=hashlib.sha256(f"{i % 7 == 0}{i % 65}".encode()).hexdigest(),
        )
        for i in range(90)
    )
    made = Manifest(Path("/r"), rows)
    found = ["".join(str(s.split)[0] for s in divided(made, seed).samples) for seed in range(3)]
    assert found == [
        "tffttftfffffffftfffftfffffffffcffcfcfffcfcffctccffttctcffffftfctfcffttftfffffcfftffftttfff",
        "fccfffffffffffftfffftcfcffftctffcfcftfttttfffcfffccftftfffffffftcfccfftffffffffttffftttfcf",
        "fffffffttfffffffftfttftftftfffcffcfffcfctcffcfcfcfffcfcfffffttfcftffffffftffftfffftfctctft",
    ]
