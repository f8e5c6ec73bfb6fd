"""What a receiver can rely on to know who called: signatures over exactly the bytes that are sent, secrets that can be
changed, and one body for every attempt."""
from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from standardwebhooks import Webhook, WebhookVerificationError

from app import config, db, deliveries, kinds, signing
from app.errors import WrongSetting
from app.jobs import storable
from hooksink import signature as receiving
from tasks import deliver_webhook, run_job, signature
from tests import test_house
from tests.asking import deliver_all, redeliver
from tests.conftest import World, forget_settings, one_database
from tests.processes import ROOT
from tests.rawsink import Rawsink, Request, rawsink
from tests.running import a_kind, later, submit

PUBLISHED = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
NEW, OLD, OTHER = ("whsec_" + base64.b64encode(bytes([number]) * 32).decode() for number in (251, 254, 3))
VALUES: dict[str, Any] = {
    "é": "é", "beyond the BMP": "😀𝒳", "line separators": "\u2028\u2029\x85", "controls": "\x01\x1f\x7f\t\r\n\0",
    "quotes": "\"\\\"\\\\'", "</script>": "</script><!--", "one": 1.0, "large": 1e22, "minus zero": -0.0, "tenth": 0.1,
    "smallest": 5e-324, "whole": 1, "large whole": 2**53 + 1, "larger": -2**64, "very large": 10**4000, "": "",
    "empty": {"object": {"": {}}, "array": [[], [{}]]}, "order": {"b": 1, "a": [2, "1", None, True, False]},
}


@pytest.fixture
def sink(world: World) -> Iterator[Rawsink]:
    with rawsink() as told:
        world.set(CALLBACK_ALLOW=told.url.removeprefix("http://"), CALLBACK_SCHEDULE_SECONDS="0,5,5")
        yield told


def finish(api: FlaskClient, sink: Rawsink, result: Any = None) -> str:
    """Runs a job that returns this; returns its id."""
    with a_kind(lambda input, job: result) as kind:
        job_id = submit(api, kind, callback_url=sink.url)
        run_job.run_once(job_id)
    return job_id


def attempt(job_id: str, now: datetime | None = None) -> deliveries.Delivery | None:
    """The next attempt of a job's latest delivery."""
    with db.reading() as view:
        delivery = deliveries.latest_of_job(view, job_id)
    assert delivery is not None
    return deliver_webhook.run_once(delivery.id, now=lambda: now or later(1))


def verifies(request: Request, secret: str, body: bytes | None = None) -> bool:
    """Whether a receiver that knows this secret believes it; `standardwebhooks` and hooksink must agree."""
    moment, received = int(request.headers["webhook-timestamp"]), request.body if body is None else body
    wrong = receiving.verify(request.headers, received, [secret], moment)
    try:
        assert Webhook(secret).verify(received, request.headers) == json.loads(received)
    except WebhookVerificationError as error:
        assert (str(error), wrong) == ("No matching signature found", "no signature matches")
        return False
    assert wrong is None
    return True


def signature_of(request: Request, secret: str) -> str:
    """As the specification's text has it, over what came on the socket."""
    signed = f"{request.headers['webhook-id']}.{request.headers['webhook-timestamp']}.".encode() + request.body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def test_the_published_vector_of_standard_webhooks() -> None:
    """https://github.com/standard-webhooks/standard-webhooks, the reference of its libraries."""
    body, moment = b'{"test": 2432232314}', datetime.fromtimestamp(1614265330.999, timezone(timedelta(hours=9)))
    headers = signature.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", moment, body, [PUBLISHED])
    assert headers == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek", "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="}
    assert receiving.verify(headers, body, [PUBLISHED], 1614265330) is None


def test_the_product_does_not_sign_with_the_library_that_verifies_it() -> None:
    assert not any("standardwebhooks" in test_house.imports(path) for path in test_house.SOURCES)
    assert "standardwebhooks" not in (ROOT / "requirements.lock").read_text()


# --- the bytes ---


def test_the_bytes_that_were_signed_are_the_ones_sent_by_every_attempt_and_round(
    api: FlaskClient, world: World, sink: Rawsink,
) -> None:
    (secret,) = signing.callback_secrets()
    for value in (*VALUES.values(), VALUES):
        sink.requests.clear()
        sink.codes[:] = [503, 503]
        job_id = finish(api, sink, value)
        moments = [later(seconds) for seconds in (1, 100, 200)]
        for moment in moments:
            assert attempt(job_id, moment) is not None
            db.dispose()  # what the next one tells is read anew
            world.redis.flushdb()
        assert redeliver(api, job_id).status_code == 202
        deliver_all(later(1))
        expected, told = the_body(api, job_id, value), sink.came(4)
        assert [request.body for request in told] == [expected] * 4
        assert [request.headers["content-length"] for request in told] == [str(len(expected))] * 4
        assert [request.headers["webhook-signature"] for request in told] == [
            signature_of(request, secret) for request in told]
        assert all(verifies(request, secret) for request in told)
        assert not verifies(told[0], secret, expected + b" ") and not verifies(told[0], OTHER)
        first, *others, again = [request.headers["webhook-id"] for request in told]
        assert others == [first] * 2 and again != first  # of a round, and of the next one
        sent = [int(request.headers["webhook-timestamp"]) for request in told]
        assert sent[:3] == [int(moment.timestamp()) for moment in moments]


def the_body(api: FlaskClient, job_id: str, value: Any) -> bytes:
    """The job as it is polled, without `callback`, and what happened when: written here once more, on any database."""
    polled = api.get(f"/jobs/{job_id}")
    job = exactly(polled.text)
    assert job.pop("callback")["status"] == "delivered"
    assert json.dumps(job["result"]) == json.dumps(exactly(json.dumps(value)))  # 1.0 is 1.0 there, too
    known = {"type": "job.succeeded", "timestamp": polled.json["finished_at"], **polled.json, "result": value}
    del known["callback"]
    return json.dumps(known, ensure_ascii=False).encode()


def exactly(text: str) -> Any:
    """A document whose numbers are as they are written."""
    return json.loads(text, parse_float=lambda number: ["float", number], parse_int=lambda number: ["int", number],
                      parse_constant=pytest.fail)


def test_the_largest_result_is_told_whole(api: FlaskClient, world: World, sink: Rawsink) -> None:
    value = "é" * ((kinds.MAX_RESULT_BYTES - 2) // 2)
    sink.codes[:] = [500]
    job_id = finish(api, sink, value)
    for moment in (later(1), later(100)):
        attempt(job_id, moment)
    first, second = sink.came(2)
    assert first.body == second.body == the_body(api, job_id, value) and len(first.body) > kinds.MAX_RESULT_BYTES
    assert all(verifies(request, *signing.callback_secrets()) for request in (first, second))


@one_database
@pytest.mark.parametrize(
    "value", [float("nan"), {"x": [float("-inf")]}, 10**4300, "\ud800", {"\udfff": 1}],
    ids=["nan", "infinity", "4301 digits", "surrogate", "surrogate's name"])
def test_what_json_cannot_say_is_told_as_a_failure(
    api: FlaskClient, world: World, sink: Rawsink, value: Any,
) -> None:
    attempt(finish(api, sink, value))
    (request,) = sink.came(1)
    told = exactly(request.body.decode())
    assert (told["type"], told["error"]["code"], "result" in told) == ("job.failed", "bad_result", False)
    assert verifies(request, *signing.callback_secrets())


@one_database
def test_a_failures_message_is_told_as_it_is_kept(api: FlaskClient, world: World, sink: Rawsink) -> None:
    def function(input: Any, job: Any) -> None:
        raise kinds.Refused(message)

    message = "é😀\u2028\"</script>\0\ud800"
    with a_kind(function) as kind:
        job_id = submit(api, kind, callback_url=sink.url)
        run_job.run_once(job_id)
    attempt(job_id)
    (request,) = sink.came(1)
    assert json.loads(request.body)["error"] == {"code": "refused", "message": storable(message)}
    assert verifies(request, *signing.callback_secrets())


@one_database
def test_a_history_is_told_with_its_note(api: FlaskClient, world: World, sink: Rawsink) -> None:
    job_id = api.post("/notes", json={"text": "é\u2028", "callback_url": sink.url}).json["job_id"]
    run_job.run_once(job_id)
    attempt(job_id)
    (request,) = sink.came(1)
    told, job = json.loads(request.body), api.get(f"/jobs/{job_id}").json
    del job["callback"]
    assert told == {"type": "job.succeeded", "timestamp": job["finished_at"], **job} and told["note_id"] == 1


# --- the secrets ---


@one_database
def test_each_secret_signs_the_newest_first(api: FlaskClient, world: World, sink: Rawsink) -> None:
    """So a receiver may know the old one, the new one or both."""
    world.set(CALLBACK_SECRETS=f"{NEW}, {OLD}")
    attempt(finish(api, sink))
    (request,) = sink.came(1)
    assert request.headers["webhook-signature"] == f"{signature_of(request, NEW)} {signature_of(request, OLD)}"
    assert (verifies(request, NEW), verifies(request, OLD), verifies(request, OTHER)) == (True, True, False)
    for known in ([OLD, NEW], [NEW, OTHER]):
        assert receiving.verify(request.headers, request.body, known, time.time()) is None


@one_database
def test_secrets_may_change_between_two_attempts(api: FlaskClient, world: World, sink: Rawsink) -> None:
    sink.codes[:] = [500, 500]
    world.set(CALLBACK_SECRETS=OLD)
    job_id = finish(api, sink)
    for secrets, seconds in ((OLD, 1), (f"{NEW},{OLD}", 100), (NEW, 200)):
        world.set(CALLBACK_SECRETS=secrets)
        attempt(job_id, later(seconds))
    assert [[secret for secret in (NEW, OLD) if verifies(request, secret)] for request in sink.came(3)] == [
        [OLD], [NEW, OLD], [NEW]]
    assert len({(request.headers["webhook-id"], request.body) for request in sink.requests}) == 1


RACE = """
import multiprocessing, os, sys
from app import config, signing
def ask(barrier, said):
    for number in range(20):
        os.environ["VAR_DIR"] = f"{sys.argv[1]}/{number}"
        config.settings.cache_clear()
        barrier.wait(30)
        said.put((number, *signing.callback_secrets()))
os.umask(0)
fork = multiprocessing.get_context("fork")
barrier, said = fork.Barrier(8), fork.Queue()
asking = [fork.Process(target=ask, args=(barrier, said)) for _ in range(8)]
for process in asking: process.start()
for _ in range(160): print(*said.get(timeout=30))
for process in asking: process.join()
"""


def test_processes_that_start_at_the_same_moment_keep_one_secret(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CALLBACK_SECRETS": ""}
    ran = subprocess.run([sys.executable, "-c", RACE, tmp_path], env=env, capture_output=True, text=True, timeout=60)
    said = {tuple(line.split()) for line in ran.stdout.splitlines()}
    assert (ran.stderr, len(ran.stdout.splitlines()), len(said)) == ("", 160, 20)
    for number, secret in said:
        config.check_secret(secret)
        (kept,) = (tmp_path / number).iterdir()
        assert (kept.name, kept.read_text(), kept.stat().st_mode & 0o777) == ("callback_secret", f"{secret}\n", 0o600)
    assert len({secret for _, secret in said}) == 20


@one_database
@pytest.mark.parametrize("settled", [True, False])
def test_a_kept_secret_that_is_changed_signs_the_next_callback(world: World, settled: bool) -> None:
    """Though it is as long as the one before; whether that was there for long, or for a moment."""
    world.set(CALLBACK_SECRETS="")
    signing.callback_secrets()
    path, now = config.settings().var_dir / "callback_secret", time.time()
    for at, secret in enumerate((NEW, OLD, OTHER)):
        path.write_text(f"{secret}\n")
        changed = 1_700_000_000 + at if settled else now
        os.utime(path, (changed, changed))
        assert signing.callback_secrets() == signing.callback_secrets() == (secret,)
    path.unlink()
    (made,) = signing.callback_secrets()
    assert made not in (NEW, OLD, OTHER)


@pytest.mark.parametrize("text", ["", "whsec_c2hvcnQ="])
def test_a_courier_does_not_start_with_a_kept_secret_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "callback_secret").write_text(text)
    env = {**os.environ, "VAR_DIR": str(tmp_path), "CALLBACK_SECRETS": ""}
    argv = [sys.executable, "-m", "tasks", "courier"]
    ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, len(ran.stderr.splitlines())) == (2, 1)
    assert str(tmp_path / "callback_secret") in ran.stderr and (text == "" or text not in ran.stderr)


def written(size: int, filled: int = 251) -> str:
    return "whsec_" + base64.b64encode(bytes([filled]) * size).decode()


@pytest.mark.parametrize("secret", [PUBLISHED, written(24), written(25), written(26), written(64)])
def test_a_secret_has_24_to_64_bytes(secret: str) -> None:
    config.check_secret(secret)


@pytest.mark.parametrize("secret", [
    PUBLISHED.removeprefix("whsec_"), PUBLISHED.upper(), f"whsec_{PUBLISHED}", "whsec_", written(23), written(65),
    PUBLISHED + "=", PUBLISHED + "==", written(25)[:-1], written(25)[:-2], written(25) + "=", "whsec_=" + PUBLISHED[6:],
    written(25, 0)[:-3] + "B==",  # bits behind the last byte: decoders differ
    written(32).replace("+", "-"), written(32, 255).replace("/", "_"), PUBLISHED[:-1] + "é", PUBLISHED[:-1] + "！",
    PUBLISHED[:20] + " " + PUBLISHED[20:], PUBLISHED[:20] + "\n" + PUBLISHED[20:], "whsec_ " + PUBLISHED[6:],
    "whsec_\t" + PUBLISHED[6:], PUBLISHED.replace("_", "-"), f"{PUBLISHED};{written(24)}", f"'{PUBLISHED}'",
])
def test_what_is_not_strictly_a_secret_stops_the_start_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, secret: str,
) -> None:
    monkeypatch.setenv("CALLBACK_SECRETS", f"{written(24)},{secret}")
    forget_settings()
    try:
        with pytest.raises(WrongSetting) as raised:
            config.settings()
    finally:
        monkeypatch.undo()
        forget_settings()
    assert str(raised.value) == (
        "CALLBACK_SECRETS=(hidden) cannot be used: whsec_ and the base64 of 24 to 64 bytes, comma separated, "
        "newest first")
    assert raised.value.__cause__ is None
