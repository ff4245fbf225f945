"""Networks from settings and weights: the only place that puts them together."""

import hashlib

import torch
from torch import Tensor, nn

from cdgp.method.backbone import Encoder, load_weights
from cdgp.method.distance import STAGES, NormalDistance, StageDistance
from cdgp.method.gp import DualGP, SparseGP
from cdgp.method.kernels import kernel_named
from cdgp.method.network import Network
from cdgp.method.student import ReverseStudent
from cdgp.method.tokens import TokenProjection
from cdgp.presets import DualGPSettings, Settings


def seeded(seed: int, *key: object) -> torch.Generator:
    """A generator that depends on the seed and the key alone, so that any step can be redone."""
    digest = hashlib.sha256(repr((seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def pretrained_encoder(settings: Settings) -> Encoder:
    """A fresh encoder with the pretrained weights that the settings name."""
    encoder = Encoder(settings.backbone.name)
    load_weights(encoder, settings.backbone.name, settings.backbone.weights)
    return encoder


def new_projection(encoder: Encoder, settings: Settings) -> TokenProjection:
    """Untrained token projections, a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "projection").initial_seed())
        return TokenProjection(encoder.channels, settings.backbone.token_dim)


def new_pair(Zn: Tensor, Za: Tensor, s: DualGPSettings) -> DualGP:
    """An untrained pair over two inducing sets, (M_N, D) and (M_A, D)."""
    kernel = kernel_named(s.kernel, s.rbf_sigma)
    normal, anomaly = (
        SparseGP(Z, kernel, s.jitter, s.initial_mean, s.initial_scale) for Z in (Zn, Za)
    )
    return DualGP(normal, anomaly)


def new_student(teacher: Encoder, settings: Settings) -> ReverseStudent:
    """An untrained reverse student of a teacher, a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeded(settings.seed, "student").initial_seed())
        return ReverseStudent(teacher.channels, settings.student.widths)


def assemble(
    tuned: tuple[Encoder, TokenProjection, DualGP] | None,
    teacher: Encoder,
    student: ReverseStudent,
    distance: NormalDistance | None,
    settings: Settings,
) -> Network:
    """All branches as one network, with the settings that inference needs.

    ``tuned`` is the branch that is trained on labels; None where there was no defective image.
    """
    encoder, projection, gps = tuned or (None, None, None)
    return Network(
        encoder,
        projection,
        gps,
        teacher,
        student,
        distance,
        settings.calibration.pooling_sharpness,
        settings.dual_gp.variance_floor,
        settings.calibration.evidence,
        settings.calibration.image_evidence,
    )


def network_from_tensors(settings: Settings, tensors: dict[str, Tensor]) -> Network:
    """A trained network from the tensors of its ``state_dict``.

    Raises:
        ValueError, KeyError, RuntimeError: they do not fit the network that the settings name.
    """
    _check_shapes(settings, tensors)
    backbone = settings.backbone
    teacher, tuned, distance = Encoder(backbone.name), None, None
    if "gps.normal.Z" in tensors:
        tuned = (
            Encoder(backbone.name),
            TokenProjection(teacher.channels, backbone.token_dim),
            new_pair(tensors["gps.normal.Z"], tensors["gps.anomaly.Z"], settings.dual_gp),
        )
    if "distance.stages.0.mean" in tensors:
        names = ("basis", "mean", "whitening")
        distance = NormalDistance([
            StageDistance(*(tensors[f"distance.stages.{stage}.{name}"] for name in names))
            for stage in range(len(STAGES))
        ])  # fmt: skip
    student = ReverseStudent(teacher.channels, settings.student.widths)
    network = assemble(tuned, teacher, student, distance, settings)
    network.load_state_dict(tensors)
    return network


def _check_shapes(settings: Settings, tensors: dict[str, Tensor]) -> None:
    """Damaged settings may name a network of any size, so nothing of it is made before this."""
    backbone = settings.backbone
    with torch.device("meta"):
        encoder = Encoder(backbone.name)
        parts: dict[str, nn.Module] = {
            "teacher": encoder,
            "student": ReverseStudent(encoder.channels, settings.student.widths),
        }
        if "gps.normal.Z" in tensors:
            parts["encoder"] = encoder
            parts["projection"] = TokenProjection(encoder.channels, backbone.token_dim)
    expected = {
        f"{part}.{key}": value.shape
        for part, module in parts.items()
        for key, value in module.state_dict().items()
    }
    for name in ("normal", "anomaly") if "gps.normal.Z" in tensors else ():
        count = len(tensors[f"gps.{name}.Z"])
        expected[f"gps.{name}.Z"] = torch.Size((count, backbone.token_dim))
        expected[f"gps.{name}.m"] = torch.Size((count,))
        expected[f"gps.{name}.L"] = torch.Size((count, count))
    for place, index in enumerate(STAGES) if "distance.stages.0.mean" in tensors else ():
        stage = f"distance.stages.{place}"
        (h, w, K), (rows, columns) = (
            tensors[f"{stage}.mean"].shape, tensors[f"{stage}.whitening"].shape[:2],
        )  # fmt: skip
        if h % rows or w % columns:
            raise ValueError(f"{stage} has {rows} x {columns} cells of {h} x {w} positions")
        expected[f"{stage}.basis"] = torch.Size((encoder.channels[index], K))
        expected[f"{stage}.whitening"] = torch.Size((rows, columns, K, K))
    other = [key for key, shape in expected.items() if tensors[key].shape != shape]
    if other:
        raise ValueError(f"{other[0]} has another shape than its settings name")
