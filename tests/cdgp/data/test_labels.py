"""Label files told from images by their names."""

from pathlib import Path

import pytest
from PIL import Image
from tests.helpers import noise_image

from cdgp.data.labels import LABEL_WORDS, tell_labels


def told(folder: Path, *names: str) -> tuple[list[str], list[str], list[str]]:
    """(images, labels, orphans) of photographs of these names."""
    paths = sorted(noise_image(folder / name, seed=i) for i, name in enumerate(names))
    found = tell_labels(paths)
    return tuple([p.name for p in part] for part in (found.images, found.labels, found.orphans))  # type: ignore[return-value]


@pytest.mark.parametrize("word", LABEL_WORDS)
@pytest.mark.parametrize("form", ["_{}", "-{}", ".{}", " {}", "_{}_2", "_{}2", ".png_{}"])
def test_every_ending_in_any_case(tmp_path: Path, word: str, form: str) -> None:
    for number, text in enumerate((word, word.upper(), word.title())):
        label = f"7{form.format(text)}.bmp"
        assert told(tmp_path / str(number), "7.png", label) == (["7.png"], [label], [])


def test_accents_and_case_of_the_image(tmp_path: Path) -> None:
    names = ["U\u0308.PNG", "\u00fc_mask.png"]
    assert told(tmp_path, *names) == ([names[0]], [names[1]], [])


def test_a_label_of_a_label_belongs_to_the_image(tmp_path: Path) -> None:
    for name in ("7.png", "7_mask.png", "7_mask_gt.png"):
        noise_image(tmp_path / name)
    found = tell_labels(sorted(tmp_path.iterdir()))
    assert set(found.labels) == {tmp_path / "7_mask.png", tmp_path / "7_mask_gt.png"}
    assert list(found.labels.values()) == [[tmp_path / "7.png"]] * 2


@pytest.mark.parametrize(
    "names",
    [
        ("7.png", "7_2.png", "8.png"),
        ("mask.png", "label.png"),
        ("7_masked.png", "7_unlabel.png", "7_gto.png"),
        ("front_mask.png", "back_mask.png"),
        ("mask_7.png", "7.png"),  # named so in front, but a photograph
    ],
)
def test_images_stay_images(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert told(tmp_path, *names) == (sorted(names), [], [])


def test_orphans_beside_label_files(tmp_path: Path) -> None:
    names = ("1.png", "1_mask.png", "2_mask.png", "3.png")
    assert told(tmp_path, *names) == (["1.png", "3.png"], ["1_mask.png"], ["2_mask.png"])


def flat(path: Path, *values: int) -> Path:
    """Write a grey image of vertical stripes, one of each value."""
    image = Image.new("L", (len(values), 1))
    image.putdata(values)
    image.resize((40, 40), Image.Resampling.NEAREST).save(path)
    return path


@pytest.mark.parametrize("name", ["{}_scratch", "{}-binary_1", "{}mask", "maske_{}", "{}.defect"])
def test_any_further_word_with_few_colours(tmp_path: Path, name: str) -> None:
    images = [noise_image(tmp_path / f"{i}.png", seed=i) for i in range(12)]
    labels = [flat(tmp_path / f"{name.format(i)}.png", 0, 255 * (i > 5)) for i in range(12)]
    found = tell_labels(sorted(tmp_path.iterdir()))
    assert found.images == sorted(images)
    assert found.labels == {label: [image] for label, image in zip(labels, images, strict=True)}


def test_images_of_few_colours_stay_images(tmp_path: Path) -> None:
    """Black frames of a second camera, a set of two tones, and names without a shared word."""
    noise_image(tmp_path / "7.png")
    flat(tmp_path / "7_back.png", 0)
    flat(tmp_path / "8.png", 0, 255)
    flat(tmp_path / "8_back.png", 0, 255)
    flat(tmp_path / "77.png", 0, 255)
    flat(tmp_path / "7_2.png", 0, 255)
    files = sorted(tmp_path.iterdir())
    assert tell_labels(files).images == files
