"""A station filled with solar cells."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import select

from cdgp.runtimes.base import cores
from cdgp.station import accounts, trail
from cdgp.station.intake import Facts, add_line
from cdgp.station.pipeline import Policy, promote
from cdgp.station.schema import models, users
from cdgp.station.service import Station

CELLS = 60
"""Of each kind."""
LINE = "solar cells"
LOTS = 4


def fill(station: Station, model: Path, cells: list[Path]) -> str:
    """Add a user, a line with a live model, and scored images; returns the user's password.

    The policy is cautious: a person is asked for everything from half of the model's threshold to
    half way between it and 1.
    """
    with station.store.write() as connection:
        password = accounts.add_user(connection, trail.STATION, "engineer", "engineer")
        line = add_line(connection, trail.STATION, LINE)
        user = connection.execute(select(users.c.id).where(users.c.name == "engineer")).scalar_one()
    model_id = station.pipeline.adopt(model, trail.STATION)
    with station.store.read() as connection:
        own = select(models.c.threshold).where(models.c.id == model_id)
        threshold = connection.execute(own).scalar_one()
    policy = Policy(round(threshold / 2, 3), round((1 + threshold) / 2, 3))
    with station.store.write() as connection:
        promote(connection, (user, trail.STATION), line, model_id, policy, "the demo")
    for number, cell in enumerate(cells):
        facts = Facts(part=f"cell {number:03d}", lot=f"lot {number % LOTS}", label=cell.name)
        with station.intake.receiving() as file:
            file.add(cell.read_bytes())
            station.intake.enter(file, line, facts)
    with ThreadPoolExecutor(cores()) as pool:
        while station.pipeline.step(pool):
            pass
    return password
