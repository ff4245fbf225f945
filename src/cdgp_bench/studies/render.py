"""Copy result rows to docs/results, and put their tables into the documentation.

    python -m cdgp_bench.studies.render --take runs/in-house runs/in-house-full
    python -m cdgp_bench.studies.render

The first copies the rows of finished plans; images are not copied, since those of real parts do not
belong into the repository. Both render docs/results/PLAN again and replace the text between
`<!-- NAME -->` and `<!-- end -->` in README.md and pages of docs/.
"""

import argparse
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from cdgp.files import write_text
from cdgp_bench.grid import METHODS
from cdgp_bench.page import render
from cdgp_bench.plan import read_plan
from cdgp_bench.results import FAIR_SHARE, NAMES, PIXEL
from cdgp_bench.rows import COSTS, ROWS, Row, read_rows
from cdgp_bench.scoring import METRICS
from cdgp_bench.studies import grouped, markdown_table
from cdgp_bench.studies.ablation import table as ablation_table
from cdgp_bench.studies.cross_testing import page as folds
from cdgp_bench.studies.latency import table as latency_table
from cdgp_bench.studies.paired import by_method, pairs_table, seeds_table, sizes_table
from cdgp_bench.studies.seeds import table as chance_table
from cdgp_bench.studies.side_by_side import table as side_by_side_table

RESULTS = Path("docs/results")
PLANS = ("in-house", "in-house-full", "in-house-cv", "in-house-budget", "in-house-outside")
SHORT = ("padim", "classifier_cam", "cdgp")
"""The methods of the README's table."""
PAIRED = """# CDGP against every other method, seed by seed

Percentage points, first minus second, with nominal 95 % percentile intervals over groups of test
images (2,000 draws, the same for all methods). They cover which images were drawn, not another
training, and are not adjusted for their number; with about ten groups they come out somewhat too
narrow. [+0.0, +0.0] means that both are perfect on every draw. Made by
`python -m cdgp_bench.studies.paired`.

"""

CHANCE = """# How much is chance: the training, and the split

CDGP on one test part, × 100: sample standard deviations over trainings of one split into fit and
calibration images that differ by their seed, and over such splits with one seed of training.
Neither is the spread over other test images. Made by `python -m cdgp_bench.studies.seeds`.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--take", nargs="*", type=Path, default=[], help="folders of finished runs")
    for folder in parser.parse_args().take:
        (RESULTS / folder.name).mkdir(exist_ok=True)
        for name in (ROWS, COSTS):
            if (folder / name).exists():
                shutil.copy(folder / name, RESULTS / folder.name / name)
    render_plans()
    pages = [page for page in (Path("README.md"), *Path("docs").rglob("*.md"))
             if "<!-- end -->" in page.read_text(encoding="utf-8")]  # fmt: skip
    fill(pages, blocks())


def render_plans() -> None:
    """The tables and figures of each plan that has rows, under docs/results/PLAN."""
    for name in PLANS:
        folder, plan = RESULTS / name, read_plan(name)
        if (folder / ROWS).exists():
            costs = [row for row in read_rows(folder / COSTS) if row["status"] == "ok"]
            render(plan, read_rows(folder / ROWS), costs, folder)
        if paired := read_rows(folder / "paired.jsonl"):
            text = PAIRED + seeds_table(paired) + "\n"
            write_text(folder / "paired.md", text if plan.folds is None else folds(paired, name))
        if chance := read_rows(folder / "seeds.jsonl"):
            write_text(folder / "seeds.md", CHANCE + chance_table(chance) + "\n")


def blocks() -> dict[str, str]:
    """The tables of the documentation, by the name of their place."""
    paired = read_rows(RESULTS / PLANS[0] / "paired.jsonl")
    rows = read_rows(RESULTS / PLANS[0] / ROWS)
    whole = [r for r in rows if r["setting"] == "default" and r["budget"] is None]
    return {
        "comparison": comparison(read_rows(RESULTS / "in-house-cv" / ROWS)),
        "headline": headline(whole),
        "paired": pairs_table(paired),
        "sizes": sizes_table(paired),
        "kinds": kinds_table(whole),
        "branches": branches_table(whole),
        "ablation": ablation_table(RESULTS / "ablation.jsonl"),
        "aupro": aupro_table(RESULTS / "aupro.json"),
        "doctor": doctor_table(read_rows(RESULTS / "doctor.jsonl")),
        "stream": stream_table(read_rows(RESULTS / "stream.jsonl")),
        "station": station_table(read_rows(RESULTS / "station.jsonl")),
        "holes": holes_table(json.loads((RESULTS / "fuzzing.json").read_text())),
        "latency": latency_table(json.loads((RESULTS / "latency.json").read_text())),
        "side_by_side": side_by_side_table(json.loads((RESULTS / "side_by_side.json").read_text())),
    }


def fill(pages: Iterable[Path], found: dict[str, str]) -> None:
    """Put each table into its place in the pages."""
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    together = "".join(texts.values())
    nowhere = [name for name in found if f"<!-- {name} -->" not in together]
    if nowhere:
        raise SystemExit(f"no page has a place for {', '.join(nowhere)}")

    def block(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n{found[name]}\n<!-- end -->" if name in found else match[0]

    for page, text in texts.items():
        new = re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)
        page.write_text(new, encoding="utf-8")


def headline(rows: Sequence[Row]) -> str:
    """Mean ± sample standard deviation (x 100) over seeds, a line a set and method."""
    ranked = [
        r for r in rows
        if r["status"] == "ok" and METHODS[r["method"]].supervision != "control"
    ]  # fmt: skip
    lines = []
    for (dataset, method), found in by_method(ranked, "dataset", "method"):
        name = METHODS[method].title
        collapsed = sum(not r["facts"].get("separated", True) for r in found)
        if collapsed:
            name += f" ({collapsed} did not separate)"
        share = min(r["facts"].get("budget_share", 1) for r in found)
        if share < FAIR_SHARE:
            name += f" ({100 * share:.1f} % of the published training)"
        values = [mean_std([r[key] for r in found]) for key in METRICS]
        values.append(mean_std([r.get("image_ece") for r in found]))
        seconds = np.mean([r["seconds"] for r in found])
        lines.append([dataset, name, len(found), *values, f"{seconds:.0f}"])
    return markdown_table(["set", "method", "seeds", *NAMES.values(), "ECE", "s"], lines)


def comparison(rows: Sequence[Row]) -> str:
    """The README's short table: means over folds (x 100), sets side by side."""
    metrics = ("image_auroc", "pixel_aupro_30", "pixel_aupro_05")
    found = grouped((r for r in rows if r["status"] == "ok"), "dataset", "method")
    sets = sorted({row["dataset"] for row in rows})
    head = ["method", *(f"{name}: {NAMES[metric]}" for name in sets for metric in metrics)]
    return markdown_table(head, [
        [METHODS[method].title, *(
            mean([r[metric] for r in found.get((name, method), [])])
            for name in sets for metric in metrics
        )]
        for method in SHORT
    ])  # fmt: skip


def mean_std(values: Sequence[float | None]) -> str:
    """Mean ± sample standard deviation (x 100) of the values that are defined."""
    defined = [100 * v for v in values if v is not None]
    spread = f" ± {np.std(defined, ddof=1):.1f}" if len(defined) > 1 else ""
    return mean(values) + spread


def mean(values: Sequence[float | None]) -> str:
    """Mean (x 100) of the values that are defined."""
    defined = [100 * v for v in values if v is not None]
    return f"{np.mean(defined):.1f}" if defined else "–"


def aupro_table(path: Path) -> str:
    """Our exact AUPRO against a full sort."""
    return markdown_table(
        ["limit", "full sort", "cdgp", "times faster", "memory"],
        [
            [
                row["limit"],
                *(f"{row[side]['seconds']:.2f} s, {row[side]['peak_mib']:.0f} MiB"
                  for side in ("full sort", "cdgp")),
                f"{row['times_faster']:.1f}", f"{100 * row['memory_share']:.0f} %",
            ]
            for row in json.loads(path.read_text())["rows"]
        ],
    )  # fmt: skip


def doctor_table(rows: Sequence[Row]) -> str:
    """What `cdgp check` finds on the two sets, and how many flipped labels."""
    keys = ("dataset", "pictures", "near_pairs_by_brute_force", "found", "false_alarms",
            "false_alarms_of_another_group", "byte_copies", "empty_masks")  # fmt: skip
    checks = []
    for row in (r for r in rows if r["kind"] == "check"):
        fact, auroc = max(row["shortcuts"].items(), key=lambda item: item[1])
        checks.append([*(row[key] for key in keys), f"{fact}, AUROC {auroc:.3f}"])
    flips = [
        [r["dataset"], r["draw"], r["flipped"], r["found"], f"{100 * r['share']:.0f} %"]
        for r in rows if r["kind"] == "flips"
    ]  # fmt: skip
    head = ["set", "images", "near pairs", "found", "reported beyond them",
            "of which another part", "byte duplicates", "empty masks",
            "strongest shortcut"]  # fmt: skip
    flips_head = ["set", "draw", "flipped", "in the first 5 %", "share"]
    return f"{markdown_table(head, checks)}\n\n{markdown_table(flips_head, flips)}"


def stream_table(rows: Sequence[Row]) -> str:
    """Memory and time of streaming predictions."""
    return markdown_table(
        ["images", "peak memory", "seconds a 1,000"],
        [[f"{r['pictures']:,}", f"{r['peak_mib']:.0f} MiB", f"{r['seconds_a_1000']:.1f}"]
         for r in rows],
    )  # fmt: skip


def station_table(rows: Sequence[Row]) -> str:
    """Kills, load and full disks of the inspection station."""
    found = {row["campaign"]: row for row in rows}
    killed = found["kills"]
    kept = [[name, killed[name], killed[f"{name}_held"]]
            for name in ("uploads", "reviews", "promotions")]  # fmt: skip
    loads = [
        [
            r["model"], f"{r['images']:,}", r["clients"], r["swaps"], len(r["wrong"]),
            sum(n for code, n in r["answers"].items() if code >= "500"),
            r["uploads_a_second"], r["scores_a_second"], r["p50_s"], r["p95_s"], r["longest_s"],
            f"{r['memory_mib'][0][1]} … {r['memory_mib'][len(r['memory_mib']) // 2][1]} … "
            f"{r['memory_mib'][-1][1]} MiB",
        ]
        for r in rows if r["campaign"] in ("load", "real")
    ]  # fmt: skip
    disk = found["full"]
    filled = [
        ["uploads up to the reserve", disk["filling"]],
        ["reviews at the reserve", disk["reviews_at_the_reserve"]],
        ["reviews, not a byte free", disk["reviews_without_any_space"]],
        ["then the queue asked for, until refused", disk["more_writes"]],
        ["uploads, not a byte free", disk["uploads_without_any_space"]],
        ["reviews afterwards", disk["reviews_after"]],
        ["three disks full of uploads, with removal", disk["retention"]["answers"]],
    ]
    told = [[what, ", ".join(f"{n} × {code}" for code, n in answers.items())]
            for what, answers in filled]  # fmt: skip
    return "\n\n".join((
        markdown_table([f"{killed['kills']} kills", "acknowledged", "there afterwards"], kept),
        markdown_table(
            ["scorer", "images", "clients", "promotions", "lost, twice or wrong", "5xx",
             "uploads a second", "scores a second", "p50, s", "p95, s", "longest, s",
             "memory at begin, half way and end"], loads,
        ),
        markdown_table([f"disk of {disk['disk_mib']} MiB", "answers"], told),
    ))  # fmt: skip


def holes_table(rows: Sequence[Row]) -> str:
    """The share of damaged files that are read with other pixels, by format and damage."""
    damages = list(dict.fromkeys(r["damage"] for r in rows))
    cells: dict[str, dict[str, str]] = {}
    for r in rows:
        passed = r["inputs"] - r["refused"] - r["whole"]
        share = f"{100 * passed / r['inputs']:.1f}" if passed else "0"
        cells.setdefault(r["format"], {})[r["damage"]] = share
    return markdown_table(
        ["format", *damages],
        [[form, *[found.get(damage, "–") for damage in damages]] for form, found in cells.items()],
    )


def branches_table(rows: Sequence[Row]) -> str:
    """What each branch localises alone, mean over seeds."""
    lines = []
    for (dataset,), found in sorted(grouped(of_cdgp(rows), "dataset").items()):
        for name in ("residual", "dominance", "surprisal", "final"):
            maps = [r if name == "final" else r["branches"][name] for r in found]
            lines.append([dataset, name, *(mean([m.get(key) for m in maps]) for key in PIXEL)])
    return markdown_table(["set", "map", *(NAMES[key] for key in PIXEL)], lines)


def kinds_table(rows: Sequence[Row]) -> str:
    """Each kind of defect of `magnetic_tile`, mean over seeds: where which map wins."""
    columns = [(map_, key) for key in ("pixel_aupro_30", "pixel_auroc")
               for map_ in ("residual", "dominance", "final")]  # fmt: skip
    found = [r for r in of_cdgp(rows) if r["dataset"] == "magnetic_tile"]
    return markdown_table(
        ["kind", *(f"{map_} {NAMES[key]}" for map_, key in columns)],
        [
            [kind, *(mean([r["kinds"][map_].get(kind, {}).get(key) for r in found])
                     for map_, key in columns)]
            for kind in sorted({k for r in found for k in r["kinds"]["final"]})
        ],
    )  # fmt: skip


def of_cdgp(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["method"] == "cdgp"]


if __name__ == "__main__":
    main()
