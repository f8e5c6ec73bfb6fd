"""Flask + RQ."""
from __future__ import annotations

import os
from typing import Any

from flask import Flask, request
from redis import Redis
from rq import Queue
from rq.job import Job

from bench.peers import work

queue = Queue(connection=Redis.from_url(os.environ["REDIS_URL"]))
app = Flask(__name__)


@app.post("/jobs")
def submit() -> tuple[dict[str, Any], int]:
    return {"job_id": queue.enqueue(work.primes, request.get_json()["n"]).id}, 202


@app.post("/naps")
def submit_nap() -> tuple[dict[str, Any], int]:
    return {"job_id": queue.enqueue(work.nap, **request.get_json()).id}, 202


@app.get("/jobs/<job_id>")
def poll(job_id: str) -> dict[str, Any]:
    job = Job.fetch(job_id, connection=queue.connection)
    status = job.get_status(refresh=False)
    if status == "finished":
        return {"job_id": job_id, "status": status, "result": job.return_value()}
    return {"job_id": job_id, "status": status}
