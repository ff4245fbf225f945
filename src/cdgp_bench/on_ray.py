"""The rows of a plan on Ray: a task a row, equal to those of one process.

A task has as many threads as this process, since sums of floats depend on their number. Machines
share the folders of images and checkpoints.
"""

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cdgp.cluster.engine import connected, first_line
from cdgp.errors import SettingsError
from cdgp.progress import Quiet
from cdgp_bench.grid import Run
from cdgp_bench.plan import Plan
from cdgp_bench.rows import Row
from cdgp_bench.run import Engine, Place, Task, computed


def on_ray(address: str) -> Engine:
    """The engine of ``run.run_plan`` that has tasks computed by Ray; address as ``connected``'s."""
    return partial(_rows, address)


def _rows(
    address: str, tasks: Sequence[Task], plan: Plan, place: Place
) -> Iterator[tuple[Run, Row]]:
    if not tasks:
        return
    threads = torch.get_num_threads()
    out, checkpoints = place.out.resolve(), place.checkpoints.resolve()
    whole = Place(out, checkpoints, Quiet(), _mute)
    with connected(address, 0) as ray:
        # Rows of a GPU and of a processor differ: all are of what this process has.
        gpus = int(torch.cuda.is_available())
        check_room(ray.nodes(), threads, gpus)
        # Once more after a worker is gone: its finished stages are not trained again.
        remote = ray.remote(_computed).options(num_cpus=threads, num_gpus=gpus, max_retries=1)
        shared = ray.put((plan, whole, threads, Path.cwd()))
        left = {remote.remote(task, shared): task.run for task in tasks}
        while left:
            (done,), _ = ray.wait([*left], num_returns=1)
            run = left.pop(done)
            try:
                yield run, ray.get(done)
            except ray.exceptions.RayError as error:
                yield run, {"status": "failed", "reason": f"its worker ended: {first_line(error)}"}


def _computed(task: Task, shared: tuple[Plan, Place, int, Path]) -> Row:
    plan, place, threads, here = shared
    torch.set_num_threads(threads)
    os.chdir(here)  # the plan's paths may be relative
    return computed(task.run, task.prepared, plan, place)


def _mute(line: str) -> None:
    pass


def check_room(nodes: Sequence[dict[str, Any]], threads: int, gpus: int) -> None:
    """Raise SettingsError where no machine has room for a task: it would wait for ever."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    if gpus:
        alive = [resources for resources in alive if resources.get("GPU", 0) >= gpus]
        if not alive:
            raise SettingsError(
                "--ray: this machine has a GPU, and no machine of the cluster has one; rows would "
                "differ: start from a machine without, or hide it with CUDA_VISIBLE_DEVICES="
            )
    most = max((resources.get("CPU", 0) for resources in alive), default=0)
    if most < threads:
        raise SettingsError(
            f"--ray: a row takes {threads} threads, and no machine of the cluster has more than "
            f"{most:g} processors; set OMP_NUM_THREADS to fewer"
        )
