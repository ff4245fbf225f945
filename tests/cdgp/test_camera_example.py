"""``examples/camera_folder.py`` as a program: files come while it runs, some of them in pieces."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import cdgp

EXAMPLE = Path(__file__).parents[2] / "examples" / "camera_folder.py"


def test_images_are_scored_as_they_come(
    exported: dict[str, Path], odd_images: list[NDArray[np.uint8]], tmp_path: Path
) -> None:
    camera = tmp_path / "camera"
    camera.mkdir()
    (camera / "notes.txt").write_text("no image")
    code = (
        "import runpy, sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name.split('.')[0] not in ('torch', 'timm'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"sys.argv = ['x', {str(exported['onnx'])!r}, {str(camera)!r}]\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout and process.stderr
    try:
        assert "ready" in process.stderr.readline()
        first, second = camera / "b.png", camera / "a.png"
        Image.fromarray(odd_images[0]).save(first)
        lines = [json.loads(process.stdout.readline())]
        whole = tmp_path / "whole.png"
        Image.fromarray(odd_images[1]).save(whole)
        content = whole.read_bytes()
        with second.open("wb") as file:  # written in four pieces, with looks between them
            for piece in range(4):
                file.write(content[piece * len(content) // 4 : (piece + 1) * len(content) // 4])
                file.flush()
                time.sleep(0.1)
        lines.append(json.loads(process.stdout.readline()))
        (camera / "c.jpg").write_bytes(b"no image")
        lines.append(json.loads(process.stdout.readline()))
        process.terminate()
        out, errors = process.communicate()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and not out
    assert "3 images scored" in errors
    detector = cdgp.load(exported["onnx"])
    for line, path in zip(lines, (first, second), strict=False):
        expected = detector.predict(path)
        assert line["image"] == path.name
        assert line["score"] == round(expected.pred_score, 6)
        assert line["defective"] == expected.pred_label
        assert line["boxes"] == [[r.x, r.y, r.width, r.height] for r in expected.regions]
    assert lines[2]["image"] == "c.jpg" and "c.jpg" in lines[2]["problem"]
