"""What a stage's key holds, so that no state of other code or settings is used."""

import shutil
from pathlib import Path

import pytest
from tests.helpers import tiny_settings

from cdgp.data import decode, images
from cdgp.method import backbone
from cdgp.training import context, dataset, dual_gp, loop, student
from cdgp.training.context import stage_key


def test_stages_of_other_code_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments and layout do not count; a changed number does, wherever training rests on it."""
    chosen, package = tiny_settings(), Path(context.__file__).parents[1]

    def key(copy: Path) -> str:
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(context, "__file__", str(copy / "training/context.py"))
            context.code_sha256.cache_clear()
            found = stage_key(chosen, "", "student")
        context.code_sha256.cache_clear()
        return found

    shutil.copytree(package, tmp_path / "cdgp", ignore=shutil.ignore_patterns("__pycache__"))
    before = stage_key(chosen, "", "student")
    for place in ("method/student.py", "training/loop.py", "data/images.py", "data/decode.py"):
        file = tmp_path / "cdgp" / place
        text = file.read_text(encoding="utf-8")
        file.write_text(f"# a comment\n\n{text}", encoding="utf-8")
        assert key(tmp_path / "cdgp") == before
        file.write_text(f"{text}\nCHANGED = 1\n", encoding="utf-8")
        assert key(tmp_path / "cdgp") != before, place
        file.write_text(text, encoding="utf-8")
    assert key(tmp_path / "cdgp") == before


def test_a_stage_key_covers_what_training_imports() -> None:
    """All of the method, the loop and the reader of pixels; not the words around them."""
    covered = {path for pattern in context.CODE
               for path in Path(context.__file__).parents[1].glob(pattern)}  # fmt: skip
    for module in (student, dual_gp, loop, context, dataset, backbone, images, decode):
        assert Path(module.__file__ or "") in covered, module
    assert not {path.name for path in covered} & {"html.py", "presets.py", "manifest.py"}


@pytest.mark.parametrize("decision", [{"defect_rate": 0.02}, {"threshold": 0.3}])
def test_decisions_are_no_part_of_a_stages_key(decision: dict[str, float]) -> None:
    for stage in ("dual_gp", "student"):
        keys = [stage_key(s, "", stage)
                for s in (tiny_settings(), tiny_settings(decision=decision))]  # fmt: skip
        assert keys[0] == keys[1]
