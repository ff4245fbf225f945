"""Plans: what is ready, what is refused before anything runs, and options."""

import re
from pathlib import Path

import pytest
from tests.cdgp_bench.helpers import written

from cdgp.data.manifest import Manifest
from cdgp.errors import SettingsError
from cdgp_bench.plan import dataset_path, read_plan, ready_plans, required_packages
from cdgp_bench.run import plan_runs


def test_ready_plans_are_whole() -> None:
    assert ready_plans() == [
        "in-house", "in-house-budget", "in-house-cv", "in-house-full", "in-house-outside",
        "paper-ksdd2", "paper-mvtec-ad2", "paper-visa", "smoke",
    ]  # fmt: skip
    for name in ready_plans():
        plan = read_plan(name)
        runs = plan_runs(plan, {(d, "x") for d in plan.datasets})
        assert len({r.identity for r in runs}) == len(runs) > 0


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('"cdgp"]', '"cdpg"]', "'cdgp'"),
        ("main =", "mian =", "'main'"),
        ('["surfaces"]', '["surface"]', "'surfaces'"),
        ("seeds = [0]", "seeds = []", "seeds"),
        (
            "seeds = [0]",
            "seeds = [0, 1]\nfolds = 3",
            "a plan with folds takes one seed, 2 are given",
        ),
        ("seeds = [0]", "seeds = [0]\nfolds = 1", "folds"),
        ("seeds = [0]", "seeds = [0]\nbudgets = [-1]", "budgets"),
        ("title", "titel", "titel"),
        ('preset = "lite"', 'preset = "dino"', "preset"),
        ("[64, 64]", "[60, 64]", "datasets.surfaces: settings: input_size 60x64"),
        ("steps = 2, b", "stpes = 2, b", "'dual_gp.stpes': did you mean 'steps'"),
        ("input_size", "layout = 'visa3'\ninput_size", "'visa3'"),
        ("path =", "generated = true\n#", "layout"),
        ("path =", "#", "path"),
        ("title =", "title", "TOML"),
        ('main = ["surfaces"]', "", "experiments"),
        ('["surfaces"]', '"surfaces"', "experiments.main"),
        ("[datasets", "[options.pdim]\n[datasets", "options.pdim: did you mean 'padim'"),
        ("[datasets", "[options.cdgp]\n[datasets", "options.cdgp"),
        ("[datasets", "[options.padim]\nfeature = 3\n[datasets", "options.padim.feature"),
        ("[datasets", "[options.rd4ad]\nepochs = 0\n[datasets", "options.rd4ad.epochs"),
        ("[datasets", "[settings]\nseed = 3\n[datasets", "settings.seed"),
        ("[datasets", "[settings]\npreset = 'paper'\n[datasets", "settings.preset"),
        ("[datasets", "[settings]\ninput_size = [64, 64]\n[datasets", "settings.input_size"),
    ],
)
def test_a_wrong_plan_names_what_is_wrong(
    old: str, new: str, named: str, tmp_path: Path, surfaces: Manifest
) -> None:
    top = () if "[settings]" not in new else (("settings.dual_gp", "#"), ("settings.student", "#"))
    with pytest.raises(SettingsError, match=re.escape(named)):
        read_plan(str(written(tmp_path, surfaces.root, (old, new), *top)))


def test_a_variable_that_is_not_set_is_named(tmp_path: Path, surfaces: Manifest) -> None:
    plan = read_plan(str(written(tmp_path, surfaces.root, ("path =", "path = '$NOWHERE/x'  #"))))
    with pytest.raises(SettingsError, match=r"\$NOWHERE"):
        dataset_path("surfaces", plan.datasets["surfaces"])


def test_required_packages(tmp_path: Path, surfaces: Manifest) -> None:
    plan = written(tmp_path, surfaces.root, ('"cdgp"]', '"cdgp", "grad_cam"]'))
    assert required_packages(read_plan(str(plan))) == ["statsmodels", "matplotlib", "grad-cam"]


def test_variables_in_options_are_replaced(
    tmp_path: Path, surfaces: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELSEWHERE", "/textures")
    change = ("[datasets", "[options.draem]\nauxiliary = '$ELSEWHERE/dtd'\n[datasets")
    plan = read_plan(str(written(tmp_path, surfaces.root, change)))
    options = plan.options_of("draem")
    assert options is not None and options.model_dump()["auxiliary"] == "/textures/dtd"
    assert plan.options_of("cdgp") is None
