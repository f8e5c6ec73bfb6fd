"""Cancelling in real workers: functions that heed it, are interrupted, must be killed; workers that die or stop."""
from __future__ import annotations

from typing import Any

import pytest

from tests.processes import Site
from tests.servers import wait_until

pytestmark = pytest.mark.acceptance


def cancel(site: Site, job_id: str) -> str:
    """Returns the job's status in the answer."""
    answer = site.post(f"/jobs/{job_id}/cancel", None)
    assert answer.status_code == 200, answer.text
    return answer.json()["status"]


def running(site: Site, **body: Any) -> str:
    job_id = site.submit(**body)
    wait_until(lambda: site.get(f"/jobs/{job_id}").json()["status"] == "running")
    return job_id


def ends_cancelled(site: Site, job_id: str, attempt: int = 1) -> bool:
    job = site.poll(job_id)
    return (job["status"], job["error"]["code"], job["attempt"]) == ("failed", "cancelled", attempt)


@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_cancelled_functions_end_one_way_or_another_and_their_worker_goes_on(site: Site) -> None:
    site.env |= {"CANCEL_GRACE_SECONDS": "2", "WORKER_CONCURRENCY": "3"}
    stack = site.start("web", "worker", "courier", "beat", "hooksink")
    site.wait_ready()
    ids = [running(site, kind=kind, seconds=60, callback_url=f"{site.hook}/") for kind in ("heedful", "nap", "stone")]
    waiting = site.submit(n=5)
    assert [cancel(site, job_id) for job_id in ids] == ["running"] * 3
    assert all(ends_cancelled(site, job_id) for job_id in ids)
    assert site.poll(waiting)["status"] == "succeeded"
    for _ in range(3):  # every slot is free again
        running(site, kind="nap", seconds=60)
    assert [cancel(site, job_id) for job_id in ids] == ["failed"] * 3
    wait_until(lambda: len(site.hooks()) == 3, what="each end is told once")
    assert all("status=failed" in hook for hook in site.hooks())
    assert stack.output().count("the cancelled function did not stop") == 1  # only the stone


@pytest.mark.parametrize("site", ["postgresql"], indirect=True)
def test_what_was_cancelled_does_not_run_again_after_its_worker_died_or_stopped(site: Site) -> None:
    site.env |= {"CANCEL_GRACE_SECONDS": "60", "WORKER_STOP_SECONDS": "0.5"}
    site.start("web", "courier", "beat")
    worker = site.start_alone("worker")
    site.wait_ready()
    orphan = running(site, kind="trace", seconds=50)
    assert cancel(site, orphan) == "running"
    worker.kill()
    stopping = site.start_alone("worker")
    stopped, released = (running(site, kind="trace", seconds=30) for _ in range(2))
    assert cancel(site, stopped) == "running"
    assert stopping.stop() == 0
    assert ends_cancelled(site, stopped) and ends_cancelled(site, orphan)
    site.start_alone("worker")
    wait_until(lambda: site.get(f"/jobs/{released}").json()["attempt"] == 2)
    assert cancel(site, released) == "running"
    assert site.poll(site.submit(n=5))["status"] == "succeeded"
    began = (site.folder / "trace.log").read_text().split("\n")[:-1]
    assert sorted(began) == sorted([f"{orphan} 1", f"{stopped} 1", f"{released} 1", f"{released} 2"])
