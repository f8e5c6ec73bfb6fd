"""The same key twice, or two hundred times: one job, and the first answer again."""
from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from flask.testing import FlaskClient

from app import clock
from tasks import prune_expired, run_job
from tests.conftest import World, one_database
from tests.processes import Site
from tests.running import later

CLIENTS = 200


def submit(api: FlaskClient, key: str, path: str = "/jobs", **members: Any) -> Any:
    body = members or ({"n": 5} if path == "/jobs" else {"text": "x"})
    return api.post(path, json=body, headers={"Idempotency-Key": key})


# --- the same key at the same time ---


@pytest.fixture
def four(site: Site) -> Iterator[Site]:
    """Four web processes."""
    site.env["WEB_WORKERS"] = "4"
    web = site.start_alone("web")
    site.wait_answering()
    yield site
    assert web.stop() == 0


@pytest.mark.acceptance
def test_two_hundred_submissions_of_one_key_to_four_processes_make_one_job(four: Site) -> None:
    for path, body in (("/jobs", {"n": 5}), ("/notes", {"text": "x"})):
        answers: list[requests.Response] = []
        barrier = threading.Barrier(CLIENTS)

        def ask() -> None:
            barrier.wait()
            with four.client() as session:  # a connection of its own, to whichever process takes it
                answers.append(session.post(
                    four.api + path, json=body, headers={"Idempotency-Key": path}, timeout=60))

        threads = [threading.Thread(target=ask) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert Counter(answer.status_code for answer in answers) == {202: CLIENTS}
        assert len({answer.content for answer in answers}) == 1
        assert len({(answer.headers["Location"], answer.headers.get("Link")) for answer in answers}) == 1
        replayed = Counter(answer.headers.get("Idempotent-Replayed") for answer in answers)
        assert replayed == {None: 1, "true": CLIENTS - 1}
        job_id = answers[0].json()["job_id"]
        assert answers[0].headers["Location"] == f"/jobs/{job_id}"
        assert four.sql(f"SELECT count(*) FROM outbox WHERE target_id = '{job_id}'") == [(1,)]
    counts = [four.sql(f"SELECT count(*) FROM {table}")[0][0] for table in ("jobs", "outbox", "notes")]
    assert counts == [2, 2, 1] and four.sql("SELECT count(*) FROM idempotency_keys") == [(2,)]


# --- another request under the key ---


def test_a_key_that_stands_for_another_request_names_its_job(api: FlaskClient, world: World) -> None:
    for path, members in (("/jobs", {"n": 5}), ("/notes", {"text": "x"})):
        first = submit(api, path, path, **members)
        for other, body in (("/jobs", {"n": 6}), ("/notes", {"text": "y"}), ("/jobs", {"n": -1}), ("/jobs", {"x": 1})):
            answer = submit(api, path, other, **body)
            assert (answer.status_code, answer.json["type"]) == (422, "/problems/key-reused")
            assert answer.headers["Location"] == answer.json["location"] == first.headers["Location"]
            assert "Idempotent-Replayed" not in answer.headers and "Retry-After" not in answer.headers
        run_job.run_once(first.json["job_id"])
        assert submit(api, path, path, **members).data == first.data  # the first answer, whatever has become of it
    assert [world.count(table) for table in ("jobs", "notes", "idempotency_keys")] == [2, 1, 2]


@one_database
def test_the_spelling_of_a_request_does_not_count(api: FlaskClient) -> None:
    first = submit(api, "k", n=10)
    for body in ('{"n": 10, "kind": "primes"}', '{"n": 10, "callback_url": null}',
                 ' {\n"kind":"primes","n":1e1}', '{"n":10.0}', '{"\\u006e": 10}'):
        again = api.post("/jobs", data=body, headers={"Idempotency-Key": "k"}, content_type="application/json")
        assert again.data == first.data and again.headers["Idempotent-Replayed"] == "true", body
    for body in ('{"n": "10"}', '{"n": 11}', '{"n": 10, "kind": null}', '{"n": true}', '{}'):
        other = api.post("/jobs", data=body, headers={"Idempotency-Key": "k"}, content_type="application/json")
        assert other.status_code == 422 and other.json["type"] == "/problems/key-reused", body


# --- what is a key ---

ACCEPTED = {  # as sent: as kept
    "1": "1", "a" * 255: "a" * 255, '"' + "a" * 255 + '"': "a" * 255, "a,b": "a,b", "a b": "a b", "a\"b": "a\"b",
    "a\\b": "a\\b", '"a\\"b"': 'a"b', '"a\\\\b"': "a\\b", '" "': " ", " k ": "k", "\tk": "k", ' "q"  ': "q",
    "~!@#$%^&*()": "~!@#$%^&*()", '"' + '\\"' * 255 + '"': '"' * 255, "8e03978e-40d5-43e8-bc93-6894a57f9324": None,
    "k;a=1": "k;a=1", "?1": "?1", ":YWJj:": ":YWJj:", "'": "'", '"a,b"': None, 'x"': 'x"',
}
REFUSED = [
    "", " ", "\t", '""', '" ', '"', '"a', '"a\\b"', '"a\\', '"a"b"', '"a" "b"', '"a", "b"', '"a";x=1', "a" * 256,
    '"' + "a" * 256 + '"', "a" * 8000, "a\tb", '"a\tb"', "é", "é".encode().decode("latin-1"), '"é"', "\x7f", "a\x00b",
    "\x01", "\u00a0", "\xff\xfe",
]


@one_database
def test_a_key_is_printable_ascii_bare_or_quoted(api: FlaskClient, world: World) -> None:
    for sent, kept in ACCEPTED.items():
        answer = submit(api, sent)
        assert answer.status_code == 202, sent
        if kept is not None:
            assert (kept,) in world.sql("SELECT key FROM idempotency_keys"), sent
        assert submit(api, sent).data == answer.data
    made = [world.count(table) for table in ("jobs", "idempotency_keys")]
    for sent in REFUSED:
        for path in ("/jobs", "/notes"):
            answer = submit(api, sent, path)
            assert answer.status_code == 400, sent[:40]
            assert answer.json["type"] == "/problems/bad-idempotency-key"
    assert [world.count(table) for table in ("jobs", "idempotency_keys")] == made


@one_database
def test_bare_and_quoted_name_the_same_key(api: FlaskClient, world: World) -> None:
    for bare, quoted in (("k", '"k"'), ("a,b", '"a,b"'), ('a"b', '"a\\"b"'), ("a\\b", '"a\\\\b"')):
        first = submit(api, bare)
        again = submit(api, quoted)
        assert again.data == first.data and again.headers["Idempotent-Replayed"] == "true"
    assert world.count("jobs") == 4
    assert submit(api, "K").headers.get("Idempotent-Replayed") is None  # it is not a word


@pytest.mark.acceptance
@pytest.mark.parametrize("site", ["sqlite"], indirect=True)
def test_a_key_means_the_same_behind_the_real_server(site: Site) -> None:
    """Bytes that no client library would send; two headers are one with a comma, as for any other field."""
    site.start_alone("web")
    site.wait_answering()

    def ask(*keys: bytes) -> tuple[int, str]:
        head = b"".join(b"Idempotency-Key: " + key + b"\r\n" for key in keys)
        with socket.create_connection(("127.0.0.1", site.port), timeout=30) as connection:
            connection.sendall(
                b"POST /jobs HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n" + head
                + b"Content-Length: 8\r\n\r\n" + b'{"n": 5}')
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        return int(answer.split(b" ", 2)[1]), answer.decode("latin-1")

    for keys in ([b"\xff"], [b"k\xc3\xa9"], [b""], [b'"a"', b'"b"'], [b"a" * 8000], [b"a\tb"], [b'"open']):
        code, text = ask(*keys)
        assert code == 400 and "bad-idempotency-key" in text, keys[0][:20]
    assert site.sql("SELECT count(*) FROM jobs") == [(0,)]
    assert ask(b"a", b"b")[0] == ask(b"a,b")[0] == 202
    assert site.sql("SELECT key FROM idempotency_keys") == [("a,b",)]


# --- how long it is kept ---


def expire(world: World) -> None:
    world.sql("UPDATE jobs SET expires_at = finished_at")
    world.redis.flushall()


@pytest.mark.parametrize("path", ["/jobs", "/notes"])
def test_a_key_lives_as_long_as_its_job_can_be_read_and_is_free_afterwards(
    api: FlaskClient, world: World, path: str,
) -> None:
    """However short its own time is; and its own time, however soon the job is gone."""
    world.set(IDEMPOTENCY_TTL_SECONDS=100)
    first = submit(api, "k", path)
    job_id = first.json["job_id"]

    def replayed() -> bool:
        answer = submit(api, "k", path)
        assert answer.status_code == 202
        return answer.data == first.data and "Idempotent-Replayed" in answer.headers

    prune_expired.run_once(later(80_000))
    assert replayed()  # it waits
    run_job.run_once(job_id)
    prune_expired.run_once(later(80_000))
    assert replayed() and api.get(f"/jobs/{job_id}").status_code == 200
    expire(world)
    prune_expired.run_once(clock.now())
    assert replayed() and api.get(f"/jobs/{job_id}").status_code == 410
    prune_expired.run_once(later(101))
    again = submit(api, "k", path)
    assert again.status_code == 202 and "Idempotent-Replayed" not in again.headers
    assert again.json["job_id"] != job_id and world.count("idempotency_keys") == 1
