"""Every method and experiment, and the runs that a plan makes of them."""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from cdgp.data.manifest import WeakSplit
from cdgp.files import digest
from cdgp.presets import PresetName, Settings, merged, settings
from cdgp.progress import Progress
from cdgp_bench.methods import (
    Fit,
    Fitted,
    MethodOptions,
    cdgp,
    classifier,
    draem,
    efficientad,
    mil_topk,
    padim,
    patchcore,
    rd4ad,
    static_max,
    supersimplenet,
    weakrest,
)
from cdgp_bench.protocol import SplitKey

Changes = Mapping[str, Any]
"""Settings by section, on top of others."""
UNCHANGED: Changes = {}
NO_OPTIONS: Mapping[PresetName, MethodOptions] = {}
SHARED = ("preset", "seed", "input_size", "data", "backbone")
TRAINED = (*SHARED, "dual_gp")
ALL = (*SHARED, "inducing", "dual_gp", "student", "training", "distance", "calibration")
REFERENCE = {"calibration": {"pictures": "seen"}}
"""Methods without a calibration leave no image to it: they train on all training images."""
CLASSIFIER: Changes = REFERENCE | {
    "dual_gp": {"sampler": "balanced", "mil_pooling": "max", "mean_weight": 0.0}
}
"""Their batches are half defective. The MIL pooling and the mean term are no part of them: stated,
so that their digests do not follow the presets."""
CLASSIFIER_RATE = {"dual_gp": {"learning_rate": 3e-3}}
"""Chosen on calibration images; see docs/decisions.md."""
PAPER_LITERAL = {
    "dual_gp": {
        "sigma_gradient": True, "sampler": "random", "mil_pooling": "max", "mean_weight": 0.0,
    },
    "distance": {"weight": 0.0},
    "calibration": {
        "pictures": "seen", "image_evidence": "dominance", "fusion_weight": 0.025,
        "most_fusion_weight": 0.025, "dominance_cap": None, "image_weight": 1 / 3,
        "tail": "counting",
    },
}  # fmt: skip
OWN_NETWORK = ("preset", "seed", "input_size", "data")
"""The settings of a method that does not use the shared backbone."""


class Method(NamedTuple):
    """A method under its name in plans and rows."""

    title: str
    supervision: Literal["normal", "image", "control"]
    """Block of the main table: normal images only, image labels, or a control of the paper."""
    fit: Fit
    uses: tuple[str, ...]
    """The settings that its rows depend on."""
    changes: Changes = UNCHANGED
    """On top of the plan's settings."""
    lite: Changes = UNCHANGED
    """On top of them where the preset is `lite`."""
    requires: tuple[str, ...] = ()
    """Distributions that it needs beyond the product's own; named in the extra `bench`."""
    options: Mapping[PresetName, MethodOptions] = NO_OPTIONS
    """Its own hyperparameters by preset, where it has some."""
    least_defects: int = 4
    """Fewest defective training images that it is shown with in a budget curve; a method that uses
    good images alone has one result for all budgets."""
    version: int = 1
    """Raised when its code may give other numbers, so that older rows no longer count. Version 2 of
    CDGP and its controls scores by the product's inference graph and scikit-learn's logistic.
    Version 3 of both has, in `lite`, the normal distance, an image score from all evidence, and
    calibration images that no stage has seen."""


def _with_options(
    title: str,
    supervision: Literal["normal", "image"],
    module: ModuleType,
    uses: tuple[str, ...] = SHARED,
) -> Method:
    """A method that needs anomalib and has hyperparameters of its own."""
    options: dict[PresetName, MethodOptions] = {"paper": module.PAPER, "lite": module.LITE}
    return Method(
        title, supervision, module.fit, uses, REFERENCE, requires=("anomalib",), options=options
    )


NEWER = (
    ("data", "pages", "single"),
    ("decision", "defect_rate", 0.5),
    ("decision", "p_value", 0.05),
    ("dual_gp", "mean_weight", 0.0),
    ("calibration", "image_evidence", "dominance"),
    ("calibration", "dominance_cap", None),
    ("training", "precision", "float32"),
)
"""Settings that are younger than the first committed rows, with the values that these have."""
METHODS: dict[str, Method] = {
    "padim": _with_options("PaDiM", "normal", padim),
    "patchcore": _with_options("PatchCore", "normal", patchcore),
    "rd4ad": _with_options("RD4AD", "normal", rd4ad),
    "draem": _with_options("DRAEM", "normal", draem, OWN_NETWORK),
    "efficientad": _with_options("EfficientAD", "normal", efficientad, OWN_NETWORK),
    "grad_cam": Method(
        "Classifier + Grad-CAM", "image", classifier.fit_grad_cam, TRAINED, CLASSIFIER,
        CLASSIFIER_RATE, ("grad-cam",),
    ),
    "classifier_cam": Method(
        "Classifier + CAM", "image", classifier.fit_cam, TRAINED, CLASSIFIER, CLASSIFIER_RATE
    ),
    "mil_topk": Method("MIL-TopK", "image", mil_topk.fit, TRAINED, CLASSIFIER),
    "supersimplenet": _with_options(
        "SuperSimpleNet (weak, reimplemented)", "image", supersimplenet
    ),
    "weakrest": _with_options("WeakREST (reimplemented)", "image", weakrest),
    "static_max": Method(
        "Static max similarity", "image", static_max.fit, (*SHARED, "inducing"), REFERENCE
    ),
    "cdgp_paper": Method("CDGP (paper-literal)", "image", cdgp.fit, ALL, PAPER_LITERAL,
                         least_defects=0, version=2),
    "cdgp": Method("CDGP", "image", cdgp.fit, ALL, least_defects=0, version=4),
    "linear_head": Method(
        "Direct linear head", "control", functools.partial(cdgp.fit, control="linear"), ALL,
        version=4,
    ),
    "heteroscedastic_head": Method(
        "Heteroscedastic linear", "control", functools.partial(cdgp.fit, control="heteroscedastic"),
        ALL, version=4,
    ),
}  # fmt: skip


class Variant(NamedTuple):
    """A method with changed settings, and the label of its row in a table."""

    label: str
    method: str = "cdgp"
    changes: Changes = UNCHANGED

    @property
    def setting(self) -> str:
        """The changes as text, ``default`` where there are none."""
        pairs = [
            f"{section}.{key}={_short(value)}"
            for section, values in self.changes.items() for key, value in values.items()
        ]  # fmt: skip
        return ",".join(pairs) or "default"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _calibrated(label: str, **changes: Any) -> Variant:
    return Variant(label, changes={"calibration": changes} if changes else {})


FULL = Variant("Full CDGP (both GP paths)")
GP_FREE = _calibrated("GP-free residual pipeline", fusion_weight=0.0, image_weight=0.0)
SPATIAL = _calibrated("Spatial GP only (+G)", image_weight=0.0)
IMAGE = _calibrated("Image GP only (+p)", fusion_weight=0.0)
MEAN_MARGIN = _calibrated("CDGP mean margin", evidence="mean_margin")
LINEAR = Variant("Direct linear head", "linear_head")

EXPERIMENTS: dict[str, tuple[Variant, ...]] = {
    "main": (),  # the plan's methods
    "components": (GP_FREE, SPATIAL, IMAGE, FULL),
    "scoring": (LINEAR, MEAN_MARGIN, Variant("CDGP posterior dominance")),
    "heteroscedastic": (Variant("Heteroscedastic linear", "heteroscedastic_head"), Variant("CDGP")),
    "hard_pool": (
        Variant("10 %", changes={"inducing": {"hard_fraction": 0.1}}),
        Variant("20 % (paper)", changes={"inducing": {"hard_fraction": 0.2}}),
        Variant("40 %", changes={"inducing": {"hard_fraction": 0.4}}),
    ),
    "inducing_budgets": (
        Variant("(16, 8)", changes={"inducing": {"normal": 16, "anomaly": 8}}),
        Variant("(32, 16) (paper)", changes={"inducing": {"normal": 32, "anomaly": 16}}),
        Variant("(64, 32)", changes={"inducing": {"normal": 64, "anomaly": 32}}),
    ),
    "kernels": (
        Variant("Linear (paper)", changes={"dual_gp": {"kernel": "linear"}}),
        *(
            Variant(f"Spherical RBF, σ = {sigma:g}",
                 changes={"dual_gp": {"kernel": "rbf", "rbf_sigma": sigma}})
            for sigma in (0.25, 0.5, 1.0)
        ),
    ),
    "fusion_weight": (
        _calibrated("0", fusion_weight=0.0),
        _calibrated("0.01", fusion_weight=0.01),
        _calibrated("0.025 (paper)", fusion_weight=0.025),
        _calibrated("0.05", fusion_weight=0.05),
    ),
    "image_weight": (
        _calibrated("0", image_weight=0.0),
        _calibrated("1/6", image_weight=1 / 6),
        _calibrated("1/3 (paper)", image_weight=1 / 3),
        _calibrated("1/2", image_weight=1 / 2),
        _calibrated("2/3", image_weight=2 / 3),
    ),
    "label_budget": (SPATIAL, FULL),
    "budget_curve": (),  # the plan's methods
    "held_out": (_calibrated("Held out of both stages", pictures="held_out"),
                 _calibrated("Seen", pictures="seen")),
    "qualitative": (),  # one image a category
    "complexity": (),  # the plan's methods, timed
}  # fmt: skip
CONTRASTS: tuple[tuple[str, Variant, Variant], ...] = (
    ("Full CDGP − GP-free", FULL, GP_FREE),
    ("Spatial G (image fixed)", FULL, IMAGE),
    ("Posterior − mean margin", FULL, MEAN_MARGIN),
    ("Posterior − direct linear", FULL, LINEAR),
)
"""The paper's paired contrasts, first minus second."""


class Run(NamedTuple):
    """One variant on one category, with one seed, fold and label budget: one result row."""

    dataset: str
    category: str
    variant: Variant
    seed: int
    budget: int | None
    settings: Settings
    options: MethodOptions | None = None
    fold: int | None = None

    def fit(self, data: WeakSplit, checkpoints: Path, progress: Progress) -> Fitted:
        """Train the method, or load what it has trained from ``checkpoints``."""
        own = () if self.options is None else (self.options,)
        method = METHODS[self.variant.method]
        return method.fit(data, self.settings, checkpoints, progress, *own)

    @property
    def identity(self) -> tuple[str, str, str, str, int, int | None, int | None]:
        """What names the row in tables, as ``rows.IDENTITY``."""
        method, setting = self.variant.method, self.variant.setting
        return self.dataset, self.category, method, setting, self.seed, self.budget, self.fold

    @property
    def split_key(self) -> SplitKey:
        """The prepared split that it uses."""
        return SplitKey(self.dataset, self.category, self.seed, self.budget, self.fold)

    @property
    def config_sha256(self) -> str:
        """Digest of the method's name and the settings that its row depends on."""
        method, chosen = METHODS[self.variant.method], self.settings
        used = chosen.model_dump(mode="json", include=set(method.uses))
        # Only where they differ from what the first rows had, so that older rows keep their digest.
        for section, key, default in NEWER:
            if section in used and used[section][key] == default:
                del used[section][key]
        if not used.get("training"):
            used.pop("training", None)
        if not chosen.distance.weight:  # without the branch its components decide nothing
            used.pop("distance", None)
        calibration = used.get("calibration", {})
        if calibration and calibration["most_fusion_weight"] == calibration["fusion_weight"]:
            del calibration["most_fusion_weight"]  # a fixed weight, as older rows have
        if "calibration" not in used and chosen.calibration.pictures != "seen":
            used["pictures"] = chosen.calibration.pictures
        if chosen.backbone.weights not in ("hub", "bundled", "random"):
            used["weights_sha256"] = digest(Path(chosen.backbone.weights))
        if method.version > 1:
            used["version"] = method.version
        if self.options is not None:
            used["options"] = self.options.decides()
        text = json.dumps([self.variant.method, used], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def variants_of(experiment: str, methods: tuple[str, ...]) -> tuple[Variant, ...]:
    """The variants that need rows; in `main` and `budget_curve` the plan's methods as they are."""
    if experiment in ("main", "budget_curve"):
        return tuple(Variant(METHODS[name].title, name) for name in methods)
    return EXPERIMENTS[experiment]


def budgets_of(experiment: str, budgets: tuple[int, ...]) -> tuple[int | None, ...]:
    """The label budgets of an experiment; None is all defective training images."""
    return (*budgets, None) if experiment in ("label_budget", "budget_curve") else (None,)


def own_row(experiment: str, variant: Variant, budget: int | None) -> bool:
    """Whether a variant has a row of its own at one of the experiment's label budgets."""
    if experiment != "budget_curve" or budget is None:
        return True
    method = METHODS[variant.method]
    return method.supervision != "normal" and budget >= method.least_defects


def variant_settings(
    variant: Variant,
    preset: PresetName,
    seed: int,
    input_size: tuple[int, int],
    changes: Changes,
) -> Settings:
    """All settings of one run: the preset's, then the changes of plan and data set (``changes``),
    of the method, and of the variant.
    """
    method = METHODS[variant.method]
    chosen = merged(changes, method.changes)
    if preset == "lite":
        chosen = merged(chosen, method.lite)
    chosen = merged(chosen, variant.changes)
    weight = variant.changes.get("calibration", {}).get("fusion_weight")
    if weight is not None:  # a variant's weight is fixed
        chosen = merged(chosen, {"calibration": {"most_fusion_weight": weight}})
    # A training that does not separate the labels is scored and flagged, never dropped. Rows hold
    # calibration errors of probabilities at equal numbers of good and defective parts.
    chosen = merged(
        chosen, {"dual_gp": {"no_separation": "flag"}, "decision": {"defect_rate": 0.5}}
    )
    return settings(preset, seed=seed, input_size=input_size, **chosen)
