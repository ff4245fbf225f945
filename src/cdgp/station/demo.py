"""A station filled with solar cells."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import Connection, select

from cdgp.data.manifest import Sample
from cdgp.files import write_text
from cdgp.runtimes.base import cores
from cdgp.station import accounts, review, trail
from cdgp.station.accounts import User
from cdgp.station.config import CONFIG
from cdgp.station.intake import Facts, add_line
from cdgp.station.pipeline import Policy, promote
from cdgp.station.review import Seen
from cdgp.station.schema import images, models, users
from cdgp.station.service import Station

GOOD, DEFECTIVE = 150, 50
LINE = "solar cells"
LOTS = 40
REVIEWED = 0.75
"""Share of the images, the oldest, whose turn in the queue has come."""
SHARES = {"audit_share": 0.6, "test_share": 0.4, "calibration_share": 0.3}
"""So large that few images show the whole loop; a line takes the defaults."""


def configure(home: Path, train: Sequence[str]) -> None:
    """Write the configuration of a new home; ``train`` are options of ``cdgp train``."""
    values = {**SHARES, "train": list(train)}
    text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())
    write_text(home / CONFIG, f"# Larger shares and shorter trainings than a line has.\n{text}")


def fill(station: Station, model: Path, cells: Sequence[Sample]) -> str:
    """Add a user, a line with a live model, scored images and verdicts; the user's password.

    At first the model's own threshold is live, then a cautious policy: a person is asked for
    everything from half of that threshold to half way between it and 1.
    """
    with station.store.write() as connection:
        password = accounts.add_user(connection, trail.STATION, "engineer", "engineer")
        line = add_line(connection, trail.STATION, LINE)
        user = _user(connection)
    model_id = station.pipeline.adopt(model, trail.STATION)
    with station.store.read() as connection:
        own = select(models.c.threshold).where(models.c.id == model_id)
        threshold = connection.execute(own).scalar_one()
    cautious = Policy(round(threshold / 2, 3), round((1 + threshold) / 2, 3))
    for policy, reason in [
        (Policy(threshold, threshold), "the model's own threshold"),
        (cautious, "a person is asked about doubtful cells"),
    ]:
        with station.store.write() as connection:
            promote(connection, (user.id, trail.STATION), line, model_id, policy, reason)
    defective: dict[int, bool] = {}
    for number, cell in enumerate(cells):
        facts = Facts(
            part=f"cell {number:03d}", lot=str(number * LOTS // len(cells)),
            label=cell.image.name,
        )  # fmt: skip
        with station.intake.receiving() as file:
            file.add(cell.image.read_bytes())
            defective[station.intake.enter(file, line, facts).id] = cell.defective
    with ThreadPoolExecutor(cores()) as pool:
        while station.pipeline.step(pool):
            pass
    _judge(station, user, line, defective)
    while station.trials.step():
        pass
    return password


def _user(connection: Connection) -> User:
    row = connection.execute(select(users).where(users.c.name == "engineer")).one()
    return User(row.id, row.name, row.role, row.must_change, "", "")


def _judge(station: Station, user: User, line: int, defective: dict[int, bool]) -> None:
    """Give the older images of the queue the verdict that experts gave."""
    with station.store.write() as connection:
        last = sorted(defective)[int(REVIEWED * len(defective)) - 1]
        queued = select(images.c.id, images.c.version).where(
            images.c.line_id == line, review.queued(), images.c.id <= last
        )
        rows = connection.execute(queued).fetchall()
        for verdict, wanted in (("good", False), ("defective", True)):
            seen = [Seen(row.id, row.version) for row in rows if defective[row.id] == wanted]
            if seen:
                review.review(connection, user, verdict, seen, "the experts' label")
