"""A few damaged inputs for every parser; the study gives them thousands."""

from pathlib import Path

from cdgp_bench.studies.fuzzing import fuzz, input_parsers


def test_parsers_take_or_refuse_what_they_get(tmp_path: Path) -> None:
    for name in ("images", "masks", "mask pairing", "manifest", "settings"):
        ((seeds, parser),) = (
            found for key, found in input_parsers(tmp_path, name).items() if key == name
        )
        assert fuzz(seeds, parser, 30).total() >= 20, name
