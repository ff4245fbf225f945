"""Feature pyramids to dense unit-norm tokens (Eq. 1)."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional


class TokenProjection(nn.Module):
    """Project three stages to D channels, normalise, align to the first stage, average, normalise.

    The projections are orthogonal before training, so that cosine similarities between ImageNet
    features survive as well as D dimensions allow.

    Args:
        channels: channels of the three stages.
        dim: D.
    """

    def __init__(self, channels: Sequence[int], dim: int) -> None:
        super().__init__()
        self.phi = nn.ModuleList(nn.Conv2d(c, dim, kernel_size=1, bias=False) for c in channels)
        for layer in self.phi:
            assert isinstance(layer, nn.Conv2d)
            nn.init.orthogonal_(layer.weight.view(dim, -1))

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """(B, C_l, H_l, W_l) of three stages to tokens (B, H', W', D), each of norm 1."""
        size = features[0].shape[-2:]
        total: Tensor | None = None
        for phi, feature in zip(self.phi, features, strict=True):
            stage = functional.normalize(phi(feature), dim=1)
            if stage.shape[-2:] != size:
                stage = functional.interpolate(
                    stage, size=size, mode="bilinear", align_corners=False
                )
            total = stage if total is None else total + stage
        assert total is not None
        # The mean's factor of one third vanishes in the norm.
        return functional.normalize(total, dim=1).permute(0, 2, 3, 1)
