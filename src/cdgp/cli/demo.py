"""``cdgp demo``: train and evaluate on real images of solar cells, in minutes."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cdgp.cli import options
from cdgp.cli.common import bars, handle_errors, say, show_run, warn

if TYPE_CHECKING:
    from cdgp.data.manifest import Manifest, Sample
    from cdgp.presets import Settings
    from cdgp.progress import Progress
    from cdgp.workflows import Run

PER_CLASS = 250
INPUT_SIZE = (160, 160)
DUAL_GP_STEPS = 200
STUDENT_STEPS = 200


@handle_errors
def demo(
    out_folder: options.RunFolder = Path("runs/demo"),
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    quiet: options.Quiet = False,
) -> None:
    """Train and evaluate on electroluminescence images of solar cells.

    Takes 250 cells that experts call good and 250 that they call defective from the
    elpv-dataset package (CC BY-NC-SA 4.0: for trying out, not for products), with a smaller input
    and fewer steps than a real training.

    Examples:

      cdgp demo

      cdgp demo --out runs/cells
    """
    from cdgp.presets import settings
    from cdgp.run_folder import OVERLAYS, REPORT

    usual, chosen = settings("lite"), demo_settings()
    warn(
        f"demo: {PER_CLASS} good and {PER_CLASS} defective solar cells, input "
        f"{_size(chosen)} instead of {_size(usual)}, {_steps(chosen)} steps instead of "
        f"{_steps(usual)}"
    )
    show_run(train_demo(out_folder, bars(quiet), resume, overwrite))
    say(f"look at {out_folder / REPORT} and {out_folder / OVERLAYS}")


def demo_settings() -> "Settings":
    """The lite preset, smaller and shorter."""
    from cdgp.presets import settings

    return settings(
        "lite",
        input_size=INPUT_SIZE,
        dual_gp={"steps": DUAL_GP_STEPS},
        student={"steps": STUDENT_STEPS},
    )


def train_demo(
    out_folder: Path, progress: "Progress", resume: bool = False, overwrite: bool = False
) -> "Run":
    """The run of the demo; arguments and errors as ``train_run``."""
    from cdgp.workflows import train_run

    return train_run(
        solar_cells(PER_CLASS), out_folder, demo_settings(), resume=resume, overwrite=overwrite,
        progress=progress,
    )  # fmt: skip


def short_training() -> list[str]:
    """The settings of the demo as options of ``cdgp train``."""
    size = "x".join(map(str, INPUT_SIZE))
    steps = {"dual_gp.steps": DUAL_GP_STEPS, "student.steps": STUDENT_STEPS}
    changed = [word for name, value in steps.items() for word in ("--set", f"{name}={value}")]
    return ["--input-size", size, *changed]


def new_cells(good: int, defective: int) -> "list[Sample]":
    """Cells that the demo's model has not seen, in an order of chance that is always the same."""
    import random

    seen = {sample.image for sample in solar_cells(PER_CLASS).samples}
    found: list[Sample] = []
    for wanted, count in ((False, good), (True, defective)):
        more = solar_cells(PER_CLASS + count).samples
        found += [cell for cell in more if cell.defective == wanted and cell.image not in seen]
    random.Random(0).shuffle(found)
    return found


def _size(chosen: "Settings") -> str:
    return "x".join(map(str, chosen.input_size))


def _steps(chosen: "Settings") -> str:
    return f"{chosen.dual_gp.steps} + {chosen.student.steps}"


def solar_cells(per_class: int) -> "Manifest":
    """Good (defect probability 0) and defective (1) cells, chosen by the digest of their names."""
    from cdgp.data.manifest import Manifest, Sample
    from cdgp.errors import DataError

    found = find_spec("elpv_dataset")
    if found is None or found.origin is None:
        raise DataError(
            "the demo's images come from the elpv-dataset package: pip install 'cdgp[demo]', or "
            "in a clone pip install -e '.[demo]'"
        )
    root = Path(found.origin).parent / "data"
    rows = [line.split() for line in (root / "labels.csv").read_text(encoding="utf-8").splitlines()]
    samples: list[Sample] = []
    for defective in (False, True):
        names = [name for name, probability, _ in rows if float(probability) == defective]
        names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
        samples += [Sample(image=root / name, defective=defective) for name in names[:per_class]]
    return Manifest(root, tuple(samples))
