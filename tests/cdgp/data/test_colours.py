"""Colour profiles against formulas and ImageCms; what else files state; images without content."""

import io
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageCms
from tests.cdgp.data import profiles
from tests.helpers import WHITE, surface
from tests.refused import rows

from cdgp.data import colours, images
from cdgp.errors import ImageError
from cdgp_bench.studies.refused import Row

RNG = np.random.default_rng(0)
COLOUR = RNG.integers(0, 256, (24, 32, 3), np.uint8)
GREY = COLOUR[..., 0].copy()
INKS = RNG.integers(0, 256, (24, 32, 4), np.uint8)
LEVEL = 1 / 255
Made = tuple[Path, NDArray[Any] | None]
"""A file, and its pixels in [0, 1] where they are known: grey (H, W) or RGB."""


def by_image_cms(image: Image.Image, profile: bytes) -> NDArray[Any]:
    """Pillow's own conversion to sRGB, in 8 bits, without the tables that lcms rounds by."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    target, flags = ImageCms.createProfile("sRGB"), ImageCms.Flags(colours.FLAGS)
    made = ImageCms.profileToProfile(
        image, source, target, ImageCms.Intent.RELATIVE_COLORIMETRIC, "RGB", flags=flags
    )
    assert made is not None
    return np.asarray(made) / 255


def saved(path: Path, values: NDArray[Any], **options: Any) -> Path:
    Image.fromarray(values).save(path, **options)
    return path


def linear_rgb(folder: Path) -> Made:
    path = saved(folder / "a.png", COLOUR, icc_profile=profiles.LINEAR)
    return path, profiles.srgb_of(COLOUR / 255)


def linear_grey(folder: Path) -> Made:
    path = saved(folder / "a.jpg", GREY, quality=95, icc_profile=profiles.GREY_LINEAR)
    return path, profiles.srgb_of(np.asarray(Image.open(path)) / 255)


def adobe_rgb(folder: Path) -> Made:
    path = saved(folder / "a.jpg", COLOUR, quality=95, icc_profile=profiles.ADOBE)
    return path, by_image_cms(Image.open(path), profiles.ADOBE)


def gamma_22_tiff(folder: Path) -> Made:
    path = saved(folder / "a.tif", COLOUR, icc_profile=profiles.GAMMA_22)
    return path, profiles.srgb_of((COLOUR / 255) ** 2.2)


def grey_16_bit(folder: Path) -> Made:
    deep = GREY.astype(np.uint16) * 256 + 3
    (folder / "a.png").write_bytes(imagecodecs.png_encode(deep))
    content = b"grey\0\0" + zlib.compress(profiles.GREY_22)
    path = profiles.png_with(folder / "a.png", iCCP=content)
    return path, profiles.srgb_of((deep / 65535) ** 2.2)


def tiff_in_linear_light(folder: Path, values: NDArray[Any]) -> Path:
    tifffile.imwrite(
        folder / "a.tif", values, photometric="rgb",
        extratags=[(34675, 7, len(profiles.LINEAR), profiles.LINEAR, True)],
    )  # fmt: skip
    return folder / "a.tif"


def rgb_16_bit_tiff(folder: Path) -> Made:
    deep = COLOUR.astype(np.uint16) * 256 + 3
    return tiff_in_linear_light(folder, deep), profiles.srgb_of(deep / 65535)


def float_tiff(folder: Path) -> Made:
    values = (COLOUR / 255).astype(np.float32)
    return tiff_in_linear_light(folder, values), profiles.srgb_of(values)


def webp_profile(folder: Path) -> Made:
    path = saved(folder / "a.webp", COLOUR, lossless=True, icc_profile=profiles.ADOBE)
    return path, by_image_cms(Image.fromarray(COLOUR), profiles.ADOBE)


def avif_profile(folder: Path) -> Made:
    path = saved(folder / "a.avif", COLOUR, quality=95, icc_profile=profiles.ADOBE)
    return path, by_image_cms(Image.open(path), profiles.ADOBE)


def jpeg_2000_rgb(folder: Path) -> Made:
    """The decoder converts it, in 8 bits."""
    path = profiles.jp2_with_profile(folder / "a.jp2", COLOUR, profiles.LINEAR)
    return path, np.rint(255 * profiles.srgb_of(COLOUR / 255)) / 255


def jpeg_2000_grey(folder: Path) -> Made:
    deep = GREY.astype(np.uint16) * 257
    return profiles.jp2_with_profile(folder / "a.jp2", deep, profiles.GREY_LINEAR), None


def bmp_profile(folder: Path) -> Made:
    path = profiles.bmp_with_profile(folder / "a.bmp", COLOUR, profiles.LINEAR)
    return path, profiles.srgb_of(COLOUR / 255)


def palette_profile(folder: Path) -> Made:
    palette = Image.fromarray(GREY // 64)
    entries = COLOUR[0, :4]
    palette.putpalette(entries.ravel().tolist())
    palette.save(folder / "a.png", icc_profile=profiles.LINEAR)
    return folder / "a.png", profiles.srgb_of(entries[GREY // 64] / 255)


def alpha_profile(folder: Path) -> Made:
    four = np.dstack([COLOUR, GREY])
    path = saved(folder / "a.png", four, icc_profile=profiles.LINEAR)
    return path, profiles.srgb_of(COLOUR / 255) * (GREY / 255)[..., None]


def srgb_profile(folder: Path) -> Made:
    return saved(folder / "a.png", COLOUR, icc_profile=profiles.SRGB), COLOUR / np.float32(255)


def grey_with_srgb(folder: Path) -> Made:
    return saved(folder / "a.png", GREY, icc_profile=profiles.SRGB), GREY / np.float32(255)


def grey_with_p3(folder: Path) -> Made:
    return saved(folder / "a.png", GREY, icc_profile=profiles.DISPLAY_P3), GREY / np.float32(255)


def cmyk_profile(folder: Path) -> Made:
    path, profile = folder / "a.jpg", profiles.cmyk_profile()
    profiles.cmyk(INKS).save(path, quality=95, icc_profile=profile)
    return path, by_image_cms(Image.open(path), profile)


def cmyk_adobe(folder: Path) -> Made:
    profiles.cmyk(INKS).save(folder / "a.jpg", quality=95)
    return folder / "a.jpg", np.asarray(Image.open(folder / "a.jpg").convert("RGB")) / 255


def grey_with_linear_rgb(folder: Path) -> Made:
    return saved(folder / "a.png", GREY, icc_profile=profiles.LINEAR), GREY / 255


def rgb_with_grey(folder: Path) -> Made:
    return saved(folder / "a.png", COLOUR, icc_profile=profiles.GREY_LINEAR), COLOUR / 255


def lab_profile(folder: Path) -> Made:
    return saved(folder / "a.png", COLOUR, icc_profile=profiles.LAB), COLOUR / 255


def damaged_profile(folder: Path) -> Made:
    path = saved(folder / "a.jpg", COLOUR, icc_profile=profiles.LINEAR[:200])
    return path, np.asarray(Image.open(path)) / 255


def undeclared_fragments(folder: Path) -> Made:
    path = saved(folder / "a.jpg", COLOUR)
    part = b"ICC_PROFILE\0" + bytes([1, 2]) + profiles.LINEAR[:300]
    profiles.jpeg_with(path, 0xE2, part)
    return path, np.asarray(Image.open(path)) / 255


def damaged_iccp(folder: Path) -> Made:
    path = saved(folder / "a.png", COLOUR)
    content = b"linear\0\0" + zlib.compress(profiles.LINEAR)[:-60]
    return profiles.png_with(path, iCCP=content), COLOUR / 255


def png_stating(**chunks: bytes) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        path = saved(folder / "a.png", COLOUR)
        return profiles.png_with(path, **chunks), COLOUR / 255

    return make


def uints(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "big") for value in values)


BT_2020 = uints(31270, 32900, 70800, 29200, 17000, 79700, 13100, 4600)


def exif_adobe_rgb(folder: Path) -> Made:
    exif = Image.Exif()
    exif.get_ifd(0x8769).update({0xA001: 65535, 0xA005: {1: "R03"}})
    path = saved(folder / "a.jpg", COLOUR, exif=exif)
    return path, np.asarray(Image.open(path)) / 255


def cmyk_unmarked(folder: Path) -> Made:
    path, expected = cmyk_adobe(folder)
    return profiles.jpeg_without(path, 0xEE), expected


def alpha_zero(folder: Path) -> Made:
    return saved(folder / "a.png", np.dstack([COLOUR, GREY * 0])), COLOUR * 0.0


def frame(level: float, sigma: float, hot: int = 0) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        rng = np.random.default_rng(0)
        values = np.clip(np.rint(rng.normal(level, sigma, (96, 64))), 0, 255).astype(np.uint8)
        values.ravel()[rng.choice(values.size, hot, replace=False)] = 255
        return saved(folder / "a.png", values), values / 255

    return make


def flat_colour(folder: Path) -> Made:
    values = np.broadcast_to(np.array([200, 30, 60], np.uint8), (20, 20, 3))
    return saved(folder / "a.png", values), values / 255


def equal_brightness(folder: Path) -> Made:
    values = np.zeros((20, 20, 3), np.uint8)
    values[:, :10], values[:, 10:] = (120, 60, 60), (60, 60, 120)
    return saved(folder / "a.png", values), values / 255


def dim_part(folder: Path) -> Made:
    values = surface(0) // 11
    values[20:40, 10:50] += 8
    assert 11 < values.mean() < 14 and values.max() < 24
    return saved(folder / "a.png", values), values / 255


MAKERS: dict[str, Callable[[Path], Made]] = {
    "linear-rgb": linear_rgb,
    "linear-grey": linear_grey,
    "adobe-rgb": adobe_rgb,
    "gamma-22-tiff": gamma_22_tiff,
    "grey-16-bit": grey_16_bit,
    "rgb-16-bit-tiff": rgb_16_bit_tiff,
    "float-tiff": float_tiff,
    "webp-profile": webp_profile,
    "avif-profile": avif_profile,
    "jpeg-2000-rgb": jpeg_2000_rgb,
    "jpeg-2000-grey": jpeg_2000_grey,
    "bmp-profile": bmp_profile,
    "palette-profile": palette_profile,
    "alpha-profile": alpha_profile,
    "srgb-profile": srgb_profile,
    "grey-with-srgb": grey_with_srgb,
    "grey-with-p3": grey_with_p3,
    "cmyk-profile": cmyk_profile,
    "cmyk-adobe": cmyk_adobe,
    "grey-with-linear-rgb": grey_with_linear_rgb,
    "rgb-with-grey": rgb_with_grey,
    "lab-profile": lab_profile,
    "damaged-profile": damaged_profile,
    "undeclared-fragments": undeclared_fragments,
    "damaged-iccp": damaged_iccp,
    "gama-linear": png_stating(gAMA=uints(100_000)),
    "gama-usual": png_stating(gAMA=uints(45_455)),
    "gama-and-srgb": png_stating(sRGB=b"\0", gAMA=uints(100_000)),
    "chrm-wide": png_stating(gAMA=uints(45_455), cHRM=BT_2020),
    "cicp-hdr": png_stating(cICP=bytes([9, 16, 0, 1])),
    "cicp-video": png_stating(cICP=bytes([1, 13, 0, 0])),
    "cicp-short": png_stating(cICP=bytes([9])),
    "exif-adobe-rgb": exif_adobe_rgb,
    "cmyk-unmarked": cmyk_unmarked,
    "alpha-zero": alpha_zero,
    "black-frame": frame(1, 0.6, hot=50),
    "black-noise": frame(5, 6, hot=40),
    "white-frame": frame(253, 2),
    "flat-colour": flat_colour,
    "equal-brightness": equal_brightness,
    "dim-part": dim_part,
}


@rows("colours", MAKERS)
def test_colours_are_srgb_or_told(tmp_path: Path, row: Row) -> None:
    """Converted values are within half a level of the formula; what is not converted is exact."""
    path, expected = MAKERS[row.id](tmp_path)
    if row.result == "refused":
        with pytest.raises(ImageError, match=row.says):
            images.read_image(path, WHITE)
        return
    pixels, facts = images.read_with_facts(path, WHITE)
    nothing = images.no_content(pixels)
    told = [*facts.warnings, *([nothing] if nothing else [])]
    assert len(told) == (row.result == "warned") and all(row.says in text for text in told)
    assert not any(str(path) in text for text in told)
    assert expected is not None
    shown = expected[..., None] if expected.ndim == 2 else expected
    # Half a level and a little where ImageCms rounds to 8 bits; what is not converted is exact.
    tolerance = 0.55 * LEVEL if facts.profile else 1e-6
    tolerance = 1.01 * LEVEL if facts.format == "JPEG2000" else tolerance  # both are rounded
    np.testing.assert_allclose(pixels, np.broadcast_to(shown, pixels.shape), atol=tolerance)


@pytest.mark.parametrize("kind", ["8-bit", "16-bit", "float"])
@pytest.mark.parametrize("values", [GREY, COLOUR], ids=["grey", "colour"])
def test_converting_is_exact_at_every_depth(
    tmp_path: Path, kind: str, values: NDArray[Any]
) -> None:
    """Linear light by the formula of sRGB to 0.01 levels: lcms's own tables miss by 10."""
    stored = {
        "8-bit": values,
        "16-bit": values.astype(np.uint16) * 257,
        "float": (values / 255).astype(np.float32),
    }[kind]
    profile = profiles.GREY_LINEAR if values.ndim == 2 else profiles.LINEAR
    tifffile.imwrite(
        tmp_path / "a.tif", stored, photometric="minisblack" if values.ndim == 2 else "rgb",
        extratags=[(34675, 7, len(profile), profile, True)],
    )  # fmt: skip
    pixels, facts = images.read_with_facts(tmp_path / "a.tif", WHITE)
    assert facts.profile and facts.warnings == ()
    expected = profiles.srgb_of(values / 255)
    expected = np.repeat(expected[..., None], 3, 2) if values.ndim == 2 else expected
    np.testing.assert_allclose(pixels, expected, atol=0.01 * LEVEL)
    if values.ndim == 2:
        assert (pixels[..., 0] == pixels[..., 1]).all() and (pixels[..., 0] == pixels[..., 2]).all()


def test_white_level_comes_before_the_profile(tmp_path: Path) -> None:
    twelve = GREY.astype(np.uint16) * 16
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(twelve))
    content = b"grey\0\0" + zlib.compress(profiles.GREY_LINEAR)
    path = profiles.png_with(tmp_path / "a.png", iCCP=content)
    expected = profiles.srgb_of(twelve / 4095)
    np.testing.assert_allclose(images.read_image(path, 4095)[..., 1], expected, atol=0.01 * LEVEL)


def test_pixels_without_a_profile_are_what_they_were(tmp_path: Path) -> None:
    """The arithmetic of a division and a product, bit for bit, in float32."""
    four = np.dstack([COLOUR, GREY])
    path = saved(tmp_path / "a.png", four)
    alpha = GREY[..., None].astype(np.float32) / np.float32(255)
    expected = COLOUR.astype(np.float32) / np.float32(255) * alpha
    assert np.array_equal(images.read_image(path, WHITE), expected)
    deep = COLOUR.astype(np.uint16) * 257
    (tmp_path / "d.png").write_bytes(imagecodecs.png_encode(deep))
    expected = deep.astype(np.float32) / np.float32(65535)
    assert np.array_equal(images.read_image(tmp_path / "d.png", WHITE), expected)


def test_a_cmyk_jpeg_without_a_marker_has_two_brightnesses(tmp_path: Path) -> None:
    light = (INKS // 8).astype(np.uint8)
    profiles.cmyk(light).save(tmp_path / "a.jpg", quality=100)
    path = profiles.jpeg_without(tmp_path / "a.jpg", 0xEE)
    pixels, facts = images.read_with_facts(path, WHITE)
    other = np.asarray(profiles.cmyk(255 - light).convert("RGB")) / 255
    assert facts.swapped == pytest.approx(other.mean(), abs=0.01)
    assert facts.swapped is not None and pixels.mean() > 0.8 > 0.1 > facts.swapped


def test_content_of_large_images_is_that_of_all_their_pixels() -> None:
    """A large image is looked at coarsely first: what lies between those pixels counts too."""
    flat = np.full((1100, 1100, 3), 0.5, np.float32)
    assert images.no_content(flat)
    flat[1::2, 1::2] = 0.8  # a coarse look at every fourth pixel sees none of it
    assert not images.no_content(flat)


def test_a_small_defect_in_a_textured_part_is_content() -> None:
    for seed in range(5):
        pixels = np.repeat(surface(seed)[..., None] / np.float32(255), 3, 2)
        assert not images.no_content(np.asarray(pixels, np.float32))
