"""Flask + Procrastinate. It keeps no results, so the task writes its own into a table beside it."""
from __future__ import annotations

import asyncio
import functools
import os
from typing import Any

import psycopg
from flask import Flask, request
from procrastinate import App, JobContext, PsycopgConnector, RetryStrategy
from psycopg.types.json import Jsonb
from psycopg_pool import ConnectionPool

from bench.peers import work

DSN = os.environ["POSTGRES_DSN"]
jobs = App(connector=PsycopgConnector(conninfo=DSN))


@functools.cache
def database() -> ConnectionPool:
    return ConnectionPool(DSN, min_size=1, max_size=4, open=True)


@jobs.task(name="primes", pass_context=True)
def primes(context: JobContext, n: int) -> None:
    result = work.primes(n)
    with database().connection() as connection:
        connection.execute("INSERT INTO results (job_id, result) VALUES (%s, %s) ON CONFLICT DO NOTHING",
                           (context.job.id, Jsonb(result)))


@jobs.task(name="nap", retry=RetryStrategy(max_attempts=3))
def nap(file: str, seconds: float) -> None:
    work.nap(file, seconds)


@jobs.periodic(cron="*/10 * * * *")  # as often as its documentation suggests
@jobs.task(name="rescue", queueing_lock="rescue")
async def rescue(timestamp: int) -> None:
    """The jobs of workers that died."""
    stalled = await jobs.job_manager.get_stalled_jobs()
    await asyncio.gather(*map(jobs.job_manager.retry_job, stalled))


def create_app() -> Flask:
    app = Flask(__name__)
    jobs.open()

    @app.post("/jobs")
    def submit() -> tuple[dict[str, Any], int]:
        return {"job_id": primes.defer(n=request.get_json()["n"])}, 202

    @app.post("/naps")
    def submit_nap() -> tuple[dict[str, Any], int]:
        return {"job_id": nap.defer(**request.get_json())}, 202

    @app.get("/jobs/<int:job_id>")
    def poll(job_id: int) -> dict[str, Any]:
        with database().connection() as connection:
            status, result = connection.execute(
                "SELECT status::text, result FROM procrastinate_jobs j LEFT JOIN results r ON r.job_id = j.id "
                "WHERE j.id = %s", (job_id,)).fetchone() or ("unknown", None)
        if status == "succeeded":
            return {"job_id": job_id, "status": status, "result": result}
        return {"job_id": job_id, "status": status}

    return app


def create_tables() -> None:
    with jobs.open():
        jobs.schema_manager.apply_schema()
    with psycopg.connect(DSN) as connection:
        connection.execute("CREATE TABLE results (job_id bigint PRIMARY KEY, result jsonb NOT NULL)")
