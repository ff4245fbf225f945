"""Every method and experiment of the evidence, and the cells that a plan makes of them."""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
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

Changes = Mapping[str, Any]
NOTHING: Changes = MappingProxyType({})


class Method(NamedTuple):
    """A method under its name in plans and rows."""

    title: str
    supervision: Literal["normal", "image", "control"]
    """Block of the main table: normal images only, image labels, or a control of the paper."""
    fit: Fit
    uses: tuple[str, ...]
    """The settings that its row depends on."""
    changes: Changes = NOTHING
    """On top of the plan's settings."""
    lite: Changes = NOTHING
    """On top of them where the preset is `lite`."""
    requires: tuple[str, ...] = ()
    """Distributions that it needs beyond the product's own; named in the extra `bench`."""
    options: Mapping[PresetName, MethodOptions] = MappingProxyType({})
    """Hyperparameters of its own by preset, where it has some."""
    version: int = 1
    """Raised when its code gives other numbers, so that older rows do not count as its own."""


SHARED = ("preset", "seed", "input_size", "data", "backbone")
TRAINED = (*SHARED, "dual_gp")
ALL = (*SHARED, "inducing", "dual_gp", "student", "calibration")
BALANCED = {"dual_gp": {"sampler": "balanced"}}
CLASSIFIER_RATE = {"dual_gp": {"learning_rate": 3e-3}}
"""Ranked on calibration images; see docs/decisions.md."""
PAPER_READING = {
    "dual_gp": {"sigma_gradient": True, "sampler": "random", "mil_pooling": "max"},
    "calibration": {"fusion_weight": 0.025, "tail": "counting"},
}
ANOMALIB = ("anomalib",)
OWN_NETWORK = ("preset", "seed", "input_size", "data")
"""What a method depends on whose networks are its own."""
METHODS: dict[str, Method] = {
    "padim": Method(
        "PaDiM", "normal", padim.fit, SHARED, requires=ANOMALIB,
        options={"paper": padim.PAPER, "lite": padim.LITE},
    ),
    "patchcore": Method(
        "PatchCore", "normal", patchcore.fit, SHARED, requires=ANOMALIB,
        options={"paper": patchcore.PAPER, "lite": patchcore.LITE},
    ),
    "rd4ad": Method(
        "RD4AD", "normal", rd4ad.fit, SHARED, requires=ANOMALIB,
        options={"paper": rd4ad.PAPER, "lite": rd4ad.LITE},
    ),
    "draem": Method(
        "DRAEM", "normal", draem.fit, OWN_NETWORK, requires=ANOMALIB,
        options={"paper": draem.PAPER, "lite": draem.LITE},
    ),
    "efficientad": Method(
        "EfficientAD", "normal", efficientad.fit, OWN_NETWORK, requires=ANOMALIB,
        options={"paper": efficientad.PAPER, "lite": efficientad.LITE},
    ),
    "grad_cam": Method(
        "Classifier + Grad-CAM", "image", classifier.fit_grad_cam, TRAINED, BALANCED,
        CLASSIFIER_RATE, ("grad-cam",),
    ),
    "classifier_cam": Method(
        "Classifier + CAM", "image", classifier.fit_cam, TRAINED, BALANCED, CLASSIFIER_RATE
    ),
    "mil_topk": Method("MIL-TopK", "image", mil_topk.fit, TRAINED, BALANCED),
    "supersimplenet": Method(
        "SuperSimpleNet (weak, reimplemented)", "image", supersimplenet.fit, SHARED,
        requires=ANOMALIB, options={"paper": supersimplenet.PAPER, "lite": supersimplenet.LITE},
    ),
    "weakrest": Method(
        "WeakREST (reimplemented)", "image", weakrest.fit, SHARED, requires=ANOMALIB,
        options={"paper": weakrest.PAPER, "lite": weakrest.LITE},
    ),
    "static_max": Method(
        "Static max similarity", "image", static_max.fit, (*SHARED, "inducing")
    ),
    "cdgp_paper": Method("CDGP (paper's reading)", "image", cdgp.fit, ALL, PAPER_READING),
    "cdgp": Method("CDGP", "image", cdgp.fit, ALL),
    "linear_head": Method(
        "Direct linear head", "control", functools.partial(cdgp.fit, head="linear"), ALL
    ),
    "heteroscedastic_head": Method(
        "Heteroscedastic linear", "control", functools.partial(cdgp.fit, head="heteroscedastic"),
        ALL,
    ),
}  # fmt: skip


class Line(NamedTuple):
    """One line of a table: a method, changed settings, and how the table calls it."""

    label: str
    method: str = "cdgp"
    changes: Changes = NOTHING

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


def _calibrated(label: str, **changes: Any) -> Line:
    return Line(label, changes={"calibration": changes} if changes else {})


FULL = Line("Full CDGP (both GP paths)")
GP_FREE = _calibrated("GP-free residual pipeline", fusion_weight=0.0, image_weight=0.0)
SPATIAL = _calibrated("Spatial GP only (+G)", image_weight=0.0)
IMAGE = _calibrated("Image GP only (+p)", fusion_weight=0.0)
MEAN_MARGIN = _calibrated("CDGP mean margin", evidence="mean_margin")
LINEAR = Line("Direct linear head", "linear_head")

EXPERIMENTS: dict[str, tuple[Line, ...]] = {
    "main": (),  # the plan's methods
    "components": (GP_FREE, SPATIAL, IMAGE, FULL),
    "scoring": (LINEAR, MEAN_MARGIN, Line("CDGP posterior dominance")),
    "heteroscedastic": (Line("Heteroscedastic linear", "heteroscedastic_head"), Line("CDGP")),
    "hard_pool": (
        Line("10 %", changes={"inducing": {"hard_fraction": 0.1}}),
        Line("20 % (paper)", changes={"inducing": {"hard_fraction": 0.2}}),
        Line("40 %", changes={"inducing": {"hard_fraction": 0.4}}),
    ),
    "inducing_budgets": (
        Line("(16, 8)", changes={"inducing": {"normal": 16, "anomaly": 8}}),
        Line("(32, 16) (paper)", changes={"inducing": {"normal": 32, "anomaly": 16}}),
        Line("(64, 32)", changes={"inducing": {"normal": 64, "anomaly": 32}}),
    ),
    "kernels": (
        Line("Linear (paper)", changes={"dual_gp": {"kernel": "linear"}}),
        *(
            Line(f"Spherical RBF, σ = {sigma:g}",
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
    "held_out": (_calibrated("Held out of both stages", pictures="held_out"), Line("Seen")),
    "qualitative": (),  # one image a category
    "complexity": (),  # the plan's methods, timed
}  # fmt: skip
CONTRASTS: tuple[tuple[str, Line, Line], ...] = (
    ("Full CDGP − GP-free", FULL, GP_FREE),
    ("Spatial G (image fixed)", FULL, IMAGE),
    ("Posterior − mean margin", FULL, MEAN_MARGIN),
    ("Posterior − direct linear", FULL, LINEAR),
)
"""The paper's paired contrasts, first minus second."""


class Cell(NamedTuple):
    """One row to compute."""

    dataset: str
    category: str
    line: Line
    seed: int
    budget: int | None
    settings: Settings
    options: MethodOptions | None = None

    def fit(self, data: WeakSplit, states: Path, progress: Progress) -> Fitted:
        """Train its method, or take from ``states`` what it has trained."""
        return fit(self.line.method, data, self.settings, self.options, states, progress)

    @property
    def identity(self) -> tuple[str, str, str, str, int, int | None]:
        """What names the row in tables."""
        return (
            self.dataset, self.category, self.line.method, self.line.setting, self.seed, self.budget
        )  # fmt: skip

    @property
    def config_sha256(self) -> str:
        """Digest of the method's name and the settings that its row depends on."""
        method, chosen = METHODS[self.line.method], self.settings
        used = chosen.model_dump(mode="json", include=set(method.uses))
        # Named only where they are not the plain case, so that rows keep their digest.
        if "calibration" not in used and chosen.calibration.pictures != "seen":
            used["pictures"] = chosen.calibration.pictures
        if chosen.backbone.weights not in ("hub", "bundled", "random"):
            used["weights_sha256"] = digest(Path(chosen.backbone.weights))
        if method.version > 1:
            used["version"] = method.version
        if self.options is not None:
            used["options"] = self.options.decides()
        text = json.dumps([self.line.method, used], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def fit(
    method: str,
    data: WeakSplit,
    chosen: Settings,
    options: MethodOptions | None,
    states: Path,
    progress: Progress,
) -> Fitted:
    """A method by name, with its own options where it has some."""
    own = () if options is None else (options,)
    return METHODS[method].fit(data, chosen, states, progress, *own)


def lines_of(experiment: str, methods: tuple[str, ...]) -> tuple[Line, ...]:
    """The lines that need rows; the plan's methods in `main`."""
    if experiment == "main":
        return tuple(Line(METHODS[name].title, name) for name in methods)
    return EXPERIMENTS[experiment]


def budgets_of(experiment: str, budgets: tuple[int, ...]) -> tuple[int | None, ...]:
    """The label budgets that an experiment's lines run under."""
    return (*budgets, None) if experiment == "label_budget" else (None,)


def line_settings(
    line: Line,
    preset: PresetName,
    seed: int,
    input_size: tuple[int, int],
    changes: Changes,
) -> Settings:
    """All settings of one row.

    Args:
        line: its method and what it changes.
        preset: what the rest comes from.
        seed: of the run.
        input_size: (height, width) of the network's input.
        changes: of the plan and of the data set.
    """
    method = METHODS[line.method]
    chosen = merged(changes, method.changes)
    if preset == "lite":
        chosen = merged(chosen, method.lite)
    chosen = merged(chosen, line.changes)
    # A run that does not separate is scored and flagged here, never dropped.
    chosen = merged(chosen, {"dual_gp": {"no_separation": "flag"}})
    return settings(preset, seed=seed, input_size=input_size, **chosen)


def distinct(cells: Iterator[Cell]) -> list[Cell]:
    """The cells, each once."""
    return list({cell.identity: cell for cell in cells}.values())
