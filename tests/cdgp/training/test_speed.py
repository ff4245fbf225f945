"""What makes training fast changes no number: each against the plain computation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.helpers import random_gp, sparse_gps, tiny_settings, unit_tokens
from torch import Tensor, nn
from torch.nn import functional

from cdgp.data.manifest import Manifest
from cdgp.method.backbone import Encoder
from cdgp.method.build import pretrained_encoder
from cdgp.method.gp import DualGP
from cdgp.method.kernels import linear
from cdgp.method.student import ReverseStudent, reconstruction_loss
from cdgp.method.tokens import TokenProjection, l2_normalize
from cdgp.presets import settings
from cdgp.progress import Advance, Quiet
from cdgp.training import loop, student
from cdgp.training.context import new_context
from cdgp.training.dataset import WeakDataset, new_inputs
from cdgp.training.dual_gp import DualGPTraining
from cdgp.training.student import StudentTraining, TeacherFeatureCache, train_student


@pytest.fixture(scope="module")
def teacher() -> Encoder:
    encoder: Encoder = pretrained_encoder(tiny_settings()).requires_grad_(False).eval()
    return encoder


def images(count: int, seed: int) -> Tensor:
    return torch.randn(count, 3, 64, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("room", [0, 2**30])
def test_student_loss_is_that_of_the_plain_teacher(
    teacher: Encoder, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """Kept or not, first visit or second; 1e-6 of a loss of about 1."""
    monkeypatch.setattr(student, "KEPT_BYTES", room)
    before = {key: value.clone() for key, value in teacher.state_dict().items()}
    s = settings("lite").student
    torch.manual_seed(0)
    network = ReverseStudent(teacher.channels, s.widths)
    training = StudentTraining(teacher, network, s)
    clean = images(5, 0)
    for indices in ([0, 3, 1], [3, 4, 0], [2, 2, 3]):
        corrupted = images(3, 1 + indices[0])
        found, diagnostics = training(clean[indices], corrupted, indices)
        target = teacher(clean[indices])
        rebuilt = network(teacher(corrupted)[2], [(f.shape[-2], f.shape[-1]) for f in target])
        expected = reconstruction_loss(
            target, rebuilt, s.hard_fraction, s.hard_weight, s.smooth_weight
        )
        assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
        r = 1 - torch.cosine_similarity(target[1], rebuilt[1], dim=1)
        assert float(diagnostics["residual_2"]) == pytest.approx(float(r.detach().mean()), abs=1e-6)
    after = teacher.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert not any(key.startswith("target") for key in training.state_dict())


def test_clean_image_is_seen_once_and_its_features_are_those_of_any_batch(
    teacher: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = images(4, 0)
    drawn = [(index, (0, 0)) for index in range(4)]
    target = TeacherFeatureCache(teacher)
    seen: list[int] = []
    hook = teacher.register_forward_hook(lambda *call: seen.append(len(call[1][0])))
    first = target.of(drawn, clean)
    again = target.of([drawn[2], drawn[0]], clean[[2, 0]])
    hook.remove()
    assert seen == [4]
    monkeypatch.setattr(student, "KEPT_BYTES", 2 * sum(f[:1].nbytes for f in first))
    some = TeacherFeatureCache(teacher)
    some.of(drawn, clean)
    assert len(some._kept) == 2
    for a, b, c in zip(first, again, some.of([drawn[2], drawn[0]], clean[[2, 0]]), strict=True):
        assert torch.equal(a[[2, 0]], b)
        assert torch.equal(b, c)
        assert not a.requires_grad


class Interrupting(Quiet):
    """Raises KeyboardInterrupt after so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Advance]:
        def advance(note: str = "") -> None:
            self.after -= 1
            if self.after == 0:
                raise KeyboardInterrupt

        yield advance


def test_student_resumed_among_kept_images_is_the_same(
    surfaces: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unbroken, the third epoch's features are all kept; resumed within it, none is."""
    monkeypatch.setattr(loop, "SAVE_SECONDS", 0.0)
    chosen = tiny_settings(student={"steps": 8, "batch_size": 2})
    good = [sample for sample in surfaces.weak(None) if not sample.defective][:5]

    def trained(checkpoints: Path | None, progress: Quiet) -> dict[str, Tensor]:
        context = new_context(checkpoints, None, progress)
        dataset = WeakDataset(good, new_inputs(chosen))
        return train_student(dataset, chosen, context, "key").student.state_dict()

    unbroken = trained(None, Quiet())
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, Interrupting(7))
    resumed = trained(tmp_path, Quiet())
    for key, value in unbroken.items():
        torch.testing.assert_close(value, resumed[key], atol=1e-6, rtol=0, msg=key)


class Features(nn.Module):
    """Stands in for the encoder: gives the same features, whatever the images."""

    def __init__(self, features: list[Tensor]) -> None:
        super().__init__()
        self.features = features

    def normalise(self, images: Tensor) -> Tensor:
        return images

    def train_trunk(self, batch_norm: str) -> None:
        pass

    def forward(self, images: Tensor) -> list[Tensor]:
        return self.features


@pytest.mark.parametrize("pooling", ["max", "logsumexp", "top"])
def test_dual_gp_without_tokens_is_the_one_with_tokens(pooling: str) -> None:
    """Loss, diagnostics and gradients in float64; a kernel by another name needs the tokens."""
    generator = torch.Generator().manual_seed(0)
    features = [
        torch.randn(4, c, s, s, dtype=torch.float64, generator=generator).requires_grad_()
        for c, s in ((3, 8), (4, 4), (5, 2))
    ]
    torch.manual_seed(0)
    projection = TokenProjection((3, 4, 5), 16).double()
    chosen = settings("lite", dual_gp={"mil_pooling": pooling}).dual_gp
    defective = torch.tensor([True, False, True, False])
    results = []
    for kernel in (linear, lambda x, z: x @ z.mT):
        pair = DualGP(
            random_gp(unit_tokens(6, 16, 1), kernel, 2), random_gp(unit_tokens(4, 16, 3), kernel, 4)
        ).requires_grad_()
        training = DualGPTraining(
            Features(features), projection, pair, chosen, 8.0,  # type: ignore[arg-type]
        )  # fmt: skip
        loss, diagnostics = training(torch.zeros(4, 3, 1, 1), defective)
        m = [gp.m for gp in sparse_gps(pair)]
        gradients = torch.autograd.grad(loss, [*features, *projection.parameters(), *m])
        results.append([loss, *gradients, *(diagnostics[key] for key in sorted(diagnostics))])
    for fast, plain in zip(*results, strict=True):
        assert (fast - plain).abs().max() <= 1e-9 * (1 + plain.abs().max())


def test_l2_normalize_has_the_gradient_that_differences_show() -> None:
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(l2_normalize, x.requires_grad_())


def plain_tokens(projection: TokenProjection, features: list[Tensor]) -> Tensor:
    """Eq. 1 with torch's own functions and their gradients."""
    size = features[0].shape[-2:]
    stages = [
        functional.interpolate(functional.normalize(phi(f), dim=1), size=size, mode="bilinear")
        for phi, f in zip(projection.phi, features, strict=True)
    ]
    return functional.normalize(torch.stack(stages).sum(0), dim=1).permute(0, 2, 3, 1)


def test_tokens_and_their_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    projection = TokenProjection((5, 6, 7), 32)
    sizes = ((5, 16), (6, 8), (7, 4))
    features = [torch.randn(2, c, s, s + s // 4, requires_grad=True) for c, s in sizes]
    weight = torch.randn(2, 16, 20, 32)
    results = []
    for make in (plain_tokens, TokenProjection.forward):
        tokens = make(projection, features)
        inputs = [*features, *projection.parameters()]
        results.append([tokens, *torch.autograd.grad((tokens * weight).sum(), inputs)])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)


def test_tokens_of_a_zero_feature_are_finite() -> None:
    features = [torch.zeros(1, 2, 4, 4, requires_grad=True) for _ in range(3)]
    tokens = TokenProjection((2, 2, 2), 8)(features)
    torch.autograd.backward(tokens.sum())
    assert not tokens.any()
    assert all(bool(f.grad.isfinite().all()) for f in features if f.grad is not None)


def test_normalising_a_zero_vector_matches_torch() -> None:
    x = torch.zeros(1, 4, 1, 1)
    assert torch.equal(l2_normalize(x), functional.normalize(x, dim=1))
