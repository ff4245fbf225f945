"""Score the images that a camera writes into a folder, as they come, with an exported model.

    cdgp export runs/parts --to onnx --out parts.onnx
    python examples/camera_folder.py parts.onnx camera/ > scores.jsonl

One JSON line an image, in the order of arrival; Ctrl-C or SIGTERM ends it. Neither torch nor timm
is needed. A file is read once its size has stayed the same for two looks; one that cannot be read
is a line with the reason.
"""

import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Event

import cdgp
from cdgp.errors import ImageError

LOOK = 0.2
"""Seconds between two looks into the folder."""
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff"}


def told(detector: cdgp.Detector, path: Path) -> dict[str, object]:
    """The line of one image."""
    started = time.perf_counter()
    try:
        found = detector.predict(path)
    except ImageError as error:
        return {"image": path.name, "problem": str(error)}
    return {
        "image": path.name,
        "score": round(found.pred_score, 6),
        "defective": found.pred_label,
        "boxes": [[r.x, r.y, r.width, r.height] for r in found.regions],
        "ms": round(1000 * (time.perf_counter() - started), 1),
    }


def main(model: str, folder: str) -> None:
    """Look, wait, score, until a signal comes; the image in work then is scored to its end."""
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    detector = cdgp.load(model)
    last: dict[Path, tuple[int, int]] = {}
    done: set[Path] = set()
    print(json.dumps({"ready": folder}), file=sys.stderr, flush=True)
    while not stop.wait(LOOK):
        now = {}  # when each file was written, and its size
        for path in Path(folder).iterdir():
            if path.suffix.lower() in SUFFIXES and path not in done:
                with suppress(FileNotFoundError):  # taken away again
                    stat = path.stat()
                    now[path] = stat.st_mtime_ns, stat.st_size
        whole = [path for path, facts in now.items() if facts[1] and last.get(path) == facts]
        for path in sorted(whole, key=now.__getitem__):
            if not stop.is_set():
                print(json.dumps(told(detector, path)), flush=True)
                done.add(path)
        last = now
    print(f"{len(done)} images scored", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
