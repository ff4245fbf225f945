"""The grid: every cell of a plan as a row, computed once, safe to kill and start again."""

import json
import logging
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdgp.bench.complexity import machine, measured
from cdgp.bench.grid import METHODS, Cell, Line, budgets_of, distinct, line_settings, lines_of
from cdgp.bench.methods import Fitted
from cdgp.bench.plan import Plan, dataset_path
from cdgp.bench.protocol import Prepared, digested, metric_mask, prepare
from cdgp.bench.qualitative import save_example
from cdgp.data.datasets import LAYOUTS, against_published
from cdgp.data.fake_trees import generate
from cdgp.data.manifest import Manifest
from cdgp.errors import CdgpError, DataError, OutputError
from cdgp.evaluation import MapFile, pixel_metrics
from cdgp.files import write_text
from cdgp.inference import resized
from cdgp.metrics.ranking import image_auroc
from cdgp.metrics.reliability import expected_calibration_error
from cdgp.presets import merged, settings
from cdgp.progress import Progress

METRICS = ("image_auroc", "pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")
ROWS = "results.jsonl"
COSTS = "complexity.jsonl"
Row = dict[str, Any]
Say = Callable[[str], None]

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What a run of a plan leaves."""

    rows: list[Row]
    """All rows of the plan."""
    costs: list[Row]
    failed: list[Row]


def run_plan(
    plan: Plan,
    out: Path,
    states: Path,
    reuse: Sequence[Path],
    progress: Progress,
    say: Say,
) -> Outcome:
    """Compute the rows that are missing in ``out``; stops at nothing but what makes all wrong.

    Args:
        plan: what to run.
        out: folder of rows, manifests, tables and figures.
        states: folder of trained stages, which plans may share.
        reuse: further files of rows; a row there of the same configuration, pictures and metric
            size is taken instead of computed.
        progress: where to tell the progress.
        say: takes lines about the data and about each finished cell.

    Raises:
        DataError: pictures that cannot be used, before anything is trained.
        OutputError: the rows in ``out`` were made with other settings or pictures.
    """
    prepared = prepare_all(plan, out, progress, say)
    cells = plan_cells(plan, {key[:2] for key in prepared})
    rows = read_rows(out / ROWS)
    refuse_stale(out / ROWS, rows, cells, prepared, plan)
    by_label = {label_of(row): row for row in rows}
    known = [r for path in reuse for r in filled(read_rows(path))] + rows
    by_hash = {hash_of(row): row for row in known if row["status"] == "ok"}
    todo = [c for c in cells if by_label.get(c.label, {}).get("status") != "ok"]
    with progress.phase("Benchmark", len(cells), len(cells) - len(todo)) as advance:
        for cell in todo:
            of_cell = prepared[cell.dataset, cell.category, cell.seed, cell.budget]
            same = by_hash.get(wanted_hash(cell, of_cell, plan))
            began = time.monotonic()
            row = {**labels(cell, plan), **of_cell.facts()}
            if same is not None:
                row = {**same, **row, "computed_as": same.get("computed_as") or told_label(same)}
            else:
                row |= computed(cell, of_cell, plan, states / cell.dataset, progress)
            by_label[cell.label] = row
            if row["status"] == "ok":
                by_hash[wanted_hash(cell, of_cell, plan)] = row
            write_rows(out / ROWS, by_label.values())
            say(finished_line(row, time.monotonic() - began))
            advance(f"{cell.dataset} {cell.line.method}")
    save_examples(plan, prepared, out, states, progress)
    costs = measure_costs(plan, prepared, out, states, progress, say)
    wanted = [by_label[cell.label] for cell in cells]
    return Outcome(wanted, costs, [row for row in wanted if row["status"] != "ok"])


def prepare_all(
    plan: Plan, out: Path, progress: Progress, say: Say
) -> dict[tuple[str, str, int, int | None], Prepared]:
    """Read, hash, split, audit and record every category; all that is wrong is told at once."""
    found: dict[tuple[str, str, int, int | None], Prepared] = {}
    problems: list[str] = []
    for name, dataset in plan.datasets.items():
        path = out / "data" / name if dataset.generated else dataset_path(name, dataset)
        layout = LAYOUTS[dataset.layout]
        if dataset.generated and not path.exists():
            generate(dataset.layout, path)
        categories = layout.load(path)
        if dataset.layout == "folder":
            categories = {name: next(iter(categories.values()))}
        for line in against_published(layout, categories):
            say(f"{name}: {line}")
        missing = [c for c in dataset.categories if c not in categories]
        if missing:
            raise DataError(f"{path}: there is no category {', '.join(missing)} in it; there are: "
                            f"{', '.join(categories)}")  # fmt: skip
        chosen = settings(plan.preset, **merged(plan.settings, dataset.settings)).data
        budgets = {
            budget
            for experiment, sets in plan.experiments.items() if name in sets
            for budget in budgets_of(experiment, plan.budgets)
        }  # fmt: skip
        for category in dataset.categories or categories:
            try:
                cache = out / "manifests" / f"digests-{name}-{category}.json"
                pictures = digested(categories[category], chosen, cache, progress)
                for seed in plan.seeds:
                    for budget in sorted(budgets, key=lambda b: b or 0):
                        part = prepare(name, category, pictures, chosen, seed, budget)
                        part.record(out / "manifests")
                        found[name, category, seed, budget] = part
                tell_masks(pictures, f"{name}/{category}", say)
            except DataError as error:
                problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return found


def tell_masks(pictures: Manifest, name: str, say: Say) -> None:
    """Say how many defective pictures have a mask, where some have none."""
    defective = [s for s in pictures.samples if s.defective]
    masked = sum(s.mask is not None for s in defective)
    if masked < len(defective):
        say(f"{name}: {masked} of {len(defective)} defective pictures have a mask; pixel metrics "
            "use those")  # fmt: skip


def plan_cells(plan: Plan, categories: set[tuple[str, str]]) -> list[Cell]:
    """The plan's cells, seed by seed, so that an early stop leaves whole comparisons."""

    def every() -> Iterator[Cell]:
        for seed in plan.seeds:
            for name, dataset in plan.datasets.items():
                changes = merged(plan.settings, dataset.settings)
                for experiment, sets in plan.experiments.items():
                    if name not in sets:
                        continue
                    for budget in budgets_of(experiment, plan.budgets):
                        for line in lines_of(experiment, plan.methods):
                            chosen = line_settings(
                                line, plan.preset, seed, dataset.input_size, changes
                            )
                            for category in sorted(c for d, c in categories if d == name):
                                yield Cell(name, category, line, seed, budget, chosen)

    return distinct(every())


def computed(cell: Cell, prepared: Prepared, plan: Plan, states: Path, progress: Progress) -> Row:
    """Train and score one cell; whatever goes wrong becomes a row with the reason."""
    marks = {"config_sha256": cell.config_sha256, "manifest_sha256": prepared.manifest.sha256}
    try:
        fitted = METHODS[cell.line.method].fit(prepared.weak, cell.settings, states, progress)
        began = time.monotonic()
        size = cell.settings.input_size if plan.metric_size == "input" else None
        scored = score_test(fitted, prepared.manifest, size, cell.line.setting == "default")
    except CdgpError as error:
        return {**marks, "status": "failed", "reason": f"{type(error).__name__}: {error}"}
    except Exception as error:
        # A grid runs for hours: a fault in one cell must not cost the others. It is told with the
        # row, makes the exit code 1, and is tried again by the next run.
        log.error("%s: %s", cell.label, traceback.format_exc())
        return {**marks, "status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return {
        **marks,
        "status": "ok",
        **scored,
        "seconds": round(fitted.seconds, 1),
        "evaluation_seconds": round(time.monotonic() - began, 1),
        "facts": fitted.facts,
        "machine": machine(),
    }


def score_test(
    fitted: Fitted, manifest: Manifest, size: tuple[int, int] | None, details: bool
) -> Row:
    """Metrics over the test part; a mask is read once its picture is scored.

    Args:
        fitted: the method.
        manifest: with the test part and its masks.
        size: (height, width) that maps and masks are brought to; None is each picture's own.
        details: whether branches and kinds of defects get metrics of their own.
    """
    samples = manifest.of("test")
    stores: dict[str, MapFile] = defaultdict(MapFile)
    masks, names, kinds, image_scores = [], [], [], []
    notes: dict[str, list[str]] = defaultdict(list)
    for sample, scored in zip(samples, fitted.score([s.image for s in samples]), strict=True):
        image_scores.append(scored.image_score)
        name = manifest.name(sample.image)
        target = size or scored.size
        mask = metric_mask(sample, scored.size, target, name, notes)
        if mask is None:
            continue
        stores["final"].append(resized(scored.anomaly_map, target))
        for branch, values in scored.branches.items() if details else ():
            stores[branch].append(resized(values, target))
        masks.append(mask)
        names.append(name)
        kinds.append(kind_of(sample.image.stem) if sample.defective else None)
    labels = np.array([s.defective for s in samples])
    ranking = image_auroc(image_scores, labels)
    row: Row = {"image_auroc": ranking.value, "image_auroc_reason": ranking.reason}
    row |= pixel_metrics(stores["final"].maps(), masks, names)
    row["metric_size"] = "input" if size else "native"
    if fitted.probability:
        row["image_ece"] = expected_calibration_error(image_scores, labels).value
    if details:
        row["branches"] = {
            branch: _short(pixel_metrics(store.maps(), masks, names))
            for branch, store in stores.items()
            if branch != "final"
        }
        row["kinds"] = {
            branch: kind_metrics(store.maps(), masks, names, kinds)
            for branch, store in stores.items()
        }
    row["notes"] = dict(notes)
    return row


def kind_of(stem: str) -> str | None:
    """The defect's kind where the file's name tells it, as in ``blowhole_exp1_num_108719``."""
    kind, found, _ = stem.partition("_exp")
    return kind if found else None


def kind_metrics(
    maps: Sequence[Any], masks: Sequence[Any], names: Sequence[str], kinds: Sequence[str | None]
) -> dict[str, Any]:
    """Pixel metrics of each kind of defect against all good pictures."""
    told = {}
    good = [i for i, mask in enumerate(masks) if not mask.any()]
    for kind in sorted({k for k in kinds if k}):
        chosen = good + [i for i, k in enumerate(kinds) if k == kind]
        told[kind] = _short(
            pixel_metrics(
                [maps[i] for i in chosen], [masks[i] for i in chosen], [names[i] for i in chosen]
            )
        )
    return told


def _short(metrics: Row) -> Row:
    return {key: round(metrics[key], 4) for key in METRICS[1:] if metrics[key] is not None}


def save_examples(
    plan: Plan,
    prepared: Mapping[tuple[str, str, int, int | None], Prepared],
    out: Path,
    states: Path,
    progress: Progress,
) -> None:
    """The qualitative pictures of the first seed, one a category, each computed once."""
    for (name, category, seed, budget), part in prepared.items():
        if name not in plan.experiments.get("qualitative", ()) or budget is not None:
            continue
        path = out / "qualitative" / f"{name}-{category}.npz"
        if seed == plan.seeds[0] and not path.exists():
            dataset = plan.datasets[name]
            changes = merged(plan.settings, dataset.settings)
            chosen = line_settings(Line(""), plan.preset, seed, dataset.input_size, changes)
            save_example(path, part, chosen, states / name, progress)


def measure_costs(
    plan: Plan,
    prepared: Mapping[tuple[str, str, int, int | None], Prepared],
    out: Path,
    states: Path,
    progress: Progress,
    say: Say,
) -> list[Row]:
    """Parameters, latency and memory of the plan's methods at each set's input, first seed."""
    rows = read_rows(out / COSTS)
    done = {(r["dataset"], r["method"], r["config_sha256"]) for r in rows}
    for name in plan.experiments.get("complexity", ()):
        part = next(p for key, p in prepared.items()
                    if key[0] == name and key[2] == plan.seeds[0] and key[3] is None)  # fmt: skip
        dataset = plan.datasets[name]
        changes = merged(plan.settings, dataset.settings)
        for line in lines_of("main", plan.methods):
            chosen = line_settings(line, plan.preset, part.seed, dataset.input_size, changes)
            cell = Cell(name, part.category, line, part.seed, None, chosen)
            if (name, line.method, cell.config_sha256) in done:
                continue
            cost = measured(line.method, part.weak, chosen, states / name)
            rows.append({"dataset": name, "method": line.method, "preset": plan.preset,
                         "input_size": list(dataset.input_size),
                         "config_sha256": cell.config_sha256, **cost,
                         "machine": machine()})  # fmt: skip
            write_rows(out / COSTS, rows)
            say(f"{name} {line.method}: {cost['latency_ms']['median']:.1f} ms a picture")
    return rows


def labels(cell: Cell, plan: Plan) -> Row:
    """What names a row, in every table."""
    return {
        "dataset": cell.dataset,
        "category": cell.category,
        "method": cell.line.method,
        "setting": cell.line.setting,
        "seed": cell.seed,
        "budget": cell.budget,
        "preset": plan.preset,
        "input_size": list(cell.settings.input_size),
    }


def label_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("dataset", "category", "method", "setting", "seed", "budget"))


def told_label(row: Row) -> str:
    return " ".join(str(part) for part in label_of(row)[2:5])


def hash_of(row: Row) -> tuple[str, str, str]:
    return row["config_sha256"], row["manifest_sha256"], row.get("metric_size", "")


def wanted_hash(cell: Cell, prepared: Prepared, plan: Plan) -> tuple[str, str, str]:
    return cell.config_sha256, prepared.manifest.sha256, plan.metric_size


def filled(rows: Sequence[Row]) -> list[Row]:
    """Rows of earlier versions with the fields that they lack."""
    return [{"status": "ok", "budget": None, **row} for row in rows]


def refuse_stale(
    path: Path,
    rows: Sequence[Row],
    cells: Sequence[Cell],
    prepared: Mapping[tuple[str, str, int, int | None], Prepared],
    plan: Plan,
) -> None:
    """Rows under a cell's name that were made with something else are never mixed in."""
    by_label = {label_of(row): row for row in rows if row["status"] == "ok"}
    stale = 0
    for cell in cells:
        row = by_label.get(cell.label)
        part = prepared[cell.dataset, cell.category, cell.seed, cell.budget]
        stale += row is not None and hash_of(row) != wanted_hash(cell, part, plan)
    if stale:
        raise OutputError(
            f"{path}: {stale} rows were made with other settings or pictures; choose another "
            "--out, or remove the file to compute them again"
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none where it is missing.

    Raises:
        OutputError: a line is not JSON.
    """
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise OutputError(f"{path}: damaged: {error}") from error


def write_rows(path: Path, rows: "Sequence[Row] | Any") -> None:
    """All rows, in one step: whatever kills the program, no row is ever torn."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def finished_line(row: Row, seconds: float) -> str:
    """One line about a finished cell."""
    name = " ".join(str(part) for part in label_of(row)[:5])
    if row["budget"] is not None:
        name += f" k={row['budget']}"
    if row["status"] != "ok":
        return f"{name}: FAILED: {row['reason']}"
    values = " ".join(
        f"{key} {'–' if row[key] is None else f'{100 * row[key]:.1f}'}" for key in METRICS
    )
    how = "taken over" if "computed_as" in row else f"{seconds:.0f} s"
    return f"{name}: {values} ({how})"
