"""A benchmark plan: which data, which methods, which experiments. TOML, validated."""

import os
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdgp.errors import SettingsError
from cdgp.presets import Settings, merged, nearest
from cdgp_bench.datasets import LAYOUTS
from cdgp_bench.grid import EXPERIMENTS, METHODS, Variant, variant_settings
from cdgp_bench.methods import MethodOptions
from cdgp_bench.protocol import BUDGETS, Repeat
from cdgp_bench.statistics import Repeats


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DatasetPlan(_Section):
    """One data set of a plan."""

    layout: str = "folder"
    """One of ``datasets.LAYOUTS``."""
    path: str = ""
    """Folder or CSV; ``$NAME`` is replaced by the environment variable."""
    generated: bool = False
    """Generated surfaces in this layout instead of real images."""
    categories: tuple[str, ...] = ()
    """Only these; all where empty."""
    input_size: tuple[int, int]
    settings: dict[str, Any] = Field(default_factory=dict)
    """On top of the plan's, for this set alone."""


class Plan(_Section):
    """What `cdgp benchmark` runs."""

    name: str
    title: str
    preset: Literal["lite", "paper"]
    seeds: Annotated[tuple[int, ...], Field(min_length=1)]
    folds: Annotated[int, Field(ge=2)] | None = None
    """Every image is tested once, in one of so many folds, in place of a test part drawn by seed.
    The plan's one seed then draws fit, calibration and the training."""
    metric_size: Literal["native", "input"]
    """Whether maps meet masks at each image's own size or at the network's input size."""
    methods: Annotated[tuple[str, ...], Field(min_length=1)]
    """Of the experiments `main` and `complexity`."""
    budgets: tuple[Annotated[int, Field(ge=0)], ...] = BUDGETS
    """Defective training images in `label_budget` and `budget_curve`, besides all of them."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """On top of the preset."""
    options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By method, on top of its own hyperparameters; environment variables are replaced."""
    datasets: Annotated[dict[str, DatasetPlan], Field(min_length=1)]
    experiments: Annotated[dict[str, tuple[str, ...]], Field(min_length=1)]
    """Data sets by experiment."""

    @property
    def repeats(self) -> tuple[Repeat, ...]:
        """Seed and fold of each measurement of a method."""
        if self.folds is None:
            return tuple(Repeat(seed, None) for seed in self.seeds)
        return tuple(Repeat(self.seeds[0], fold) for fold in range(self.folds))

    @property
    def planned(self) -> Repeats:
        """How many measurements of a method there will be."""
        return Repeats(len(self.repeats), "seeds" if self.folds is None else "folds")

    def settings_of(self, name: str, variant: Variant, seed: int) -> Settings:
        """All settings of a variant on one of the data sets."""
        dataset = self.datasets[name]
        changes = merged(self.settings, dataset.settings)
        return variant_settings(variant, self.preset, seed, dataset.input_size, changes)

    def options_of(self, method: str) -> MethodOptions | None:
        """A method's own hyperparameters; None where it has none."""
        known, given = METHODS[method].options, self.options.get(method, {})
        if not known:
            return None
        chosen = known[self.preset]
        given = {  # every text is a path
            key: str(Path(os.path.expandvars(value)).expanduser())
            if value and isinstance(value, str)
            else value
            for key, value in given.items()
        }
        try:
            return type(chosen).model_validate(chosen.model_dump() | given)
        except ValidationError as error:
            problems = [
                f"options.{method}.{'.'.join(map(str, p['loc']))}: {p['msg']}; its options are "
                f"{', '.join(type(chosen).model_fields)}"
                for p in error.errors()
            ]
            raise SettingsError("; ".join(problems)) from None


def read_plan(name: str) -> Plan:
    """A ready plan by name, or a plan file by path."""
    path = Path(name)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    elif name in ready_plans():
        text = (files("cdgp_bench") / "plans" / f"{name}.toml").read_text(encoding="utf-8")
    else:
        raise SettingsError(
            f"plan {name!r}: {nearest(name, ready_plans())}; or give the path of a .toml file"
        )
    try:
        plan = Plan.model_validate({"name": path.stem} | tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{name}: not a valid TOML file: {error}") from error
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, p['loc']))}: {p['msg'].replace('tuple', 'list')}"
            for p in error.errors()
        ]
        raise SettingsError(f"{name}: " + "; ".join(problems)) from None
    _check_names(plan, name)
    return plan


def ready_plans() -> list[str]:
    """Names of the plans that come with the package."""
    folder = files("cdgp_bench") / "plans"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name[-5:] == ".toml")


def _check_names(plan: Plan, source: str) -> None:
    for what, used, known in (
        ("method", plan.methods, list(METHODS)),
        ("experiment", plan.experiments, list(EXPERIMENTS)),
        ("layout", [d.layout for d in plan.datasets.values()], list(LAYOUTS)),
        ("data set", [d for of in plan.experiments.values() for d in of], list(plan.datasets)),
    ):
        for name in used:
            if name not in known:
                raise SettingsError(f"{source}: unknown {what} {name!r}: {nearest(name, known)}")
    if plan.folds is not None and len(plan.seeds) > 1:
        raise SettingsError(
            f"{source}: seeds: a plan with folds takes one seed, {len(plan.seeds)} are given; "
            f"write seeds = [{plan.seeds[0]}], or leave folds out"
        )
    elsewhere = {
        "seed": "seeds",
        "preset": "preset",
        "input_size": "datasets.NAME.input_size",
    }
    for place in (plan.settings, *(d.settings for d in plan.datasets.values())):
        for key in place.keys() & elsewhere.keys():
            raise SettingsError(f"{source}: settings.{key}: is set by {elsewhere[key]} in a plan")
    for method in plan.options:
        if method not in METHODS or not METHODS[method].options:
            own = [name for name, known in METHODS.items() if known.options]
            raise SettingsError(f"{source}: options.{method}: {nearest(method, own)}")
        try:
            plan.options_of(method)
        except SettingsError as error:
            raise SettingsError(f"{source}: {error}") from error
    for name, dataset in plan.datasets.items():
        if bool(dataset.path) == dataset.generated:
            raise SettingsError(f"{source}: datasets.{name} needs either path or generated = true")
        try:
            for method in plan.methods:
                if plan.settings_of(name, Variant("", method), plan.seeds[0]).tile:
                    raise SettingsError(
                        "settings.tile: a benchmark shows every method the same image, resized "
                        "to input_size; leave it out"
                    )
        except SettingsError as error:
            raise SettingsError(f"{source}: datasets.{name}: {error}") from error
        if dataset.generated and dataset.layout == "folder":
            raise SettingsError(f"{source}: datasets.{name}: name the layout that is generated")


def required_packages(plan: Plan) -> list[str]:
    """What the plan needs beyond the product's own dependencies."""
    of_methods = [name for method in plan.methods for name in METHODS[method].requires]
    return list(dict.fromkeys(["statsmodels", "matplotlib", *of_methods]))


def dataset_path(name: str, dataset: DatasetPlan) -> Path:
    """The folder of a data set, with environment variables replaced."""
    path = os.path.expandvars(dataset.path)
    if "$" in path:
        variable = path[path.index("$") :].split("/")[0]
        raise SettingsError(
            f"datasets.{name}.path {dataset.path!r}: the environment variable {variable} is not "
            f"set; it names the folder with the data, for example: {variable[1:]}=/data cdgp ..."
        )
    return Path(path).expanduser()
