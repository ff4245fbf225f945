"""Put the tables that come from result rows into the documentation.

    python benchmarks/render.py

Replaces what stands between `<!-- NAME -->` and `<!-- end -->` in README.md and pages of docs/.
"""

import json
import re
from pathlib import Path

from ablation import table as ablation_table

from cdgp.bench.run import read_rows
from cdgp.bench.run import table as core_table

RESULTS = Path("docs/results")


def main() -> None:
    core = read_rows(RESULTS / "core.jsonl")
    blocks = {
        "core": core_table(core),
        "headline": core_table([r for r in core if r["setting"] == "default"]),
        "kinds": kinds_table(core),
        "branches": branches_table(core),
        "ablation": ablation_table(RESULTS / "ablation.jsonl"),
        "aupro": aupro_table(RESULTS / "aupro.json"),
    }
    for page in (Path("README.md"), RESULTS / "README.md", Path("docs/decisions.md")):
        text = page.read_text(encoding="utf-8")
        for name, block in blocks.items():
            text = re.sub(
                rf"<!-- {name} -->\n.*?<!-- end -->",
                lambda _, n=name, b=block: f"<!-- {n} -->\n{b}\n<!-- end -->",
                text,
                flags=re.DOTALL,
            )
        page.write_text(text, encoding="utf-8")


def aupro_table(path: Path) -> str:
    lines = ["| limit | full sort | cdgp | times faster | memory |", "|---|---|---|---|---|"]
    for row in json.loads(path.read_text())["rows"]:
        cells = [
            f"{row[side]['seconds']:.2f} s, {row[side]['peak_mib']:.0f} MiB"
            for side in ("full sort", "cdgp")
        ]
        lines.append(
            f"| {row['limit']} | {cells[0]} | {cells[1]} | {row['times_faster']:.1f} | "
            f"{100 * row['memory_share']:.0f} % |"
        )
    return "\n".join(lines)


def branches_table(rows: list[dict]) -> str:
    """What each branch localises alone, mean over seeds."""
    lines = ["| set | map | AUROC-P | AUPRO@.3 | AUPRO@.05 |", "|---|---|---|---|---|"]
    chosen = [r for r in rows if r["method"] == "cdgp" and r["setting"] == "default"]
    for dataset in sorted({r["dataset"] for r in chosen}):
        cells = [r for r in chosen if r["dataset"] == dataset]
        for name in ("residual", "dominance", "surprisal"):
            values = [[c["branches"][name].get(k) for c in cells] for k in KEYS]
            lines.append(f"| {dataset} | {name} | " + " | ".join(map(mean, values)) + " |")
        values = [[c[k] for c in cells] for k in KEYS]
        lines.append(f"| {dataset} | final | " + " | ".join(map(mean, values)) + " |")
    return "\n".join(lines)


def kinds_table(rows: list[dict]) -> str:
    """Each kind of defect of `magnetic_tile`, mean over seeds: where which map wins."""
    maps = ("residual", "dominance", "final")
    lines = [
        "| kind | " + " | ".join(f"{m} {k}" for k in ("AUPRO@.3", "AUROC-P") for m in maps) + " |",
        "|---" * 7 + "|",
    ]
    chosen = [
        r for r in rows
        if (r["method"], r["setting"], r["dataset"]) == ("cdgp", "default", "magnetic_tile")
    ]  # fmt: skip
    for kind in sorted({k for r in chosen for k in r["kinds"]["final"]}):
        cells = [
            mean([r["kinds"][m].get(kind, {}).get(key) for r in chosen])
            for key in ("pixel_aupro_30", "pixel_auroc")
            for m in maps
        ]
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


KEYS = ("pixel_auroc", "pixel_aupro_30", "pixel_aupro_05")


def mean(values: list[float | None]) -> str:
    defined = [100 * v for v in values if v is not None]
    return f"{sum(defined) / len(defined):.1f}" if defined else "–"


if __name__ == "__main__":
    main()
