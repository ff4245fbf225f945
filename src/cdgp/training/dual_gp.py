"""First stage: encoder, projections and inducing values from image labels (Section 3.4)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

from cdgp.errors import NoSeparationError
from cdgp.files import subsample_evenly
from cdgp.method.backbone import Encoder
from cdgp.method.gp import DualGP, SparseGP
from cdgp.method.inducing import inducing_sets
from cdgp.method.kernels import kernel_named
from cdgp.method.losses import (
    attraction_loss,
    bag_margin,
    compactness_loss,
    log_mean_exp,
    mil_loss,
    normalised_evidence,
)
from cdgp.method.tiles import batches, cut, places, windows
from cdgp.method.tokens import TokenProjection
from cdgp.metrics.ranking import image_auroc
from cdgp.presets import DualGPSettings, Settings
from cdgp.progress import Progress
from cdgp.training.dataset import WeakDataset, seeded, shuffled_stream
from cdgp.training.loop import cosine, read_state, run_stage
from cdgp_bench.controls import HeteroscedasticHead, LinearHead

SEPARATION_IMAGES = 64
"""The check for separation looks at so many images of each label at most."""
LEAST_SEPARATION = 0.7
"""AUROC of the pooled margin over training images below which there is no usable model."""


Head = Literal["gp", "linear", "heteroscedastic"]
"""What the two evidence functions are: the method, or one of the paper's controls."""


class TrainedDualGP(NamedTuple):
    """What the first stage leaves."""

    encoder: Encoder
    projection: TokenProjection
    gps: DualGP
    separation: float
    """AUROC of the pooled mean margin over training images."""


class DualGPTraining(nn.Module):
    """Encoder, projections and Gaussian processes; called with a batch, returns the loss."""

    def __init__(
        self,
        encoder: Encoder,
        projection: nn.Module,
        gps: DualGP,
        settings: DualGPSettings,
        sharpness: float,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.gps = gps
        self.settings = settings
        self.sharpness = sharpness

    def forward(self, images: Tensor, defective: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of Eq. 13 and the signs of health, of images (B, 3, H, W) and labels (B,) bool."""
        s = self.settings
        self.encoder.train_trunk(s.batch_norm)
        images = images.contiguous(memory_format=torch.channels_last)
        tokens = self.projection(self.encoder(self.encoder.normalise(images))).flatten(1, 2)
        B, N, D = tokens.shape
        flat = tokens.reshape(B * N, D)
        normal, anomaly = self.gps.normal(flat), self.gps.anomaly(flat)
        margins = (anomaly.mean - normal.mean).view(B, N)
        bags = bag_margin(margins, s.mil_pooling, self.sharpness)
        evidence_N, evidence_A = (
            normalised_evidence(m, s.epsilon, s.variance_floor, s.sigma_gradient).view(B, N)
            for m in (normal, anomaly)
        )
        mil = mil_loss(bags, defective, s.margin)
        compact = compactness_loss(evidence_N[~defective])
        attract = attraction_loss(evidence_A[defective], margins[defective], s.epsilon)
        a, b, c = s.loss_weights
        with torch.no_grad():
            signs = {"mil": mil, "compact": compact, "attract": attract}
            largest = margins.amax(1)
            for name, chosen in (("good", ~defective), ("defective", defective)):
                if bool(chosen.any()):
                    signs[f"margin_{name}"] = largest[chosen].mean()
            signs["variance_normal"] = normal.variance.mean()
            signs["variance_anomaly"] = anomaly.variance.mean()
            # Mean cosine over all pairs of tokens: the squared length of the mean token.
            signs["token_cosine"] = flat.mean(0).square().sum()
        return a * mil + b * compact + c * attract, {k: v.detach() for k, v in signs.items()}


class Unit(torch.autograd.Function):
    """Vectors over their lengths, as ``functional.normalize``; the gradient in few passes.

    With y = x / |x| the gradient is (g - (g . y) y) / |x|, for which y and |x| suffice; autograd
    goes through every step of the quotient instead.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)
        y = x / length
        ctx.save_for_backward(y, length)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (g,) = gradients
        y, length = ctx.saved_tensors
        along = (g * y).sum(1, keepdim=True)
        gradient: Tensor = torch.addcmul(g, along, y, value=-1).div_(length)
        return gradient


def unit(x: Tensor) -> Tensor:
    """Vectors along the channels of (B, C, H, W) over their lengths."""
    y: Tensor = Unit.apply(x)
    return y


class UnitTokens(nn.Module):
    """What a projection gives, with the gradient of ``Unit``; it shares the projection's layers."""

    def __init__(self, projection: TokenProjection) -> None:
        super().__init__()
        self.phi = projection.phi

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """(B, C_l, H_l, W_l) of three stages to tokens (B, H', W', D), each of norm 1  (Eq. 1)."""
        size = features[0].shape[-2:]
        stages = [unit(phi(feature)) for phi, feature in zip(self.phi, features, strict=True)]
        total = stages[0]
        for stage in stages[1:]:
            if stage.shape[-2:] != size:
                stage = functional.interpolate(stage, size, mode="bilinear", align_corners=False)
            total = total + stage
        return unit(total).permute(0, 2, 3, 1)


def train_dual_gp(
    dataset: WeakDataset,
    encoder: Encoder,
    settings: Settings,
    fabric: Fabric,
    fingerprint: str,
    state: Path | None,
    log: Callable[[Mapping[str, Any]], None],
    progress: Progress,
    head: Head = "gp",
) -> TrainedDualGP:
    """Train the Dual GP on weakly labelled images, starting from a pretrained encoder.

    Args:
        dataset: the fit images, or fit and calibration images.
        encoder: pretrained; trained in place.
        settings: of the run.
        fabric: device and backward pass.
        fingerprint: names settings and data; a state with another one is not used.
        state: file that holds the stage's progress, or None.
        log: takes records.
        progress: where to tell the progress.
        head: what the evidence functions are.

    Raises:
        NoSeparationError: the two labels do not separate and the settings say to stop then.
        TrainingError: see ``run_stage`` and ``farthest_points``.
    """
    s = settings.dual_gp
    projection = new_projection(encoder, settings)
    encoder.freeze_stem()
    encoder.to(fabric.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    projection.to(fabric.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if head == "gp":
        found = read_state(state, fingerprint) if state else None
        if found is None:
            Zn, Za = select_inducing(dataset, encoder, projection, settings, fabric, progress)
        else:
            Zn, Za = (found.tensors[f"module.gps.{name}.Z"] for name in ("normal", "anomaly"))
        gps = new_pair(Zn, Za, s)
    else:
        gps = new_control(head, settings)
    gps.to(fabric.device)
    tokens = UnitTokens(projection)
    training = DualGPTraining(encoder, tokens, gps, s, settings.calibration.pooling_sharpness)
    inducing = list(gps.parameters())
    base = [p for p in (*encoder.parameters(), *projection.parameters()) if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": base, "lr": s.learning_rate, "weight_decay": s.weight_decay},
            {"params": inducing, "lr": s.inducing_learning_rate, "weight_decay": 0.0},
        ]
    )

    def hardest(indices: Sequence[int]) -> Tensor:
        return hardest_windows(dataset, indices, training, fabric.device)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        return weak_batch(dataset, settings, step, hardest if dataset.tile else None)

    run_stage("Dual GP", fabric, training, optimizer, s.steps,
              cosine(s.steps, s.final_learning_rate), batch, fingerprint, state, log,
              progress)  # fmt: skip
    training.eval()
    separation = separation_of(dataset, training, fabric)
    log({"stage": "Dual GP", "separation": round(separation, 4)})
    if separation < LEAST_SEPARATION and s.no_separation == "stop":
        raise NoSeparationError(no_separation_message(separation))
    return TrainedDualGP(encoder, projection, gps, separation)


def new_projection(encoder: Encoder, settings: Settings) -> TokenProjection:
    """Untrained token projections, a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "projection").initial_seed())
        return TokenProjection(encoder.channels, settings.backbone.token_dim)


def weak_batch(
    dataset: WeakDataset,
    settings: Settings,
    step: int,
    shown: Callable[[Sequence[int]], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Jittered images (B, 3, H, W) and labels (B,) bool of one step.

    Args:
        dataset: to choose from.
        settings: of the run.
        step: its number.
        shown: what of the chosen images the network sees; all of them where None.
    """
    s = settings.dual_gp
    chosen = batch_indices(dataset, s.sampler, s.batch_size, step, settings.seed)
    images = jittered((shown or dataset.batch)(chosen), s.colour_jitter, settings.seed, step)
    return images, dataset.defective[chosen]


@torch.no_grad()
def hardest_windows(
    dataset: WeakDataset, indices: Sequence[int], training: DualGPTraining, device: torch.device
) -> Tensor:
    """(B, 3, H, W): of each tiled image the window with the largest mean margin of a token.

    The maximum of Eq. 14 over all tokens of the image lies in that window, and all of the MIL
    loss's gradient with it; other poolings than ``max`` pool the window only. It is looked for
    anew at each visit, without gradients and in evaluation mode. The other two losses see that
    window alone: of good images, the one that looks most like a defect.
    """
    training.eval()
    found = []
    for index in indices:
        whole = dataset.input(index)
        possible = places(whole.shape[1:], dataset.size)
        largest = torch.cat([
            token_margins(training, images.to(device)).amax(1)
            for images in batches(cut(whole, place, dataset.size) for place in possible)
        ])  # fmt: skip
        found.append(cut(whole, possible[int(largest.argmax())], dataset.size))
    return torch.stack(found)


def token_margins(training: DualGPTraining, images: Tensor) -> Tensor:
    """(B, 3, H, W) to the mean margins s_mu of their tokens, (B, N)."""
    encoder = training.encoder
    images = images.contiguous(memory_format=torch.channels_last)
    tokens = training.projection(encoder(encoder.normalise(images)))
    return training.gps.mean_margin(tokens.flatten(0, 2)).view(len(images), -1)


def new_pair(Zn: Tensor, Za: Tensor, s: DualGPSettings) -> DualGP:
    """An untrained pair over two inducing sets."""
    kernel = kernel_named(s.kernel, s.rbf_sigma)
    normal, anomaly = (
        SparseGP(Z, kernel, s.jitter, s.initial_mean, s.initial_scale) for Z in (Zn, Za)
    )
    return DualGP(normal, anomaly)


def new_control(head: Head, settings: Settings) -> DualGP:
    """An untrained pair of one of the paper's controls, with the ranks of the inducing budgets."""
    dim = settings.backbone.token_dim
    if head == "linear":
        return DualGP(LinearHead(dim), LinearHead(dim))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "control").initial_seed())
        return DualGP(
            HeteroscedasticHead(dim, settings.inducing.normal),
            HeteroscedasticHead(dim, settings.inducing.anomaly),
        )


def select_inducing(
    dataset: WeakDataset,
    encoder: Encoder,
    projection: TokenProjection,
    settings: Settings,
    fabric: Fabric,
    progress: Progress,
) -> tuple[Tensor, Tensor]:
    """Z_N and Z_A from the tokens of the untrained network.

    At most ``inducing.tokens_per_class`` tokens of a class are held. Every image gives the same
    number, at positions drawn by seed and whole; where there are more images than tokens to
    hold, evenly spaced images give one each. So it is with the windows of a tiled whole.
    """
    s = settings.inducing
    encoder.eval()
    chosen = {
        label: subsample_evenly(dataset.indices(label), s.tokens_per_class)
        for label in (False, True)
    }
    tokens: dict[bool, list[Tensor]] = {False: [], True: []}
    total = sum(len(indices) for indices in chosen.values())
    with torch.inference_mode(), progress.phase("Inducing tokens", total) as advance:
        for label, indices in chosen.items():
            each = max(1, s.tokens_per_class // max(1, len(indices)))
            for index in indices:
                whole = dataset.input(index)
                shown = subsample_evenly(places(whole.shape[1:], dataset.size), each)
                generator = seeded(settings.seed, "tokens", label, index)
                for place in shown:
                    image = cut(whole, place, dataset.size)[None].to(fabric.device)
                    image = image.contiguous(memory_format=torch.channels_last)
                    grid = projection(encoder(encoder.normalise(image))).flatten(0, 2)
                    order = torch.randperm(len(grid), generator=generator)[: each // len(shown)]
                    tokens[label].append(grid[order.sort().values].cpu())
                advance()
    Zn, Za = inducing_sets(
        torch.cat(tokens[False]), torch.cat(tokens[True]), s.normal, s.anomaly, s.hard_fraction
    )
    return Zn.clone(), Za.clone()


def batch_indices(dataset: WeakDataset, sampler: str, size: int, step: int, seed: int) -> list[int]:
    """Positions of the images of one step."""
    if sampler == "random":
        everything = list(range(len(dataset)))
        return shuffled_stream(everything, step * size, size, seed, "all")
    defective = size // 2
    good = size - defective
    return shuffled_stream(
        dataset.indices(True), step * defective, defective, seed, "defective"
    ) + shuffled_stream(dataset.indices(False), step * good, good, seed, "good")


def jittered(
    images: Tensor, strengths: tuple[float, float, float, float], seed: int, step: int
) -> Tensor:
    """Colour jitter (brightness, contrast, saturation, hue), drawn per image."""
    jitter = v2.ColorJitter(*strengths)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(seed, "jitter", step).initial_seed())
        return torch.stack([jitter(image) for image in images])


@torch.inference_mode()
def separation_of(dataset: WeakDataset, training: DualGPTraining, fabric: Fabric) -> float:
    """AUROC of the pooled mean margin over evenly chosen training images, network as trained.

    Of a tiled image the margins of all windows are pooled.
    """
    chosen = [
        index
        for label in (False, True)
        for index in subsample_evenly(dataset.indices(label), SEPARATION_IMAGES)
    ]
    pooled = []
    for index in chosen:
        margins = [
            token_margins(training, images.to(fabric.device)).flatten()
            for images in batches(windows(dataset.input(index), dataset.size))
        ]
        pooled.append(float(log_mean_exp(torch.cat(margins), training.sharpness)))
    finite = np.nan_to_num(np.array(pooled), nan=0.0)
    return image_auroc(finite, dataset.defective[chosen].numpy()).value or 0.0


def no_separation_message(separation: float) -> str:
    """What to tell and what to try when the two bins do not separate."""
    return (
        f"good and defective images do not separate: AUROC {separation:.2f} on the training "
        f"images themselves, at least {LEAST_SEPARATION} is needed, so no model was written. "
        "Try, in this order: (a) look whether the bins are sorted rightly; (b) a larger "
        "--input-size, so that the defects stay visible; (c) more defective images; (d) more "
        "steps: --set dual_gp.steps=800; (e) the defaults of --preset lite for "
        "dual_gp.sigma_gradient (false) and dual_gp.batch_norm (train). "
        "log.jsonl holds the signs: margin_good and margin_defective should part, "
        "variance_* should stay above 0.1"
    )
