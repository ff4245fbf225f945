"""Fuzzing: random damage against every parser of foreign input.

    python -m cdgp_bench.studies.fuzzing [--inputs 10000] [--only images] [--keep FOLDER]

Whole files of every kind are cut, overwritten and spliced by hypothesis; names and tables are made
up. For any input a parser either gives a result or raises one of our errors. Prints one line a
parser. An error ends the program with the smallest input that shows it; that input becomes a test
in tests/cdgp/test_input_parsers.py. An image that is read must look the same in a second decoder
(``holes.opinion``); how many do not is printed, and ``--keep`` keeps those files.
"""

import argparse
import io
import json
import logging
import os
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tifffile
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

from cdgp import artifact
from cdgp.audit.findings import audit
from cdgp.data import images, layouts
from cdgp.data.manifest import read_csv
from cdgp.data.scan import scan
from cdgp.errors import CdgpError
from cdgp.presets import PRESETS, DataSettings, read_settings
from cdgp.presets import settings as preset
from cdgp.progress import Quiet
from cdgp.workflows import train_run
from cdgp_bench.studies.holes import opinion

Parser = Callable[[bytes], object]
DATA = DataSettings()


def encoded(array: np.ndarray, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(array).save(stream, kind, **options)
    return stream.getvalue()


def tiff(array: np.ndarray, **options: Any) -> bytes:
    stream = io.BytesIO()
    tifffile.imwrite(stream, array, **options)
    return stream.getvalue()


def image_seeds() -> list[bytes]:
    """Small whole images of every format and depth that is read."""
    rng = np.random.default_rng(0)
    grey = rng.integers(0, 256, (24, 20), np.uint8)
    colour = rng.integers(0, 256, (24, 20, 3), np.uint8)
    alpha = rng.integers(0, 256, (24, 20, 4), np.uint8)
    deep = rng.integers(0, 65536, (24, 20), np.uint16)
    turned = Image.Exif()
    turned[0x0112] = 6
    palette = io.BytesIO()
    Image.fromarray(colour).quantize(8).save(palette, "PNG", transparency=1)
    return [
        encoded(grey, "PNG"), encoded(colour, "PNG"), encoded(alpha, "PNG"), encoded(deep, "PNG"),
        encoded(grey > 128, "PNG"), palette.getvalue(),
        encoded(colour, "JPEG"), encoded(grey, "JPEG", exif=turned),
        encoded(colour, "JPEG", progressive=True), encoded(grey, "GIF"), encoded(colour, "PPM"),
        encoded(colour, "AVIF"), encoded(colour, "JPEG2000"), encoded(deep, "PPM"),
        encoded(colour, "BMP"), encoded(grey > 128, "BMP"), encoded(alpha, "WEBP"),
        tiff(grey), tiff(colour, compression="deflate"), tiff(deep), tiff(deep, byteorder=">"),
        tiff(deep / np.float32(65535)), tiff(deep, photometric="miniswhite"),
        tiff(np.stack([deep, deep])),
    ]  # fmt: skip


class Damage(NamedTuple):
    """What is done to a whole file; small, since hypothesis remembers what it draws."""

    seed: int
    steps: list[tuple[str, int, bool, int, bytes]]
    """How, where (from the beginning or anywhere), a number, and bytes to put in."""


def damages() -> st.SearchStrategy[Damage]:
    """Cuts, overwritten bytes and words, inserted bytes, parts of another file."""
    number = st.integers(0, 255) | st.sampled_from([65535, 2**31 - 1, 2**32 - 1])
    step = st.tuples(
        st.sampled_from(["byte", "word", "cut", "splice", "insert"]),
        st.integers(0, 2**31), st.booleans(), number, st.binary(max_size=8),
    )  # fmt: skip
    return st.builds(Damage, st.integers(0, 63), st.lists(step, max_size=6))


def damaged(seeds: list[bytes], damage: Damage) -> bytes:
    """One of the seeds after its damage."""
    data = bytearray(seeds[damage.seed % len(seeds)])
    for how, where, early, number, content in damage.steps:
        # The beginning holds the header, where damage matters most.
        place = where % max(1, min(len(data), 64) if early else len(data))
        if how == "byte":
            data[place : place + 1] = bytes([number % 256])
        elif how == "word":
            data[place : place + 4] = struct.pack("<>"[where % 2] + "I", number)
        elif how == "cut":
            del data[place:]
        elif how == "splice":
            data[place:] = seeds[number % len(seeds)][place:]
        else:
            data[place:place] = content
    return bytes(data)


class Parsers:
    """The parsers of foreign input; each takes bytes and gives a result or one of our errors."""

    def __init__(self, folder: Path, keep: Path | None = None) -> None:
        self.folder, self.keep = folder, keep
        self.opinions: Counter[str] = Counter()
        self.whole = image_seeds()[0]
        for name in ("a.png", "ü.png", "b c.png"):
            (folder / name).write_bytes(self.whole)

    def _written(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def image(self, data: bytes) -> object:
        path = self._written("file", data)
        found, facts = images.read_with_facts(path, DATA.white_level)
        assert found.dtype == np.float32 and found.ndim == 3 and found.shape[2] == 3
        assert np.isfinite(found).all() and found.min() >= 0 and found.max() <= 1
        seen = opinion(path, found)
        self.opinions[f"{facts.format}: {seen}"] += 1
        if self.keep is not None and seen != "both see the same":
            self.keep.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, self.keep / f"{facts.format}-{self.opinions.total()}")
        return facts.format

    def mask(self, data: bytes) -> object:
        found = images.read_mask(self._written("file", data), (24, 20))
        assert found.dtype == np.bool_ and found.shape == (24, 20)
        return bool(found.any())

    def pairing(self, data: bytes) -> object:
        """Each line is a file: a bin's letter and a name."""
        tree = self.folder / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir()
        bins = ("good", "defective", "masks", "masks/sub", "good/sub")
        for entry in data.split(b"\n"):
            name = os.fsdecode(entry[1:].replace(b"/", b"").replace(b"\0", b"")[:60])
            if entry and name not in ("", ".", ".."):
                target = tree / bins[entry[0] % 5] / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if not target.exists():
                    target.write_bytes(self.whole)
        found = layouts.load(tree, DATA.good, DATA.defective)
        audit(scan(found, DATA.white_level), DATA.white_level).record()
        return bool(sum(len(s.masks) for s in found.samples))

    def table(self, data: bytes) -> object:
        found = read_csv(self._written("table.csv", data))
        found.write_csv(self.folder / "written.csv")
        assert read_csv(self.folder / "written.csv") == found
        return len(found.samples)

    def toml(self, data: bytes) -> object:
        return read_settings(self._written("settings.toml", data)).preset

    def model(self, data: bytes) -> object:
        return artifact.load(self._written("model.safetensors", data)).settings.preset


def tree_seeds() -> list[bytes]:
    """Listings for ``Parsers.pairing``."""
    return [
        b"\n".join(bytes([letter]) + name.encode() for letter, name in files)
        for files in (
            [(0, "a.png"), (1, "a.jpg"), (2, "a_mask.png"), (2, "a_GT.png"), (1, "b.PNG")],
            [(0, "ü.png"), (1, "u\u0308.png"), (2, "ü.png"), (4, "ü.png"), (0, "Thumbs.db")],
            [(0, ".a.png"), (0, "a"), (0, "a.b.png"), (1, "a.b.png"), (3, "1.png"), (1, "sub.png")],
        )
    ]


def table_seeds() -> list[bytes]:
    """Manifests in several dialects of CSV."""
    return [
        b"image,label\na.png,good\nb c.png,defective\n",
        "sep=;\nimage;label;mask;split\nü.png;ok;a.png|b c.png;test\na.png;ng;;train\n".encode(),
        'image\tlabel\tgroup\n"a.png"\t0\t"x\ty"\nb c.png\t1\t\n'.encode("utf-16"),
        b"path,label\r\na.png,good\r\na.png,defective\r\n",
    ]


def settings_seeds() -> list[bytes]:
    """Settings as TOML and as JSON."""
    return [
        b"",
        b'preset = "lite"\nseed = 3\n[dual_gp]\nsteps = 10\nloss_weights = [1, 1, 4]\n',
        json.dumps(preset().model_dump(mode="json")).encode(),
        b"".join(b"%s = 1\n" % key.encode() for key in PRESETS["lite"]),
    ]


def input_parsers(
    folder: Path, chosen: str = "", parsers: Parsers | None = None
) -> dict[str, tuple[list[bytes], Parser]]:
    """The parsers whose name contains ``chosen``, each with whole inputs that get damaged."""
    parsers = parsers or Parsers(folder)
    every: dict[str, tuple[Callable[[], list[bytes]], Parser]] = {
        "images": (image_seeds, parsers.image),
        "masks": (image_seeds, parsers.mask),
        "mask pairing": (tree_seeds, parsers.pairing),
        "manifest": (table_seeds, parsers.table),
        "settings": (settings_seeds, parsers.toml),
        "model": (lambda: [trained(folder)], parsers.model),
    }
    return {name: (seeds(), parser) for name, (seeds, parser) in every.items() if chosen in name}


def trained(folder: Path) -> bytes:
    """A whole model file, of a few steps.

    It is of version 1, which has no digest: that would refuse every damage before it is parsed.
    """
    from safetensors import safe_open
    from safetensors.torch import save

    from cdgp_bench.synthetic import make_dataset

    make_dataset(folder / "surfaces", good=6, defective=4)
    chosen = preset(
        "lite", input_size=(64, 64), inducing={"normal": 8, "anomaly": 4},
        dual_gp={"steps": 1, "batch_size": 4, "no_separation": "flag"},
        student={"steps": 1, "batch_size": 2},
    )  # fmt: skip
    train_run(folder / "surfaces", folder / "run", chosen, progress=Quiet())
    with safe_open(folder / "run/model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        metadata = dict(file.metadata()) | {"version": "1"}
    del metadata["sha256"]
    return bytes(save(tensors, metadata))


def fuzz(seeds: list[bytes], parser: Parser, inputs: int) -> Counter[str]:
    """Give a parser so many damaged inputs; its outcomes, counted."""
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=inputs, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate, Phase.shrink], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(damages())
    def once(damage: Damage) -> None:
        try:
            parser(damaged(seeds, damage))
            outcomes["taken"] += 1
        except CdgpError as error:
            outcomes[type(error).__name__] += 1
            str(error).encode("utf-8", "backslashreplace")

    once()
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    logging.getLogger("cdgp").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        parsers = Parsers(Path(place), given.keep)
        for name, (seeds, parse) in input_parsers(Path(place), given.only, parsers).items():
            began = time.monotonic()
            outcomes = fuzz(seeds, parse, given.inputs)
            counts = ", ".join(f"{kind} {count}" for kind, count in outcomes.most_common())
            seconds = time.monotonic() - began
            print(f"{name}: {outcomes.total()} inputs in {seconds:.0f} s: {counts}", flush=True)
        for seen, count in sorted(parsers.opinions.items()):
            print(f"  {seen}: {count}")


if __name__ == "__main__":
    main()
