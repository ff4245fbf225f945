"""Training in bfloat16: the networks alone, near what float32 gives."""

import json
from pathlib import Path

import pytest
import torch
from tests.helpers import TINY_OPTIONS, cdgp, tiny_settings
from torch import nn

from cdgp import artifact
from cdgp.data.manifest import Manifest
from cdgp.method.build import new_pair, new_projection, new_student, pretrained_encoder, seeded
from cdgp.method.gp import Moments
from cdgp.training.context import shared_parts, stage_key
from cdgp.training.convolutions import fast_convolutions
from cdgp.training.dual_gp import DualGPTraining
from cdgp.training.student import StudentTraining

CHOSEN = tiny_settings()
IMAGES = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([True, False, True, False])


def dual_gp(dtype: torch.dtype | None) -> DualGPTraining:
    encoder = pretrained_encoder(CHOSEN)
    tokens = torch.randn(12, CHOSEN.backbone.token_dim, generator=seeded(0, "tokens"))
    Z = nn.functional.normalize(tokens, dim=1)
    pair = new_pair(Z[:8], Z[8:], CHOSEN.dual_gp)
    with torch.no_grad():
        pair.anomaly.m.fill_(0.5)  # type: ignore[attr-defined]
    projection = new_projection(encoder, CHOSEN)
    return DualGPTraining(encoder, projection, pair, CHOSEN.dual_gp, 8.0, dtype=dtype)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def test_dual_gp_computes_its_moments_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, losses, steps = set[torch.dtype](), [], []
    moments = DualGPTraining.moments

    def watched(self: DualGPTraining, features: list[torch.Tensor]) -> object:
        assert not torch.is_autocast_enabled("cpu")
        found = moments(self, features)
        kinds.update(v.dtype for m in found if isinstance(m, Moments) for v in (*m, *features))
        return found

    monkeypatch.setattr(DualGPTraining, "moments", watched)
    for dtype in (None, torch.bfloat16):
        training = dual_gp(dtype)
        with fast_convolutions(training.encoder):
            loss, _ = training(IMAGES, LABELS)
            loss.backward()
        losses.append(float(loss.detach()))
        steps.append(gradients(training))
    assert kinds == {torch.float32}
    check(losses, steps)


def test_student_loss_is_in_float32() -> None:
    losses, steps = [], []
    for dtype in (None, torch.bfloat16):
        teacher = pretrained_encoder(CHOSEN).requires_grad_(False).eval()
        student = new_student(teacher, CHOSEN)
        training = StudentTraining(teacher, student, CHOSEN.student, dtype=dtype)
        clean = teacher.normalise(IMAGES)
        loss, _ = training(clean, clean + 0.1, [(i, (0, 0)) for i in range(4)])
        assert loss.dtype == torch.float32
        loss.backward()
        losses.append(float(loss.detach()))
        steps.append(gradients(student))
    check(losses, steps)


def check(losses: list[float], steps: list[dict[str, torch.Tensor]]) -> None:
    """The loss is near, and so is the gradients' direction.

    2^-9 is the precision of a number, some fifty layers of them lie before the loss, and the batch
    norms of 4 images of 2 x 2 positions amplify it.
    """
    plain, reduced = losses
    assert 0 < abs(reduced - plain) < 0.02 * abs(plain)
    assert steps[0].keys() == steps[1].keys()
    a, b = (torch.cat([g.flatten() for g in found.values()]) for found in steps)
    assert {g.dtype for g in steps[1].values()} == {torch.float32}
    assert float(nn.functional.cosine_similarity(a, b, dim=0)) > 0.5


def test_the_command_trains_in_bfloat16_and_keeps_float32(
    surfaces: Manifest, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    done = cdgp("train", surfaces.root, "--out", out, "--precision", "bfloat16", *TINY_OPTIONS)
    assert done.exit_code == 0, done.output
    assert json.loads((out / "config.json").read_text())["training"] == {"precision": "bfloat16"}
    state = artifact.load(out / "model.safetensors").network.state_dict().values()
    assert {v.dtype for v in state if v.is_floating_point()} == {torch.float32}
    done = cdgp("train", surfaces.root, "--out", out, "--resume", *TINY_OPTIONS)
    assert done.exit_code == 2 and "training.precision" in done.output


def test_stages_of_another_precision_are_not_used() -> None:
    reduced = tiny_settings(training={"precision": "bfloat16"})
    for stage in ("dual_gp", "student"):
        assert stage_key(reduced, "", stage) != stage_key(CHOSEN, "", stage)
    assert "training" not in shared_parts(CHOSEN)
