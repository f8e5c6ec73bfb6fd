"""How Alembic reaches the database: through the same engine as everything else."""
from alembic import context

from app import db
from app.schema import metadata


def run() -> None:
    """Applies the migrations in one transaction each; a SQLite file is put into WAL mode here, once, where nothing else
    has it open yet."""
    if db.engine().dialect.name == "sqlite":
        db.use_wal()
    with db.transaction() as tx:
        context.configure(
            connection=tx, target_metadata=metadata, render_as_batch=tx.dialect.name == "sqlite",
            compare_server_default=False)
        context.run_migrations()


run()
