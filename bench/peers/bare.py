"""The ceilings: Flask routes behind the same server that do no work, and one that does one HGETALL."""
from __future__ import annotations

import os
import uuid
from typing import Any

import redis
from flask import Flask, request

store = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True)
app = Flask(__name__)


@app.post("/jobs")
def submit() -> tuple[dict[str, Any], int]:
    n = request.get_json()["n"]
    return {"job_id": str(uuid.uuid4()), "n": n}, 202


@app.get("/jobs/<job_id>")
def poll(job_id: str) -> dict[str, Any]:
    return {"job_id": job_id, "status": "succeeded", "result": {"n": 5, "count": 3}}


@app.get("/hashes/<job_id>")
def read(job_id: str) -> dict[str, Any]:
    return {"job_id": job_id, **store.hgetall(f"job:{job_id}")}  # type: ignore[dict-item]
