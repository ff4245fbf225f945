"""What makes training fast changes no number: each against the plain computation."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.helpers import tiny_settings
from torch import Tensor
from torch.nn import functional

from cdgp.data.manifest import Manifest
from cdgp.method.backbone import Encoder
from cdgp.method.student import ReverseStudent, reconstruction_loss
from cdgp.method.tokens import TokenProjection
from cdgp.presets import settings
from cdgp.progress import Advance, Quiet
from cdgp.training import loop, student
from cdgp.training.dataset import WeakDataset
from cdgp.training.dual_gp import UnitTokens, unit
from cdgp.training.loop import new_fabric
from cdgp.training.stages import pretrained
from cdgp.training.student import StudentTraining, Target, train_student


@pytest.fixture(scope="module")
def teacher() -> Encoder:
    return pretrained(tiny_settings()).requires_grad_(False).eval()


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
        found, signs = training(clean[indices], corrupted, indices)
        target = teacher(clean[indices])
        rebuilt = network(teacher(corrupted)[2], [(f.shape[-2], f.shape[-1]) for f in target])
        expected = reconstruction_loss(
            target, rebuilt, s.hard_fraction, s.hard_weight, s.smooth_weight
        )
        assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)
        r = 1 - torch.cosine_similarity(target[1], rebuilt[1], dim=1)
        assert float(signs["residual_2"]) == pytest.approx(float(r.detach().mean()), abs=1e-6)
    after = teacher.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert not any(key.startswith("target") for key in training.state_dict())


def test_clean_image_is_seen_once_and_its_features_are_those_of_any_batch(
    teacher: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean, indices = images(4, 0), [0, 1, 2, 3]
    target = Target(teacher)
    seen: list[int] = []
    hook = teacher.register_forward_hook(lambda *call: seen.append(len(call[1][0])))
    first = target.of(indices, clean)
    again = target.of([2, 0], clean[[2, 0]])
    hook.remove()
    assert seen == [4]
    monkeypatch.setattr(student, "KEPT_BYTES", 2 * sum(f[:1].nbytes for f in first))
    some = Target(teacher)
    some.of(indices, clean)
    assert len(some._kept) == 2
    for a, b, c in zip(first, again, some.of([2, 0], clean[[2, 0]]), strict=True):
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

    def trained(state: Path | None, progress: Quiet) -> dict[str, Tensor]:
        return train_student(
            WeakDataset(good, chosen.input_size, 65535), pretrained(chosen), chosen, new_fabric(),
            "mark", state, lambda record: None, progress,
        ).state_dict()  # fmt: skip

    unbroken = trained(None, Quiet())
    state = tmp_path / "student.safetensors"
    with pytest.raises(KeyboardInterrupt):
        trained(state, Interrupting(7))
    resumed = trained(state, Quiet())
    for key, value in unbroken.items():
        torch.testing.assert_close(value, resumed[key], atol=1e-6, rtol=0, msg=key)


def test_unit_has_the_gradient_that_differences_show() -> None:
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(unit, x.requires_grad_())


def test_tokens_and_their_gradients_are_those_of_the_projection() -> None:
    torch.manual_seed(0)
    projection = TokenProjection((5, 6, 7), 32)
    sizes = ((5, 16), (6, 8), (7, 4))
    features = [torch.randn(2, c, s, s + s // 4, requires_grad=True) for c, s in sizes]
    weight = torch.randn(2, 16, 20, 32)
    results = []
    for make in (projection, UnitTokens(projection)):
        tokens = make(features)
        inputs = [*features, *projection.parameters()]
        results.append([tokens, *torch.autograd.grad((tokens * weight).sum(), inputs)])
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-5, rtol=1e-5)


def test_tokens_of_a_zero_feature_are_finite() -> None:
    features = [torch.zeros(1, 2, 4, 4, requires_grad=True) for _ in range(3)]
    tokens = UnitTokens(TokenProjection((2, 2, 2), 8))(features)
    tokens.sum().backward()
    assert not tokens.any()
    assert all(bool(f.grad.isfinite().all()) for f in features if f.grad is not None)


def test_normalising_a_zero_vector_matches_torch() -> None:
    x = torch.zeros(1, 4, 1, 1)
    assert torch.equal(unit(x), functional.normalize(x, dim=1))
