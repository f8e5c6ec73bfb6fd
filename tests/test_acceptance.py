"""The whole story, with the Procfile's own processes."""
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import requests

from tests import verify
from tests.processes import Site
from tests.servers import Valkey, valkey, wait_until

pytestmark = pytest.mark.acceptance


def test_a_job_goes_all_the_way_with_one_command(tmp_path: Path) -> None:
    """make run: submit, poll, result, hook.log, note and history, a repeated key; stop; start again on the same."""
    with Site(tmp_path, FLOWER_BASIC_AUTH="u:p", CALLBACK_SCHEDULE_SECONDS="0,1,1") as site:
        stack = site.start()
        site.wait_ready()
        assert f"API       {site.api}" in stack.output() and "curl -i" in stack.output()

        answer = site.post("/jobs", {"n": 10**6, "callback_url": f"{site.hook}/"})
        job_id = answer.json()["job_id"]
        assert answer.headers["Location"] == f"/jobs/{job_id}"
        job = site.poll(job_id, politely=True)
        assert (job["status"], job["result"]) == ("succeeded", {"n": 10**6, "count": 78498})
        wait_until(lambda: any(f"job_id={job_id} status=succeeded" in line and "signature=valid" in line
                               for line in site.hooks()))
        wait_until(lambda: site.get(f"/jobs/{job_id}").json()["callback"]["status"] == "delivered")

        first = site.post("/notes", {"text": "CANARY1"}, Idempotency_Key="n1")
        again = site.post("/notes", {"text": "CANARY1"}, Idempotency_Key="n1")
        assert first.content == again.content and again.headers["Idempotent-Replayed"] == "true"
        site.poll(first.json()["job_id"])
        events = site.get(f"/notes/{first.json()['id']}/events").json()["events"]
        assert [(event["kind"], event["job_id"]) for event in events] == [("created", first.json()["job_id"])]

        flaky = site.submit(n=5, callback_url=f"{site.hook}/flaky/2?token=CANARY2")
        wait_until(lambda: len(site.get(f"/jobs/{flaky}/deliveries").json()["deliveries"]) == 3, 30)
        codes = [row["response_code"] for row in site.get(f"/jobs/{flaky}/deliveries").json()["deliveries"]]
        assert codes == [503, 503, 204]

        look_at_flower(site, job_id)
        family = stack.family()
        assert stack.stop() == 0
        assert not psutil.wait_procs(family, timeout=1)[1]
        assert "Traceback" not in stack.output() and "CANARY" not in stack.output()

        site.start()
        site.wait_ready()
        assert site.get(f"/jobs/{job_id}").json()["result"] == {"n": 10**6, "count": 78498}
        assert site.poll(site.submit(n=10))["result"]["count"] == 4
        assert sum(f"job_id={job_id}" in line for line in site.hooks()) == 1


def look_at_flower(site: Site, job_id: str) -> None:
    """Flower knows the tasks by name, and no more of their arguments than ids."""
    def tasks() -> dict[str, Any]:
        url = f"http://127.0.0.1:{site.flower_port}/api/tasks?limit=1000"
        assert requests.get(url, timeout=10).status_code == 401
        return requests.get(url, auth=("u", "p"), timeout=10).json()

    wait_until(lambda: {"tasks.run_job", "tasks.deliver_webhook", "tasks.relay_outbox"} <= {
        task["name"] for task in tasks().values()}, 20, "Flower knows the tasks")
    shown = json.dumps(tasks())
    assert job_id in shown and "CANARY" not in shown and site.hook not in shown


def test_nothing_is_lost_while_parts_come_and_go(site: Site) -> None:
    """The API is killed between submission and processing; the worker comes last; one submission is one message."""
    rest = site.start("courier", "beat", "hooksink")
    web = site.start_alone("web")
    site.wait_answering()
    note = site.post("/notes", {"text": "kept"}).json()
    job_id = site.submit(n=100, callback_url=f"{site.hook}/")
    web.kill()
    with redis.Redis.from_url(site.env["REDIS_URL"]) as client:
        wait_until(lambda: client.llen("q:jobs2") == 2, what="two submissions are two messages")
        web = site.start_alone("web")
        site.wait_answering()
        assert site.get(f"/jobs/{job_id}").json()["status"] == "queued"
        assert site.get("/health/ready").json()["parts"]["workers"]["ok"] is False
        assert client.llen("q:jobs2") == 2
    worker = site.start_alone("worker")
    assert site.poll(job_id)["result"] == {"n": 100, "count": 25}
    site.poll(note["job_id"])
    assert len(site.get(f"/notes/{note['id']}/events").json()["events"]) == 1
    wait_until(lambda: len(site.hooks()) == 1, what="one hook")
    site.wait_ready()
    for process in (worker, web, rest):
        assert process.stop() == 0


def test_without_redis_jobs_are_accepted_and_run_once_it_returns(site: Site) -> None:
    """Neither the view nor the broker is needed for a 202, and nobody has to restart anything afterwards."""
    with valkey() as own:
        site.env["REDIS_URL"] = own.url
        site.start("web", "worker", "courier", "beat")
        site.wait_ready()
        own.stop()
        shutil.rmtree(own.folder)  # it comes back empty
        took, jobs = [], []
        for _ in range(20):
            began = time.monotonic()
            jobs.append(site.submit(n=100))
            assert site.get(f"/jobs/{jobs[-1]}").json()["status"] == "queued"
            took.append(time.monotonic() - began)
        assert max(took) < 4 and site.get("/health/ready").status_code == 503
        own.start()
        for job_id in jobs:
            assert site.poll(job_id)["attempt"] == 1
        site.wait_ready()


def test_a_worker_that_dies_in_mid_job_is_followed_by_another(site: Site) -> None:
    site.start("web", "courier", "beat")
    worker = site.start_alone("worker")
    site.wait_ready()
    job_id = site.submit(kind="nap", seconds=3)
    wait_until(lambda: site.get(f"/jobs/{job_id}").json()["status"] == "running")
    worker.kill()
    site.start_alone("worker")
    assert site.poll(job_id)["result"] == {"attempt": 2}


def test_limits_and_crashes_end_as_they_should(site: Site) -> None:
    """Beyond its time limit, deaf to it, killing its own process, without memory, longer than its lease: each ends, and
    others run on."""
    site.start("web", "courier", "beat", "worker")
    site.wait_ready()
    deaf = site.submit(kind="deaf", seconds=60)
    greedy = [site.submit(kind="glutton") for _ in range(4)]
    late = site.submit(kind="overtime", seconds=30)
    poison = site.submit(kind="suicide")
    long = site.submit(kind="nap", seconds=5)
    assert site.poll(long)["result"] == {"attempt": 1}
    assert site.poll(late)["error"]["code"] == "timeout"
    assert site.poll(poison)["error"]["code"] == "crashed"
    assert site.poll(deaf)["error"]["code"] == "timeout"
    for job_id in greedy:
        error = site.poll(job_id)["error"]
        assert error["code"] == "exception" and error["message"].startswith("MemoryError")
    assert site.poll(site.submit(n=10))["status"] == "succeeded"


def test_a_finished_job_expires_and_is_pruned_by_the_clock(site: Site) -> None:
    site.env |= {"RESULT_TTL_SECONDS": "2", "TOMBSTONE_TTL_SECONDS": "3", "PRUNE_INTERVAL_SECONDS": "0.5"}
    site.start("web", "courier", "beat", "worker")
    site.wait_ready()
    job_id = site.submit(n=100)
    site.poll(job_id)
    wait_until(lambda: site.answers(f"/jobs/{job_id}", 410), what="expired")
    gone = site.get(f"/jobs/{job_id}").json()
    assert (gone["kind"], gone["job_status"]) == ("primes", "succeeded") and "25" not in str(gone.get("result"))
    wait_until(lambda: site.answers(f"/jobs/{job_id}", 404), what="forgotten")


def test_a_worker_started_by_celerys_own_command_counts(site: Site) -> None:
    """Whoever knows Celery needs to know nothing else."""
    site.start("web", "courier", "beat")
    worker = site.run("celery", "celery", "--app", "tasks.celery", "worker", "--concurrency", "1")
    site.wait_ready()
    assert site.poll(site.submit(n=100))["status"] == "succeeded"
    assert worker.stop() == 0


def raw(site: Site, request: bytes) -> bytes:
    """What the server answers to these very bytes."""
    with socket.create_connection(("127.0.0.1", site.port), timeout=20) as connection:
        connection.sendall(request)
        answer = b""
        while b"\r\n\r\n" not in answer and (part := connection.recv(65536)):
            answer += part
        return answer


def test_the_server_in_front_keeps_the_promises_about_bodies(site: Site) -> None:
    site.start("web")
    site.wait_answering()
    head = b"POST /jobs HTTP/1.1\r\nHost: evil.example\r\nContent-Type: application/json\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n8\r\n" + b'{"n": 5}' + b"\r\n0\r\n\r\n"
    answer = raw(site, chunked)
    assert b" 202 " in answer.split(b"\r\n")[0] and b"evil" not in answer

    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 65536

    for body in (parts(), b" " * (1024 * 1024 + 1)):
        try:
            large = site.session.post(
                f"{site.api}/jobs", data=body, headers={"Content-Type": "application/json"}, timeout=30)
        except requests.ConnectionError:
            continue  # refused while it was still being sent
        assert large.status_code == 413 and large.headers["Content-Type"] == "application/problem+json"
    assert site.get("/jobs/%00").status_code == 404
    assert site.get("/nowhere").headers["Content-Type"] == "application/problem+json"


def test_a_port_that_is_taken_is_one_line(tmp_path: Path) -> None:
    with Site(tmp_path) as site, socket.socket() as taken:
        taken.bind(("127.0.0.1", site.port))
        taken.listen()
        stack = site.start()
        assert stack.popen.wait(30) == 2
        assert stack.output() == f"uketsuke: web: port {site.port} is taken: choose another with PORT\n"


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_lets_the_running_job_finish(tmp_path: Path, sig: signal.Signals) -> None:
    with Site(tmp_path, JOB_MODULES="tests.slow_kinds") as site:
        stack = site.start("redis", "web", "worker", "courier", "beat")
        site.wait_ready()
        job_id = site.submit(kind="nap", seconds=2)
        waiting = [site.submit(kind="nap", seconds=0.1) for _ in range(5)]
        wait_until(lambda: site.get(f"/jobs/{job_id}").json()["status"] == "running")
        assert stack.stop(sig=sig) == 0
        site.start("redis", "web", "worker", "courier", "beat")
        site.wait_answering()
        assert site.get(f"/jobs/{job_id}").json()["result"] == {"attempt": 1}
        for other in waiting:
            assert site.poll(other)["status"] == "succeeded"


def test_a_line_that_dies_is_started_again_and_one_that_is_stopped_is_not(tmp_path: Path) -> None:
    with Site(tmp_path, JOB_MODULES="tests.slow_kinds", LEASE_SECONDS=2, RESCUE_INTERVAL_SECONDS=1) as site:
        stack = site.start("redis", "web", "worker", "courier", "beat")
        site.wait_ready()
        job_id = site.submit(kind="nap", seconds=1)
        wait_until(lambda: site.get(f"/jobs/{job_id}").json()["status"] == "running")
        for words in ("tasks worker", "valkey-server", "tasks beat", "tasks courier", "-m app.api"):
            dying = stack.part(words)
            dying.kill()
            dying.wait(10)
        site.wait_answering()
        assert site.poll(job_id)["result"] == {"attempt": 2}
        site.wait_ready()
        stopped = stack.part("tasks worker")
        stopped.terminate()
        wait_until(lambda: "stopped; the others run on" in stack.output())
        waiting = site.submit(n=10)
        with redis.Redis(port=int((tmp_path / "redis.port").read_text())) as client:
            wait_until(lambda: client.llen("q:jobs2") == 1)
        assert site.get(f"/jobs/{waiting}").json()["status"] == "queued"
        assert stack.stop() == 0


def test_a_stop_while_a_line_is_down_is_clean_too(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        stack = site.start("redis", "web", "courier", "beat")
        wait_until(lambda: "beat started" in re.sub(" +", " ", stack.output()))
        stack.part("tasks beat").kill()
        wait_until(lambda: "it is started again" in stack.output())
        assert stack.stop(seconds=12) == 0
        assert "redis stopped (rc=0)" in re.sub(" +", " ", stack.output())


def test_two_servers_never_share_their_data(tmp_path: Path) -> None:
    """A server that outlived its launcher still has it; a second start says so, and the port file stays the first's."""
    with Site(tmp_path) as site:
        site.start_alone("redis")
        wait_until(lambda: (tmp_path / "redis.port").exists())
        port = (tmp_path / "redis.port").read_text()
        with redis.Redis(port=int(port)) as client:
            wait_until(lambda: answers(client))
        for second in (site.start_alone("redis"), site.start("redis", "web")):
            assert second.popen.wait(30) == 2
            assert "a server is already running on" in second.output().splitlines()[-1]
        assert (tmp_path / "redis.port").read_text() == port


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_with_an_outside_redis_there_is_no_embedded_one(tmp_path: Path, valkey: Valkey) -> None:
    with Site(tmp_path, REDIS_URL=valkey.url) as site:
        stack = site.start("redis", "web")
        site.wait_answering()
        assert not any("valkey-server" in process.name() for process in stack.family())
        alone = site.start_alone("redis")
        wait_until(lambda: "REDIS_URL is given" in alone.output())
        assert alone.stop() == 0 and stack.stop() == 0
        assert not (tmp_path / "redis.port").exists()


def test_a_port_of_redis_that_a_stranger_has_is_passed_by(tmp_path: Path) -> None:
    with Site(tmp_path) as site, socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        (tmp_path / "redis.port").write_text(f"{taken}\n")
        site.start("redis", "web", "worker", "courier", "beat")
        site.wait_ready()
        assert (tmp_path / "redis.port").read_text().strip() != str(taken)
        assert site.poll(site.submit(n=10))["status"] == "succeeded"


def test_nothing_but_loopback_is_listened_on(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        stack = site.start()
        site.wait_ready()
        listening = {connection.laddr.ip for process in stack.family()
                     for connection in process.net_connections("inet") if connection.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
        assert os.path.exists(tmp_path / "jobs.sqlite3")


def test_the_story_for_a_person_holds(tmp_path: Path) -> None:
    """make verify."""
    record = tmp_path / "verification.md"
    assert verify.main(record) == 0
    assert record.read_text().count("✓") > 20 and str(tmp_path) not in record.read_text()
