"""Training that is killed goes on with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cdgp_bench.helpers import tiny_options
from tests.helpers import tiny_settings

from cdgp.progress import Quiet
from cdgp_bench.methods import supersimplenet, weakrest
from cdgp_bench.protocol import Prepared


@pytest.mark.parametrize(
    ("module", "drawn"), [(supersimplenet, "perlin_masks"), (weakrest, "synthetic")]
)
def test_reimplementations_go_on_where_they_were(
    module: Any, drawn: str, prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after any step they end with the same weights: what is drawn depends on the step."""
    name = module.__name__.rpartition(".")[2]
    options, chosen = tiny_options(name, Path()), tiny_settings()
    whole = module.fit(prepared.weak, chosen, tmp_path / "a", Quiet(), options)
    monkeypatch.setattr("cdgp.training.loop.SAVE_SECONDS", -1.0)
    draw = getattr(module, drawn)
    calls: list[int] = []

    def killed(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return draw(*arguments)

    monkeypatch.setattr(module, drawn, killed)
    with pytest.raises(KeyboardInterrupt):
        module.fit(prepared.weak, chosen, tmp_path / "b", Quiet(), options)
    resumed = module.fit(prepared.weak, chosen, tmp_path / "b", Quiet(), options)
    again = resumed.pipeline().network.state_dict()
    for key, value in whole.pipeline().network.state_dict().items():
        assert torch.equal(value, again[key]), key
