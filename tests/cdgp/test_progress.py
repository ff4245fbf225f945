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


def test_a_note_is_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder's name may look like rich's markup, or steer the terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Bars().phase("Benchmark", 1) as advance:
        advance("[/b] [red]line\x1b]0;title\x07")
    shown = capsys.readouterr().err
    assert "\x1b]0;" not in shown and "\x07" not in shown
    assert "[red]line" in shown
