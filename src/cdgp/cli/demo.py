"""``cdgp demo``: the whole path on real images of solar cells, in minutes."""

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cdgp.cli.common import bars, say, told, warn

if TYPE_CHECKING:
    from cdgp.data.manifest import Manifest

PER_CLASS = 250
INPUT_SIZE = (160, 160)
DUAL_GP_STEPS = 200
STUDENT_STEPS = 200


@told
def demo(
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the run.")] = Path(
        "runs/demo"
    ),
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted demo.")] = False,
    overwrite: Annotated[bool, typer.Option(help="Replace the demo in --out.")] = False,
    quiet: Annotated[bool, typer.Option(help="No progress bars.")] = False,
) -> None:
    """Train and evaluate on electroluminescence images of solar cells.

    Takes 250 cells that experts call sound and 250 that they call defective from the
    elpv-dataset package (CC BY-NC-SA 4.0: for trying out, not for products), at a smaller input
    and with fewer steps than a real training.

    Examples:

      cdgp demo

      cdgp demo --out runs/cells
    """
    from cdgp.cli.train import run_training
    from cdgp.presets import settings

    chosen = settings(
        "lite",
        input_size=INPUT_SIZE,
        dual_gp={"steps": DUAL_GP_STEPS},
        student={"steps": STUDENT_STEPS},
    )
    warn(
        f"demo: {PER_CLASS} good and {PER_CLASS} defective solar cells, input "
        f"{INPUT_SIZE[0]}x{INPUT_SIZE[1]} instead of 256x256, {DUAL_GP_STEPS} + {STUDENT_STEPS} "
        "steps instead of 400 + 360"
    )
    run_training(solar_cells(PER_CLASS), out_folder, chosen, resume, overwrite, False, bars(quiet))
    say(f"look at {out_folder / 'report.html'} and {out_folder / 'overlays'}")


def solar_cells(per_class: int) -> "Manifest":
    """Good (defect probability 0) and defective (1) cells, chosen by the digest of their names.

    Raises:
        DataError: the elpv-dataset package is not installed.
    """
    from cdgp.data.manifest import Manifest, Sample
    from cdgp.errors import DataError

    found = find_spec("elpv_dataset")
    if found is None or found.origin is None:
        raise DataError(
            "the demo's images come from the elpv-dataset package: pip install 'cdgp[demo]', or "
            "in a clone pip install -e '.[demo]'"
        )
    root = Path(found.origin).parent / "data"
    names: dict[bool, list[str]] = {False: [], True: []}
    for line in (root / "labels.csv").read_text(encoding="utf-8").splitlines():
        name, probability, _ = line.split()
        if float(probability) in (0.0, 1.0):
            names[float(probability) == 1.0].append(name)
    samples = [
        Sample(image=root / name, defective=defective)
        for defective, found_names in names.items()
        for name in sorted(found_names, key=lambda n: hashlib.sha256(n.encode()).digest())[
            :per_class
        ]
    ]
    return Manifest(root, tuple(samples))
