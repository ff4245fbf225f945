"""Variants, their settings, and the digests of committed rows."""

import pytest
from tests.cdgp_bench.helpers import RESULTS

from cdgp import presets
from cdgp.presets import merged
from cdgp_bench.grid import EXPERIMENTS, METHODS, Run, Variant, variant_settings
from cdgp_bench.methods import padim
from cdgp_bench.plan import read_plan
from cdgp_bench.rows import identity_of, read_rows
from cdgp_bench.run import plan_runs

LITE_BEFORE_3 = {
    "dual_gp": {"mil_pooling": "max", "mean_weight": 0.0},
    "distance": {"weight": 0.0},
    "calibration": {
        "pictures": "seen", "image_evidence": "dominance", "most_fusion_weight": 0.025,
        "dominance_cap": None, "tail": "counting", "image_weight": 1 / 3,
    },
}  # fmt: skip
"""What `lite` was until version 3 of CDGP and its controls."""


def test_settings_of_variants() -> None:
    """Each variant changes what it names; the classifier's rate belongs to lite alone."""
    lite = {m: variant_settings(Variant("", m), "lite", 0, (64, 64), {}) for m in METHODS}
    assert lite["cdgp"].student == lite["cdgp_paper"].student
    assert lite["cdgp_paper"].dual_gp.sigma_gradient and not lite["cdgp"].dual_gp.sigma_gradient
    assert lite["grad_cam"].dual_gp.learning_rate == 3e-3
    paper = variant_settings(Variant("", "grad_cam"), "paper", 0, (64, 64), {})
    assert paper.dual_gp.learning_rate == 1e-4
    for variants in EXPERIMENTS.values():
        names = [(variant.method, variant.setting) for variant in variants]
        assert len(set(names)) == len(names)


def test_rows_hold_probabilities_at_equal_numbers_and_no_decision() -> None:
    """So committed rows keep their digests, and their calibration errors what they refer to."""
    for method in METHODS:
        chosen = variant_settings(Variant("", method), "lite", 0, (64, 64), {})
        assert chosen.decision.defect_rate == 0.5
        decided = chosen.model_copy(
            update={"decision": chosen.decision.model_copy(update={"defect_rate": 0.02})}
        )
        digests = {Run("d", "c", Variant("", method), 0, None, s).config_sha256
                   for s in (chosen, decided)}  # fmt: skip
        assert len(digests) == 1


def test_a_distance_takes_part_in_the_digest_only_where_there_is_one() -> None:
    """Rows of the paper's pipeline are older than the branch."""

    def digest(method: str, **distance: float) -> str:
        changes = {"distance": distance}
        chosen = variant_settings(Variant("", method), "lite", 0, (64, 64), changes)
        return Run("d", "c", Variant("", method), 0, None, chosen).config_sha256

    assert digest("cdgp", weight=0.5) != digest("cdgp", weight=0.0) != digest("cdgp", weight=0.4)
    assert digest("cdgp", components=8) != digest("cdgp", components=16)
    assert digest("cdgp", weight=0, components=8) == digest("cdgp", weight=0, components=16)
    for method in ("cdgp_paper", "padim", "mil_topk", "classifier_cam"):
        assert digest(method, components=8) == digest(method, components=16)


def test_references_train_on_all_training_images() -> None:
    """They calibrate nothing, so they leave no image to it; CDGP does."""
    for name, method in METHODS.items():
        chosen = variant_settings(Variant("", name), "lite", 0, (64, 64), {})
        held = name == "cdgp" or method.supervision == "control"
        assert chosen.calibration.pictures == ("held_out" if held else "seen"), name


def test_options_take_part_in_the_rows_digest() -> None:
    chosen = variant_settings(Variant("", "padim"), "lite", 0, (64, 64), {})
    runs = [
        Run("d", "c", Variant("", "padim"), 0, None, chosen, padim.Options(features=n))
        for n in (100, 101)
    ]
    assert runs[0].config_sha256 != runs[1].config_sha256


@pytest.mark.parametrize("plan", ["in-house", "in-house-full"])
def test_committed_rows_are_those_of_the_plans(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has the configuration digest of its run, so none was made with other settings.

    A row may be older than its method's last version: it matches under exactly one of them, with
    the settings that `lite` had then.
    """
    chosen = read_plan(plan)
    sets = {(d, d) for d in chosen.datasets}
    runs = {r.identity: r for r in plan_runs(chosen, sets)}
    with monkeypatch.context() as older:
        older.setitem(presets.PRESETS, "lite", merged(presets.PRESETS["lite"], LITE_BEFORE_3))
        before = {r.identity: r for r in plan_runs(chosen, sets)}
    rows = read_rows(RESULTS / plan / "results.jsonl")
    assert rows
    for row in rows:
        # Textures and a teacher's weights are what the machine of these rows does not have.
        missing = row["method"] in ("draem", "efficientad")
        assert row["status"] == ("not run" if missing else "ok")
        method, digests = METHODS[row["method"]], []
        for version in range(1, method.version + 1):
            with monkeypatch.context() as older:
                older.setitem(METHODS, row["method"], method._replace(version=version))
                of_version = before if version < 3 <= method.version else runs
                digests.append(of_version[identity_of(row)].config_sha256)
        assert digests.count(row["config_sha256"]) == 1 and len(set(digests)) == method.version


def test_published_hyperparameters_are_in_the_paper_preset() -> None:
    """From the authors' papers, typed a second time."""
    published: dict[str, dict[str, object]] = {
        "padim": {"features": 550},
        "patchcore": {"coreset": 0.1, "neighbours": 9},
        "rd4ad": {"epochs": 200},
        "draem": {"epochs": 700},
        "efficientad": {"steps": 70_000},
        "supersimplenet": {"epochs": 300, "batch": 32, "noise": 0.015, "threshold": 0.2},
    }
    for method, options in published.items():
        assert options.items() <= METHODS[method].options["paper"].model_dump().items()
