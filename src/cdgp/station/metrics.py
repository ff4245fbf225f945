"""What Prometheus reads at ``/metrics``, counted anew from the database each time."""

import shutil
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from sqlalchemy import func, select

from cdgp.station import review
from cdgp.station.intake import waiting
from cdgp.station.schema import alarms, images, lines, reviews, watched
from cdgp.station.service import Station


class StationCollector(Collector):
    """Counts of a station."""

    def __init__(self, station: Station) -> None:
        self.station = station

    def collect(self) -> Iterator[Metric]:
        decided = CounterMetricFamily(
            "cdgp_station_images", "Images decided.", labels=["line", "decision"]
        )
        depth = GaugeMetricFamily(
            "cdgp_station_queue_depth", "Images that wait for a person.", labels=["line"]
        )
        oldest = GaugeMetricFamily(
            "cdgp_station_queue_oldest_seconds", "Age of the oldest of them.", labels=["line"]
        )
        with self.station.store.read() as connection:
            counts = connection.execute(
                select(lines.c.name, images.c.decision, func.count())
                .join(lines, lines.c.id == images.c.line_id)
                .where(images.c.decision.is_not(None))
                .group_by(lines.c.name, images.c.decision)
            )
            for name, decision, count in counts:
                decided.add_metric([name, decision], count)
            for line in connection.execute(select(lines)):
                number, since = review.depth(connection, line.id)
                depth.add_metric([line.name], number)
                oldest.add_metric([line.name], 0 if since is None else time.time() - since)
            backlog = waiting(connection)
            reviewed = connection.scalar(select(func.count()).select_from(reviews)) or 0
            open_alarms = connection.scalar(
                select(func.count()).where(alarms.c.acknowledged_at.is_(None))
            )
            refused = connection.scalar(select(func.count()).where(watched.c.problem != ""))
        yield from (decided, depth, oldest, *self._messages())
        yield GaugeMetricFamily(
            "cdgp_station_watched_refused", "Watched files that are no image.", refused or 0
        )
        yield GaugeMetricFamily(
            "cdgp_station_alarms", "Alarms that wait for somebody.", open_alarms or 0
        )
        yield GaugeMetricFamily("cdgp_station_backlog", "Images not scored yet.", backlog)
        yield CounterMetricFamily("cdgp_station_reviews", "Verdicts, undone ones too.", reviewed)
        free = shutil.disk_usage(self.station.store.home).free
        yield GaugeMetricFamily("cdgp_station_free_bytes", "Free space of the home.", free)
        problems = len(self.station.problems())
        yield GaugeMetricFamily("cdgp_station_problems", "What is wrong right now.", problems)

    def _messages(self) -> Iterator[Metric]:
        waiting = GaugeMetricFamily(
            "cdgp_station_messages_waiting", "Messages not delivered yet.", labels=["receiver"]
        )
        oldest = GaugeMetricFamily(
            "cdgp_station_messages_oldest_seconds", "Age of the oldest.", labels=["receiver"]
        )
        lost = CounterMetricFamily(
            "cdgp_station_messages_lost", "Messages dropped, ever.", labels=["receiver"]
        )
        for it in self.station.outbox.backlog():
            waiting.add_metric([it.name], it.waiting)
            oldest.add_metric([it.name], time.time() - it.oldest if it.oldest else 0)
            lost.add_metric([it.name], it.lost)
        yield from (waiting, oldest, lost)


def exposed(station: Station) -> bytes:
    """The metrics of a station, as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StationCollector(station))
    return generate_latest(registry)
