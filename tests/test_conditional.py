"""GET /jobs/<id> for clients that know a state already, or would wait for the next one."""
from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest
import requests
from flask.testing import FlaskClient

from app import clock, db, jobs, redis_client, states, status
from app.api import polling
from app.jobs import Job
from tasks import deliver_webhook, prune_expired, run_job
from tests.conftest import World, one_database
from tests.processes import Process, Site
from tests.running import submit
from tests.servers import Valkey, wait_until

ETAG = re.compile(r'"[0-9a-f]{32}"')
LONG = "wait=30"


@pytest.fixture
def away(world: World) -> Iterator[Callable[[], None]]:
    """Takes Redis away."""
    def take() -> None:
        world.set(REDIS_URL="redis://127.0.0.1:1/0")
        redis_client._client.cache_clear()

    yield take
    redis_client._client.cache_clear()


def claim(job_id: str) -> Job:
    held = run_job.claim(job_id, clock.now())
    assert held is not None
    status.write(held)
    return held


def finish(held: Job) -> None:
    run_job.finish(held, run_job.Success('{"n": 5, "count": 3}'), clock.now)


# --- ETag ---


def test_each_state_has_a_tag_of_its_own_whoever_tells_it(api: FlaskClient, world: World, receiver: Any) -> None:
    """The same from Redis, from SQL, and once more; another one after each change that a client sees."""
    def tag() -> str:
        first, shown = api.get(f"/jobs/{job_id}"), world.redis.exists(status.key(job_id))
        world.redis.flushall()
        again = [api.get(f"/jobs/{job_id}") for _ in range(2)]  # from SQL, and from what that has put back
        assert shown and {answer.data for answer in again} == {first.data}
        assert {answer.headers["ETag"] for answer in again} == {first.headers["ETag"]}
        assert ETAG.fullmatch(first.headers["ETag"])
        return first.headers["ETag"]

    job_id = submit(api, n=5, callback_url=receiver.url)
    tags = [tag()]
    held = claim(job_id)
    tags.append(tag())
    with db.transaction() as tx:
        after = jobs.extend_lease(tx, held, clock.now() + timedelta(seconds=30), 3, 10)
    assert after is not None
    status.write(after)
    tags.append(tag())
    finish(held)
    tags.append(tag())
    deliver_webhook.run_once(world.sql("SELECT id FROM deliveries")[0][0])
    tags.append(tag())
    assert api.post(f"/jobs/{job_id}/redeliver").status_code == 202
    tags.append(tag())
    assert len(set(tags)) == 6


@one_database
def test_two_jobs_in_the_same_state_have_two_tags(api: FlaskClient) -> None:
    assert len({api.get(f"/jobs/{submit(api, n=5)}").headers["ETag"] for _ in range(2)}) == 2


# --- If-None-Match ---


def check_unchanged(answer: Any, tag: str) -> None:
    assert answer.status_code == 304 and answer.data == b""
    assert answer.headers["ETag"] == tag
    assert answer.headers["Cache-Control"] == "private, no-cache"
    assert answer.headers["Vary"] == "Prefer"
    assert "Content-Type" not in answer.headers and "Content-Length" not in answer.headers


@pytest.mark.parametrize("form", ["{}", '"x", {}, "y"', "*", "W/{}", '"x",{}', "  {}  ", "{},"])
def test_whoever_has_the_state_already_gets_none(api: FlaskClient, form: str) -> None:
    for job_id in (submit(api, n=5), submit(api, n=5)):
        tag = api.get(f"/jobs/{job_id}").headers["ETag"]
        for ask in (api.get, api.head):
            check_unchanged(ask(f"/jobs/{job_id}", headers={"If-None-Match": form.format(tag)}), tag)
        run_job.run_once(job_id)
        finished = api.get(f"/jobs/{job_id}", headers={"If-None-Match": form.format(tag)})
        assert finished.status_code == (304 if form == "*" else 200)
        again = api.get(f"/jobs/{job_id}", headers={"If-None-Match": form.format(finished.headers["ETag"])})
        check_unchanged(again, finished.headers["ETag"])
        assert again.headers["Sunset"] and "Retry-After" not in again.headers


OTHER_CONDITIONS = [
    '"x"', "garbage", "", ",", ", ,", '"', '"unfinished', "\xff\xfe", '"' * 4000, "W/", 'W/"', "**", '"*"', "W/*",
    '"a"b', "\\", ", ".join(f'"{number}"' for number in range(500)),
]


@one_database
def test_any_other_condition_gets_the_state(api: FlaskClient) -> None:
    job_id = submit(api, n=5)
    for header in OTHER_CONDITIONS:
        answer = api.get(f"/jobs/{job_id}", headers={"If-None-Match": header})
        assert (answer.status_code, answer.json["job_id"]) == (200, job_id), header
        assert answer.headers["Cache-Control"] == "private, no-cache"
        assert answer.headers["ETag"] == api.get(f"/jobs/{job_id}").headers["ETag"]


@one_database
def test_conditions_that_nobody_promises_change_nothing(api: FlaskClient) -> None:
    job_id = submit(api, n=5)
    future = "Thu, 01 Jan 2099 00:00:00 GMT"
    for header, value in (("If-Match", '"x"'), ("If-Modified-Since", future), ("If-Unmodified-Since", future),
                          ("If-Range", '"x"'), ("Range", "bytes=0-1")):
        for given in (value, "garbage"):
            answer = api.get(f"/jobs/{job_id}", headers={header: given})
            assert answer.status_code == 200 and answer.json["job_id"] == job_id, header
            assert answer.headers["Cache-Control"] == "no-store"


def test_head_is_get_without_its_body(api: FlaskClient) -> None:
    for finished in (False, True):
        job_id = submit(api, n=5)
        if finished:
            run_job.run_once(job_id)
        head, get = api.head(f"/jobs/{job_id}"), api.get(f"/jobs/{job_id}")
        assert head.data == b"" and head.status_code == get.status_code == 200
        without = [{name: value for name, value in answer.headers.items() if name != "X-Request-Id"}
                   for answer in (head, get)]
        assert without[0] == without[1] and without[0]["Content-Length"] == str(len(get.data))
        assert without[0]["Cache-Control"] == "no-store"
    assert api.head("/jobs/x").status_code == 404


def test_sunset_is_when_the_job_expires(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)
    assert "Sunset" not in api.get(f"/jobs/{job_id}").headers
    held = claim(job_id)
    assert "Sunset" not in api.get(f"/jobs/{job_id}").headers
    finish(held)
    for _ in ("Redis", "SQL"):
        answer = api.get(f"/jobs/{job_id}")
        expires_at = datetime.fromisoformat(answer.json["expires_at"])
        assert answer.headers["Sunset"].endswith(" GMT")
        assert parsedate_to_datetime(answer.headers["Sunset"]) == expires_at.replace(microsecond=0)
        assert abs((expires_at - datetime.now(timezone.utc)).total_seconds() - 86400) < 600
        world.redis.flushall()


# --- Prefer: wait ---


@contextlib.contextmanager
def meanwhile(act: Callable[[], object], looks: int = 2) -> Iterator[None]:
    """Acts once whoever waits has looked so often; fails when nobody does."""
    seen, find, errors = [0], polling.find, []

    def counted(job_id: str) -> Any:
        seen[0] += 1
        return find(job_id)

    def run() -> None:
        try:
            wait_until(lambda: seen[0] > looks, 20, "somebody waits")
            act()
        except BaseException as error:
            errors.append(error)

    polling.find = counted  # put back below
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        polling.find = find
    assert errors == []


def wait_for(api: FlaskClient, job_id: str, prefer: Any = LONG, **headers: str) -> tuple[Any, float]:
    began = time.monotonic()
    answer = api.get(f"/jobs/{job_id}", headers={"Prefer": prefer, **headers})
    return answer, time.monotonic() - began


@pytest.mark.parametrize("redis", ["there", "away"])
def test_whoever_waits_is_told_of_the_next_status(
    api: FlaskClient, away: Callable[[], None], redis: str,
) -> None:
    if redis == "away":
        away()
    job_id = submit(api, n=5)
    held: list[Job] = []
    for act, expected in ((lambda: held.append(claim(job_id)), "running"), (lambda: finish(held[0]), "succeeded")):
        with meanwhile(act):
            answer, took = wait_for(api, job_id)
        assert (answer.status_code, answer.json["status"]) == (200, expected)
        assert answer.headers["Preference-Applied"] == LONG and answer.headers["Vary"] == "Prefer"
        assert took < 25
    answer, took = wait_for(api, job_id)
    assert answer.json["status"] == "succeeded" and took < 5


@one_database
def test_a_cancellation_is_told_to_whoever_waits(api: FlaskClient) -> None:
    job_id = submit(api, n=5)
    with meanwhile(lambda: api.application.test_client().post(f"/jobs/{job_id}/cancel")):
        answer, _ = wait_for(api, job_id)
    assert answer.json["error"]["code"] == "cancelled"


@one_database
def test_progress_alone_is_no_change_of_the_status(api: FlaskClient) -> None:
    job_id = submit(api, n=5)
    held = claim(job_id)

    def progress() -> None:
        with db.transaction() as tx:
            after = jobs.extend_lease(tx, held, clock.now() + timedelta(seconds=30), 1, 2)
        assert after is not None
        status.write(after)

    with meanwhile(progress):
        answer, took = wait_for(api, job_id, "wait=1")
    assert took >= 1 and answer.json["progress"] == {"done": 1, "total": 2}


@one_database
def test_nobody_waits_longer_than_asked(api: FlaskClient) -> None:
    job_id = submit(api, n=5)
    answer, took = wait_for(api, job_id, "wait=1")
    assert answer.json["status"] == "queued" and took >= 1
    assert answer.headers["Preference-Applied"] == "wait=1" and answer.headers["Retry-After"]
    assert answer.headers["Cache-Control"] == "no-store"


PREFERENCES: list[tuple[str | list[str], int | None]] = [
    ("wait=7", 7), ("Wait=7", 7), ("WAIT=7", 7), ('wait="7"', 7), ("wait = 7", 7), ("wait=7; x=y", 7), ("wait=30", 30),
    ("wait=31", 30), ("wait=86400", 30), ("wait=" + "9" * 30, 30), ("wait=007", 7), ("wait=0", 0),
    ("respond-async, wait=7", 7), ("return=minimal,wait=7,handling=lenient", 7), ("wait=7, wait=9", 7),
    (["respond-async", "wait=7"], 7), (["wait=7", "wait=9"], 7), ("wait=x, wait=7", 7),
    ("wait", None), ("wait=", None), ("wait=-1", None), ("wait=1.5", None), ("wait=1e1", None), ("wait=x", None),
    ("wait=\xb2", None), ("wait=1 1", None), ("waits=7", None), ("respond-async", None), ("", None), (",,,", None),
    ("wait=" + "9" * 5000, None), ("=" * 5000, None), ('"', None), ("\xff", None), ("await=7", None),
]


@one_database
def test_a_wait_is_read_as_it_is_written(api: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 seconds at most; what cannot be read is ignored, as a preference may be."""
    asked: list[int] = []

    def after_change(job_id: str, document: Any, seconds: int) -> Any:
        asked.append(seconds)
        return document

    monkeypatch.setattr(polling, "after_change", after_change)
    job_id = submit(api, n=5)
    for prefer, applied in PREFERENCES:
        asked.clear()
        headers = [("Prefer", each) for each in ([prefer] if isinstance(prefer, str) else prefer)]
        answer = api.get(f"/jobs/{job_id}", headers=headers)
        assert answer.status_code == 200
        assert asked == ([] if applied is None else [applied]), prefer
        assert answer.headers.get("Preference-Applied") == (None if applied is None else f"wait={applied}")


@one_database
def test_whoever_waits_with_a_condition_gets_what_it_does_not_have(api: FlaskClient) -> None:
    job_id = submit(api, n=5)
    tag = api.get(f"/jobs/{job_id}").headers["ETag"]
    unchanged, took = wait_for(api, job_id, "wait=1", If_None_Match=tag)
    check_unchanged(unchanged, tag)
    assert took >= 1 and unchanged.headers["Preference-Applied"] == "wait=1"
    with meanwhile(lambda: run_job.run_once(job_id), looks=3):
        changed, _ = wait_for(api, job_id, If_None_Match=tag)
    assert changed.status_code == 200 and changed.json["status"] in ("running", "succeeded")
    assert changed.headers["Cache-Control"] == "private, no-cache"


@one_database
def test_nobody_waits_for_what_is_not_there(world: World) -> None:
    from app.api import create_app

    world.set(API_TOKENS="ada:secret-a, bob:secret-b")
    client = create_app().test_client()
    ada, bob = ({"Authorization": f"Bearer secret-{name}"} for name in "ab")
    job_id = client.post("/jobs", json={"n": 5}, headers=ada).json["job_id"]
    for path in (f"/jobs/{job_id}", "/jobs/01a2291c-4328-73fb-86ef-c5a9895026da", "/jobs/x"):
        began = time.monotonic()
        answer = client.get(path, headers={**bob, "Prefer": LONG})
        assert answer.status_code == 404 and time.monotonic() - began < 20
        assert "Preference-Applied" not in answer.headers


@pytest.mark.parametrize("pruned", [False, True])
def test_a_job_that_ends_and_expires_while_somebody_waits_is_gone(
    api: FlaskClient, world: World, pruned: bool,
) -> None:
    job_id = submit(api, n=5)

    def expire() -> None:
        with db.transaction() as tx:
            held = jobs.start(tx, job_id, "w", clock.now(), clock.now() + timedelta(seconds=30), None)
            assert held is not None and jobs.succeed(tx, held, "null", clock.now(), timedelta(seconds=-1))
        if pruned:
            prune_expired.run_once(clock.now())
        world.redis.flushall()

    with meanwhile(expire):
        answer, _ = wait_for(api, job_id)
    assert answer.status_code == 410 and answer.json["job_status"] == "succeeded"


@one_database
def test_a_database_that_goes_away_while_somebody_waits_is_a_503(api: FlaskClient, world: World) -> None:
    job_id = submit(api, n=5)

    def leave() -> None:
        db.dispose()
        world.set(DATABASE_URL="postgresql+psycopg://nobody@127.0.0.1:1/nothing")
        world.redis.flushall()

    with meanwhile(leave):
        answer, _ = wait_for(api, job_id)
    assert answer.status_code == 503 and answer.headers["Retry-After"]


@one_database
def test_beyond_web_waiters_the_answer_is_that_of_now(world: World) -> None:
    from app.api import create_app

    world.set(WEB_WAITERS=2)
    application = create_app()
    job_id = submit(application.test_client(), n=5)
    answers: list[Any] = []

    def wait() -> None:
        answers.append(wait_for(application.test_client(), job_id)[0])

    waiting = [threading.Thread(target=wait) for _ in range(2)]

    def one_more() -> None:
        for _ in range(3):
            answer, took = wait_for(application.test_client(), job_id)
            assert answer.json["status"] == "queued" and "Preference-Applied" not in answer.headers
            assert answer.headers["Retry-After"] and answer.headers["Vary"] == "Prefer" and took < 20
        run_job.run_once(job_id)

    for thread in waiting:
        thread.start()
    semaphore = application.extensions["uketsuke_waiters"]
    wait_until(lambda: semaphore._value == 0, what="two wait")
    one_more()
    for thread in waiting:
        thread.join()
    assert [answer.headers["Preference-Applied"] for answer in answers] == [LONG] * 2
    assert semaphore._value == 2  # whoever has waited makes room
    assert api_error_makes_room(application, semaphore)


def api_error_makes_room(application: Any, semaphore: Any) -> bool:
    """Also one whose wait ends in an error."""
    client = application.test_client()
    job_id = submit(client, n=5)
    with db.transaction() as tx:
        held = jobs.start(tx, job_id, "w", clock.now(), clock.now() + timedelta(seconds=30), None)
    assert held is not None

    def expire() -> None:
        with db.transaction() as tx:
            jobs.succeed(tx, held, "null", clock.now(), timedelta(seconds=-1))
        redis_client.client().delete(status.key(job_id))

    with meanwhile(expire):
        assert wait_for(client, job_id)[0].status_code == 410
    return semaphore._value == 2


# --- behind the real server ---


class Waiters:
    """Clients that wait at a real `web`, each with a connection of its own."""

    def __init__(self, site: Site, job_id: str, number: int) -> None:
        self.answers: list[requests.Response] = []
        self.errors: list[Exception] = []
        self._ask = lambda: site.client().get(f"{site.api}/jobs/{job_id}", headers={"Prefer": LONG}, timeout=60)
        self._threads = [threading.Thread(target=self._wait) for _ in range(number)]
        for thread in self._threads:
            thread.start()

    def _wait(self) -> None:
        try:
            self.answers.append(self._ask())
        except requests.RequestException as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.fixture
def narrow(tmp_path: Path, valkey: Valkey) -> Iterator[tuple[Site, Process]]:
    """One `web` process with two threads, and three more for waiters."""
    with Site(tmp_path, REDIS_URL=valkey.url, WEB_WORKERS=1, WEB_THREADS=2, WEB_WAITERS=3) as site:
        web = site.start_alone("web")
        site.wait_answering()
        yield site, web


@pytest.mark.acceptance
def test_many_who_wait_hold_up_nobody(narrow: tuple[Site, Process]) -> None:
    """Three wait; all others, and those who would wait as well, are answered meanwhile."""
    site, _ = narrow
    job_id = site.submit(n=5)
    waiters = Waiters(site, job_id, 12)
    wait_until(lambda: len(waiters.answers) == 9, 25, "nine are not kept")
    others = [site.submit(n=number) for number in range(20)]
    for other in others:
        assert site.get(f"/jobs/{other}").json()["status"] == "queued"
    assert site.get("/health").status_code == 200
    assert len(waiters.answers) == 9 and waiters.errors == []  # before any of those that wait
    assert site.post(f"/jobs/{job_id}/cancel", None).status_code == 200
    waiters.join()
    assert waiters.errors == [] and {answer.status_code for answer in waiters.answers} == {200}
    applied = [answer.headers.get("Preference-Applied") for answer in waiters.answers]
    assert applied == [None] * 9 + [LONG] * 3
    assert [answer.json()["status"] for answer in waiters.answers] == [states.QUEUED] * 9 + [states.FAILED] * 3


@pytest.mark.acceptance
def test_whoever_waits_when_web_is_stopped_is_answered(narrow: tuple[Site, Process]) -> None:
    """With the job as it is; and `web` ends long before the wait would."""
    site, web = narrow
    waiters = Waiters(site, site.submit(n=5), 5)
    wait_until(lambda: len(waiters.answers) == 2, 25, "three wait")
    assert web.stop() == 0  # killed after 10 s, it would leave them without an answer
    waiters.join()
    assert waiters.errors == [] and len(waiters.answers) == 5
    for answer in waiters.answers:
        assert (answer.status_code, answer.json()["status"]) == (200, "queued")
        assert answer.headers["Retry-After"] and "Preference-Applied" not in answer.headers


def test_the_signals_that_end_a_wait_are_still_handled_by_their_own_handlers() -> None:
    """In a process of its own: what is listened to there stays."""
    program = (
        "import os, signal, sys, threading, time; from app.api import shutdown; shutdown.listen();"
        "signal.signal(signal.SIGTERM, lambda *_: print('handled'));"
        "assert not shutdown.wait(0.01);"
        "threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start();"
        "began = time.monotonic(); assert shutdown.wait(30); assert shutdown.wait(30);"
        "print(time.monotonic() - began < 20)")
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert ran.stdout.split() == ["handled", "True"], ran.stderr
