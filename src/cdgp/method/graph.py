"""The one inference path: the numbers of ``network.py`` with less work, in every runtime.

Calibration, evaluation, prediction, export and benchmarks run this graph. What it saves, none of it
at the cost of the result:

- batch norms are folded into the convolutions before them (``fold``);
- the stem, which training leaves frozen, runs once where both encoders hold the same one;
- tokens are never formed in D dimensions: both the variance and the margin of a token are read off
  one vector of at most D entries, built at each stage's own resolution (``DominanceHead``);
- the branches are fused before they are upsampled, and once; both steps are linear;
- the surprisal is read off a table (``SurprisalTable``).
"""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor, nn

from cdgp.errors import TrainingError
from cdgp.method.backbone import Encoder
from cdgp.method.calibration import (
    Calibration,
    NormalTail,
    final_map,
    fuse,
    surprisal,
)
from cdgp.method.fold import fix_padding, fold_batch_norms
from cdgp.method.gp import has_linear_forms, linear_forms
from cdgp.method.network import Evidence, Network, Outputs, evidence_at, pool
from cdgp.method.resize import Size, upsample
from cdgp.method.score import BALANCED, ConformalTable, conformal_table, image_logit, rate_shift
from cdgp.method.student import residual_map

TABLE_SIZE = 2**20
MOST_RANGES = 50
"""A table is spaced as if the normal scores spread over at most so many quartile ranges."""
CHECKED = 20_000
"""At most so many normal scores at the end of the tail, and as many of all, test the table."""
CHECK_INPUT = 1e-4
"""Two scores this close are one to the table: as a share of their distance from the median plus the
quartile range, and of a hundredth of a standard deviation, so that rounding does not count."""
CHECK_NATS = 0.01
"""A difference of the surprisal that never counts: one hundredth of a probability."""


class EvidenceGraph(nn.Module):
    """All branches of a trained network, for inference alone; the network given is not changed.

    Args:
        network: trained.
        precision: of the encoders and the student. Where their features meet, small differences
            count, so the head, the residual and the distance are always in float32.
    """

    def __init__(self, network: Network, precision: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.precision = precision
        self.encoders = Encoders(network.encoder, network.teacher)
        self.head = None if network.gps is None else head_of(network)
        self.student = copy.deepcopy(network.student)
        self.distance = copy.deepcopy(network.distance)
        for part in (self.student.squeeze, *self.student.blocks):
            fold_batch_norms(part)
        self.sharpness, self.image_evidence = network.sharpness, network.image_evidence
        self.requires_grad_(False).eval()
        self.to(memory_format=torch.channels_last)

    @property
    def teacher(self) -> Encoder:
        """The frozen encoder; the fine-tuned one, if any, is another of its kind."""
        return self.encoders.teacher

    def forward(self, images: Tensor) -> Evidence:
        """(B, 3, H, W) float32 RGB in [0, 1] to the evidence of all branches."""
        with self._cast(images):
            tuned, frozen = self.encoders(images)
        dominance = None if self.head is None else self.head([f.float() for f in tuned])
        residual = self.residual(frozen)
        distance = None if self.distance is None else self.distance([f.float() for f in frozen])
        pooled = pool(dominance, residual, distance, self.sharpness, self.image_evidence)
        return Evidence(dominance, residual, distance, pooled)

    def residual(self, frozen: Sequence[Tensor]) -> Tensor:
        """The teacher's features of three stages to the residual map (B, H', W') of the first."""
        with self._cast(frozen[2]):
            rebuilt = self.student(frozen[2], [(f.shape[-2], f.shape[-1]) for f in frozen])
        pairs = zip(frozen, rebuilt, strict=True)
        return 1 - residual_map([cosine(t.float(), s.float()) for t, s in pairs])

    def _cast(self, images: Tensor) -> AbstractContextManager[object]:
        if self.precision == torch.float32:
            return nullcontext()
        return torch.autocast(images.device.type, self.precision)


class InferenceGraph(nn.Module):
    """From images to the calibrated result, as one module without control flow."""

    def __init__(
        self, evidence: EvidenceGraph, calibration: Calibration, defect_rate: float = BALANCED
    ) -> None:
        super().__init__()
        self.evidence = evidence
        self.outputs = OutputGraph(calibration, defect_rate)

    def forward(self, images: Tensor) -> Outputs:
        """(B, 3, H, W) float32 RGB in [0, 1] to maps and image scores."""
        found: Outputs = self.outputs(self.evidence(images), (images.shape[-2], images.shape[-1]))
        return found

    def at_size(self, size: Size) -> "InferenceGraph":
        """A copy for inputs of (height, width) alone.

        Nothing in it resizes a position embedding, which not all runtimes do as torch does.
        """
        fixed = copy.deepcopy(self)
        for encoder in (fixed.evidence.encoders.encoder, fixed.evidence.encoders.teacher):
            if encoder is not None:
                encoder.fix_input_size(size)
        return fixed


class OutputGraph(nn.Module):
    """From the evidence to the calibrated result; ``network.calibrated`` with less work.

    The image score refers to a defect rate; the map (Eq. 29) does not change with it.
    """

    def __init__(self, calibration: Calibration, defect_rate: float = BALANCED) -> None:
        super().__init__()
        self.calibration = calibration
        self.shift = rate_shift(defect_rate)
        self.table = SurprisalTable(calibration.tail)
        self.p_value: nn.Module | None = None
        if calibration.image.is_p_value:
            self.p_value = PValue(conformal_table(calibration.image.good_logits))

    def forward(self, evidence: Evidence, size: tuple[int, int]) -> Outputs:
        """Evidence (B, h, w) to maps (B, H, W) of a size and image scores."""
        c, pooled = self.calibration, evidence.pooled
        U = upsample(fuse(evidence.maps_below(c.dominance_cap), c.branches, c.weights), size)
        P = self.table(U)
        logit = image_logit(pooled, c.image)
        if self.p_value is None:
            score = torch.sigmoid(logit + self.shift)
        else:
            score = 1 - self.p_value(logit)
        return Outputs(final_map(P, logit, c.image_weight), P, U, pooled, score)


class PValue(nn.Module):
    """``score.p_value`` in torch, for graphs."""

    def __init__(self, table: ConformalTable) -> None:
        super().__init__()
        self.least, self.spread = table.least, table.spread
        self.register_buffer("logits", torch.from_numpy(table.logits).float())
        self.register_buffer("values", torch.from_numpy(table.values).float())
        self.logits: Tensor
        self.values: Tensor

    def forward(self, logit: Tensor) -> Tensor:
        """Log-odds (B,) to p-values (B,)."""
        u, p = self.logits, self.values
        shares = ((logit[:, None] - u[:-1]) / (u[1:] - u[:-1])).clamp(0, 1)
        inside = p[0] + (shares * (p[1:] - p[:-1])).sum(1)
        beyond = (logit - u[-1]).clamp_min(0) / self.spread
        return self.least + (inside - self.least) * torch.exp(-beyond)


class Encoders(nn.Module):
    """The frozen teacher and the fine-tuned encoder, if any, with a shared stem run once.

    A transformer's stem is run twice: it is one hundredth of the work, and timm takes the size of
    the grid from the image itself.
    """

    def __init__(self, encoder: Encoder | None, teacher: Encoder) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(teacher)
        self.encoder = None if encoder is None else copy.deepcopy(encoder)
        self.stem: nn.Module = nn.Identity()
        for part in (self.teacher, self.encoder):
            if part is not None:
                fold_batch_norms(part.trunk)
                fix_padding(part.trunk)
        if self.encoder is None or encoder is None:
            return
        names = [name for name, _ in encoder.named_stem()]
        own = teacher.trunk.state_dict()
        shared = not encoder.blocks and all(
            torch.equal(value, own[key])
            for key, value in encoder.trunk.state_dict().items()
            if key.split(".")[0] in names
        )
        if shared:
            self.stem = nn.Sequential(*self.encoder.stem())
            for name in names:
                setattr(self.encoder.trunk, name, nn.Identity())
                setattr(self.teacher.trunk, name, nn.Identity())

    def forward(self, images: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(B, 3, H, W) RGB in [0, 1] to both pyramids of features, the tuned one first."""
        x = self.stem(self.teacher.normalise(images))
        return () if self.encoder is None else self.encoder(x), self.teacher(x)


def head_of(network: Network) -> nn.Module:
    """The head with the least work that gives the evidence of a network with a Dual GP.

    ``DominanceHead`` leaves out the floor of the variance, so it must be out of reach.
    """
    assert network.gps is not None
    if not has_linear_forms(network.gps):
        return TokenHead(network)
    _, C = linear_forms(network.gps)
    least = 2 + float(torch.linalg.eigvalsh(C)[0])
    if network.evidence == "dominance" and least < network.floor:
        return TokenHead(network)
    return DominanceHead(network)


class DominanceHead(nn.Module):
    """Features to the linear-kernel dominance, without a token of D dimensions.

    With t = c / |c| the summed variance is t^T (2 I + C) t (see ``gp.linear_forms``), and 2 I + C
    has a Cholesky factor U^T U since variances are positive. So, with s = U c and b = U^-T beta,

        g = beta . c / sqrt(c^T U^T U c) = b . s / |s|,

    which no longer depends on |c|. s is the sum of what the stages give, each made at its own
    resolution, over the length of its projection, and then upsampled. Coordinates are those of a
    QR factorisation of the projections, finest stage first, so that the first two stages give
    C_1 + C_2 entries of s alone; the others come from the coarsest stage alone and have nothing to
    be added to. Both groups of entries are turned so that b lies along the first of each: lengths
    stay, and the margin is read off s.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        assert network.gps is not None and network.projection is not None
        phi = [weight.double().flatten(1) for weight in network.projection.state_dict().values()]
        Q, R = torch.linalg.qr(torch.cat(phi, dim=1))
        beta, C = linear_forms(network.gps)
        second = torch.eye(Q.shape[1], dtype=torch.float64, device=Q.device)
        if network.evidence == "dominance":
            second = 2 * second + Q.mT @ C @ Q
        U = torch.linalg.cholesky(second).mT
        b = torch.linalg.solve_triangular(U.mT, (Q.mT @ beta)[:, None], upper=False)
        ends = [0, *torch.tensor([p.shape[1] for p in phi]).cumsum(0).tolist()]
        common = min(ends[2], len(U))
        groups = [part for part in (slice(common), slice(common, len(U))) if len(U[part])]
        turns = [torch.linalg.qr(b[part], mode="complete") for part in groups]
        U = torch.cat([turn.mT @ U[part] for (turn, _), part in zip(turns, groups, strict=True)])
        self.along = [float(lengths[0, 0]) for _, lengths in turns]
        """The share of the first entry of either group in the margin."""
        own = [R[:end, a:end] for a, end in pairwise(ends)]
        of_s = [U[:, : len(r)] @ r for r in own]
        # The length of its projection takes no more numbers than the stage has channels.
        blocks = [[torch.linalg.qr(r, mode="r").R, part[:common]]
                  for r, part in zip(own, of_s, strict=True)]  # fmt: skip
        blocks[2] += [of_s[2][part] for part in groups[1:]]
        self.layers = nn.ModuleList(nn.ModuleList(map(pointwise, block)) for block in blocks)
        """For each stage what the length of its projection is read off and its share of the common
        entries of s, and at the coarsest stage the other entries. A layer each: runtimes take
        longer to cut one result into parts."""

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """(B, C_l, H_l, W_l) of three stages to the evidence (B, H_1, W_1)."""
        size = (features[0].shape[-2], features[0].shape[-1])
        parts, others = [], []
        for layers, feature in zip(self.layers, features, strict=True):
            assert isinstance(layers, nn.ModuleList)
            own, *entries = (layer(feature) for layer in layers)
            own = channel_norm(own)[:, None]
            part, *others = (part / own for part in entries)
            parts.append(upsample(part, size))
        # In place: at the finest resolution it is passes over memory that take the time.
        groups = [reduce(Tensor.add_, parts), *(upsample(other, size) for other in others)]
        margin = reduce(Tensor.add, (k * g[:, :1] for k, g in zip(self.along, groups, strict=True)))
        of_s = reduce(Tensor.add, (channel_norm(g).square() for g in groups)).sqrt()
        dominance: Tensor = margin[:, 0] / of_s
        return dominance


def channel_norm(vectors: Tensor) -> Tensor:
    """Norms (B, H, W) of the vectors along the channels of (B, C, H, W), above zero."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1)
    return norms.clamp_min(1e-12)


class TokenHead(nn.Module):
    """Features to evidence by way of the tokens, for whatever has no ``DominanceHead``."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        assert network.gps is not None and network.projection is not None
        self.projection = copy.deepcopy(network.projection)
        self.gps = copy.deepcopy(network.gps)
        self.floor, self.evidence = network.floor, network.evidence

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """(B, C_l, H_l, W_l) of three stages to the evidence (B, H_1, W_1)."""
        tokens = self.projection(features)
        return evidence_at(self.gps, tokens.flatten(0, 2), self.floor, self.evidence).view(
            tokens.shape[:3]
        )


class SurprisalTable(nn.Module):
    """The surprisal of Eq. 27 read off a table, linear between its entries.

    Entries are evenly spaced on y = z / (1 + |z|), z being the distance from the median in
    quartile ranges: finest where scores are dense, and all of the tail is within reach.
    """

    def __init__(self, tail: NormalTail, size: int = TABLE_SIZE) -> None:
        super().__init__()
        scores = tail.scores.double().cpu()
        quarters = scores[(torch.tensor([0.25, 0.5, 0.75]) * (len(scores) - 1)).long()]
        self.centre = float(quarters[1])
        # Where most of an image is one flat colour the quartiles tell nothing of the rest.
        spread = float(scores[-1] - scores[0]) / MOST_RANGES
        self.quartile_range = float(quarters[2] - quarters[0])
        self.scale = max(self.quartile_range, spread, 1e-6)
        z = (scores[[0, -1]] - self.centre) / self.scale
        first, last = (z / (1 + z.abs())).tolist()
        if not math.isnan(tail.shape):
            last = 1 - 2**-18  # a fitted tail goes on rising
        # One step beyond either end, so that the first and the last score are not ends themselves.
        step = max(last - first, 2**-12) / (size - 3)
        self.first, self.steps = first - step, 1 / step
        y = self.first + step * torch.arange(size, dtype=torch.float64)
        U = self.centre + self.scale * y / (1 - y.abs())
        self.register_buffer("values", surprisal(U, tail._replace(scores=scores)).float())
        self.values: Tensor

    def forward(self, fused: Tensor) -> Tensor:
        """Fused scores of any shape to surprisals, in nats."""
        z = (fused.flatten() - self.centre).div_(self.scale)
        place = (z / z.abs().add_(1)).sub_(self.first).mul_(self.steps)
        place = place.clamp_(0, len(self.values) - 1)
        lower = place.floor().clamp_(max=len(self.values) - 2)
        index = lower.int()
        left = self.values.index_select(0, index)
        right = self.values.index_select(0, index + 1)
        return torch.lerp(left, right, place - lower).view(fused.shape)


def check_table(table: SurprisalTable, tail: NormalTail) -> None:
    """Compare the table with the exact tail at normal scores: all of the end, and some below it.

    At a normal score the table must lie between the surprisals of the next lower and the next
    higher one, so at most one rank off. Scores within `CHECK_INPUT` count as one, and where a rank
    is less than `CHECK_NATS`, that much is allowed.

    Raises:
        TrainingError: it is further off.
    """
    scores = tail.scores.unique_consecutive()
    end = torch.arange(max(0, len(scores) - CHECKED), len(scores))
    some = torch.linspace(0, len(scores) - 1, min(CHECKED, len(scores))).long()
    queries = scores[torch.cat([some, end])]
    reach = CHECK_INPUT * (table.quartile_range + (queries - table.centre).abs() + 0.01)
    lower = torch.searchsorted(scores, queries - reach) - 1
    higher = torch.searchsorted(scores, queries + reach, right=True)
    least = surprisal(scores[lower.clamp_min(0)], tail) * (lower >= 0) - CHECK_NATS
    most = surprisal(scores[higher.clamp_max(len(scores) - 1)], tail) + CHECK_NATS
    found = table(queries)
    wrong = int(((found < least) | (found > most) | ~torch.isfinite(found)).sum())
    if wrong:
        raise TrainingError(
            f"the surprisal table is more than one rank off at {wrong} of {len(queries)} normal "
            "scores: some normal pixels are so extreme that the table cannot follow the tail. Look "
            "for spoilt images among the good ones of the calibration part of manifest.csv"
        )


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosines over the channels of (B, C, h, w), (B, h, w)."""
    return (a * b).sum(1) / (channel_norm(a) * channel_norm(b))


def pointwise(weight: Tensor) -> nn.Conv2d:
    """A 1 x 1 convolution with a given matrix (outputs, inputs)."""
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], kernel_size=1, bias=False)
    layer.weight.data = weight.float()[:, :, None, None].to(memory_format=torch.channels_last)
    return layer
