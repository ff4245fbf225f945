"""Two vision transformers of three narrow blocks, under names that timm knows from now on."""

from typing import Any

from timm.models import register_model
from timm.models.eva import vit_small_patch16_dinov3
from timm.models.vision_transformer import vit_small_patch14_dinov2

NARROW = {"embed_dim": 48, "depth": 3, "num_heads": 3}


@register_model
def tiny_patch14_dinov2(pretrained: bool = False, **kwargs: Any) -> Any:
    """Of the kind of DINOv2: a position embedding of 37 x 37, and a class token."""
    return vit_small_patch14_dinov2(pretrained, **{**NARROW, **kwargs})


@register_model
def tiny_patch16_dinov3(pretrained: bool = False, **kwargs: Any) -> Any:
    """Of the kind of DINOv3: rotary positions, a class token and four registers."""
    return vit_small_patch16_dinov3(pretrained, **{**NARROW, **kwargs})


DINOV2, DINOV3 = "tiny_patch14_dinov2", "tiny_patch16_dinov3"
