"""Flask + Celery: `delay()`, a Redis broker and result backend, `AsyncResult`. Notes are rows of its own SQLite."""
from __future__ import annotations

import contextlib
import os
import sqlite3
from typing import Any

from celery import Celery
from flask import Flask, request

from bench.peers import work

celery = Celery("jobs", broker=os.environ["REDIS_URL"], backend=os.environ["RESULTS_URL"])
celery.conf.broker_connection_retry_on_startup = True
app = Flask(__name__)

primes = celery.task(work.primes)
nap = celery.task(work.nap)


@app.post("/jobs")
def submit() -> tuple[dict[str, Any], int]:
    return {"job_id": primes.delay(request.get_json()["n"]).id}, 202


@app.post("/naps")
def submit_nap() -> tuple[dict[str, Any], int]:
    return {"job_id": nap.delay(**request.get_json()).id}, 202


@app.get("/jobs/<job_id>")
def poll(job_id: str) -> dict[str, Any]:
    found = celery.AsyncResult(job_id)
    status = found.status  # asks Redis, and remembers it once it is final
    if status == "SUCCESS":
        return {"job_id": job_id, "status": status, "result": found.result}
    return {"job_id": job_id, "status": status}


def database() -> contextlib.closing[sqlite3.Connection]:
    return contextlib.closing(sqlite3.connect(os.environ["SQLITE_FILE"], timeout=30))


def create_tables() -> None:
    with database() as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript("""
            CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL, created_at TEXT DEFAULT CURRENT_TIMESTAMP);
            CREATE TABLE history (id INTEGER PRIMARY KEY, note_id INTEGER NOT NULL REFERENCES notes (id),
                                  kind TEXT NOT NULL, at TEXT DEFAULT CURRENT_TIMESTAMP);
        """)


@celery.task
def history(note_id: int) -> None:
    with database() as connection, connection:
        connection.execute("INSERT INTO history (note_id, kind) VALUES (?, 'created')", (note_id,))


@app.post("/notes")
def submit_note() -> tuple[dict[str, Any], int]:
    text = request.get_json()["text"]
    with database() as connection, connection:
        note_id = connection.execute("INSERT INTO notes (text) VALUES (?)", (text,)).lastrowid
    return {"id": note_id, "text": text, "job_id": history.delay(note_id).id}, 202
