"""Decoding: damage is refused with its reason, oddities are read, formats agree with each other."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import imagecodecs
import numpy as np
import pytest
import simplejpeg
import tifffile
from numpy.typing import NDArray
from PIL import Image, ImageOps
from tests.helpers import WHITE
from tests.refused import rows

from cdgp.data import decode, images
from cdgp.data.jpeg import scan_faults
from cdgp.errors import ImageError
from cdgp_bench.studies.refused import Row

SIDE = 96
NOISE = np.random.default_rng(0).integers(0, 60, (SIDE, SIDE, 3), np.uint8)
RAMP = np.add.outer(np.arange(SIDE), np.arange(SIDE)).astype(np.uint8)[:, :, None]
COLOUR = RAMP + NOISE
"""A ramp with noise: no block of it is like another, so that every hole shows."""
GREY = COLOUR[:, :, 0]
BIG = np.kron(COLOUR, np.ones((2, 2, 1), np.uint8))


class Made(NamedTuple):
    """An input, and what is read of it: as HWC or (H, W) in 0..1; None where it is refused."""

    content: bytes
    pixels: NDArray[Any] | None = None
    name: str = "image"


def encoded(values: NDArray[Any], kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, kind, **options)
    return stream.getvalue()


def tiff(values: NDArray[Any], **options: Any) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, values, **options)
    return stream.getvalue()


def read(path: Path, content: bytes, first_page: bool = False) -> NDArray[np.float32]:
    path.write_bytes(content)
    return images.read_image(path, WHITE, first_page)


def by_pillow(content: bytes) -> NDArray[Any]:
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB")) / 255


def without(content: bytes, share: float, length: int, filler: bytes = b"\0") -> bytes:
    """The file with a block in it overwritten."""
    at = int(len(content) * share)
    return content[:at] + filler * length + content[at + length :]


# ------------------------------------------------------------------------------------------- JPEG

JPEG = encoded(COLOUR, "JPEG", quality=90)
PROGRESSIVE = encoded(COLOUR, "JPEG", quality=90, progressive=True)
RESTARTS = encoded(COLOUR, "JPEG", quality=90, restart_marker_blocks=4)
END = b"\xff\xd9"


def scans(content: bytes) -> list[int]:
    """Where the scans of a JPEG begin (no entropy-coded byte can look like their marker)."""
    return [at for at in range(len(content)) if content[at : at + 2] == b"\xff\xda"]


def without_an_interval() -> bytes:
    first, second = (RESTARTS.index(marker) for marker in (b"\xff\xd1", b"\xff\xd2"))
    return RESTARTS[:first] + RESTARTS[second:]


def odd_sampling() -> bytes:
    """4:4:4 whose components state 2 × 2, 2 × 1 and 1 × 1."""
    content = bytearray(encoded(COLOUR, "JPEG", subsampling=0))
    frame = content.index(b"\xff\xc0")
    for number, factor in enumerate((0x22, 0x21, 0x11)):
        content[frame + 11 + 3 * number] = factor
    return bytes(content)


def with_orientation(kind: int, value: bytes) -> bytes:
    """The JPEG with an EXIF block of one entry, tag 274, of a type (TIFF 6.0) and a value."""
    entry = struct.pack("<HHI", 274, kind, 1) + value.ljust(4, b"\0")
    body = b"Exif\0\0II*\0\x08\0\0\0\1\0" + entry + bytes(4)
    return JPEG[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + JPEG[2:]


JPEGS: dict[str, Callable[[], Made]] = {
    "jpeg-hole": lambda: Made(JPEG[: int(len(JPEG) * 0.6)] + END),
    "jpeg-no-end": lambda: Made(JPEG[:-2]),
    "jpeg-zeroed": lambda: Made(without(JPEG, 0.5, 1024)),
    "jpeg-ff": lambda: Made(without(JPEG, 0.5, 1024, b"\xff")),
    "jpeg-scans": lambda: Made(PROGRESSIVE[: scans(PROGRESSIVE)[5]] + END),
    "jpeg-last-scan": lambda: Made(PROGRESSIVE[: scans(PROGRESSIVE)[-1]] + END),
    "jpeg-interval": lambda: Made(without_an_interval()),
    "jpeg-sampling": lambda: Made(odd_sampling()),
    "jpeg-12-bit": lambda: Made(
        bytes(imagecodecs.jpeg_encode(GREY.astype(np.uint16) * 16, bitspersample=12))
    ),
    "jpeg-revision": lambda: Made(JPEG[:11] + b"\7" + JPEG[12:]),
    "jpeg-behind": lambda: Made(JPEG + b"\0" * 5000 + JPEG, by_pillow(JPEG)),
    "jpeg-exif-orientation": lambda: Made(with_orientation(1, b"\6"), by_pillow(JPEG)),
}

# -------------------------------------------------------------------------------------------- PNG

PNG = encoded(COLOUR, "PNG")


def chunk(name: bytes, body: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(name + body))
    return struct.pack(">I", len(body)) + name + body + checksum


def png(
    pixels: bytes,
    extra: bytes = b"",
    end: bytes = chunk(b"IEND", b""),
    size: tuple[int, int] = (SIDE, SIDE),
    kind: int = 2,
    interlaced: bool = False,
) -> bytes:
    """An 8-bit PNG, RGB unless `kind` says otherwise, with these compressed rows."""
    height, width = size
    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, interlaced)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + end


def png_rows(height: int = SIDE) -> bytes:
    return b"".join(b"\0" + COLOUR[y].tobytes() for y in range(height))


def short_palette() -> bytes:
    image = Image.fromarray(np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE) % 16)
    image.putpalette([7] * 48)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    content = stream.getvalue()
    at = content.index(b"PLTE") - 4
    length = int.from_bytes(content[at : at + 4], "big")
    return content[:at] + chunk(b"PLTE", b"\7" * 12) + content[at + 12 + length :]


def bad_text() -> bytes:
    text = bytearray(chunk(b"tEXt", b"Comment\0camera 7"))
    text[-1] ^= 1
    return png(zlib.compress(png_rows()), bytes(text))


def exif_behind() -> bytes:
    exif = Image.Exif()
    exif[274] = 6
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    end = chunk(b"eXIf", body) + chunk(b"IEND", b"")
    return png(zlib.compress(png_rows()), end=end)


def animated(kind: str) -> bytes:
    stream = io.BytesIO()
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    frames[0].save(stream, kind, save_all=True, append_images=frames[1:])
    return stream.getvalue()


PNGS: dict[str, Callable[[], Made]] = {
    "png-checksum": lambda: Made(without(PNG, 0.5, 1, bytes([PNG[len(PNG) // 2] ^ 1]))),
    "png-adler": lambda: Made(png(zlib.compress(png_rows())[:-4] + b"abcd")),
    "png-rows": lambda: Made(png(zlib.compress(png_rows(SIDE // 2)))),
    "png-more-rows": lambda: Made(png(zlib.compress(png_rows()), size=(SIDE // 2, SIDE))),
    "png-transparency": lambda: Made(png(zlib.compress(png_rows()), chunk(b"tRNS", b"\0\7"))),
    "png-cut": lambda: Made(PNG[:-12]),
    "png-critical": lambda: Made(png(zlib.compress(png_rows()), chunk(b"CgBI", b"\0" * 4))),
    "png-palette": lambda: Made(short_palette()),
    "png-text-checksum": lambda: Made(bad_text(), COLOUR / 255),
    "png-text-size": lambda: Made(
        png(
            zlib.compress(png_rows()),
            chunk(b"zTXt", b"Setup\0\0" + zlib.compress(b"a" * 3_000_000)),
        ),
        COLOUR / 255,
    ),
    "png-behind": lambda: Made(PNG + b"index\n" * 100, COLOUR / 255),
    "png-exif-behind": lambda: Made(exif_behind(), np.rot90(COLOUR, -1) / 255),
    "png-exif-damaged": lambda: Made(
        png(zlib.compress(png_rows()), chunk(b"eXIf", b"damaged!")), COLOUR / 255
    ),
    "png-grey-palette": lambda: Made(
        png(
            zlib.compress(b"".join(b"\0" + row.tobytes() for row in GREY)),
            chunk(b"PLTE", bytes(range(48))),
            kind=0,
        ),
        GREY / 255,
    ),
    "png-frames": lambda: Made(animated("PNG")),
}

# ------------------------------------------------------------------------------------------- TIFF


def first_segment(content: bytes) -> tuple[int, int]:
    """Offset and size of the first strip or tile."""
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        page = file.pages.first
        return int(page.dataoffsets[0]), int(page.databytecounts[0])


def with_tag(content: bytes, code: int, value: int, index: int = 0, page: int = 0) -> bytes:
    """The file with one value of a tag overwritten."""
    with tifffile.TiffFile(io.BytesIO(content)) as file:
        tag = file.pages[page].aspage().tags[code]
        size = {3: 2, 4: 4}[int(tag.dtype)]
        at = tag.valueoffset + size * index
    return content[:at] + value.to_bytes(size, "little") + content[at + size :]


def damaged_segment(content: bytes, length: int = 300, filler: bytes = b"\0") -> bytes:
    offset, size = first_segment(content)
    return without(content, (offset + size // 3) / len(content), length, filler)


def pyramid() -> bytes:
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as writer:
        writer.write(GREY[::4, ::4], subfiletype=1)
        writer.write(GREY)
        writer.write(GREY[::2, ::2], subfiletype=1)
    return stream.getvalue()


def raw_of_a_camera() -> bytes:
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as writer:
        writer.write(COLOUR[::4, ::4], subfiletype=1, subifds=1, photometric="rgb")
        writer.write(GREY.astype(np.uint16), photometric="cfa")
    return stream.getvalue()


def strips(values: NDArray[Any] = COLOUR, **options: Any) -> bytes:
    return tiff(values, rowsperstrip=32, **options)


TIFFS: dict[str, Callable[[], Made]] = {
    "tiff-no-directory": lambda: Made(b"II*\0\0\0\0\0"),
    "tiff-directory-behind": lambda: Made(b"II*\0" + (10**6).to_bytes(4, "little") + bytes(500)),
    "tiff-strip-empty": lambda: Made(with_tag(strips(), 279, 0, 1)),
    "tiff-strip-behind": lambda: Made(with_tag(strips(compression="lzw"), 273, 10**8, 1)),
    "tiff-strip-at-0": lambda: Made(with_tag(strips(), 273, 0, 1)),
    "tiff-height": lambda: Made(with_tag(tiff(GREY), 257, SIDE + 40)),
    "tiff-fewer-rows": lambda: Made(with_tag(strips(), 257, 32)),
    "tiff-narrower": lambda: Made(with_tag(strips(), 256, SIDE // 2)),
    "tiff-narrower-lzw": lambda: Made(with_tag(strips(compression="lzw"), 256, SIDE // 2)),
    "tiff-bytes": lambda: Made(with_tag(tiff(GREY), 279, 4000)),
    "tiff-tag": lambda: Made(tiff(GREY).replace(b"\x06\x01\x03\0", b"\x06\x01\x63\0", 1)),
    "tiff-no-photometric": lambda: Made(
        tiff(GREY).replace(b"\x06\x01\x03\0", b"\x05\x01\x03\0", 1)
    ),
    "tiff-cut": lambda: Made(strips(compression="lzw")[:-500]),
    "tiff-deflate": lambda: Made(damaged_segment(strips(compression="deflate"))),
    "tiff-packbits": lambda: Made(damaged_segment(strips(compression="packbits"))),
    "tiff-lzw": lambda: Made(damaged_segment(strips(compression="lzw"))),
    "tiff-jpeg": lambda: Made(damaged_segment(strips(compression="jpeg"))),
    "tiff-fax": lambda: Made(
        damaged_segment(encoded(GREY > 120, "TIFF", compression="group3"), 40, b"\x55")
    ),
    "tiff-channels": lambda: Made(
        tiff(np.zeros((SIDE, SIDE, 300), np.uint8), photometric="minisblack", planarconfig="contig")
    ),
    "tiff-cmyk-lerc": lambda: Made(
        tiff(np.dstack([COLOUR, GREY]), photometric="separated", compression="lerc")
    ),
    "tiff-pages": lambda: Made(tiff(np.stack([GREY, GREY]), photometric="minisblack")),
    "tiff-imagej": lambda: Made(tiff(np.stack([GREY, 255 - GREY]), imagej=True)),
    "tiff-raw": lambda: Made(raw_of_a_camera()),
    "tiff-huge-tag": lambda: Made(tiff(GREY, description="a" * 3_000_000), GREY / 255),
    "tiff-pyramid": lambda: Made(pyramid(), GREY / 255),
    "tiff-jpeg2000": lambda: Made(tiff(COLOUR, compression="jpeg2000"), COLOUR / 255),
    "tiff-jpegxl": lambda: Made(
        tiff(COLOUR, compression="jpegxl", compressionargs={"lossless": True}), COLOUR / 255
    ),
    "tiff-lerc": lambda: Made(tiff(COLOUR, compression="lerc"), COLOUR / 255),
    "tiff-palette-8-bit": lambda: Made(
        tiff(GREY, photometric="palette", colormap=np.tile(np.arange(256, dtype=np.uint16), (3, 1)))
    ),
}

# ----------------------------------------------------------------------------------- other formats

DEEP = GREY.astype(np.uint16) * 16


def stated_bmp(offset: int) -> bytes:
    """A BMP whose header states 40 rows (offset 22) or columns (18) in place of all."""
    content = encoded(COLOUR, "BMP")
    return content[:offset] + (40).to_bytes(4, "little") + content[offset + 4 :]


def run_length_bmp(cut: bool) -> bytes:
    """An 8-bit grey BMP in run-length code, each row in runs of one pixel."""
    body = b"".join(b"".join(b"\1" + bytes([v]) for v in row) + b"\0\0" for row in GREY[::-1])
    body = (body[: len(body) // 2] if cut else body) + b"\0\1"
    palette = b"".join(bytes([v, v, v, 0]) for v in range(256))
    head = struct.pack("<IiiHHIIiiII", 40, SIDE, SIDE, 1, 8, 1, len(body), 0, 0, 256, 0)
    start = 14 + len(head) + len(palette)
    return b"BM" + struct.pack("<IHHI", start + len(body), 0, 0, start) + head + palette + body


OTHERS: dict[str, Callable[[], Made]] = {
    "bmp-lower": lambda: Made(stated_bmp(22)),
    "bmp-narrower": lambda: Made(stated_bmp(18)),
    "bmp-cut": lambda: Made(encoded(COLOUR, "BMP")[:-200]),
    "bmp-runs-cut": lambda: Made(run_length_bmp(cut=True)),
    "bmp-runs": lambda: Made(run_length_bmp(cut=False), GREY / 255),
    "webp-cut": lambda: Made(encoded(COLOUR, "WEBP")[:-200]),
    "gif-cut": lambda: Made(encoded(GREY, "GIF")[:-2000]),
    "gif": lambda: Made(encoded(GREY, "GIF"), GREY / 255),
    "gif-frames": lambda: Made(animated("GIF")),
    "avif-cut": lambda: Made(encoded(COLOUR, "AVIF")[:-200]),
    "jp2-cut": lambda: Made(encoded(COLOUR, "JPEG2000")[:-200]),
    "avif-zeroed": lambda: Made(without(encoded(BIG, "AVIF", quality=90), 0.5, 512)),
    "jp2-zeroed": lambda: Made(without(encoded(COLOUR, "JPEG2000"), 0.5, 512)),
    "jp2": lambda: Made(encoded(COLOUR, "JPEG2000"), COLOUR / 255),
    "jp2-12-bit": lambda: Made(
        bytes(
            imagecodecs.jpeg2k_encode(
                np.dstack([DEEP] * 3), bitspersample=12, reversible=True, level=0, codecformat="j2k"
            )
        ),
        DEEP / 4095,
    ),
    "pgm-cut": lambda: Made(encoded(GREY, "PPM")[:-200]),
    "pgm-largest": lambda: Made(
        b"P5 96 96 1000\n" + DEEP.clip(0, 1000).astype(">u2").tobytes(), DEEP.clip(0, 1000) / 1000
    ),
    "pgm-header": lambda: Made(b"P5 96 96 255\xff" + GREY.tobytes()),
    "pgm-above": lambda: Made(b"P5 96 96 200\n" + GREY.tobytes()),
    "pgm-several": lambda: Made(encoded(GREY, "PPM") * 2),
    "pgm-behind": lambda: Made(b"P5 96 96 255 # camera\n" + GREY.tobytes()),
    "pgm-line-ends": lambda: Made(b"P5\r\n96 96\r\n255\r\n" + GREY.tobytes(), GREY / 255),
    "ppm-plain-more": lambda: Made(b"P2 90 96 255\n" + b" ".join(b"%d" % v for v in GREY.ravel())),
    "pbm-plain": lambda: Made(b"P1 8 8\n" + b"0 1 2 " * 32),
    "ppm-plain": lambda: Made(
        b"P3 # camera\n96 96\n255\n" + b" ".join(b"%d" % v for v in COLOUR.ravel()), COLOUR / 255
    ),
    "pbm": lambda: Made(encoded(GREY > 120, "PPM"), (GREY > 120).astype(float)),
    "heic": lambda: Made(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)),
    "tga": lambda: Made(encoded(COLOUR, "TGA"), name="image.tga"),
    "dng": lambda: Made(raw_of_a_camera(), name="image.dng"),
    "html": lambda: Made(b"<!doctype html><title>Sign in</title>", name="image.png"),
    "empty-file": lambda: Made(b""),
}

MAKERS = JPEGS | PNGS | TIFFS | OTHERS


@rows("decoding", MAKERS)
def test_what_is_refused_and_what_is_read(
    tmp_path: Path, row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    made: Made = MAKERS[row.id]()
    path = tmp_path / made.name
    assert (made.pixels is None) == (row.result == "refused")
    if made.pixels is None:
        with pytest.raises(ImageError) as caught:
            read(path, made.content)
        assert str(caught.value).startswith(f"{path}: ")
        assert row.says in str(caught.value)
    else:
        pixels = made.pixels if made.pixels.ndim == 3 else np.dstack([made.pixels] * 3)
        np.testing.assert_allclose(read(path, made.content), pixels, atol=1e-6)
    assert not caplog.records, "a decoder's riddle beside our message"


def test_the_files_that_are_damaged_above_are_read_whole(tmp_path: Path) -> None:
    """A row that is refused for what it is, and not for its damage, would prove nothing."""
    for kind in ("JPEG", "BMP", "WEBP", "GIF", "AVIF", "JPEG2000"):
        assert read(tmp_path / kind, encoded(COLOUR, kind)).shape == (SIDE, SIDE, 3)
    for compression in ("lzw", "deflate", "packbits", "jpeg"):
        content = strips(compression=compression)
        np.testing.assert_allclose(read(tmp_path / "a", content), by_pillow(content), atol=1e-6)
    fax = encoded(GREY > 120, "TIFF", compression="group3")
    np.testing.assert_array_equal(read(tmp_path / "fax.tif", fax)[:, :, 0], GREY > 120)
    for whole in (PROGRESSIVE, RESTARTS, PNG):
        np.testing.assert_allclose(read(tmp_path / "a", whole), by_pillow(whole), atol=1e-6)


# ------------------------------------------------------------- equal to Pillow where it is whole


def jpegs() -> dict[str, bytes]:
    """Whole JPEG files of every kind that cameras and programs write."""
    values = COLOUR[:83, :91]  # no multiple of a block
    cmyk = np.asarray(Image.fromarray(values).convert("CMYK"))
    made = {}
    for progressive in (False, True):
        for blocks in (0, 3):
            options = {"progressive": progressive, "restart_marker_blocks": blocks, "quality": 88}
            kind = f"{'progressive' if progressive else 'sequential'}-{blocks}"
            for sampling in ("4:4:4", "4:2:2", "4:2:0"):
                made[f"{kind}-{sampling}"] = encoded(
                    values, "JPEG", subsampling=sampling, **options
                )
            made[f"{kind}-grey"] = encoded(values[:, :, 0], "JPEG", **options)
            made[f"{kind}-rgb"] = encoded(values, "JPEG", keep_rgb=True, **options)
            stream = io.BytesIO()
            Image.fromarray(cmyk, "CMYK").save(stream, "JPEG", **options)
            made[f"{kind}-cmyk"] = stream.getvalue()
    made["cmyk-without-adobe"] = without_segment(made["sequential-0-cmyk"], 0xEE)
    made["rgb-without-adobe"] = without_segment(made["sequential-0-rgb"], 0xEE)
    made["ycck"] = simplejpeg.encode_jpeg(np.ascontiguousarray(cmyk), colorspace="CMYK")
    for sampling in ("440", "411"):
        made[sampling] = simplejpeg.encode_jpeg(
            np.ascontiguousarray(values), colorsubsampling=sampling
        )
    return made


def without_segment(content: bytes, kind: int) -> bytes:
    """A JPEG without its segments of one marker."""
    kept, at = content[:2], 2
    while content[at + 1] != 0xDA:
        length = 2 + int.from_bytes(content[at + 2 : at + 4], "big")
        kept += content[at : at + length] if content[at + 1] != kind else b""
        at += length
    return kept + content[at:]


@pytest.mark.parametrize("kind", jpegs())
def test_whole_jpegs_are_those_of_pillow(tmp_path: Path, kind: str) -> None:
    content = jpegs()[kind]
    found = read(tmp_path / "a.jpg", content)
    assert np.abs(found - by_pillow(content)).max() < 1e-6


@pytest.mark.parametrize("size", [(8, 8), (9, 11), (16, 13), (31, 64)])
def test_interlaced_pngs_are_read(tmp_path: Path, size: tuple[int, int]) -> None:
    """The seven passes of PNG 8.2, by its own table of which pixel belongs to which."""
    table = np.array([[1, 6, 4, 6, 2, 6, 4, 6], [7] * 8, [5, 6] * 4, [7] * 8,
                      [3, 6, 4, 6, 3, 6, 4, 6], [7] * 8, [5, 6] * 4, [7] * 8])  # fmt: skip
    values = COLOUR[: size[0], : size[1]]
    passes = np.tile(table, (4, 8))[: size[0], : size[1]]
    stored = b"".join(
        b"\0" + row[of_row == number].tobytes()
        for number in range(1, 8)
        for row, of_row in zip(values, passes, strict=True)
        if (of_row == number).any()
    )
    content = png(zlib.compress(stored), size=size, interlaced=True)
    np.testing.assert_allclose(read(tmp_path / "a.png", content), values / 255, atol=1e-6)


@pytest.mark.parametrize("kind", ["1", "L", "P", "P4", "RGB", "RGBA", "LA", "transparent"])
def test_whole_pngs_are_those_of_pillow(tmp_path: Path, kind: str) -> None:
    """The alpha of libpng and of Pillow is composed over black here."""
    image = Image.fromarray(COLOUR)
    if kind in ("P", "P4", "transparent"):
        image = image.quantize(256 if kind == "P" else 12)
    elif kind == "LA":
        image = Image.merge("LA", [Image.fromarray(GREY), Image.fromarray(GREY)])
    elif kind == "RGBA":
        image.putalpha(Image.fromarray(GREY))
    else:
        image = image.convert(kind)
    options: dict[str, Any] = {"bits": 4} if kind == "P4" else {}
    options |= {"transparency": 3} if kind == "transparent" else {}
    image.save(tmp_path / "a.png", **options)
    with Image.open(tmp_path / "a.png") as saved:
        alpha = saved.convert("RGBA")
    values = np.asarray(alpha) / 255
    expected = values[:, :, :3] * values[:, :, 3:]
    found = images.read_image(tmp_path / "a.png", WHITE)
    np.testing.assert_allclose(found, expected, atol=1e-6)


TIFF_KINDS: dict[str, Callable[[], bytes]] = {
    "tiles, LZW": lambda: tiff(COLOUR, tile=(32, 48), compression="lzw"),
    "tiles, deflate": lambda: tiff(COLOUR[:90, :70], tile=(32, 48), compression="deflate"),
    "tiles, JPEG": lambda: tiff(COLOUR[:90, :70], tile=(32, 48), compression="jpeg"),
    "tiles, PackBits": lambda: tiff(GREY[:90, :70], tile=(32, 48), compression="packbits"),
    "predictor": lambda: strips(compression="deflate", predictor=True),
    "big endian": lambda: tiff(COLOUR, byteorder=">"),
    "BigTIFF": lambda: tiff(COLOUR, bigtiff=True),
    "OME": lambda: tiff(GREY, ome=True),
    "planes": lambda: tiff(
        COLOUR.transpose(2, 0, 1), photometric="rgb", planarconfig="separate", rowsperstrip=20,
        compression="packbits",
    ),
    "Zstd": lambda: tiff(COLOUR, compression="zstd"),
    "YCbCr, JPEG": lambda: encoded(COLOUR, "TIFF", compression="jpeg"),
    "one bit, group 3": lambda: encoded(GREY > 99, "TIFF", compression="group3"),
    "one bit, group 4": lambda: encoded(GREY > 99, "TIFF", compression="group4"),
    "one bit, CCITT": lambda: encoded(GREY > 99, "TIFF", compression="tiff_ccitt"),
    "one bit, PackBits": lambda: encoded(GREY > 99, "TIFF", compression="packbits"),
    "palette, LZW": lambda: indexed("tiff_lzw"),
    "palette, deflate": lambda: indexed("tiff_adobe_deflate"),
    "CMYK, PackBits": lambda: cmyk_tiff("packbits"),
}  # fmt: skip


def indexed(compression: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(COLOUR).quantize(16).save(stream, "TIFF", compression=compression)
    return stream.getvalue()


def cmyk_tiff(compression: str) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(COLOUR).convert("CMYK").save(stream, "TIFF", compression=compression)
    return stream.getvalue()


@pytest.mark.parametrize("kind", TIFF_KINDS)
def test_whole_tiffs_are_those_of_pillow(tmp_path: Path, kind: str) -> None:
    """The checks of strips, tiles and codes refuse nothing that is whole."""
    content = TIFF_KINDS[kind]()
    np.testing.assert_allclose(read(tmp_path / "a.tif", content), by_pillow(content), atol=1e-6)


# ------------------------------------------------------------------------------------------- scans


def scan_script(*scans: tuple[int, int, int, int], frame: int = 0xC2) -> bytes:
    """Markers alone: a frame of components 1 and 2, and scans of (component, Ss, Se, Al)."""
    content = b"\xff\xd8\xff" + bytes([frame, 0, 14, 8, 0, 8, 0, 8, 2, 1, 0x11, 0, 2, 0x11, 0])
    for part, first, last, bit in scans:
        content += b"\xff\xda" + bytes([0, 8, 1, part, 0, first, last, bit]) + b"\x12\xff\0\x34"
    return content + END


@pytest.mark.parametrize(
    ("content", "missing"),
    [
        (scan_script((1, 0, 63, 0), (2, 0, 63, 0), frame=0xC0), ""),
        (scan_script((1, 0, 63, 0), frame=0xC0), "1 of 2 colour components lack a scan"),
        (scan_script((1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 63, 0), (2, 1, 63, 0)), ""),
        (scan_script((1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 63, 0)), "1 of 2 colour components lack"),
        (scan_script((1, 0, 0, 1), (2, 0, 0, 0), (1, 1, 63, 0), (2, 1, 63, 0)), "1 of 2"),
        (
            scan_script((1, 0, 0, 1), (2, 0, 0, 0), (1, 1, 63, 0), (2, 1, 63, 0), (1, 0, 0, 0x10)),
            "",
        ),
        (scan_script((1, 0, 63, 0), (2, 0, 62, 0)), "1 of 2 colour components lack a scan"),
        (scan_script((1, 4, 0, 0), (2, 4, 0, 0), frame=0xC3), ""),
    ],
)
def test_scan_faults(content: bytes, missing: str) -> None:
    found = scan_faults(content)
    assert found.startswith(missing) and bool(found) == bool(missing)


FLAT_IMAGES = [
    np.zeros((800, 800), np.uint8),
    np.full((800, 800, 3), 255, np.uint8),
    np.pad(COLOUR, ((300, 300), (300, 300), (0, 0))),
    np.kron(np.indices((100, 100)).sum(0) % 2, np.full((8, 8), 255)).astype(np.uint8),
]


@pytest.mark.parametrize("values", FLAT_IMAGES, ids=["black", "white", "border", "checker"])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("optimize", [False, True])
def test_flat_images_are_no_blocks_of_zeros(
    tmp_path: Path, values: NDArray[Any], progressive: bool, optimize: bool
) -> None:
    for restart, quality in ((0, 75), (5, 100)):
        content = encoded(
            values, "JPEG", progressive=progressive, optimize=optimize, quality=quality,
            restart_marker_blocks=restart,
        )  # fmt: skip
        read(tmp_path / "a.jpg", content)
    for kind in ("AVIF", "JPEG2000"):
        read(tmp_path / "a", encoded(values, kind))


def test_flat_images_do_hold_zeros() -> None:
    """So that the test above tests something: optimised tables write flat blocks as zeros."""
    assert bytes(64) in encoded(FLAT_IMAGES[0], "JPEG", optimize=True)


# ---------------------------------------------------------------------------------- pages and names


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "TIFF", "AVIF"])
def test_the_first_of_several_pages(tmp_path: Path, kind: str) -> None:
    stream = io.BytesIO()
    frames = [Image.fromarray(GREY), Image.fromarray(255 - GREY)]
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    options |= {"quality": 100, "subsampling": "4:4:4"} if kind == "AVIF" else {}
    frames[0].save(stream, kind, save_all=True, append_images=frames[1:], **options)
    with pytest.raises(ImageError, match=r"holds 2 pages.*data\.pages=first"):
        read(tmp_path / "a", stream.getvalue())
    found = read(tmp_path / "a", stream.getvalue(), first_page=True)
    assert np.abs(found - GREY[:, :, None] / 255).max() < (0.02 if kind == "AVIF" else 1e-6)
    assert images.image_size(tmp_path / "a", first_page=True) == (SIDE, SIDE)


def test_the_first_full_page_behind_a_thumbnail(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tifffile.TiffWriter(stream) as writer:
        writer.write(COLOUR[::4, ::4], subfiletype=1)
        for values in (COLOUR, 255 - COLOUR):
            writer.write(values, photometric="rgb")
    with pytest.raises(ImageError, match="holds 2 pages"):
        read(tmp_path / "a.tif", stream.getvalue())
    found = read(tmp_path / "a.tif", stream.getvalue(), first_page=True)
    np.testing.assert_allclose(found, COLOUR / 255, atol=1e-6)


def test_a_thumbnail_before_a_palette_image(tmp_path: Path) -> None:
    """Palettes go through Pillow, which must be at the same page."""
    image = Image.fromarray(COLOUR).quantize(16)
    thumbnail = Image.fromarray(GREY[::4, ::4])
    stream = io.BytesIO()
    thumbnail.save(stream, "TIFF", save_all=True, append_images=[image], tiffinfo={254: 1})
    content = with_tag(stream.getvalue(), 254, 0, page=1)
    np.testing.assert_allclose(
        read(tmp_path / "a.tif", content), np.asarray(image.convert("RGB")) / 255, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF", "PNG", "TIFF"])
@pytest.mark.parametrize("orientation", [3, 5, 6, 7, 8])
def test_every_format_stands_upright(tmp_path: Path, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    content = encoded(COLOUR[:40], kind, exif=exif)
    with Image.open(io.BytesIO(content)) as image:
        expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB")) / 255
    found = read(tmp_path / "a", content)
    assert found.shape == ((96, 40, 3) if orientation > 4 else (40, 96, 3))
    assert np.abs(found - expected).max() < 1e-6


def test_what_is_no_fault_of_the_file_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ImageError, match=r"folder\.png: cannot be read: Is a directory"):
        images.read_image(tmp_path / "folder.png", WHITE)

    def full(path: Path, header: decode.Header) -> None:
        raise MemoryError

    monkeypatch.setattr(images, "decode", full)
    with pytest.raises(ImageError, match="needs more memory"):
        read(tmp_path / "a", PNG)


def test_images_are_told_by_their_content(tmp_path: Path) -> None:
    for number, made in enumerate(make() for make in MAKERS.values()):
        path = tmp_path / str(number)
        path.write_bytes(made.content)
        text = made.content[:1] in (b"<", b"")
        tga = made.name.endswith("tga")
        assert decode.is_image(path) == (not text and not tga), list(MAKERS)[number]
    for words in (b"P5 is the best part", b"BMW and Audi", b"II. Chapter", b"GIF image", b"RIFF"):
        (tmp_path / "notes").write_bytes(words)
        assert not decode.is_image(tmp_path / "notes")
    assert not decode.is_image(tmp_path) and not decode.is_image(tmp_path / "gone")


def test_every_suffix_belongs_to_a_decoder(tmp_path: Path) -> None:
    """A suffix is readable or not, and never both; those that Pillow writes here are read."""
    assert not set(decode.EXTENSIONS) & set(decode.UNREADABLE_EXTENSIONS)
    written = Image.registered_extensions()
    for suffix in decode.EXTENSIONS:
        if written.get(suffix) in Image.SAVE:
            path = tmp_path / f"image{suffix}"
            Image.fromarray(GREY).save(path)
            if suffix != ".dib":  # Pillow writes it without the file header
                assert images.read_image(path, WHITE).shape == (SIDE, SIDE, 3), suffix
