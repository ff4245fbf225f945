"""Peak memory and time of the exact pixel metrics over many large maps.

    python -m cdgp_bench.studies.memory --out docs/results/memory.json

2000 maps of 512 x 512 in one temporary file, every second image defective with three regions; the
peak is the resident set of the whole process, pages of that file included.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np

from cdgp.evaluation import MapFile, pixel_metrics
from cdgp_bench.measure.harness import machine, peak_memory

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
    before = peak_memory().mib
    began = time.monotonic()
    found = pixel_metrics(store.maps(), masks, [str(i) for i in range(IMAGES)])
    record = {
        "pictures": IMAGES,
        "side": SIDE,
        "maps_gib": IMAGES * SIDE**2 * 4 / 2**30,
        "peak_mib_before": before,
        "peak_mib": peak_memory().mib,
        "seconds": round(time.monotonic() - began, 1),
        "metrics": found,
        "machine": machine(),
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({k: v for k, v in record.items() if k != "machine"}))


if __name__ == "__main__":
    main()
