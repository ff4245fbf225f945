"""The configuration file of a station, ``station.toml`` in its home: every limit and default."""

import tomllib
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cdgp.errors import SettingsError

CONFIG = "station.toml"
Share = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Watch(_Section):
    """A folder whose images are taken in. They stay where they are."""

    folder: Path
    """Absolute; it is no link."""
    line: str
    """Name of the line that its images belong to; made where there is none."""
    camera: str = ""


class Config(_Section):
    """What a station is allowed, and what it keeps."""

    image_mib: Annotated[float, Field(gt=0)] = 64
    """Largest upload, in MiB."""
    megapixels: Annotated[float, Field(gt=0)] = 100
    """Largest image, in millions of pixels."""
    backlog: Annotated[int, Field(ge=1)] = 1000
    """So many images may wait for their score; further uploads are asked to come later."""
    audit_share: Share = 0.02
    """Share of all images, drawn at random, that people review whatever their score."""
    test_share: Share = 0.2
    """Share of the groups that no model is trained on: the test set, which grows."""
    calibration_share: Share = 0.2
    """Share of the groups that thresholds and calibration rest on."""
    retention_days: Annotated[float, Field(gt=0)] | None = None
    """Image files that nobody reviewed are removed after so many days; None keeps them."""
    free_gib: Annotated[float, Field(ge=0)] = 2
    """Below so much free space, in GiB, the oldest image files that nobody reviewed are removed."""
    reserve_gib: Annotated[float, Field(ge=0)] = 0.5
    """Below so much free space uploads are refused, so that reviews can go on."""
    train: tuple[str, ...] = ()
    """Options of ``cdgp train`` for retraining, such as ``["--preset", "paper"]``."""
    webhook: str | None = None
    """Address of a web server that is told of events; None tells none."""
    mqtt: str | None = None
    """``mqtt://host/topic``, or ``mqtts://``, of a broker that is told; None tells none."""
    outbox: Annotated[int, Field(ge=100)] = 100_000
    """So many messages are kept for a receiver out of reach; then the oldest are dropped."""
    watch: tuple[Watch, ...] = ()


def read_config(home: Path) -> Config:
    """The configuration of a home; the defaults where it has no file.

    Raises:
        SettingsError: no TOML, an unknown key, a value out of its range, or a watched folder that
            is no absolute path, a link, or missing.
    """
    path = home / CONFIG
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Config()
    try:
        config = Config.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: is no TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        raise SettingsError(f"{path}: {name}: {first['msg']}; see docs/station.md") from error
    if config.test_share + config.calibration_share > 1:
        raise SettingsError(f"{path}: test_share and calibration_share are more than 1 together")
    for watch in config.watch:
        if not watch.folder.is_absolute():
            raise SettingsError(f"{path}: watch.folder {watch.folder}: give an absolute path")
        if watch.folder.is_symlink() or not watch.folder.is_dir():
            raise SettingsError(
                f"{path}: watch.folder {watch.folder}: is no folder, or a link; make the folder, "
                "or give the one that the link leads to"
            )
    return config
