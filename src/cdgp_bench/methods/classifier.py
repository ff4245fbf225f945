"""A plain classifier on the same backbone, mapped by class activation or by Grad-CAM.

Global average pooling of the stage at stride 16 and one linear layer, binary cross-entropy, batches
that are half defective, the jitter and the number of steps of the Dual GP. The class activation
map (Zhou et al., 2016) is the linear layer applied at every position. Grad-CAM (Selvaraju et al.,
2017) comes from the ``grad-cam`` package; over average pooling and one linear layer it is that map
without its bias and cut at zero. The package's own last step, stretching each image's map to
[0, 1], is left out: it would make the maps of two images incomparable, and the metrics pool them.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from cdgp.data.manifest import WeakSplit
from cdgp.method.backbone import Encoder
from cdgp.method.build import pretrained_encoder, seeded
from cdgp.presets import Settings
from cdgp.progress import Progress
from cdgp_bench.methods import Fitted
from cdgp_bench.methods.common import fit_on_labels

Mapper = Callable[["Classifier", Tensor], tuple[NDArray[np.float32], float]]
"""Classifier and input (1, 3, H, W) to map (h, w) and probability."""


class Classifier(nn.Module):
    """Encoder, average pooling, one linear layer; called with a batch, returns the loss."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.linear = nn.Linear(encoder.channels[2], 1)

    def coarse(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the stage at stride 16, (B, C, H/16, W/16)."""
        images = images.contiguous(memory_format=torch.channels_last)
        return cast(Tensor, self.encoder(self.encoder.normalise(images))[2])

    def activation(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) RGB in [0, 1] to the class activation map (B, H/16, W/16)."""
        coarse = self.coarse(images).permute(0, 2, 3, 1)
        return cast(Tensor, self.linear(coarse))[..., 0]

    def forward(self, images: Tensor, defective: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.encoder.train_trunk("train")
        logit = self.activation(images).mean((1, 2))
        return functional.binary_cross_entropy_with_logits(logit, defective.float()), {}


class Logit(nn.Module):
    """The trained classifier in the form of the Grad-CAM package: images to logits (B, 1)."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier
        self.stage = nn.Identity()
        """Where activations and gradients are taken: the stage at stride 16."""

    def forward(self, images: Tensor) -> Tensor:
        coarse = self.stage(self.classifier.coarse(images))
        pooled = coarse.mean((2, 3))
        return cast(Tensor, self.classifier.linear(pooled))


@torch.inference_mode()
def class_activation(classifier: Classifier, image: Tensor) -> tuple[NDArray[np.float32], float]:
    """Class activation map, and the probability of its mean."""
    activation = classifier.activation(image).cpu()
    return activation[0].numpy(), float(torch.sigmoid(activation.double().mean()))


def grad_cam(classifier: Classifier, image: Tensor) -> tuple[NDArray[np.float32], float]:
    """The package's weighted activations, cut at zero, and the probability."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import RawScoresOutputTarget

    class Unstretched(GradCAM):  # type: ignore[misc]
        def compute_cam_per_layer(self, images: Any, targets: Any, eigen_smooth: bool) -> Any:
            seen = self.activations_and_grads
            activations, gradients = (
                taken[0].cpu().numpy() for taken in (seen.activations, seen.gradients)
            )
            return self.get_cam_image(
                images, self.target_layers[0], targets, activations, gradients, eigen_smooth
            )

        def aggregate_multi_layers(self, raw: Any) -> Any:
            return np.maximum(raw, 0)

    logit = Logit(classifier).eval()
    with Unstretched(logit, [logit.stage]) as cam:
        raw = cam(image, [RawScoresOutputTarget()])
        probability = float(torch.sigmoid(cam.outputs.detach().double())[0, 0])
    return raw[0].astype(np.float32), probability


def _fit(
    mapper: Mapper, data: WeakSplit, settings: Settings, checkpoints: Path, progress: Progress
) -> Fitted:
    """Train on fit and calibration images; ``dual_gp.learning_rate`` is the classifier's."""
    encoder = pretrained_encoder(settings)
    encoder.freeze_stem()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "classifier").initial_seed())
        classifier = Classifier(encoder)
    s = settings.dual_gp
    trained = [p for p in classifier.parameters() if p.requires_grad]
    groups = [{"params": trained, "lr": s.learning_rate, "weight_decay": s.weight_decay}]
    predict = functools.partial(mapper, classifier)
    return fit_on_labels(
        "classifier", classifier, groups, predict, data, settings, checkpoints, progress,
        {"learning_rate": s.learning_rate},
    )  # fmt: skip


fit_cam = functools.partial(_fit, class_activation)
fit_grad_cam = functools.partial(_fit, grad_cam)
