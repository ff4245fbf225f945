"""First stage: encoder, projections and inducing values from image labels (Section 3.4)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cdgp.data.manifest import WeakSample, WeakSplit
from cdgp.errors import NoSeparationError
from cdgp.files import subsample_evenly
from cdgp.method.backbone import Encoder
from cdgp.method.build import new_pair, new_projection, pretrained_encoder, seeded
from cdgp.method.gp import DualGP, Moments, has_linear_forms, linear_moments
from cdgp.method.inducing import inducing_sets
from cdgp.method.losses import (
    attraction_loss,
    bag_margin,
    compactness_loss,
    log_mean_exp,
    mean_loss,
    mil_loss,
    normalised_evidence,
)
from cdgp.method.tokens import ImplicitTokens, TokenProjection
from cdgp.method.windows import batches, cut, places, windows
from cdgp.metrics.ranking import image_auroc
from cdgp.presets import DualGPSettings, Settings
from cdgp.training.context import TrainingContext, reduced, reduced_dtype
from cdgp.training.convolutions import fast_convolutions
from cdgp.training.dataset import WeakDataset, shuffled_stream
from cdgp.training.devices import ALONE, Share, synchronised
from cdgp.training.jitter import jittered
from cdgp.training.loop import Stage, cosine, read_checkpoint, run_stage

FILE = "dual_gp.safetensors"
MEAN_LOGIT = (10.0, 0.0)
"""Scale and bias that make log-odds of a mean margin, before training."""
MEAN_LEARNING_RATE = 1e-2
SEPARATION_IMAGES = 64
"""The check for separability uses at most so many images of each label."""
LEAST_SEPARATION = 0.7
"""AUROC of the pooled margin over training images below which there is no usable model."""
NO_SEPARATION = (
    "good and defective images are not separable: AUROC {:.2f} on the training images themselves, "
    "at least {} is needed, so no model was written. Try, in this order: (a) check that the bins "
    "are sorted rightly; (b) a larger --input-size, so that the defects stay visible; (c) more "
    "defective images; (d) more steps: --set dual_gp.steps=800; (e) the defaults of --preset lite "
    "for dual_gp.sigma_gradient (false) and dual_gp.batch_norm (train). log.jsonl holds the "
    "diagnostics: margin_good and margin_defective should move apart, variance_* should stay "
    "above 0.1"
)


class TrainedDualGP(NamedTuple):
    """What the first stage leaves."""

    encoder: Encoder
    projection: TokenProjection
    gps: DualGP
    separation: float
    """AUROC of the pooled mean margin over training images."""
    seconds: float

    @property
    def tuned(self) -> tuple[Encoder, TokenProjection, DualGP]:
        """The branch that it has trained."""
        return self.encoder, self.projection, self.gps


class DualGPTraining(nn.Module):
    """Encoder, projections and Gaussian processes; called with a batch, returns the loss."""

    def __init__(
        self,
        encoder: Encoder,
        projection: TokenProjection,
        gps: DualGP,
        settings: DualGPSettings,
        sharpness: float,
        share: Share = ALONE,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.projection = projection
        self.gps = gps
        self.settings = settings
        self.sharpness = sharpness
        self.share = share
        self.dtype = dtype
        """Of the encoder's own computations; None is float32."""
        self.mean_logit: nn.Parameter | None = None
        if settings.mean_weight:
            self.mean_logit = nn.Parameter(torch.tensor(MEAN_LOGIT))

    def forward(self, images: Tensor, defective: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of Eq. 13 and the diagnostics, of images (B, 3, H, W) and labels (B,) bool.

        Of several processes each has its own rows of the images, and all labels.
        """
        s, share, B = self.settings, self.share, len(defective)
        self.encoder.train_trunk(s.batch_norm)
        images = images.contiguous(memory_format=torch.channels_last)
        with reduced(self.dtype, images.device):
            features = self.encoder(self.encoder.normalise(images))
        if self.dtype is not None:  # the Gaussian processes stay in float32
            features = [f.float() for f in features]
        normal, anomaly, mean_token = self.moments(features)
        normal, anomaly = (
            Moments(*(share.gathered(v.view(len(images), -1), B) for v in moments))
            for moments in (normal, anomaly)
        )
        margins = (anomaly.mean - normal.mean).view(B, -1)
        bags = bag_margin(margins, s.mil_pooling, self.sharpness)
        evidence_N, evidence_A = (
            normalised_evidence(m, s.epsilon, s.variance_floor, s.sigma_gradient).view(B, -1)
            for m in (normal, anomaly)
        )
        mil = mil_loss(bags, defective, s.margin)
        compact = compactness_loss(evidence_N[~defective])
        mean = mean_loss(margins, defective, self.mean_logit)
        attract = attraction_loss(evidence_A[defective], margins[defective], s.epsilon)
        a, b, c = s.loss_weights
        with torch.no_grad():
            diagnostics = {"mil": mil, "mean": mean, "compact": compact, "attract": attract}
            largest = margins.amax(1)
            for name, chosen in (("good", ~defective), ("defective", defective)):
                if bool(chosen.any()):
                    diagnostics[f"margin_{name}"] = largest[chosen].mean()
            diagnostics["variance_normal"] = normal.variance.mean()
            diagnostics["variance_anomaly"] = anomaly.variance.mean()
            diagnostics["token_cosine"] = share.mean(mean_token, B).square().sum()
        loss = a * mil + b * compact + c * attract + s.mean_weight * mean
        return loss, {k: v.detach() for k, v in diagnostics.items()}

    def moments(self, features: Sequence[Tensor]) -> tuple[Moments, Moments, Tensor]:
        """Moments of both functions at all tokens of features, and the mean token."""
        if has_linear_forms(self.gps) and not self.settings.sigma_gradient:
            implicit = ImplicitTokens(self.projection, features)
            normal, anomaly = linear_moments(self.gps, implicit.products, implicit.scale.flatten())
            return normal, anomaly, implicit.mean_token()
        tokens = self.projection(features).flatten(0, 2)
        return self.gps.normal(tokens), self.gps.anomaly(tokens), tokens.detach().mean(0)


def dual_gp_samples(data: WeakSplit, settings: Settings) -> tuple[WeakSample, ...]:
    """The Dual GP's images: fit and calibration, or fit alone where those are held out."""
    return data.fit if settings.calibration.pictures == "held_out" else data.train


def train_dual_gp(
    dataset: WeakDataset,
    settings: Settings,
    context: TrainingContext,
    cache_key: str,
    make_pair: Callable[[], DualGP] | None = None,
) -> TrainedDualGP:
    """Train the Dual GP on weakly labelled images, starting from a pretrained encoder.

    Args:
        dataset: the images of ``dual_gp_samples``.
        cache_key: see ``context.stage_key``.
        make_pair: makes other evidence functions than the sparse GPs, such as the paper's controls.

    Raises:
        NoSeparationError: the two labels are not separable and the settings say to stop then.
    """
    s, device = settings.dual_gp, context.fabric.device
    encoder = pretrained_encoder(settings)
    projection = new_projection(encoder, settings)
    encoder.freeze_stem()
    for part in (encoder, projection):
        part.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    if make_pair is None:
        gps = initial_pair(dataset, encoder, projection, settings, context, cache_key)
    else:
        gps = make_pair()
    gps.to(device)
    training = DualGPTraining(
        encoder, projection, gps, s, settings.calibration.pooling_sharpness, context.share,
        reduced_dtype(settings),
    )  # fmt: skip

    def batch(step: int) -> tuple[Tensor, Tensor]:
        tiled = training if dataset.tile else None
        return weak_batch(dataset, settings, step, tiled, context.share)

    with fast_convolutions(encoder), synchronised(encoder, context.share):
        seconds = run_stage(
            Stage("Dual GP", training, new_optimizer(training), s.steps,
                  cosine(s.steps, s.final_learning_rate), batch, cache_key, FILE),
            context,
        )  # fmt: skip
    training.eval()
    separation = separation_of(dataset, training)
    context.log({"stage": "Dual GP", "separation": round(separation, 4)})
    if separation < LEAST_SEPARATION and s.no_separation == "stop":
        raise NoSeparationError(NO_SEPARATION.format(separation, LEAST_SEPARATION))
    return TrainedDualGP(encoder, projection, gps, separation, seconds)


def initial_pair(
    dataset: WeakDataset,
    encoder: Encoder,
    projection: TokenProjection,
    settings: Settings,
    context: TrainingContext,
    cache_key: str,
) -> DualGP:
    """Sparse GPs at the inducing tokens of the untrained network, or of the checkpoint."""
    path = context.checkpoint(FILE)
    found = read_checkpoint(path, cache_key) if path else None
    if found is None:
        Zn, Za = (
            context.share.from_first(Z, context.fabric.device)
            for Z in select_inducing(dataset, encoder, projection, settings, context)
        )
    else:
        Zn, Za = (found.tensors[f"module.gps.{name}.Z"] for name in ("normal", "anomaly"))
    return new_pair(Zn, Za, settings.dual_gp)


def new_optimizer(training: DualGPTraining) -> torch.optim.AdamW:
    """AdamW with rates of their own, and no decay, for what is not encoder or projection."""
    s = training.settings
    trained = (*training.encoder.parameters(), *training.projection.parameters())
    base = [p for p in trained if p.requires_grad]
    gps = list(training.gps.parameters())
    groups: list[dict[str, Any]] = [
        {"params": base, "lr": s.learning_rate, "weight_decay": s.weight_decay},
        {"params": gps, "lr": s.inducing_learning_rate, "weight_decay": 0.0},
    ]
    if training.mean_logit is not None:
        group = {"params": [training.mean_logit], "lr": MEAN_LEARNING_RATE, "weight_decay": 0.0}
        groups.append(group)
    return torch.optim.AdamW(groups)


def weak_batch(
    dataset: WeakDataset,
    settings: Settings,
    step: int,
    tiled: DualGPTraining | None = None,
    share: Share = ALONE,
) -> tuple[Tensor, Tensor]:
    """Jittered images (B, 3, H, W) and labels (B,) bool of one step.

    Where the images are tiled, the network ``tiled`` chooses the window of each. Of several
    processes each gets its own rows of the images, and all labels.
    """
    s = settings.dual_gp
    chosen = batch_indices(dataset, s.sampler, s.batch_size, step, settings.seed)
    rows = share.rows(len(chosen))
    own = chosen[rows.start : rows.stop]
    images = hardest_windows(dataset, own, tiled) if tiled else dataset.batch(own)
    images = jittered(images, s.colour_jitter, settings.seed, step, rows.start)
    return images, dataset.defective[chosen]


@torch.no_grad()
def hardest_windows(
    dataset: WeakDataset, indices: Sequence[int], training: DualGPTraining
) -> Tensor:
    """(B, 3, H, W): of each tiled image the window with the largest mean margin of a token.

    The maximum of Eq. 14 over all tokens of the image lies in that window, and all of the MIL
    loss's gradient with it; other poolings than ``max`` pool the window only. The window is chosen
    anew at each visit, without gradients and in evaluation mode. The other two losses use that
    window alone: of good images, the one most like a defect.
    """
    training.eval()
    found = []
    for index in indices:
        whole = dataset.input(index)
        possible = places(whole.shape[1:], dataset.size, training.encoder.strides)
        largest = torch.cat([
            token_margins(training, torch.stack(some)).amax(1)
            for some in batches(cut(whole, place, dataset.size) for place in possible)
        ])  # fmt: skip
        found.append(cut(whole, possible[int(largest.argmax())], dataset.size))
    return torch.stack(found)


def token_margins(training: DualGPTraining, images: Tensor) -> Tensor:
    """(B, 3, H, W) to the mean margins s_mu of their tokens, (B, N)."""
    encoder = training.encoder
    images = images.to(encoder.mean.device).contiguous(memory_format=torch.channels_last)
    tokens = training.projection(encoder(encoder.normalise(images)))
    return training.gps.mean_margin(tokens.flatten(0, 2)).view(len(images), -1)


def select_inducing(
    dataset: WeakDataset,
    encoder: Encoder,
    projection: TokenProjection,
    settings: Settings,
    context: TrainingContext,
) -> tuple[Tensor, Tensor]:
    """Z_N and Z_A from the tokens of the untrained network.

    At most ``inducing.tokens_per_class`` tokens of a class are held. Every image gives the same
    number, at positions drawn by seed and image; where there are more images than tokens to
    hold, evenly spaced images give one each. The same holds for the windows of a tiled image.
    """
    s = settings.inducing
    encoder.eval()
    chosen = {
        label: subsample_evenly(dataset.indices(label), s.tokens_per_class)
        for label in (False, True)
    }
    tokens: dict[bool, list[Tensor]] = {False: [], True: []}
    total = sum(len(indices) for indices in chosen.values())
    with torch.inference_mode(), context.progress.phase("Inducing tokens", total) as advance:
        for label, indices in chosen.items():
            each = max(1, s.tokens_per_class // max(1, len(indices)))
            for index in indices:
                whole = dataset.input(index)
                possible = places(whole.shape[1:], dataset.size, encoder.strides)
                corners = subsample_evenly(possible, each)
                generator = seeded(settings.seed, "tokens", label, index)
                for place in corners:
                    image = cut(whole, place, dataset.size)[None].to(context.fabric.device)
                    image = image.contiguous(memory_format=torch.channels_last)
                    grid = projection(encoder(encoder.normalise(image))).flatten(0, 2)
                    order = torch.randperm(len(grid), generator=generator)[: each // len(corners)]
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


@torch.inference_mode()
def separation_of(dataset: WeakDataset, training: DualGPTraining) -> float:
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
            token_margins(training, torch.stack(some)).flatten()
            for some in batches(
                windows(dataset.input(index), dataset.size, training.encoder.strides)
            )
        ]
        pooled.append(float(log_mean_exp(torch.cat(margins), training.sharpness)))
    finite = np.nan_to_num(np.array(pooled), nan=0.0)
    return image_auroc(finite, dataset.defective[chosen].numpy()).value or 0.0
