"""Scoring on a Ray cluster: shards of images, each with a Parquet file as its receipt.

Needs the extra ``ray``; see ``cluster.job`` for how a job runs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cdgp.cluster.job import PredictedShards, predict_on_ray

__all__ = ["PredictedShards", "predict_on_ray"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cdgp.cluster' has no attribute {name!r}")
    from cdgp.cluster import job

    return getattr(job, name)
