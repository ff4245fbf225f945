"""Score one image with an exported model, using onnxruntime and numpy alone.

    cdgp export runs/parts --to onnx --out parts.onnx
    python examples/onnx_numpy.py parts.onnx image.npy     # (H, W, 3) sRGB, uint8

From bytes, onnxruntime reads no other file. Colour profiles and orientation are cdgp's to read.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # onnxruntime looks when it is imported
import onnxruntime

if not sys.argv[2].endswith(".npy"):
    sys.exit(f"{sys.argv[2]}: give an array of sRGB, uint8, saved as .npy; cdgp reads image files")


def weights(inputs: int, outputs: int) -> np.ndarray:
    """(outputs, inputs): bilinear with antialiasing, a triangle as wide as an output pixel."""
    distance = np.arange(inputs) + 0.5 - (np.arange(outputs)[:, None] + 0.5) * inputs / outputs
    triangle = np.maximum(0, 1 - np.abs(distance) / max(inputs / outputs, 1))
    return (triangle / triangle.sum(1, keepdims=True)).astype(np.float32)


content = Path(sys.argv[1]).read_bytes()
session = onnxruntime.InferenceSession(content)
about = session.get_modelmeta().custom_metadata_map
head, seal, tail = content.rpartition(about.get("sha256", "none").encode())
if hashlib.sha256(head + b"0" * 64 + tail).hexdigest().encode() != seal:
    sys.exit(f"{sys.argv[1]}: has changed since cdgp exported it, or is no such file; export again")
height, width = json.loads(about["settings"])["input_size"]
decision, fit = json.loads(about["decision"]), json.loads(about["image"])
threshold = decision.get("balanced_threshold") or decision["threshold"]
image = np.load(sys.argv[2])
if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
    sys.exit(f"{sys.argv[2]}: {image.dtype} {image.shape}; (height, width, 3) of uint8 is expected")
if image.std((0, 1)).max() < 2.55:
    sys.exit(f"{sys.argv[2]}: holds nothing to see, so that it cannot be called good")
rows, columns = weights(image.shape[0], height), weights(image.shape[1], width)
image = np.einsum("hy,yxc,wx->chw", rows, image / np.float32(255), columns, optimize=True)[None]
score, pooled, anomaly_map = session.run(["pred_score", "pooled", "anomaly_map"], {"images": image})
# Decided as at equal numbers of good and defective parts; pred_score refers to the defect rate.
z = (pooled[0] - fit["centre"]) / fit["scale"]
z = 2 * np.arcsinh(z / 2) if fit["compressed"] else z
decisive = 1 / (1 + np.exp(-fit["intercept"] - fit["slope"] @ z))
if fit["good_logits"]:  # no defective calibration image: one minus a p-value, at any defect rate
    decisive = score[0]
defective = np.float32(decisive) > np.float32(threshold)
y, x = np.unravel_index(anomaly_map[0].argmax(), anomaly_map[0].shape)
if not (np.isfinite(score).all() and np.isfinite(anomaly_map).all()):
    sys.exit(f"{sys.argv[2]}: the model gives no finite number for it")
print("defective" if defective else "good", f"{score[0]:.6f}")
print(f"most anomalous at x = {x / width:.3f}, y = {y / height:.3f} of the image's sides")
