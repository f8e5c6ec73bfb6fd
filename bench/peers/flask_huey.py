"""Flask + Huey, on SQLite when SQLITE_FILE is given, else on Redis."""
from __future__ import annotations

import os
from typing import Any

from flask import Flask, request
from huey import RedisHuey, SqliteHuey

from bench.peers import work

if "SQLITE_FILE" in os.environ:
    huey = SqliteHuey("jobs", filename=os.environ["SQLITE_FILE"])
else:
    huey = RedisHuey("jobs", url=os.environ["REDIS_URL"])
app = Flask(__name__)

primes = huey.task()(work.primes)
nap = huey.task()(work.nap)


@app.post("/jobs")
def submit() -> tuple[dict[str, Any], int]:
    return {"job_id": primes(request.get_json()["n"]).id}, 202


@app.post("/naps")
def submit_nap() -> tuple[dict[str, Any], int]:
    return {"job_id": nap(**request.get_json()).id}, 202


@app.get("/jobs/<job_id>")
def poll(job_id: str) -> dict[str, Any]:
    result = huey.result(job_id, preserve=True)
    if result is None:
        return {"job_id": job_id, "status": "pending"}
    return {"job_id": job_id, "status": "finished", "result": result}
