"""Progress bars."""

import pytest

from cdgp.progress import Bars


def test_a_phase_within_a_phase_gets_a_bar_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    progress = Bars()
    with progress.phase("Benchmark", 2) as advance:
        for _ in range(2):
            with progress.phase("Dual GP", 3) as inner:
                for _ in range(3):
                    inner("loss 0.1")
            advance("cell")
    with progress.phase("Again", 1) as advance:
        advance()
    shown = capsys.readouterr().err
    assert "Benchmark" in shown and "2/2" in shown
    assert "Again" in shown and "1/1" in shown
