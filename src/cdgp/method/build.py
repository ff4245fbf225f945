"""Networks from settings and weights: the only place that puts them together."""

import hashlib

import torch
from torch import Tensor

from cdgp.method.backbone import Encoder, load_weights
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
    encoder: Encoder,
    projection: TokenProjection,
    gps: DualGP,
    teacher: Encoder,
    student: ReverseStudent,
    settings: Settings,
) -> Network:
    """Both branches as one network, with the settings that inference needs."""
    return Network(
        encoder,
        projection,
        gps,
        teacher,
        student,
        settings.calibration.pooling_sharpness,
        settings.dual_gp.variance_floor,
        settings.calibration.evidence,
    )


def network_from_tensors(settings: Settings, tensors: dict[str, Tensor]) -> Network:
    """A trained network from the tensors of its ``state_dict``.

    Raises:
        ValueError, KeyError, RuntimeError: they do not fit the network that the settings name.
    """
    _check_shapes(settings, tensors)
    encoder, teacher = Encoder(settings.backbone.name), Encoder(settings.backbone.name)
    network = assemble(
        encoder,
        TokenProjection(encoder.channels, settings.backbone.token_dim),
        new_pair(tensors["gps.normal.Z"], tensors["gps.anomaly.Z"], settings.dual_gp),
        teacher,
        ReverseStudent(teacher.channels, settings.student.widths),
        settings,
    )
    network.load_state_dict(tensors)
    return network


def _check_shapes(settings: Settings, tensors: dict[str, Tensor]) -> None:
    """Damaged settings may name a network of any size, so nothing of it is made before this."""
    backbone = settings.backbone
    with torch.device("meta"):
        encoder = Encoder(backbone.name)
        parts = {
            "encoder": encoder,
            "teacher": encoder,
            "projection": TokenProjection(encoder.channels, backbone.token_dim),
            "student": ReverseStudent(encoder.channels, settings.student.widths),
        }
    expected = {
        f"{part}.{key}": value.shape
        for part, module in parts.items()
        for key, value in module.state_dict().items()
    }
    for name in ("normal", "anomaly"):
        count = len(tensors[f"gps.{name}.Z"])
        expected[f"gps.{name}.Z"] = torch.Size((count, backbone.token_dim))
        expected[f"gps.{name}.m"] = torch.Size((count,))
        expected[f"gps.{name}.L"] = torch.Size((count, count))
    other = [key for key, shape in expected.items() if tensors[key].shape != shape]
    if other:
        raise ValueError(f"{other[0]} has another shape than its settings name")
