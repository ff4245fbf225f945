"""Draw the two images at the top of the README, from a short training on generated surfaces.

    python -m cdgp_bench.studies.readme_images --work runs/readme

Trains once (minutes; a finished WORK/surfaces is used again) and writes what_it_does.png and
report.png to docs/images. The second is a screenshot of the run's report, taken by Chromium
(Debian: apt-get install chromium).
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

import cdgp
from cdgp.data.images import read_masks
from cdgp.data.manifest import Sample, read_csv
from cdgp.inference import Detector, Prediction
from cdgp.progress import Bars
from cdgp.report.overlay import heat, panels, score_text
from cdgp_bench.synthetic import make_dataset

IMAGES = Path("docs/images")
SIZE = (160, 160)
GOOD, DEFECTIVE, SEED = 120, 80, 4
STEPS = 200
"""Of each stage; a real training takes 400 + 360."""
PANEL, GAP, HEADER, TEXT = 196, 6, 30, 178
PAPER, INK, SOFT = (255, 255, 255), (28, 39, 51), (85, 99, 111)
COLOURS = 256
"""Of a palette, so that an image stays below 300 kB."""
SCREEN = (1000, 2510)
"""Of the report, in pixels; its two halves are shown side by side."""
SHARE = 0.7
CHROMIUM = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("runs/readme"))
    work = parser.parse_args().work
    run = work / "surfaces"
    if not (run / "report.html").is_file():
        parts = make_dataset(work / "parts", GOOD, DEFECTIVE, SIZE, SEED)
        steps = {"steps": STEPS}
        settings = cdgp.settings("lite", input_size=SIZE, dual_gp=steps, student=steps)
        cdgp.fit(parts, out=run, settings=settings, progress=Bars())
    IMAGES.mkdir(parents=True, exist_ok=True)
    save(what_it_does(run), IMAGES / "what_it_does.png")
    save(screenshot(run / "report.html"), IMAGES / "report.png")


def what_it_does(run: Path) -> Image.Image:
    """Two defective test images and a good one, each as image, map, overlay and decision."""
    detector = cdgp.load(run)
    samples = chosen(detector, read_csv(run / "manifest.csv").of("test"))
    width, row = 3 * (PANEL + GAP) + TEXT, PANEL + GAP
    canvas = Image.new("RGB", (width, HEADER + len(samples) * row - GAP), PAPER)
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(("image", "anomaly map", "regions", "decision")):
        left = column * (PANEL + GAP) + (12 if column == 3 else 2)
        draw.text((left, HEADER / 2), title, SOFT, ImageFont.load_default(15), anchor="lm")
    for index, sample in enumerate(samples):
        top = HEADER + index * row
        image = detector.read(sample.image)
        prediction = detector.predict_pixels(image)
        plain, boxed = panels(image, prediction, detector.colour_scale, (PANEL, PANEL))
        colours = Image.fromarray(heat(prediction.anomaly_map, detector.colour_scale))
        shown = (plain, colours.resize(plain.size, Image.Resampling.BILINEAR), boxed)
        for column, panel in enumerate(shown):
            canvas.paste(panel, (column * (PANEL + GAP), top))
        write_decision(draw, (3 * (PANEL + GAP) + 12, top + PANEL // 2), prediction)
    return canvas


def chosen(detector: Detector, samples: tuple[Sample, ...]) -> list[Sample]:
    """A small and a large defect among those that were found, and an ordinary good image."""
    predictions = {sample: detector.predict(sample.image) for sample in samples}
    found = [s for s in samples if s.defective and predictions[s].pred_label]
    found = [s for s in found if predictions[s].regions]
    found.sort(key=lambda s: read_masks(s.masks, SIZE).sum())
    good = sorted((s for s in samples if not s.defective), key=lambda s: predictions[s].pred_score)
    return [found[len(found) // 4], found[3 * len(found) // 4], good[len(good) // 2]]


def write_decision(draw: ImageDraw.ImageDraw, place: tuple[int, int], found: Prediction) -> None:
    """Probability, decision and number of regions, around the (x, y) of their left middle."""
    x, y = place
    count = len(found.regions)
    word = "defective" if found.pred_label else "good"
    draw.text((x, y - 30), "P(defective)", SOFT, ImageFont.load_default(15), anchor="lm")
    draw.text((x, y), score_text(found.pred_score), INK, ImageFont.load_default(26), anchor="lm")
    line = f"{word}, {count} region{'' if count == 1 else 's'}"
    draw.text((x, y + 30), line, INK, ImageFont.load_default(15), anchor="lm")


def screenshot(page: Path) -> Image.Image:
    """The top of a page as Chromium shows it, in two columns."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("the screenshot needs Chromium, for example: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        subprocess.run(
            [browser, *CHROMIUM, f"--user-data-dir={folder}/profile", f"--screenshot={shot}",
             f"--window-size={SCREEN[0]},{SCREEN[1]}", page.resolve().as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip
        with Image.open(shot) as image:
            page_top = image.convert("RGB")
    width, height = SCREEN[0], SCREEN[1] // 2
    columns = Image.new("RGB", (2 * width, height), PAPER)
    for number in range(2):
        half = page_top.crop((0, number * height, width, (number + 1) * height))
        columns.paste(half, (number * width, 0))
    size = round(SHARE * columns.width), round(SHARE * columns.height)
    return columns.resize(size, Image.Resampling.LANCZOS)


def save(image: Image.Image, path: Path) -> None:
    """As PNG with a palette."""
    quantised = image.quantize(COLOURS, dither=Image.Dither.NONE)
    quantised.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {np.asarray(quantised).shape}")


if __name__ == "__main__":
    main()
