"""Connected components against a search by hand; groups by name and by equal pixels."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers import raised

from cdgp.data.groups import connected, group_members, group_numbers
from cdgp.data.manifest import Manifest, Sample

ROOT = Path("/r")


def by_search(count: int, pairs: list[tuple[int, int]]) -> list[list[int]]:
    """Components by walking from each position that was not reached yet."""
    neighbours: dict[int, set[int]] = {i: set() for i in range(count)}
    for a, b in pairs:
        neighbours[a].add(b)
        neighbours[b].add(a)
    found: list[list[int]] = []
    reached: set[int] = set()
    for start in range(count):
        if start in reached:
            continue
        component, waiting = {start}, [start]
        while waiting:
            for other in neighbours[waiting.pop()] - component:
                component.add(other)
                waiting.append(other)
        reached |= component
        found.append(sorted(component))
    return found


@given(st.data())
def test_components_are_those_of_a_search(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    position = st.integers(0, count - 1)
    pairs = data.draw(st.lists(st.tuples(position, position), max_size=40))
    assert connected(count, pairs) == by_search(count, pairs)


def test_components_of_nothing() -> None:
    assert connected(0, []) == []
    assert connected(3, []) == [[0], [1], [2]]


def sample(i: int, pixels: str | None, group: str | None) -> Sample:
    return Sample(ROOT / f"{i}.png", False, group=group, pixel_sha256=pixels)


def test_groups_join_by_name_and_by_equal_pixels() -> None:
    rows = (
        sample(0, "p0", "a"), sample(1, "p1", "b"), sample(2, "p1", "a"), sample(3, "p3", None),
        sample(4, "p3", None), sample(5, "b", None), sample(6, "p6", None),
    )  # fmt: skip
    made = Manifest(ROOT, rows)
    assert group_members(made, made.samples) == [[0, 1, 2], [3, 4], [5], [6]]
    numbers = group_numbers(made, made.samples)
    expected = np.empty(7, int)
    least = {"p0": [0, 1, 2], "p3": [3, 4], "b": [5], "p6": [6]}
    order = sorted(least, key=lambda pixels: hashlib.sha256(f"0:{pixels}".encode()).hexdigest())
    for number, pixels in enumerate(order):
        expected[least[pixels]] = number
    np.testing.assert_array_equal(numbers, expected)
    renamed = replace(made, samples=tuple(
        replace(s, image=ROOT / f"{9 - i}.png") for i, s in enumerate(made.samples)
    ))  # fmt: skip
    np.testing.assert_array_equal(group_numbers(renamed, renamed.samples), numbers[::-1])


def test_pixel_digests_are_needed() -> None:
    made = Manifest(ROOT, (sample(0, None, "a"),))
    raised(lambda: group_numbers(made, made.samples), "0.png", "digested")
