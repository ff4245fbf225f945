"""An exported model that cuts images into windows: two graphs, and NumPy between them.

``parts.onnx`` takes a window and gives its evidence; ``parts.outputs.onnx`` takes rows of the whole
image's evidence and gives the calibrated result. With OpenVINO either is an ``.xml`` with its
``.bin``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cdgp.method.score import pool_maps
from cdgp.method.windows import Band, Size, blended, by_bands, windows
from cdgp.runtimes.base import INPUT, Array, Outputs
from cdgp.runtimes.onnx import OnnxRuntime
from cdgp.runtimes.openvino import OpenVinoRuntime

EVIDENCE = "evidence"
"""What the first graph gives, (B, M, h/s, w/s), and the second takes, (M, rows, columns)."""
POOLED = "pooled"
"""What the second graph takes beside it, (1, F)."""


class Tiling(NamedTuple):
    """What cutting and blending need beside the two graphs; part of the card's ``export``."""

    window: Size
    """(h, w)."""
    strides: tuple[int, ...]
    """Of the encoder; the first is s, the side of a position of the evidence in pixels."""
    sharpness: float
    """r of the pooled dominance."""
    image_evidence: str
    """Which maps are pooled, see ``network.pool``."""
    outputs_sha256: str = ""
    """The seal of the file of the second graph."""


class TiledExport:
    """Runs both graphs; safe in threads where their runtimes are."""

    def __init__(
        self,
        evidence: OnnxRuntime | OpenVinoRuntime,
        outputs: OnnxRuntime | OpenVinoRuntime,
        tiling: Tiling,
    ) -> None:
        self.evidence, self.outputs, self.tiling = evidence, outputs, tiling
        self.name = evidence.name

    def run(self, images: Array) -> Outputs:
        """One image (1, 3, H, W) float32 RGB in [0, 1] of any size to maps of that size."""
        (image,) = images
        window, strides, sharpness, image_evidence, _ = self.tiling

        def maps() -> Iterator[Array]:
            for part in windows(image, window, strides):
                (found,) = self.evidence.call({INPUT: part[None]}, [EVIDENCE])
                yield found[0]

        size = (image.shape[1], image.shape[2])
        whole = blended(maps(), size, window, strides)
        pooled = pool_maps(whole, sharpness, image_evidence)

        def calibrated(band: Array) -> Band:
            return Band(*self.outputs.call({EVIDENCE: band, POOLED: pooled}, Band._fields))

        anomaly_map, surprisal, fused, score = by_bands(calibrated, whole, size, strides[0])
        return Outputs(anomaly_map, surprisal, fused, pooled, np.asarray(score))
