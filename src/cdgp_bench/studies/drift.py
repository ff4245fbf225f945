"""Drift: false alarms of stable months and delays until a change is told, by simulation.

    python -m cdgp_bench.studies.drift [--months 60]

Prints a Markdown table: for each kind of stream, alarms in 30 stable days with the default promise
and with one false alarm in ten days allowed, and how many parts pass until the exposure, down by
15 %, is told, over as many streams.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, timedelta

import numpy as np

from cdgp.station.drift import DAYS, Alarm, ImageStatistics, Monitor, Part
from cdgp_bench.studies import markdown_table

FIRST = date(2026, 3, 1)
OFTEN = 10


@dataclass(frozen=True)
class Line:
    """What a line makes; every number of a part has a variance of one, and that of lots beside."""

    parts: int = 40
    """A day."""
    lot: int = 0
    """Parts of a lot; 0 gives none."""
    of_lots: float = 0.0
    """Standard deviation between lots."""
    memory: float = 0.0
    """Correlation of a part with the next one."""
    shares: tuple[float, ...] = (1.0,)
    """Of the products."""
    batch: int = 1
    """Parts of one product in a row."""
    exposure: float = 1.0
    reference: int = 200
    """Parts on each of the five days that the reference is from."""

    def stream(self, rng: np.random.Generator, days: int, first: int, name: str) -> Iterator[Part]:
        """The parts of some days, from day ``first`` on; brightness varies by 3 % of its mean."""
        own, of_lot, product = rng.normal(size=10), np.zeros(10), 0
        for number in range(days * self.parts):
            if self.lot and number % self.lot == 0:
                of_lot = self.of_lots * rng.normal(size=10)
            if number % (self.lot or self.batch) == 0:
                product = int(rng.choice(len(self.shares), p=self.shares))
            own = self.memory * own + np.sqrt(1 - self.memory**2) * rng.normal(size=10)
            x = own + of_lot
            brightness = 0.4 * (1 + 0.03 * x[0]) * (1 + 0.2 * product) * self.exposure
            yield Part(
                f"{name}{number}",
                FIRST + timedelta(days=first + number // self.parts),
                float(x[3]) + 2 * product,
                ImageStatistics(float(brightness), 0.3 + 0.02 * x[1], 0.5 + 0.02 * x[2]),
                x[4:] + 4.0 * product,
                f"product {product}",
                f"{name}{number // self.lot}" if self.lot else None,
            )


STABLE = {
    "independent": Line(),
    "lots of 10": Line(lot=10, of_lots=2.0),
    "memory of 0.6": Line(memory=0.6),
    "memory of 0.9": Line(memory=0.9, reference=400),
    "three products": Line(shares=(0.5, 0.3, 0.2)),
    "their batches": Line(shares=(0.5, 0.3, 0.2), batch=20),
    "their lots of 8": Line(shares=(0.5, 0.3, 0.2), lot=8, of_lots=1.0),
}


def monitor(line: Line, rng: np.random.Generator, days: float = DAYS) -> Monitor:
    """With the line's reference."""
    return Monitor(list(replace(line, parts=line.reference).stream(rng, 5, -9, "reference ")), days)


def alarms(line: Line, days: float, seed: int, length: int = 30) -> list[Alarm]:
    """All alarms of a line's days."""
    rng = np.random.default_rng(seed)
    watching = monitor(line, rng, days)
    found = (watching.add(part) for part in line.stream(rng, length, 0, "part "))
    return [alarm for alarm in found if alarm]


def delay(line: Line, seed: int, exposure: float = 0.85) -> float:
    """Parts until a change of exposure, after five days, is told; infinite beyond 2,000."""
    rng = np.random.default_rng(seed)
    watching = monitor(line, rng)
    for part in line.stream(rng, 5, 0, "before "):
        watching.add(part)
    dark = replace(line, parts=2000, exposure=exposure)
    for number, part in enumerate(dark.stream(rng, 1, 5, "dark "), 1):
        alarm = watching.add(part)
        if alarm and ("brightness", "lower") in alarm.moves:
            return number
    return float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--months", type=int, default=60)
    seeds = range(parser.parse_args().months)
    rows = []
    for name, line in STABLE.items():
        usual, often = (
            np.array([len(alarms(line, days, seed)) for seed in seeds]) for days in (DAYS, OFTEN)
        )
        delays = [delay(line, seed) for seed in seeds]
        rows.append([name, f"{usual.mean():.2f}", int((usual > 1).sum()), f"{often.mean():.2f}",
                     f"{np.median(delays):.0f}", f"{max(delays):.0f}"])  # fmt: skip
    heads = ["stream", f"alarms (bound {30 / DAYS:.2f})", "months with more than one",
             f"alarms (bound {30 / OFTEN:.0f})", "median delay, parts", "longest"]  # fmt: skip
    print(markdown_table(heads, rows))


if __name__ == "__main__":
    main()
