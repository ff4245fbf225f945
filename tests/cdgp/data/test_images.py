"""Reading images: depth, colour, orientation, masks, unreadable files, the one resize."""

import hashlib
import io
import struct
import subprocess
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.helpers import WHITE

from cdgp.data import formats, images
from cdgp.errors import ImageError, SettingsError
from cdgp.files import digest

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (20, 30), np.uint8)
COLOUR = RNG.integers(0, 256, (20, 30, 3), np.uint8)
ALPHA = RNG.integers(0, 256, (20, 30), np.uint8)


def unit(values: NDArray[Any]) -> NDArray[Any]:
    """uint8 grey or RGB as HWC float32 RGB in [0, 1]."""
    values = np.repeat(values[..., None], 3, 2) if values.ndim == 2 else values
    return values.astype(np.float32) / np.float32(255)


def save(path: Path, values: NDArray[Any], **options: Any) -> Path:
    Image.fromarray(values).save(path, **options)
    return path


def unreadable(path: Path, *words: str, white_level: int = WHITE) -> str:
    """The message of the error, which begins with the path and holds the words."""
    with pytest.raises(ImageError) as caught:
        images.read_image(path, white_level)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert all(word in message for word in words), message
    return message


# ------------------------------------------------------------------------------- depth and colour


@pytest.mark.parametrize("name", ["a.png", "a.bmp", "a.tif", "a.tiff", "a.webp"])
@pytest.mark.parametrize("values", [GREY, COLOUR], ids=["grey", "colour"])
def test_8_bit_is_divided_by_255(tmp_path: Path, name: str, values: NDArray[Any]) -> None:
    options = {"lossless": True} if name.endswith("webp") else {}
    image = images.read_image(save(tmp_path / name, values, **options), WHITE)
    assert image.dtype == np.float32 and image.flags.c_contiguous
    np.testing.assert_array_equal(image, unit(values))


@pytest.mark.parametrize("kind", ["png", "tif", "tif-big-endian", "tif-zlib"])
@pytest.mark.parametrize("values", [GREY, COLOUR], ids=["grey", "colour"])
def test_16_bit_keeps_every_level(tmp_path: Path, kind: str, values: NDArray[Any]) -> None:
    deep = values.astype(np.uint16) * 256 + 3
    path = tmp_path / f"a.{kind[:3]}"
    if kind == "png":
        path.write_bytes(imagecodecs.png_encode(deep))
    else:
        tifffile.imwrite(
            path,
            deep,
            byteorder=">" if "big" in kind else "<",
            compression="zlib" if "zlib" in kind else None,
            photometric="minisblack" if deep.ndim == 2 else "rgb",
        )
    expected = unit(deep) * np.float32(255) / np.float32(65535)
    np.testing.assert_allclose(images.read_image(path, WHITE), expected, atol=1e-7)


def test_16_bit_with_alpha_and_planar_rgb(tmp_path: Path) -> None:
    deep = np.dstack([COLOUR, ALPHA]).astype(np.uint16) * 257
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(deep))
    tifffile.imwrite(tmp_path / "a.tif", deep, photometric="rgb", extrasamples=["unassalpha"])
    composed = unit(COLOUR) * (ALPHA / np.float32(255))[..., None]
    for name in ("a.png", "a.tif"):
        np.testing.assert_allclose(images.read_image(tmp_path / name, WHITE), composed, atol=1e-6)
    planar = deep[..., :3].transpose(2, 0, 1)
    tifffile.imwrite(tmp_path / "p.tif", planar, photometric="rgb", planarconfig="separate")
    np.testing.assert_allclose(
        images.read_image(tmp_path / "p.tif", WHITE), unit(COLOUR), atol=1e-6
    )


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("kind", ["unspecified", "assocalpha"])
def test_a_fourth_channel_that_is_no_straight_alpha_is_left_out(
    tmp_path: Path, dtype: type, kind: str
) -> None:
    """A near-infrared band is ignored, and premultiplied colours are over black already."""
    four: NDArray[Any] = np.dstack([np.minimum(COLOUR, ALPHA[..., None]), ALPHA]).astype(dtype)
    four *= 257 if dtype == np.uint16 else 1
    tifffile.imwrite(tmp_path / "a.tif", four, photometric="rgb", extrasamples=[kind])
    expected = unit(np.minimum(COLOUR, ALPHA[..., None]))
    found = images.read_image(tmp_path / "a.tif", WHITE)
    tolerance = 1e-6 if dtype == np.uint16 else 1.01 / 255
    np.testing.assert_allclose(found, expected, atol=tolerance)


def test_white_level_of_a_12_bit_camera_with_alpha(tmp_path: Path) -> None:
    deep = np.dstack([COLOUR.astype(np.uint16) * 16, ALPHA.astype(np.uint16) * 257])
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(deep))
    expected = (COLOUR / 255 * 4080 / 4095) * (ALPHA / 255)[..., None]
    np.testing.assert_allclose(images.read_image(tmp_path / "a.png", 4095), expected, atol=1e-5)


def test_white_level_of_a_12_bit_camera(tmp_path: Path) -> None:
    deep = GREY.astype(np.uint16) * 16
    path = save(tmp_path / "a.png", deep)
    expected = np.repeat((deep / 4095)[..., None], 3, 2)
    np.testing.assert_allclose(images.read_image(path, 4095), expected, atol=1e-6)
    unreadable(path, "set white_level to 4095", str(deep.max()), white_level=1000)
    for level in (0, 65536):
        with pytest.raises(SettingsError, match=str(level)):
            images.read_image(path, level)


def test_white_level_does_not_touch_8_bit(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", GREY)
    np.testing.assert_array_equal(images.read_image(path, 100), unit(GREY))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_float_tiff(tmp_path: Path, dtype: type) -> None:
    tifffile.imwrite(tmp_path / "a.tif", (GREY / 255).astype(dtype))
    np.testing.assert_allclose(images.read_image(tmp_path / "a.tif", WHITE), unit(GREY), atol=1e-3)


def test_float_tiff_outside_0_to_1(tmp_path: Path) -> None:
    values = unit(GREY)[..., 0].copy()
    values[0, :2], values[1, 0] = np.nan, np.inf
    tifffile.imwrite(tmp_path / "nan.tif", values)
    unreadable(tmp_path / "nan.tif", "3 non-finite pixels")
    colour = unit(COLOUR).copy()
    colour[3, 4] = (1.5, -1, 0)
    tifffile.imwrite(tmp_path / "high.tif", colour, photometric="rgb")
    unreadable(tmp_path / "high.tif", "1 pixels outside 0..1", "from -1 to 1.5")


@pytest.mark.parametrize("kind", ["int16", "uint32", "stack", "five", "pages"])
def test_tiff_that_is_not_a_image(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tif"
    if kind == "stack":
        deep = np.zeros((16, 32, 32), np.uint16)
        tifffile.imwrite(path, deep, volumetric=True, tile=(16, 16, 16), photometric="minisblack")
        unreadable(path, "holds a stack (ZYX)")
    elif kind == "five":
        tifffile.imwrite(
            path, np.zeros((16, 16, 5), np.uint16), photometric="minisblack", planarconfig="contig"
        )
        unreadable(path, "5 channels", "save it as")
    elif kind == "pages":
        tifffile.imwrite(path, np.zeros((2, 16, 16), np.uint16), photometric="minisblack")
        unreadable(path, "holds 2 pages")
    else:
        tifffile.imwrite(path, np.zeros((16, 16), kind))
        unreadable(path, kind, "save it as 8- or 16-bit")


def test_animation_is_refused(tmp_path: Path) -> None:
    frames = [Image.fromarray(COLOUR), Image.fromarray(255 - COLOUR)]
    for name in ("a.webp", "a.png"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        unreadable(tmp_path / name, "holds 2 pages")


def test_a_phones_mpo_is_its_first_frame(tmp_path: Path) -> None:
    frames = [Image.fromarray(COLOUR), Image.fromarray(GREY)]
    frames[0].save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=frames[1:])
    assert images.read_image(tmp_path / "a.jpg", WHITE).shape == (20, 30, 3)


def test_transparent_pixels_are_composed_over_black(tmp_path: Path) -> None:
    alpha = (ALPHA / np.float32(255))[..., None]
    rgba = save(tmp_path / "rgba.png", np.dstack([COLOUR, ALPHA]))
    np.testing.assert_allclose(images.read_image(rgba, WHITE), unit(COLOUR) * alpha, atol=1e-6)
    la = tmp_path / "la.png"
    Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(ALPHA)]).save(la)
    np.testing.assert_allclose(images.read_image(la, WHITE), unit(GREY) * alpha, atol=1e-6)


def test_palette_one_bit_and_cmyk(tmp_path: Path) -> None:
    index = (GREY // 64).astype(np.uint8)
    colours = np.array([[9, 200, 30], [1, 2, 3], [250, 0, 128], [77, 77, 77]], np.uint8)
    palette = Image.fromarray(index)
    palette.putpalette(colours.ravel().tolist())
    palette.save(tmp_path / "p.png")
    np.testing.assert_array_equal(
        images.read_image(tmp_path / "p.png", WHITE), unit(colours[index])
    )
    palette.save(tmp_path / "t.png", transparency=2)
    clear = np.where((index == 2)[..., None], 0, unit(colours[index]))
    np.testing.assert_array_equal(images.read_image(tmp_path / "t.png", WHITE), clear)
    bits = GREY > 100
    for name in ("b.png", "b.bmp", "b.tif"):
        path = save(tmp_path / name, bits)
        np.testing.assert_array_equal(images.read_image(path, WHITE), unit(bits * np.uint8(255)))
    Image.fromarray(COLOUR).convert("CMYK").save(tmp_path / "c.tif")
    np.testing.assert_allclose(
        images.read_image(tmp_path / "c.tif", WHITE), unit(COLOUR), atol=0.01
    )


# ---------------------------------------------------------------------------- orientation and size


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(
    "kind", ["8-bit png", "16-bit png", "8-bit tif", "16-bit tif", "8-bit lzw tif"]
)
def test_images_stand_upright(tmp_path: Path, kind: str, orientation: int) -> None:
    path = tmp_path / f"a.{kind[-3:]}"
    values = GREY if kind.startswith("8") else GREY.astype(np.uint16) * 257
    if kind == "16-bit tif":
        tifffile.imwrite(path, values, extratags=[(274, "H", 1, orientation, True)])
    else:
        exif = Image.Exif()
        exif[274] = orientation
        save(path, values, exif=exif, **({"compression": "tiff_lzw"} if "lzw" in kind else {}))
    tagged = Image.fromarray(GREY)
    tagged.getexif()[274] = orientation
    upright = np.asarray(ImageOps.exif_transpose(tagged))
    np.testing.assert_allclose(images.read_image(path, WHITE), unit(upright), atol=1e-6)
    assert images.image_size(path) == upright.shape
    assert images.read_mask(path, upright.shape).shape == upright.shape


def test_minimum_side(tmp_path: Path) -> None:
    thin = save(tmp_path / "thin.png", np.zeros((96, 1), np.uint8))
    unreadable(thin, "image is 1 × 96, smaller than the least that can be scored, 8 × 8")
    unreadable(save(tmp_path / "flat.png", np.zeros((7, 8), np.uint8)), "8 × 7")
    assert images.read_image(save(tmp_path / "ok.png", GREY[:8, :8]), WHITE).shape == (8, 8, 3)
    assert images.image_size(thin) == (96, 1)


def png_claiming(width: int, height: int, bits: int = 8) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    body = zlib.compress(b"\0" * 500)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    )


def test_decompression_bombs_are_refused_from_the_header(tmp_path: Path) -> None:
    path = tmp_path / "claims.png"
    for bits in (8, 16):
        path.write_bytes(png_claiming(60000, 60000, bits))
        unreadable(path, "3600000000 pixels", str(formats.MAX_PIXELS))
        with pytest.raises(ImageError, match="3600000000"):
            images.image_size(path)
    assert Image.MAX_IMAGE_PIXELS is not None and 2 * Image.MAX_IMAGE_PIXELS == formats.MAX_PIXELS


def test_our_own_limit_holds_for_every_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "MAX_PIXELS", 599)
    unreadable(save(tmp_path / "a.png", GREY), "600 pixels", "599")
    tifffile.imwrite(tmp_path / "a.tif", GREY.astype(np.uint16))
    unreadable(tmp_path / "a.tif", "600 pixels", "599")


def test_large_images_make_no_noise(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(png_claiming(12000, 9000, 1))
    code = "import sys, pathlib; from cdgp.data.images import image_size as size; "
    code += f"print(size(pathlib.Path({str(path)!r})))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("(9000, 12000)\n", "")


# ------------------------------------------------------------------------------------ broken files


def test_broken_files_are_listed_and_never_filled(tmp_path: Path) -> None:
    smooth = np.add.outer(np.arange(96), np.arange(96)).astype(np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(smooth).save(jpeg, "JPEG", quality=95)
    deep = imagecodecs.png_encode(RNG.integers(0, 65536, (64, 64, 3), np.uint16))
    tifffile.imwrite(tmp_path / "whole.tif", smooth.astype(np.uint16))
    tiff = (tmp_path / "whole.tif").read_bytes()
    bad = {
        "cut.jpg": jpeg.getvalue()[: int(len(jpeg.getvalue()) * 0.6)],
        "cut.png": save(tmp_path / "whole.png", GREY).read_bytes()[:-30],
        "deep.png": deep[:-2000],
        "cut.tif": tiff[: int(len(tiff) * 0.6)],
        "zero.png": b"",
        "head.jpg": jpeg.getvalue()[:20],
        "head.tif": tiff[:6],
        "page.png": b"<!doctype html><title>Sign in</title>",
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "png_named.jpg").write_bytes((tmp_path / "whole.png").read_bytes())
    (tmp_path / "folder.png").mkdir()
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in sorted(tmp_path.iterdir()):
            try:
                images.read_image(path, WHITE)
            except ImageError as error:
                found[path] = images.reason(error, path)
    assert [path.name for path in found] == sorted([*bad, "folder.png"])
    assert all(why and str(path) not in why for path, why in found.items()), found
    assert found[tmp_path / "zero.png"] == "is empty (0 bytes); copy it again"
    assert "truncated" in found[tmp_path / "cut.jpg"]
    assert "is not a JPEG" in found[tmp_path / "page.png"]


def test_missing_file(tmp_path: Path) -> None:
    unreadable(tmp_path / "gone.png", "there is no such file")
    with pytest.raises(ImageError, match=r"gone\.png"):
        images.image_size(tmp_path / "gone.png")
    with pytest.raises(ImageError, match=r"gone\.png"):
        digest(tmp_path / "gone.png")


def test_a_format_that_is_not_ours(tmp_path: Path) -> None:
    unreadable(save(tmp_path / "a.tga", GREY), "is a TGA image, which cannot be decoded here")


# ------------------------------------------------------------------------------------------- masks

MARKED = np.zeros((20, 30), bool)
MARKED[5:9, 6:20] = True


@pytest.mark.parametrize(
    "values",
    [
        MARKED,
        MARKED * np.uint8(255),
        MARKED * np.uint8(1),
        MARKED * np.uint8(5) - (MARKED & (np.arange(30) > 12)) * np.uint8(4),
        MARKED * np.uint8(236),
        MARKED * np.uint16(65535),
        MARKED * np.uint16(256),
        MARKED.astype(np.float32),
        MARKED[..., None] * np.array([255, 0, 0], np.uint8),
        MARKED[..., None] * np.array([0, 0, 64], np.uint8),
    ],
    ids=["1-bit", "255", "1", "5 and 1", "236", "u16", "u16 256", "float", "red", "dark blue"],
)
def test_every_encoding_of_a_mask(tmp_path: Path, values: NDArray[Any]) -> None:
    path = tmp_path / ("m.tif" if values.dtype == np.float32 else "m.png")
    mask = images.read_mask(save(path, values), (20, 30))
    assert mask.dtype == np.bool_
    np.testing.assert_array_equal(mask, MARKED)


def test_palette_mask_counts_every_colour(tmp_path: Path) -> None:
    index = MARKED * np.uint8(1) + (MARKED & (np.arange(30) > 12)) * np.uint8(1)
    image = Image.fromarray(index)
    image.putpalette([0, 0, 0, 192, 0, 0, 0, 64, 0])
    image.save(tmp_path / "m.png")
    np.testing.assert_array_equal(images.read_mask(tmp_path / "m.png", (20, 30)), MARKED)


@pytest.mark.parametrize("levels", [17, 256])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_anti_aliased_masks_are_cut_at_half(tmp_path: Path, levels: int, dtype: type) -> None:
    top = np.iinfo(dtype).max
    ramp: NDArray[Any] = np.linspace(0, top, levels).astype(dtype)
    path = save(tmp_path / "m.png", np.tile(ramp, (20, 1)))
    mask = images.read_mask(path, (20, levels))
    np.testing.assert_array_equal(mask[0], ramp >= (top + 1) // 2)


def test_faint_mask_of_many_levels_is_cut_at_half_of_its_largest(tmp_path: Path) -> None:
    ramp = np.arange(100, dtype=np.uint8)
    mask = images.read_mask(save(tmp_path / "m.png", np.tile(ramp, (20, 1))), (20, 100))
    np.testing.assert_array_equal(mask[0], ramp >= 50)


def test_lossy_and_inverted_masks(tmp_path: Path) -> None:
    wide = np.kron(MARKED, np.ones((4, 4), bool))
    lossy = save(tmp_path / "m.jpg", wide * np.uint8(255), quality=75)
    assert abs(images.read_mask(lossy, (80, 120)).sum() / wide.sum() - 1) < 0.1
    inverted = save(tmp_path / "m.png", ~MARKED)
    np.testing.assert_array_equal(images.read_mask(inverted, (20, 30)), ~MARKED)


def test_empty_mask_marks_nothing(tmp_path: Path) -> None:
    path = save(tmp_path / "m.png", np.zeros((20, 30), np.uint8))
    assert not images.read_mask(path, (20, 30)).any()


def test_mask_of_another_size(tmp_path: Path) -> None:
    path = save(tmp_path / "m.png", MARKED)
    with pytest.raises(ImageError, match="mask is 30 × 20, but its image is 20 × 30") as caught:
        images.read_mask(path, (30, 20))
    assert str(caught.value).startswith(str(path))


def test_small_masks_are_read(tmp_path: Path) -> None:
    assert images.read_mask(save(tmp_path / "m.png", MARKED[:3, :3]), (3, 3)).shape == (3, 3)


# ------------------------------------------------------------------------------ digests and resize


def test_digests(tmp_path: Path) -> None:
    a = save(tmp_path / "a.png", GREY)
    b = save(tmp_path / "b.png", GREY, dpi=(72, 72))
    deep = save(tmp_path / "c.png", GREY.astype(np.uint16) * 257)
    assert digest(a) == hashlib.sha256(a.read_bytes()).hexdigest() != digest(b)
    pixels = {images.pixel_digest(images.read_image(path, WHITE)) for path in (a, b, deep)}
    assert len(pixels) == 1
    image = images.read_image(a, WHITE)
    changed = image.copy()
    changed[0, 0, 0] += 1 / 65535
    turned = image.reshape(30, 20, 3)
    assert len({images.pixel_digest(p) for p in (image, changed, turned)}) == 3


def test_to_input_is_the_antialiased_resize() -> None:
    checker = np.indices((64, 48)).sum(0) % 2
    image = np.repeat(checker[..., None], 3, 2).astype(np.float32)
    small = images.to_input(image, (16, 12))
    assert small.shape == (3, 16, 12) and small.dtype == np.float32
    assert abs(small[:, 2:-2, 2:-2] - 0.5).max() < 0.02  # without antialias: 0 or 1
    ramp = np.repeat(np.linspace(0, 1, 64, dtype=np.float32)[:, None, None], 40, 1).repeat(3, 2)
    resized = images.to_input(ramp, (33, 17))
    assert resized.min() >= 0 and resized.max() <= 1
    assert (resized[0, 1:, 0] > resized[0, :-1, 0]).all()
    assert (images.to_input(ramp, (33, 17)) == resized).all()
    same = images.to_input(image, (64, 48))
    np.testing.assert_array_equal(same.transpose(1, 2, 0), image)


def test_colours_keep_their_channel() -> None:
    image = np.zeros((16, 16, 3), np.float32)
    image[..., 0] = 1
    assert images.to_input(image, (8, 8)).mean((1, 2)).tolist() == [1, 0, 0]


def test_reading_images_needs_no_torch() -> None:
    code = (
        "import sys, cdgp.data.images, cdgp.data.manifest, cdgp.data.layouts, cdgp.data.splits; "
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"
