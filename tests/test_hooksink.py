"""hooksink: what a developer sees of a callback."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest
from flask.testing import FlaskClient

from hooksink.server import create_app
from tasks import signature

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
BODY = '{"type": "job.succeeded", "job_id": "j1", "status": "succeeded"}'


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOOK_LOG", str(tmp_path / "hook.log"))
    monkeypatch.setenv("CALLBACK_SECRETS", SECRET)
    return tmp_path / "hook.log"


@pytest.fixture
def sink(log: Path) -> FlaskClient:
    return create_app().test_client()


def send(sink: FlaskClient, path: str = "/", webhook_id: str = "msg_1", body: str = BODY, secret: str = SECRET) -> int:
    headers = signature.headers(webhook_id, datetime.now(timezone.utc), body.encode(), [secret])
    return sink.post(path, data=body.encode(), headers=headers).status_code


def test_a_hook_is_a_line(sink: FlaskClient, log: Path) -> None:
    assert send(sink) == 204 and send(sink, "/any/thing") == 204
    first, second = log.read_text().splitlines()
    moment, rest = first.split(" ", 1)
    assert datetime.fromisoformat(moment)
    assert rest == "job_id=j1 status=succeeded webhook_id=msg_1 signature=valid"
    assert second.endswith("signature=valid duplicate")


def test_duplicates_are_known_after_a_restart(sink: FlaskClient, log: Path) -> None:
    send(sink)
    send(create_app().test_client())
    assert log.read_text().splitlines()[1].endswith(" duplicate")


def test_a_wrong_signature_is_refused_and_logged(sink: FlaskClient, log: Path) -> None:
    assert send(sink, secret="whsec_" + "A" * 32) == 401
    assert sink.post("/", data=BODY).status_code == 401
    lines = log.read_text().splitlines()
    assert all("signature=invalid" in line and "job_id" not in line for line in lines) and len(lines) == 2


def test_a_hook_that_is_none_is_refused(sink: FlaskClient, log: Path) -> None:
    for body in ("[]", "x", "{}", '{"job_id": "j1"}'):
        assert send(sink, body=body) == 400
    assert log.read_text() == ""


def test_a_line_stays_a_line(sink: FlaskClient, log: Path) -> None:
    send(sink, body='{"job_id": "a\\nb status=x", "status": "succeeded"}')
    assert len(log.read_text().splitlines()) == 1


def test_flaky_fails_so_many_times_for_each_webhook_id(sink: FlaskClient, log: Path) -> None:
    assert [send(sink, "/flaky/2") for _ in range(4)] == [503, 503, 204, 204]
    assert [send(sink, "/flaky/2", "msg_2") for _ in range(3)] == [503, 503, 204]
    assert len(log.read_text().splitlines()) == 3


def test_status_answers_with_it(sink: FlaskClient, log: Path) -> None:
    assert [send(sink, f"/status/{code}") for code in (200, 410, 500)] == [200, 410, 500]


def test_slow_answers_late(sink: FlaskClient, log: Path) -> None:
    began = time.monotonic()
    assert send(sink, "/slow/0.3") == 204
    assert time.monotonic() - began >= 0.3


def test_the_kept_secret_is_found(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALLBACK_SECRETS")
    monkeypatch.setenv("VAR_DIR", str(tmp_path))
    sink = create_app().test_client()
    assert send(sink) == 401
    (tmp_path / "callback_secret").write_text(SECRET + "\n")
    assert send(sink) == 204


@pytest.mark.parametrize("name,value", [
    ("CALLBACK_SECRETS", "whsec_abc"), ("CALLBACK_SECRETS", "AAAA"), ("HOOK_LOG", "/proc/nowhere/hook.log"),
    ("HOOKSINK_PORT", "x"),
])
def test_a_wrong_setting_stops_the_start_with_one_line(name: str, value: str) -> None:
    ran = subprocess.run([sys.executable, "-m", "hooksink"], capture_output=True, text=True, timeout=60,
                         env={**os.environ, name: value})
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1 and "whsec_abc" not in ran.stderr
