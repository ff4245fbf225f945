"""What a trained method costs: parameters, batch-one latency, peak memory."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cdgp.data.manifest import WeakSplit
from cdgp.progress import Quiet
from cdgp_bench.grid import Run
from cdgp_bench.measure import harness

WARM_UPS = 10
TIMED = 50


def measured(run: Run, data: WeakSplit, checkpoints: Path) -> dict[str, Any]:
    """Cost of a trained method's whole computation of one input, batch one.

    It is measured in a process of its own, so that what training left in memory is not counted.

    Returns:
        ``parameters``; ``stored``, which counts memories and statistics too; ``latency_ms`` with
        mean, std, median and p95 over 50 runs after 10; ``peak_memory_mib`` and ``memory_of``,
        which says what was measured.
    """
    return harness.in_process(_measure, run, data, checkpoints, torch.get_num_threads())


def _measure(run: Run, data: WeakSplit, checkpoints: Path, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    pipeline = run.fit(data, checkpoints, Quiet()).pipeline()
    device = next(pipeline.network.parameters()).device
    image = torch.rand(1, 3, *run.settings.input_size, generator=torch.Generator().manual_seed(0))
    image = image.to(device)
    harness.reset_peak_memory(device)
    turn = partial(harness.seconds_of, partial(pipeline.run, image), device)
    latency = 1000 * np.array(harness.alternate({"run": turn}, TIMED, WARM_UPS)["run"])
    peak = harness.peak_memory(device)
    return {
        "parameters": sum(p.numel() for p in pipeline.network.parameters()),
        "stored": sum(values.numel() for values in pipeline.network.state_dict().values()),
        "latency_ms": {"mean": float(latency.mean()), "std": float(latency.std(ddof=1)),
                       "median": float(np.median(latency)),
                       "p95": float(np.percentile(latency, 95))},
        "runs": TIMED,
        "device": device.type,
        "peak_memory_mib": peak.mib,
        "memory_of": peak.memory_of,
    }  # fmt: skip
