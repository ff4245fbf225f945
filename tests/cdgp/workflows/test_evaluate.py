"""Evaluation as a workflow: the command's files, results without files, one pass."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from tests.cdgp.workflows.watching import Counted, assert_same_files
from tests.helpers import cdgp

from cdgp import artifact
from cdgp.data.manifest import Manifest
from cdgp.errors import ModelFileError, OutputError
from cdgp.evaluation import MapFile
from cdgp.workflows import Run, evaluate_run


def test_python_and_command_leave_the_same_files(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path
) -> None:
    assert tiny_run.folder is not None
    ours, theirs = tmp_path / "python/out", tmp_path / "command/out"
    done = cdgp("evaluate", tiny_run.folder, surfaces.root, "--out", theirs, "--save-maps")
    assert done.exit_code == 0, done.output
    result = evaluate_run(tiny_run.folder, surfaces.root, ours, save_maps=True)
    assert result.folder == ours
    assert_same_files(ours, theirs)
    assert {path.name for path in ours.iterdir()} == {
        "maps", "metrics.json", "overlays", "report.html", "run.json", "scores.csv",
    }  # fmt: skip


def test_without_a_folder_nothing_is_written_and_rows_come_back(
    tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiny_run.folder is not None
    monkeypatch.chdir(tmp_path)
    before = sorted(tiny_run.folder.rglob("*"))
    result = evaluate_run(tiny_run.folder, tiny_run.folder / "manifest.csv")
    assert result.folder is None and not list(tmp_path.iterdir())
    assert sorted(tiny_run.folder.rglob("*")) == before
    assert result.trained_on == 0
    assert [row.pred_score for row in result.rows] == [row.pred_score for row in tiny_run.rows]
    assert tiny_run.metrics is not None
    changed = {"computed_on", "notes"}  # names are relative to the manifest
    for key in tiny_run.metrics.keys() - changed:
        assert result.metrics[key] == tiny_run.metrics[key], key


def test_each_image_is_read_to_check_it_and_to_score_it(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, counted: Counted
) -> None:
    assert tiny_run.folder is not None
    evaluate_run(tiny_run.folder, surfaces.root, tmp_path / "out")
    assert counted.reads == {sample.image: 2 for sample in surfaces.samples}
    assert len(counted.inputs) == len(surfaces.samples)
    assert max(counted.inputs.values()) == 1


def test_exported_files_know_what_their_model_has_seen(
    tiny_run: Run, exported: dict[str, Path], tmp_path: Path
) -> None:
    """As the model file alone does, wherever it was copied to."""
    trained = tiny_run.manifest.of("train")
    for sample in [s for s in trained if not s.defective][:2] + [s for s in trained if s.defective]:
        place = tmp_path / "data" / ("defective" if sample.defective else "good")
        place.mkdir(parents=True, exist_ok=True)
        with Image.open(sample.image) as image:  # other bytes, equal pixels
            image.save(place / f"{sample.image.stem}.bmp")
    count = 2 + sum(s.defective for s in trained)
    assert artifact.load(_model(tiny_run)).seen.shape == (2 * len(trained), 16)
    for path in (_model(tiny_run), *exported.values()):
        alone = tmp_path / path.stem / path.name
        alone.parent.mkdir(exist_ok=True)
        shutil.copy(path, alone)
        if path.suffix == ".xml":
            shutil.copy(path.with_suffix(".bin"), alone.with_suffix(".bin"))
        found = evaluate_run(alone, tmp_path / "data")
        assert found.trained_on == count == len(found.metrics["notes"]["trained_on"])


def _model(run: Run) -> Path:
    assert run.folder is not None
    return run.folder / "model.safetensors"


def test_older_models_without_digests_are_read(tiny_run: Run, tmp_path: Path) -> None:
    with safe_open(_model(tiny_run), "pt") as file:
        metadata = file.metadata() | {"version": "1"}
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    seen = tensors.pop(artifact.SEEN)
    older = tmp_path / "older.safetensors"
    save_file(tensors, older, metadata)
    assert artifact.load(older).seen.shape == (0, 16)
    for wrong in (seen.float(), seen[:, :8].contiguous(), seen.flatten()):
        save_file({**tensors, artifact.SEEN: wrong}, older, metadata)
        with pytest.raises(ModelFileError, match="digests"):
            artifact.load(older)


def test_maps_lie_in_the_output_folder_while_they_are_measured(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[object] = []
    original = tempfile.TemporaryFile

    def watched(*arguments: object, **options: Any) -> Any:
        places.append(options["dir"])
        return original(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", watched)
    evaluate_run(_model(tiny_run), surfaces.root, tmp_path / "out")
    assert places == [tmp_path / "out"]
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "gone")])
    with pytest.raises(OutputError, match=r"No usable temporary directory.*gone"):
        MapFile()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "small"))
    with pytest.raises(OutputError, match="small: the maps cannot be kept"):
        MapFile()


def test_maps_on_a_share_that_maps_no_file_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [np.full((2, 3), 1.5, np.float32), np.arange(4, dtype=np.float32).reshape(4, 1)]
    found = MapFile(tmp_path)
    for anomaly_map in kept:
        found.append(anomaly_map)
    mapped = found.maps()

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(19, os.strerror(19))

    monkeypatch.setattr(np, "memmap", refuse)
    for maps in (mapped, found.maps()):
        assert all(np.array_equal(a, b) for a, b in zip(maps, kept, strict=True))


@pytest.mark.parametrize("mask", [0o077, 0o002], ids=oct)
def test_the_umask_alone_sets_permissions(
    surfaces: Manifest, tiny_run: Run, tmp_path: Path, mask: int
) -> None:
    before = os.umask(mask)
    try:
        for command in (
            ("evaluate", _model(tiny_run), surfaces.root, "--out", tmp_path / "a", "--save-maps"),
            ("predict", _model(tiny_run), surfaces.root / "good", "--out", tmp_path / "b"),
            ("check", surfaces.root, "--out", tmp_path / "c"),
        ):
            assert cdgp(*command).exit_code == 0
    finally:
        os.umask(before)
    for path in (p for name in "abc" for p in (tmp_path / name).rglob("*")):
        wanted = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == wanted & ~mask, path
