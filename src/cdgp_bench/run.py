"""The grid: every cell of a plan as a row, computed once, safe to kill and start again."""

import json
import logging
import shutil
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from cdgp.training.stages import pretrained
from filelock import FileLock, Timeout

from cdgp.data.manifest import Manifest
from cdgp.errors import CdgpError, DataError, NotRunError, OutputError
from cdgp.files import write_text
from cdgp.progress import Progress
from cdgp_bench.datasets import LAYOUTS, against_published
from cdgp_bench.fake_trees import generate
from cdgp_bench.grid import METHODS, Cell, Line, budgets_of, distinct, lines_of
from cdgp_bench.measure.complexity import machine, measured
from cdgp_bench.plan import DatasetPlan, Plan, dataset_path
from cdgp_bench.protocol import Key, Prepared, digested, prepare
from cdgp_bench.qualitative import example_path, has_mark, save_example
from cdgp_bench.scoring import METRICS, Row, cell_name, score_test

HASHES = ("config_sha256", "manifest_sha256", "masks_sha256", "metric_size")
"""Rows that agree in these hold the same numbers."""
ROWS = "results.jsonl"
COSTS = "complexity.jsonl"
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
        reuse: further files of rows; a row there of the same configuration, images, masks and
            metric size is taken instead of computed.
        progress: where to tell the progress.
        say: takes lines about the data and about each finished cell.

    Raises:
        DataError: images that cannot be used, before anything is trained.
        OutputError: the rows in ``out`` were made with other settings or images.
    """
    with only_one(out):
        return _run_plan(plan, out, states, reuse, progress, say)


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Holds the folder for this process.

    Raises:
        OutputError: another one has it, or it cannot be written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise OutputError(
            f"{out}: another benchmark is running there; wait for it, or choose another --out and "
            f"share --states"
        ) from error


def _run_plan(
    plan: Plan, out: Path, states: Path, reuse: Sequence[Path], progress: Progress, say: Say
) -> Outcome:
    for name in plan.datasets:
        # Weights that cannot be had are told now, not in every cell.
        pretrained(plan.settings_of(name, Line("", plan.methods[0]), 0))
    prepared = prepare_all(plan, out, progress, say)
    cells = plan_cells(plan, {key[:2] for key in prepared})
    rows = read_rows(out / ROWS)
    hashes = {cell.identity: wanted_hash(cell, prepared[key_of(cell)], plan) for cell in cells}
    check_stale(out / ROWS, rows, hashes)
    rows_by_name = {identity_of(row): row for row in rows}
    known = [row for path in reuse for row in read_rows(path)] + rows
    by_hash = {hash_of(row): row for row in known if row["status"] == "ok"}
    todo = [c for c in cells if rows_by_name.get(c.identity, {}).get("status") != "ok"]
    started = time.monotonic()
    with progress.phase("Benchmark", len(cells), len(cells) - len(todo)) as advance:
        for number, cell in enumerate(todo, start=1):
            of_cell = prepared[key_of(cell)]
            wanted = hashes[cell.identity]
            same = by_hash.get(wanted)
            began = time.monotonic()
            row = identity(cell, plan) | of_cell.facts()
            if same is not None:
                row = same | row | {"computed_as": same.get("computed_as") or cell_name(same)}
            else:
                row |= computed(cell, of_cell, plan, states / cell.dataset, progress)
            row |= dict(zip(HASHES, wanted, strict=True))
            rows_by_name[cell.identity] = row
            if row["status"] == "ok":
                by_hash[wanted] = row
            write_rows(out / ROWS, rows_by_name.values())
            left = (time.monotonic() - started) / number * (len(todo) - number)
            place = f"[{len(cells) - len(todo) + number}/{len(cells)}, {left / 60:.0f} min left]"
            say(f"{place} {finished_line(row, time.monotonic() - began)}")
            advance(f"{cell.dataset} {cell.line.method}")
    done = [rows_by_name[cell.identity] for cell in cells]
    failed = [row for row in done if row["status"] == "failed"]
    failed += save_examples(plan, prepared, out, states, progress)
    costs = measure_costs(plan, prepared, out, states, say)
    failed += [row for row in costs if row["status"] == "failed"]
    return Outcome(done, [row for row in costs if row["status"] == "ok"], failed)


def prepare_all(plan: Plan, out: Path, progress: Progress, say: Say) -> dict[Key, Prepared]:
    """Read, hash, split, audit and record every category; all that is wrong is told at once."""
    found: dict[Key, Prepared] = {}
    problems: list[str] = []
    for name, dataset in plan.datasets.items():
        chosen = plan.settings_of(name, Line(""), 0).data
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
                cache = out / "manifests" / f"digests-{name}-{category}.json"
                images = digested(listed, chosen, cache, progress)
                for seed in plan.seeds:
                    for budget in sorted(budgets, key=lambda b: b or 0):
                        part = prepare(name, category, images, chosen, seed, budget)
                        part.record(out / "manifests")
                        found[Key(name, category, seed, budget)] = part
                tell_masks(images, f"{name}/{category}", say)
            except DataError as error:
                problems.append(str(error))
    if problems:
        raise DataError("\n".join(problems))
    return found


def load_categories(name: str, dataset: DatasetPlan, out: Path, say: Say) -> dict[str, Manifest]:
    """The categories of a data set that the plan wants, told with their counts.

    Raises:
        DataError: the folder or a wanted category is not there.
    """
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


def tell_masks(images: Manifest, name: str, say: Say) -> None:
    """Say how many defective images have a mask, where some have none."""
    defective = [s for s in images.samples if s.defective]
    masked = sum(bool(s.masks) for s in defective)
    if not masked:
        say(f"{name}: no masks, so only the image metrics are defined")
    elif masked < len(defective):
        say(f"{name}: {masked} of {len(defective)} defective images have a mask; pixel metrics "
            "use those")  # fmt: skip


def plan_cells(plan: Plan, categories: set[tuple[str, str]]) -> list[Cell]:
    """The plan's cells, seed by seed, so that an early stop leaves whole comparisons."""

    def every() -> Iterator[Cell]:
        for seed in plan.seeds:
            for name in plan.datasets:
                for experiment, sets in plan.experiments.items():
                    if name not in sets:
                        continue
                    for budget in budgets_of(experiment, plan.budgets):
                        for line in lines_of(experiment, plan.methods):
                            chosen = plan.settings_of(name, line, seed)
                            own = plan.options_of(line.method)
                            for category in sorted(c for d, c in categories if d == name):
                                yield Cell(name, category, line, seed, budget, chosen, own)

    return distinct(every())


def computed(cell: Cell, prepared: Prepared, plan: Plan, states: Path, progress: Progress) -> Row:
    """Train and score one cell; whatever goes wrong becomes a row with the reason."""
    method = METHODS[cell.line.method]
    size = cell.settings.input_size if plan.metric_size == "input" else None
    # Branches and kinds of defects cost a metric each, and are wanted of whole methods alone.
    details = (
        cell.line.setting == "default" and cell.budget is None and method.supervision != "control"
    )
    try:
        fitted = cell.fit(prepared.weak, states, progress)
        began = time.monotonic()
        scored = score_test(fitted, prepared.manifest, size, details)
    except Exception as error:
        return failure(error, cell.identity)
    return {
        "status": "ok",
        **scored,
        "seconds": round(fitted.seconds, 1),
        "evaluation_seconds": round(time.monotonic() - began, 1),
        "facts": fitted.facts,
        "machine": machine(),
    }


def failure(error: Exception, label: object) -> Row:
    """What a fault in one cell leaves.

    A grid runs for hours, so one fault must not cost the others. It is told with the row, makes the
    exit code 1, and is tried again by the next run.
    """
    if isinstance(error, NotRunError):
        return {"status": "not run", "reason": str(error)}
    if not isinstance(error, CdgpError):  # unforeseen, so that its place is worth knowing
        log.error("%s: %s", label, "".join(traceback.format_exception(error)))
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def save_examples(
    plan: Plan,
    prepared: Mapping[Key, Prepared],
    out: Path,
    states: Path,
    progress: Progress,
) -> list[Row]:
    """The qualitative images of the first seed, one a category; returns what failed."""
    failed = []
    for (name, category, seed, budget), part in prepared.items():
        wanted = name in plan.experiments.get("qualitative", ()) and seed == plan.seeds[0]
        if not wanted or budget is not None:
            continue
        cell = _plain_cell(plan, part, Line("", "cdgp"))
        mark = "-".join(wanted_hash(cell, part, plan)[:2])
        path = example_path(out, name, category)
        try:
            if not has_mark(path, mark):
                save_example(path, part, cell.settings, states / name, progress, mark)
        except Exception as error:
            label = ("qualitative", name, category)
            failed.append(
                {**identity(cell, plan), "method": "qualitative", **failure(error, label)}
            )
    return failed


def measure_costs(
    plan: Plan,
    prepared: Mapping[Key, Prepared],
    out: Path,
    states: Path,
    say: Say,
) -> list[Row]:
    """Parameters, latency and memory of the plan's methods at each set's input, first seed."""
    known = {cost_key(r): r for r in read_rows(out / COSTS) if r["status"] == "ok"}
    rows = []
    for name in plan.experiments.get("complexity", ()):
        first = next(key for key in prepared if key.dataset == name)
        part = prepared[first._replace(seed=plan.seeds[0], budget=None)]
        for line in lines_of("main", plan.methods):
            cell = _plain_cell(plan, part, line)
            row = {
                **identity(cell, plan),
                "config_sha256": cell.config_sha256,
                "machine": machine(),
            }
            if cost_key(row) in known:
                rows.append(known[cost_key(row)])
                continue
            try:
                cost = measured(line.method, part.weak, cell.settings, cell.options, states / name)
                row |= {"status": "ok", **cost}
                say(f"{name} {line.method}: {cost['latency_ms']['median']:.1f} ms an image")
            except Exception as error:
                row |= failure(error, ("complexity", name, line.method))
            rows.append(row)
            known[cost_key(row)] = row
            write_rows(out / COSTS, known.values())
    return rows


def cost_key(row: Row) -> tuple[Any, ...]:
    """A cost belongs to a method, its settings and the machine."""
    told = json.dumps(row["machine"], sort_keys=True)
    return row["dataset"], row["method"], row["config_sha256"], told


def _plain_cell(plan: Plan, part: Prepared, line: Line) -> Cell:
    """A method with the plan's settings on a category."""
    chosen = plan.settings_of(part.dataset, line, part.seed)
    own = plan.options_of(line.method)
    return Cell(part.dataset, part.category, line, part.seed, None, chosen, own)


def identity(cell: Cell, plan: Plan) -> Row:
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


def identity_of(row: Row) -> tuple[Any, ...]:
    return tuple(row[k] for k in ("dataset", "category", "method", "setting", "seed", "budget"))


def key_of(cell: Cell) -> Key:
    """The split that a cell runs on."""
    return Key(cell.dataset, cell.category, cell.seed, cell.budget)


def hash_of(row: Row) -> tuple[str, ...]:
    """What decides a row's numbers."""
    return tuple(row[key] for key in HASHES)


def wanted_hash(cell: Cell, prepared: Prepared, plan: Plan) -> tuple[str, ...]:
    """The same of a cell that is to be computed."""
    images = prepared.manifest.sha256
    return cell.config_sha256, images, prepared.masks_sha256, plan.metric_size


def check_stale(
    path: Path,
    rows: Sequence[Row],
    hashes: Mapping[tuple[Any, ...], tuple[str, ...]],
) -> None:
    """Rows under a cell's name that were made with something else are never mixed in."""
    rows_by_name = {identity_of(row): row for row in rows if row["status"] == "ok"}
    stale = []
    for name, wanted in hashes.items():
        row = rows_by_name.get(name)
        if row is not None and hash_of(row) != wanted:
            changed = [k for k, a, b in zip(HASHES, hash_of(row), wanted, strict=True) if a != b]
            stale.append(f"{cell_name(row)} (another {', '.join(changed)})")
    if stale:
        out = path.parent
        raise OutputError(
            f"{path}: {len(stale)} rows were made with other settings, images or masks, first "
            f"{stale[0]}. Keep them and go on elsewhere, where what still fits is taken over: "
            f"--out NEW --reuse {path} --states {out / 'states'}"
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none where it is missing; of earlier versions too.

    Raises:
        OutputError: a line is not JSON.
    """
    if not path.exists():
        return []
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        raise OutputError(f"{path}: damaged: {error}") from error
    missing = dict.fromkeys(HASHES, "")
    return [{"status": "ok", "budget": None, **missing, **row} for row in rows]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """All rows, in one step: whatever kills the program, no row is ever torn."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def finished_line(row: Row, seconds: float) -> str:
    """One line about a finished cell."""
    if row["status"] != "ok":
        return f"{cell_name(row)}: {row['status'].upper()}: {row['reason']}"
    values = " ".join(
        f"{key} {'–' if row[key] is None else f'{100 * row[key]:.1f}'}" for key in METRICS
    )
    how = "taken over" if "computed_as" in row else f"{seconds:.0f} s"
    return f"{cell_name(row)}: {values} ({how})"
