"""A database that has been in use for long, made in seconds: many finished jobs, many that wait, and what hangs on
them."""
from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import Connection

from app import clock, db

# How each database counts, names and dates.
_WORDS = {
    "sqlite": {
        "numbers": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {many})",
        "id": "printf('%08x-%04x-7000-8000-%012x', ms / 65536, ms % 65536, i)",
        "at": "strftime('%Y-%m-%d %H:%M:%f000', ({seconds}), 'unixepoch')",
    },
    "postgresql": {
        "numbers": "WITH n(i) AS (SELECT generate_series(1, CAST({many} AS bigint)))",
        "id": "lpad(to_hex(ms / 65536), 8, '0') || '-' || lpad(to_hex(ms % 65536), 4, '0') || '-7000-8000-'"
              " || lpad(to_hex(i), 12, '0')",
        "at": "to_timestamp({seconds})",
    },
}

_JOBS = """
INSERT INTO jobs (id, owner, kind, queue, status, version, attempt, max_attempts, time_limit_seconds, input, result,
  error_code, error_message, callback_url, published_at, created_at, started_at, finished_at, expires_at)
{numbers}, m AS (SELECT i, {began} + CAST(i AS bigint) * {spread} / {many} AS ms FROM n)
SELECT {id}, 'everybody', CASE WHEN i % 10 = 0 THEN 'history' ELSE 'primes' END, 'q:jobs2', {status}, {final} * 2,
  {final}, 3, 300, '{{"n": 5}}', {result}, {code}, {code},
  CASE WHEN i % {told} = 0 THEN 'http://127.0.0.1:9/' || i % 100 END, {published}, {created}, {started}, {finished},
  {expires} FROM m"""

_OUTBOX = """
INSERT INTO outbox (task, target_id, queue, time_limit_seconds, state, available_at, published_at, created_at)
SELECT 'run_job', id, queue, 300, 'published', created_at, {published}, created_at FROM jobs WHERE status = 'queued'
  ORDER BY id"""

_DELIVERIES = """
INSERT INTO deliveries (id, job_id, url, host, endpoint, state, attempts, last_response, created_at, next_attempt_at,
  finished_at)
SELECT 'msg_' || id, id, callback_url, '127.0.0.1:9', callback_url,
  CASE WHEN status = 'failed' THEN 'pending' ELSE 'delivered' END, 1,
  CASE WHEN status = 'failed' THEN 503 ELSE 204 END, finished_at,
  CASE WHEN status = 'failed' THEN expires_at END, CASE WHEN status <> 'failed' THEN finished_at END
  FROM jobs WHERE finished_at IS NOT NULL AND callback_url IS NOT NULL"""

_LATER = """
INSERT INTO outbox (task, target_id, queue, state, available_at, created_at)
SELECT 'deliver_webhook', id, 'callbacks', 'waiting', next_attempt_at, created_at FROM deliveries
  WHERE state = 'pending' ORDER BY id"""

_ATTEMPTS = """
INSERT INTO delivery_attempts (delivery_id, attempt, at, response_code, duration_seconds)
SELECT id, 1, created_at, last_response, 0.01 FROM deliveries"""

_KEYS = """
INSERT INTO idempotency_keys (owner, key, fingerprint, job_id, body, created_at)
SELECT owner, 'key-' || id, id, id, '{{}}', created_at FROM jobs WHERE finished_at IS NOT NULL"""

_TOMBSTONES = """
INSERT INTO tombstones (job_id, owner, kind, status, finished_at, expired_at)
{numbers}, m AS (SELECT i, i AS ms FROM n)
SELECT {id}, 'everybody', 'primes', 'succeeded', {finished}, {expires} FROM m"""

_NOTES = """
INSERT INTO notes (owner, text, created_at) {numbers} SELECT 'everybody', 'a note', {finished} FROM n"""

_EVENTS = """
INSERT INTO history_events (note_id, kind, job_id, at) SELECT id, 'created', 'gone', created_at FROM notes"""


def fill(finished: int, waiting: int, others: int = 0, told: int = 10, published_ago_seconds: float = 600) -> None:
    """Adds so many finished jobs of the last hours (one of `told` with a callback, which was delivered or
    is tried again tomorrow; each with a key) and so many that wait, with messages that were published; and so many
    notes with their events, and tombstones."""
    now = clock.now()
    _make_jobs(now - timedelta(hours=6), finished, told, now, final=True)
    with db.transaction() as tx:
        for statement in (_DELIVERIES, _LATER, _ATTEMPTS, _KEYS):
            _execute(tx, statement)
    _make_jobs(now - timedelta(minutes=20), waiting, 10**9, now, final=False)
    with db.transaction() as tx:
        _execute(tx, _OUTBOX, published=_at(tx, str(now.timestamp() - published_ago_seconds)))
        ended, expired = (_at(tx, f"{(now - timedelta(days=days)).timestamp()} + i") for days in (2, 1))
        for statement in (_TOMBSTONES, _NOTES, _EVENTS) if others else ():
            _execute(tx, statement, many=others, finished=ended, expires=expired)


def _make_jobs(began: datetime, many: int, told: int, now: datetime, final: bool) -> None:
    length = timedelta(hours=5) if final else timedelta(minutes=10)
    spread = int(length.total_seconds() * 1000)
    with db.transaction() as tx:
        def after(seconds: float) -> str:
            return _at(tx, f"ms / 1000.0 + {seconds}") if final else "NULL"

        _execute(
            tx, _JOBS, many=many, began=int(began.timestamp() * 1000), spread=spread, told=told,
            final=int(final), status="CASE WHEN i % 20 = 0 THEN 'failed' ELSE 'succeeded' END" if final else "'queued'",
            result="CASE WHEN i % 20 <> 0 THEN '{\"n\": 5, \"count\": 3}' END" if final else "NULL",
            code="CASE WHEN i % 20 = 0 THEN 'exception' END" if final else "NULL",
            created=_at(tx, "ms / 1000.0"), published=after(0.01), started=after(1), finished=after(1.01),
            expires=after(86_400))


def _at(tx: Connection, seconds: str) -> str:
    return _WORDS[tx.dialect.name]["at"].format(seconds=seconds)


def _execute(tx: Connection, statement: str, **words: str | int) -> None:
    spoken = _WORDS[tx.dialect.name]
    numbers = spoken["numbers"].format(many=words.get("many", 0))
    made = statement.format(numbers=numbers, id=spoken["id"], **words)
    if tx.dialect.name == "postgresql":
        tx.exec_driver_sql("SET LOCAL statement_timeout = 0")
        made = made.replace("%", "%%")  # its driver has a use of its own for them
    tx.exec_driver_sql(made)
