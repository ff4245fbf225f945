"""A plan's runs: each gives one row, is computed once, and may be killed and started again."""

import json
import logging
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from cdgp.errors import CdgpError, OutputError
from cdgp.method.build import pretrained_encoder
from cdgp.progress import Progress, Quiet
from cdgp.run_folder import KINDS, go_on, lock, read_run
from cdgp_bench.curves import curves_file, profile_of, write_curves
from cdgp_bench.errors import NotRunError
from cdgp_bench.grid import METHODS, Run, Variant, budgets_of, own_row, variants_of
from cdgp_bench.measure.complexity import measured
from cdgp_bench.measure.harness import machine
from cdgp_bench.plan import Plan
from cdgp_bench.prepare import Say, prepare_all
from cdgp_bench.protocol import Prepared, Repeat, SplitKey
from cdgp_bench.qualitative import example_path, is_current, save_example
from cdgp_bench.rows import (
    COSTS,
    HASHES,
    ROWS,
    Row,
    check_stale,
    finished_line,
    hash_of,
    identity,
    identity_of,
    read_rows,
    run_name,
    wanted_hash,
    write_rows,
)
from cdgp_bench.scoring import metrics_of, scores_of

log = logging.getLogger(__name__)


class Outcome(NamedTuple):
    """What a plan gives."""

    rows: list[Row]
    """All rows of the plan."""
    costs: list[Row]
    failed: list[Row]


class Place(NamedTuple):
    """Where a plan runs, and where it reports."""

    out: Path
    """Folder of rows, manifests, tables and figures."""
    checkpoints: Path
    """Folder of trained stages, which plans may share."""
    progress: Progress
    say: Say
    """Takes lines about the data and about each finished run."""


class Task(NamedTuple):
    """A run whose row has to be computed, and its images."""

    run: Run
    prepared: Prepared


Engine: TypeAlias = Callable[[Sequence[Task], Plan, Place], Iterator[tuple[Run, Row]]]
"""Computes the rows of tasks, in any order."""


def one_by_one(tasks: Sequence[Task], plan: Plan, place: Place) -> Iterator[tuple[Run, Row]]:
    """The rows of tasks, computed by this process."""
    for run, prepared in tasks:
        yield run, computed(run, prepared, plan, place)


def run_plan(
    plan: Plan, place: Place, reuse: Sequence[Path] = (), engine: Engine = one_by_one
) -> Outcome:
    """Compute the rows that are missing; a run that fails does not stop the others.

    The caller holds ``place.out``, see ``held``. Examples and costs are always of this process.

    Raises:
        DataError: images that cannot be used, before anything is trained.
        OutputError: the rows in ``place.out`` were made with other settings or images.
    """
    for name in plan.datasets:
        # Weights that cannot be had are an error now, not one in every run.
        pretrained_encoder(plan.settings_of(name, Variant("", plan.methods[0]), 0))
    prepared = prepare_all(plan, place.out, place.progress, place.say)
    rows = compute_rows(plan, prepared, place, reuse, engine)
    failed = [row for row in rows if row["status"] == "failed"]
    failed += save_examples(plan, prepared, place)
    costs = measure_costs(plan, prepared, place)
    failed += [row for row in costs if row["status"] == "failed"]
    return Outcome(rows, [row for row in costs if row["status"] == "ok"], failed)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold the folder of a plan for this call, and mark it as one.

    Raises:
        OutputError: another process works there, or it is the folder of another command.
    """
    with lock(folder, "benchmark", "choose another --out and share --checkpoints"):
        found = read_run(folder)
        if found and found.command != "benchmark":
            raise OutputError(f"{folder}: is the folder of {KINDS[found.command]}; choose another")
        go_on(folder, "benchmark")
        yield


def compute_rows(
    plan: Plan,
    prepared: Mapping[SplitKey, Prepared],
    place: Place,
    reuse: Sequence[Path],
    engine: Engine = one_by_one,
) -> list[Row]:
    """The row of every run: read from its file, taken from another file, or computed."""
    runs = plan_runs(plan, {key[:2] for key in prepared})
    path = place.out / ROWS
    rows = read_rows(path)
    hashes = {run.identity: wanted_hash(run, prepared[run.split_key], plan) for run in runs}
    check_stale(path, rows, hashes)
    by_name = {identity_of(row): row for row in rows}
    known = [row for other in reuse for row in read_rows(other)] + rows
    by_hash = {hash_of(row): row for row in known if row["status"] == "ok"}
    missing = [r for r in runs if by_name.get(r.identity, {}).get("status") != "ok"]
    # Runs of one hash give one row: the first is computed, and the others take it over.
    equal = defaultdict(list)
    for run in missing:
        equal[hashes[run.identity]].append(run)
    tasks = [Task(r[0], prepared[r[0].split_key]) for h, r in equal.items() if h not in by_hash]
    new: list[Run] = []
    started = time.monotonic()
    with place.progress.phase("Benchmark", len(runs), len(runs) - len(missing)) as advance:

        def finished(run: Run, row: Row) -> None:
            wanted = hashes[run.identity]
            named = identity(run, plan) | prepared[run.split_key].facts()
            hashed = dict(zip(HASHES, wanted, strict=True))
            by_name[run.identity] = named | row | named | hashed
            new.append(run)
            order = [r.identity for r in runs if r.identity in by_name]
            others = [name for name in by_name if name not in hashes]
            write_rows(path, [by_name[name] for name in (*others, *order)])
            left = (time.monotonic() - started) / len(new) * (len(missing) - len(new))
            there = len(runs) - len(missing) + len(new)
            count = f"[{there}/{len(runs)}, {left / 60:.0f} min left]"
            place.say(f"{count} {finished_line(by_name[run.identity])}")
            advance(f"{run.dataset} {run.variant.method}")

        def take_over(run: Run, row: Row) -> None:
            finished(run, row | {"computed_as": row.get("computed_as") or run_name(row)})

        for wanted, same in equal.items():
            for run in same if wanted in by_hash else ():
                take_over(run, by_hash[wanted])
        for run, row in engine(tasks, plan, place):
            finished(run, row)
            for other in equal[hashes[run.identity]][1:]:
                take_over(other, by_name[run.identity])
    return [by_name[run.identity] for run in runs]


def plan_runs(plan: Plan, categories: set[tuple[str, str]]) -> list[Run]:
    """The plan's runs, each once, seed by seed or fold by fold, so that an early stop leaves whole
    comparisons.
    """
    every = (
        run_of(plan, name, category, variant, repeat, budget)
        for repeat in plan.repeats
        for name in plan.datasets
        for experiment, sets in plan.experiments.items() if name in sets
        for budget in budgets_of(experiment, plan.budgets)
        for variant in variants_of(experiment, plan.methods)
        if own_row(experiment, variant, budget)
        for category in sorted(c for d, c in categories if d == name)
    )  # fmt: skip
    return list({run.identity: run for run in every}.values())


def run_of(
    plan: Plan,
    name: str,
    category: str,
    variant: Variant,
    repeat: Repeat,
    budget: int | None = None,
) -> Run:
    """A run with the plan's settings and options."""
    chosen, options = plan.settings_of(name, variant, repeat.seed), plan.options_of(variant.method)
    return Run(name, category, variant, repeat.seed, budget, chosen, options, repeat.fold)


def is_compared(run: Run) -> bool:
    """Whether a run is of a whole method with all labels, so that others are compared with it."""
    control = METHODS[run.variant.method].supervision == "control"
    return run.variant.setting == "default" and run.budget is None and not control


def computed(run: Run, prepared: Prepared, plan: Plan, place: Place) -> Row:
    """Train and score one run; an error becomes a row with the reason."""
    size = run.settings.input_size if plan.metric_size == "input" else None
    # Branches, kinds of defects and curves take as long as the map itself: of whole methods alone.
    details = is_compared(run)
    try:
        fitted = run.fit(prepared.weak, place.checkpoints / run.dataset, place.progress)
        began = time.monotonic()
        found = scores_of(fitted, prepared.manifest, size, details, Quiet())
        row = metrics_of(found, prepared.manifest, size, fitted.probability, details)
        if details:
            wanted = wanted_hash(run, prepared, plan)
            file = curves_file(place.checkpoints, run.dataset, run.variant.method, wanted)
            write_curves(file, profile_of(found))
    except Exception as error:
        return failure(error, run.identity)
    return {
        "status": "ok",
        **row,
        "seconds": round(fitted.seconds, 1),
        "evaluation_seconds": round(time.monotonic() - began, 1),
        "facts": fitted.facts,
        "machine": machine(),
    }


def failure(error: Exception, label: object) -> Row:
    """What an error in one run leaves in its row.

    A plan takes hours, so one error must not cost the other runs. The row holds the reason, the
    exit code is 1, and the next call tries the run again.
    """
    if isinstance(error, NotRunError):
        return {"status": "not run", "reason": str(error)}
    if not isinstance(error, CdgpError):  # unforeseen: the log says where it happened
        log.error("%s: %s", label, "".join(traceback.format_exception(error)))
    return {"status": "failed", "reason": f"{type(error).__name__}: {error}"}


def save_examples(plan: Plan, prepared: Mapping[SplitKey, Prepared], place: Place) -> list[Row]:
    """The qualitative images of the first seed or fold, one a category; returns what failed."""
    failed = []
    for (name, category, seed, budget, fold), part in prepared.items():
        first = Repeat(seed, fold) == plan.repeats[0] and budget is None
        if not first or name not in plan.experiments.get("qualitative", ()):
            continue
        run = run_of(plan, name, category, Variant("", "cdgp"), Repeat(seed, fold))
        cache_key = "-".join(wanted_hash(run, part, plan)[:2])
        path = example_path(place.out, name, category)
        try:
            if not is_current(path, cache_key):
                checkpoints = place.checkpoints / name
                save_example(path, part, run.settings, checkpoints, place.progress, cache_key)
        except Exception as error:
            reason = failure(error, ("qualitative", name, category))
            failed.append({**identity(run, plan), "method": "qualitative", **reason})
    return failed


def measure_costs(plan: Plan, prepared: Mapping[SplitKey, Prepared], place: Place) -> list[Row]:
    """Parameters, latency and memory of the plan's methods at each set's input."""
    path = place.out / COSTS
    known = {cost_key(r): r for r in read_rows(path) if r["status"] == "ok"}
    rows = []
    for name in plan.experiments.get("complexity", ()):
        first = next(key for key in prepared if key.dataset == name)
        part = prepared[first._replace(budget=None, **plan.repeats[0]._asdict())]
        for variant in variants_of("main", plan.methods):
            run = run_of(plan, name, part.category, variant, plan.repeats[0])
            row = identity(run, plan) | {
                "config_sha256": run.config_sha256, "machine": machine(),
            }  # fmt: skip
            key = cost_key(row)
            if key not in known:
                try:
                    cost = measured(run, part.weak, place.checkpoints / name)
                    row |= {"status": "ok", **cost}
                    median = cost["latency_ms"]["median"]
                    place.say(f"{name} {variant.method}: {median:.1f} ms an image")
                except Exception as error:
                    row |= failure(error, ("complexity", name, variant.method))
                known[key] = row
                write_rows(path, known.values())
            rows.append(known[key])
    return rows


def cost_key(row: Row) -> tuple[Any, ...]:
    """A cost belongs to a method, its settings and the machine."""
    machine_text = json.dumps(row["machine"], sort_keys=True)
    return row["dataset"], row["method"], row["config_sha256"], machine_text
