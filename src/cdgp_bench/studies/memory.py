"""Peak memory and time of the exact pixel metrics over many large maps.

    python benchmarks/memory.py --out docs/results/memory.json

2000 maps of 512 x 512 in one temporary file, every second image defective with three regions; the
peak is the resident set of the whole process, pages of that file included.
"""

import argparse
import json
import re
import time
from pathlib import Path

import numpy as np

from cdgp.evaluation import MapFile, pixel_metrics
from cdgp_bench.measure.complexity import machine

IMAGES, SIDE = 2000, 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results/memory.json"))
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    store, masks = MapFile(), []
    for index in range(IMAGES):
        values = rng.standard_normal((SIDE, SIDE), dtype=np.float32)
        mask = np.broadcast_to(np.False_, values.shape)
        if index % 2:
            mask = np.zeros(values.shape, dtype=np.bool_)
            for y, x in rng.integers(0, SIDE - 24, (3, 2)):
                mask[y : y + 24, x : x + 24] = True
            values[mask] += 1.5
        store.append(values)
        masks.append(mask)
    before = peak_mib()
    began = time.monotonic()
    found = pixel_metrics(store.maps(), masks, [str(i) for i in range(IMAGES)])
    told = {
        "pictures": IMAGES,
        "side": SIDE,
        "maps_gib": IMAGES * SIDE**2 * 4 / 2**30,
        "peak_mib_before": before,
        "peak_mib": peak_mib(),
        "seconds": round(time.monotonic() - began, 1),
        "metrics": found,
        "machine": machine(),
    }
    arguments.out.write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps({k: v for k, v in told.items() if k != "machine"}))


def peak_mib() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


if __name__ == "__main__":
    main()
