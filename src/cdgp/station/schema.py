"""The tables of a station, as the newest migration leaves them. Times are seconds since 1970."""

from typing import Any, TypeAlias

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Row,
    Table,
    Text,
    UniqueConstraint,
    insert,
)

metadata = MetaData()
AnyRow: TypeAlias = Row[*tuple[Any, ...]]


def insert_row(connection: Connection, table: Table, **values: Any) -> int:
    """Insert a row, and return its id."""
    key = connection.execute(insert(table).values(**values)).inserted_primary_key
    assert key is not None
    return int(key[0])


users = Table(
    "users", metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("password_hash", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("must_change", Boolean, nullable=False),  # the password was given by somebody else
    Column("disabled", Boolean, nullable=False),
    Column("created_at", Float, nullable=False),
)  # fmt: skip

sessions = Table(
    "sessions", metadata,
    Column("digest", Text, primary_key=True),  # SHA-256 of what the cookie holds
    Column("user_id", ForeignKey("users.id"), nullable=False),
    Column("csrf", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("seen_at", Float, nullable=False),
)  # fmt: skip

login_failures = Table(
    "login_failures", metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, index=True),
    Column("address", Text, nullable=False, index=True),
    Column("at", Float, nullable=False),
)  # fmt: skip

lines = Table(
    "lines", metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("created_at", Float, nullable=False),
)  # fmt: skip

tokens = Table(
    "tokens", metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", Text, nullable=False, unique=True),  # SHA-256 of the token
    Column("line_id", ForeignKey("lines.id"), nullable=False),
    Column("label", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("revoked_at", Float),
)  # fmt: skip

models = Table(
    "models", metadata,
    Column("id", Integer, primary_key=True),
    Column("digest", Text, nullable=False, unique=True),  # SHA-256 of the file
    Column("name", Text, nullable=False),
    Column("suffix", Text, nullable=False),
    Column("score_kind", Text, nullable=False),
    Column("threshold", Float, nullable=False),  # the model's own, on its score
    Column("added_at", Float, nullable=False),
)  # fmt: skip

# The newest row of a line is its live policy, and names its live model: a promotion or a rollback
# is one insert, and there is nothing that could be half done.
policies = Table(
    "policies", metadata,
    Column("id", Integer, primary_key=True),
    Column("line_id", ForeignKey("lines.id"), nullable=False, index=True),
    Column("model_id", ForeignKey("models.id"), nullable=False),
    Column("accept_below", Float, nullable=False),
    Column("reject_above", Float, nullable=False),
    Column("reason", Text, nullable=False),
    Column("user_id", ForeignKey("users.id"), nullable=False),
    Column("created_at", Float, nullable=False),
)  # fmt: skip

groups = Table(
    "groups", metadata,
    Column("id", Integer, primary_key=True),
    Column("line_id", ForeignKey("lines.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("split", Text, nullable=False),  # fit, calibration or test; never changed
    UniqueConstraint("line_id", "name", name="uq_groups_line_name"),
)  # fmt: skip

images = Table(
    "images", metadata,
    Column("id", Integer, primary_key=True),
    Column("line_id", ForeignKey("lines.id"), nullable=False),
    Column("digest", Text, nullable=False, index=True),  # SHA-256 of the file
    Column("part", Text, nullable=False),
    Column("lot", Text, nullable=False),
    Column("group_name", Text, nullable=False),
    Column("camera", Text, nullable=False),
    Column("label", Text, nullable=False),  # the file's name where it came from; never a path here
    Column("size", Integer, nullable=False),  # bytes
    Column("width", Integer, nullable=False),
    Column("height", Integer, nullable=False),
    Column("split", Text, nullable=False),
    Column("audit", Boolean, nullable=False),  # drawn at random, whatever its score
    Column("received_at", Float, nullable=False),
    Column("attempts", Integer, nullable=False),  # to score it; 2 mean that it ended the process
    Column("decision", Text),  # accept, reject or unsure; null while it waits
    Column("decided_at", Float),
    Column("problem", Text, nullable=False),  # why there is no score
    Column("verdict", Text),  # good, defective or unsure, of the newest review
    Column("version", Integer, nullable=False),  # number of reviews
    Column("removed_at", Float),  # when retention removed the file
    UniqueConstraint("line_id", "digest", "part", name="uq_images_line_digest_part"),
    Index("ix_images_queue", "line_id", "decision", "verdict"),
    Index("ix_images_waiting", "decision", "id"),
)  # fmt: skip

scores = Table(
    "scores", metadata,
    Column("id", Integer, primary_key=True),
    Column("image_id", ForeignKey("images.id"), nullable=False),
    Column("model_id", ForeignKey("models.id"), nullable=False),
    Column("policy_id", ForeignKey("policies.id"), nullable=False),
    Column("score", Float, nullable=False),
    Column("decision", Text, nullable=False),
    Column("regions", Text, nullable=False),  # JSON: [[x, y, width, height, peak], ...]
    Column("warnings", Text, nullable=False),  # JSON: [text, ...]
    Column("at", Float, nullable=False),
    Column("brightness", Float),  # these three are null where they were not measured
    Column("contrast", Float),
    Column("sharpness", Float),
    UniqueConstraint("image_id", "policy_id", name="uq_scores_image_policy"),
    Index("ix_scores_model", "model_id", "id"),
)  # fmt: skip

reviews = Table(
    "reviews", metadata,
    Column("id", Integer, primary_key=True),
    Column("image_id", ForeignKey("images.id"), nullable=False),
    Column("version", Integer, nullable=False),
    Column("verdict", Text),  # null: an undo that leaves none
    Column("user_id", ForeignKey("users.id"), nullable=False),
    Column("at", Float, nullable=False),
    Column("batch", Text, nullable=False),  # what was reviewed, or undone, in one go
    Column("undoes", Text),  # the batch that this one takes back
    UniqueConstraint("image_id", "version", name="uq_reviews_image_version"),
    Index("ix_reviews_user", "user_id", "id"),
    Index("ix_reviews_batch", "batch"),
)  # fmt: skip

# Regions that people drew; the newest version of an image is what is drawn on it.
drawings = Table(
    "drawings", metadata,
    Column("id", Integer, primary_key=True),
    Column("image_id", ForeignKey("images.id"), nullable=False),
    Column("version", Integer, nullable=False),
    Column("shapes", Text, nullable=False),  # JSON, as drawing.Shape reads it; [] once erased
    Column("user_id", ForeignKey("users.id"), nullable=False),
    Column("at", Float, nullable=False),
    UniqueConstraint("image_id", "version", name="uq_drawings_image_version"),
)  # fmt: skip

claims = Table(
    "claims", metadata,
    Column("image_id", ForeignKey("images.id"), primary_key=True, autoincrement=False),
    Column("user_id", ForeignKey("users.id"), nullable=False),
    Column("until", Float, nullable=False),
)  # fmt: skip

candidates = Table(
    "candidates", metadata,
    Column("id", Integer, primary_key=True),
    Column("line_id", ForeignKey("lines.id"), nullable=False),
    Column("model_id", ForeignKey("models.id"), nullable=False),
    Column("source", Text, nullable=False),  # the file, or the job, that it came from
    Column("added_at", Float, nullable=False),
    UniqueConstraint("line_id", "model_id", name="uq_candidates_line_model"),
)  # fmt: skip

# What a model says of a held-out image, whichever policy is live.
trials = Table(
    "trials", metadata,
    Column("image_id", ForeignKey("images.id"), primary_key=True, autoincrement=False),
    Column("model_id", ForeignKey("models.id"), primary_key=True, autoincrement=False),
    Column("score", Float),  # null where there is none
    Column("problem", Text, nullable=False),  # why there is none
)  # fmt: skip

jobs = Table(
    "jobs", metadata,
    Column("id", Integer, primary_key=True),
    Column("line_id", ForeignKey("lines.id"), nullable=False),
    Column("user_id", ForeignKey("users.id"), nullable=False),
    Column("folder", Text, nullable=False),  # its name among the home's jobs
    Column("counts", Text, nullable=False),  # JSON: {split: [good, defective], ...}
    Column("created_at", Float, nullable=False),
    Column("ended_at", Float),  # null while it waits or works
    Column("model_id", ForeignKey("models.id")),  # the candidate that it left
    Column("problem", Text, nullable=False),  # why a finished job left none
)  # fmt: skip

alarms = Table(
    "alarms", metadata,
    Column("id", Integer, primary_key=True),
    Column("line_id", ForeignKey("lines.id"), nullable=False),
    Column("model_id", ForeignKey("models.id"), nullable=False),
    Column("camera", Text, nullable=False),
    Column("score_id", ForeignKey("scores.id"), nullable=False),  # what completed the evidence
    Column("kind", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("images", Text, nullable=False),  # JSON: ids of images that it rests on, newest first
    Column("at", Float, nullable=False),
    Column("acknowledged_at", Float),
    Column("user_id", ForeignKey("users.id")),  # who acknowledged it
    Column("note", Text, nullable=False),
    UniqueConstraint("score_id", name="uq_alarms_score"),
)  # fmt: skip

watched = Table(
    "watched", metadata,
    Column("path", Text, primary_key=True),
    Column("size", BigInteger, nullable=False),
    Column("mtime_ns", BigInteger, nullable=False),
    Column("problem", Text, nullable=False),  # why it was not taken in
)  # fmt: skip

# Numbers only grow, also once all rows were delivered and removed.
outbox = Table(
    "outbox", metadata,
    Column("id", Integer, primary_key=True),
    Column("key", Text, nullable=False),  # the message's id for receivers
    Column("at", Float, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", Text, nullable=False),  # JSON
    sqlite_autoincrement=True,
)  # fmt: skip

receivers = Table(
    "receivers", metadata,
    Column("name", Text, primary_key=True),
    Column("delivered", Integer, nullable=False),  # the newest message that it has, or has lost
    Column("lost", Integer, nullable=False),  # messages that were dropped before it had them
)  # fmt: skip

trail = Table(
    "trail", metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),  # 1, 2, 3, ... without a gap
    Column("at", Text, nullable=False),  # ISO 8601, UTC
    Column("who", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("before", Text, nullable=False),  # JSON
    Column("after", Text, nullable=False),  # JSON
    Column("why", Text, nullable=False),
    Column("previous", Text, nullable=False),  # the hash of the entry before
    Column("hash", Text, nullable=False),
)  # fmt: skip
