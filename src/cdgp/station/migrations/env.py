"""Alembic runs this; the store hands its own connection over."""

from alembic import context

from cdgp.station import schema

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=schema.metadata,
    render_as_batch=True,  # SQLite alters a table by copying it
)
context.run_migrations()
