"""All data of a plan, read, split, audited and recorded before anything is trained."""

import shutil
from collections.abc import Callable
from pathlib import Path

from cdgp.data.manifest import Manifest
from cdgp.errors import DataError
from cdgp.presets import DataSettings
from cdgp.progress import Progress
from cdgp_bench.datasets import LAYOUTS, against_published
from cdgp_bench.fake_trees import generate
from cdgp_bench.folds import cross_test
from cdgp_bench.grid import Variant, budgets_of
from cdgp_bench.plan import DatasetPlan, Plan, dataset_path
from cdgp_bench.protocol import Prepared, SplitKey, cached_digests, prepare

Say = Callable[[str], None]


def prepare_all(plan: Plan, out: Path, progress: Progress, say: Say) -> dict[SplitKey, Prepared]:
    """Read, digest, split, audit and record every category."""
    found: dict[SplitKey, Prepared] = {}
    problems: list[str] = []
    for name, dataset in plan.datasets.items():
        chosen = plan.settings_of(name, Variant(""), 0).data
        try:
            categories = load_categories(name, dataset, out, say)
        except DataError as error:
            problems.append(str(error))
            continue
        budgets = {
            budget
            for experiment, sets in plan.experiments.items() if name in sets
            for budget in budgets_of(experiment, plan.budgets)
        }  # fmt: skip
        for category, listed in categories.items():
            try:
                images = read_images(name, category, listed, chosen, out, progress)
                divided = [images] if plan.folds is None else cross_test(images, plan.folds)
                for seed, fold in plan.repeats:
                    for budget in sorted(budgets, key=lambda b: b or 0):
                        stated = divided[fold or 0]
                        part = prepare(name, category, stated, chosen, seed, budget, fold)
                        part.record(out / "manifests")
                        found[SplitKey(name, category, seed, budget, fold)] = part
                report_masks(images, f"{name}/{category}", say)
            except DataError as error:
                problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return found


def read_images(
    name: str, category: str, listed: Manifest, data: DataSettings, out: Path, progress: Progress
) -> Manifest:
    """A category with digests, which are kept in the plan's folder."""
    cache = out / "manifests" / f"digests-{name}-{category}.json"
    return cached_digests(listed, data, cache, progress)


def load_categories(name: str, dataset: DatasetPlan, out: Path, say: Say) -> dict[str, Manifest]:
    """The categories that the plan names; their counts are printed."""
    path = out / "data" / name if dataset.generated else dataset_path(name, dataset)
    layout = LAYOUTS[dataset.layout]
    if dataset.generated and not path.exists():
        unfinished = path.with_name(f".{path.name}")  # a kill must not leave half a data set
        shutil.rmtree(unfinished, ignore_errors=True)
        generate(dataset.layout, unfinished)
        unfinished.rename(path)
    categories = layout.load(path)
    if dataset.layout == "folder":
        categories = {name: next(iter(categories.values()))}
    for line in against_published(layout, categories):
        say(f"{name}: {line}")
    missing = [c for c in dataset.categories if c not in categories]
    if missing:
        raise DataError(
            f"{path}: there is no category {', '.join(missing)} in it; there are: "
            f"{', '.join(categories)}"
        )
    return {c: categories[c] for c in dataset.categories or categories}


def report_masks(images: Manifest, name: str, say: Say) -> None:
    """Print how many defective images have a mask, where some have none."""
    defective = [s for s in images.samples if s.defective]
    masked = sum(bool(s.masks) for s in defective)
    if not masked:
        say(f"{name}: no masks, so only the image metrics are defined")
    elif masked < len(defective):
        say(f"{name}: {masked} of {len(defective)} defective images have a mask; pixel metrics "
            "use those")  # fmt: skip
