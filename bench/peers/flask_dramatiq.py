"""Flask + Dramatiq with its Redis broker and result backend."""
from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import ResultMissing, Results
from dramatiq.results.backends import RedisBackend
from flask import Flask, request

from bench.peers import work

backend = RedisBackend(url=os.environ["RESULTS_URL"])
broker = RedisBroker(url=os.environ["REDIS_URL"])
broker.add_middleware(Results(backend=backend))
dramatiq.set_broker(broker)
app = Flask(__name__)

primes = dramatiq.actor(store_results=True)(work.primes)
nap = dramatiq.actor(store_results=True)(work.nap)


@app.post("/jobs")
def submit() -> tuple[dict[str, Any], int]:
    return {"job_id": primes.send(request.get_json()["n"]).message_id}, 202


@app.post("/naps")
def submit_nap() -> tuple[dict[str, Any], int]:
    return {"job_id": nap.send(**request.get_json()).message_id}, 202


@app.get("/jobs/<job_id>")
def poll(job_id: str) -> dict[str, Any]:
    message = primes.message(0).copy(message_id=job_id)
    try:
        return {"job_id": job_id, "status": "done", "result": message.get_result(backend=backend)}
    except ResultMissing:
        return {"job_id": job_id, "status": "unknown"}
