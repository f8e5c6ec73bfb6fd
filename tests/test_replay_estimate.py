"""What a repeated submission is told about when to ask."""
from __future__ import annotations

from flask.testing import FlaskClient

from app import ids, outlook
from tasks import run_job
from tests.conftest import World
from tests.running import later, submit


def test_a_replay_is_not_sent_to_the_end_of_the_queue(api: FlaskClient, world: World) -> None:
    """Its job is further on than one that is submitted now, or done."""
    keyed = {"json": {"n": 5}, "headers": {"Idempotency-Key": "k"}}
    run_job.run_once(api.post("/jobs", **keyed).json["job_id"])
    world.sql("UPDATE jobs SET finished_at = :at", at=later(2).isoformat(sep=" "))
    for _ in range(40):
        submit(api, n=6)
    outlook.forget()
    assert int(api.post("/jobs", json={"n": 7}).headers["Retry-After"]) == 60
    assert int(api.post("/jobs", **keyed).headers["Retry-After"]) <= 3


def test_an_id_tells_when_it_was_made() -> None:
    now = later(0)
    assert ids.moment_of(ids.new_id(now)) == now.replace(microsecond=now.microsecond // 1000 * 1000)
