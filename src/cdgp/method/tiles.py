"""Large images in torch: the evidence of their windows (``windows``) as that of one image."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cdgp.method.graph import EvidenceGraph, InferenceGraph, OutputGraph
from cdgp.method.network import Evidence, Network, Outputs, pool
from cdgp.method.resize import Size
from cdgp.method.windows import Array, Band, batches, blended, by_bands, windows


class WindowGraph(nn.Module):
    """From windows to the maps of their evidence."""

    def __init__(self, evidence: Network | EvidenceGraph) -> None:
        super().__init__()
        self.evidence = evidence

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) float32 RGB in [0, 1] to (B, M, h/s, w/s): the dominance, where there is
        one, and the residual.

        There is no distance: it has a Gaussian a place of an image, and a window may lie anywhere.
        """
        found: Evidence = self.evidence(images)
        return torch.stack([m for m in found.maps[:2] if m is not None], dim=1).float()


class BandGraph(nn.Module):
    """From rows of evidence, and what the whole image gives, to the calibrated result."""

    def __init__(self, outputs: OutputGraph, cell: int) -> None:
        super().__init__()
        self.outputs, self.cell = outputs, cell

    def forward(self, maps: Tensor, pooled: Tensor) -> Band:
        """Evidence (M, h, w) and image evidence (1, F) to maps (1, s h, s w) and the score (1,)."""
        dominance = maps[:1] if len(maps) == 2 else None
        size = (self.cell * maps.shape[1], self.cell * maps.shape[2])
        found = self.outputs(Evidence(dominance, maps[-1:], None, pooled), size)
        return Band(found.anomaly_map, found.surprisal, found.fused, found.pred_score)


@torch.inference_mode()
def tiled_evidence(network: Network | EvidenceGraph, image: Tensor, window: Size) -> Evidence:
    """An image (3, H, W), RGB in [0, 1], to the evidence of all of it, (1, H/s, W/s), on the CPU.

    s is the finest stride of the encoder. Maps are blended, and then pooled over the image.
    """
    graph, device = WindowGraph(network), next(network.parameters()).device
    strides = network.teacher.strides

    def maps() -> Iterator[Array]:
        for some in batches(windows(image, window, strides)):
            images = torch.stack(some).to(device).contiguous(memory_format=torch.channels_last)
            yield from graph(images).cpu().numpy()

    whole = torch.from_numpy(blended(maps(), image.shape[1:], window, strides))
    dominance, residual = (whole[:1] if len(whole) == 2 else None), whole[-1:]
    pooled = pool(dominance, residual, None, network.sharpness, network.image_evidence)
    return Evidence(dominance, residual, None, pooled)


@torch.inference_mode()
def outputs_of(graph: InferenceGraph, evidence: Evidence, size: Size) -> Outputs:
    """Evidence (1, H/s, W/s) of a tiled image to maps (1, H, W) and scores, on the CPU."""
    cell, device = graph.evidence.teacher.strides[0], next(graph.buffers()).device
    band_graph, pooled = BandGraph(graph.outputs, cell), evidence.pooled.to(device)
    maps = torch.cat([m for m in evidence.maps[:2] if m is not None])

    def run(band: Array) -> Band:
        found = band_graph(torch.from_numpy(band).to(device), pooled)
        return Band(*(part.cpu().numpy() for part in found))

    anomaly_map, surprisal, fused, score = map(
        torch.from_numpy, by_bands(run, maps.numpy(), size, cell)
    )
    return Outputs(anomaly_map, surprisal, fused, pooled.cpu(), score)
