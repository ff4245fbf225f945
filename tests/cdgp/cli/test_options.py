"""Options and settings files: each mistake is exit code 2, before anything is read."""

from pathlib import Path

import pytest
from tests.helpers import cdgp, plain, tiny_settings

from cdgp.presets import read_settings
from cdgp.workflows import Run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "imagesize=3"], "did you mean 'input_size'"),
        (["--set", "dual_gp.lerning_rate=1"], "did you mean 'learning_rate'"),
        (["--set", "learning_rate=1"], "did you mean 'dual_gp.learning_rate'"),
        (["--set", "dual_gp.steps=ten"], "dual_gp.steps = 'ten'"),
        (["--set", "dual_gp.batch_size=-4"], "dual_gp.batch_size = -4"),
        (["--set", "dual_gp.learning_rate=NaN"], "dual_gp.learning_rate"),
        (["--set", "nothing"], "expected KEY=VALUE"),
        (["--input-size", "wide"], "expected HEIGHTxWIDTH"),
        (["--input-size", "100x64"], "multiple of 16 for tf_efficientnet_lite0"),
        (["--input-size", "32x64"], "at least 64; the nearest is 64x64"),
        (
            ["--preset", "dino", "--input-size", "256"],
            "multiple of 14 for vit_small_patch14_dinov2.lvd142m, and at least 70; the nearest is "
            "252x252",
        ),
        (
            ["--set", "backbone.name=vit_small_patch16_dinov3", "--input-size", "70"],
            "of 16 for vit",
        ),
        (["--input-size", "160²"], "expected HEIGHTxWIDTH"),
        (["--set", "seed=1", "--set", "seed.x=2"], "was given a value before"),
        (["--set", "preset=[1]"], "does not exist"),
        (["--set", "path=3"], "unknown key 'path'"),
        (["--set", "dual_gp.loss_weights=[-1, 1, 1]"], "dual_gp.loss_weights"),
        (["--set", "dual_gp.initial_mean=Infinity"], "dual_gp.initial_mean"),
        (["--set", "data.test_fraction=0.7"], "data.test_fraction"),
        (["--preset", "huge"], "preset 'huge' does not exist"),
        (["--max-false-rejects", "2"], "max_false_rejects"),
    ],
)
def test_bad_options_exit_2_before_anything_is_read(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = cdgp("train", tmp_path / "not there", "--out", tmp_path / "run", *arguments)
    assert result.exit_code == 2, result.output
    assert message in plain(result)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("imagesize = [64, 64]", "did you mean 'input_size'"),
        ("[data]\nimage_size = 3", "image_size"),
        ("seed = 1\nseed = 2", "not a valid TOML file"),
        ("[dual_gp]\nlearning_rate = nan", "dual_gp.learning_rate"),
        ("[dual_gp]\n\tsteps = 'ten'", "dual_gp.steps"),
    ],
)
def test_bad_config_file(tmp_path: Path, text: str, message: str) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(text)
    result = cdgp("train", tmp_path / "x", "--out", tmp_path / "run", "--config", config)
    assert result.exit_code == 2, result.output
    assert "bad.toml" in plain(result) and message in plain(result)


def test_config_file_and_json_of_a_run(tiny_run: Run, tmp_path: Path) -> None:
    assert tiny_run.folder is not None
    assert read_settings(tiny_run.folder / "config.json") == tiny_settings()
    config = tmp_path / "good.toml"
    config.write_text("[dual_gp]\nlearning_rate = 1e-3\nsteps = 7\n")
    assert read_settings(config).dual_gp.steps == 7
    assert read_settings(config, seed=3).seed == 3
    (tmp_path / "empty.toml").write_text("")
    assert read_settings(tmp_path / "empty.toml").preset == "lite"


def test_a_config_of_one_preset_is_not_another(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('preset = "paper"\n')
    result = cdgp("train", tmp_path, "--out", tmp_path / "run", "--config", config,
                  "--preset", "lite")  # fmt: skip
    assert result.exit_code == 2
    assert "holds the settings of preset 'paper', but 'lite' is asked for" in plain(result)
    result = cdgp("train", tmp_path, "--out", tmp_path / "run", "--input-size", "")
    assert result.exit_code == 2 and "--input-size ''" in plain(result)
