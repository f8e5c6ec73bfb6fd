"""hooksink: what a developer sees of a callback."""
from __future__ import annotations

import io
import os
import re
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


@pytest.mark.parametrize("path", [
    "/status/99", "/status/199", "/status/600", "/status/x", "/status/-1", "/status/", "/status", "/status/503/x",
    "/status/2e2", "/status/٥٠٠", "/slow/abc", "/slow/-1", "/slow/121", "/slow/nan", "/slow/inf", "/slow/1e1",
    "/flaky/-1", "/flaky/1.5", "/flaky/1001", "/flaky/" + "9" * 5000, "/status/503?retry_after=soon",
    "/flaky/1?retry_after=-1",
])
def test_a_path_that_asks_for_what_cannot_be_is_a_400_in_one_line(sink: FlaskClient, log: Path, path: str) -> None:
    headers = signature.headers("msg_1", datetime.now(timezone.utc), BODY.encode(), [SECRET])
    answer = sink.post(path, data=BODY.encode(), headers=headers)
    assert answer.status_code == 400 and answer.text.count("\n") == 1 and " takes a" in answer.text
    assert log.read_text() == ""


@pytest.mark.parametrize("path", ["/a/b/", "/a//b", "/%00%ff", "/statuses/99", "/é", "/a?b=c", "/?x"])
def test_any_other_path_takes_hooks(sink: FlaskClient, path: str) -> None:
    assert send(sink, path) == 204


@pytest.mark.parametrize("path", ["/flaky/1", "/slow/60", "/status/204", "/status/x"])
def test_a_wrong_signature_comes_before_misbehaviour(sink: FlaskClient, path: str) -> None:
    assert send(sink, path, secret="whsec_" + "A" * 32) == 401


def test_a_redirect_leads_somewhere_and_retry_after_is_what_was_asked_for(sink: FlaskClient) -> None:
    def answer(path: str, webhook_id: str = "msg_1") -> tuple[int, str | None, str | None]:
        headers = signature.headers(webhook_id, datetime.now(timezone.utc), BODY.encode(), [SECRET])
        got = sink.post(path, data=BODY.encode(), headers=headers)
        return got.status_code, got.headers.get("Location"), got.headers.get("Retry-After")

    for code in (301, 302, 303, 307, 308):
        assert answer(f"/status/{code}") == (code, "/followed", None)
    assert answer("/status/503?retry_after=15") == (503, None, "15")
    assert answer("/flaky/1?retry_after=7", "msg_2") == (503, None, "7")
    assert answer("/flaky/1?retry_after=7", "msg_2") == (204, None, None)


@pytest.mark.parametrize("body", [
    "[" * 100_000, '{"job_id": ' + "9" * 5000 + ', "status": "x"}', '{"job_id": {}, "status": []}', "\ufeff{}", "null"])
def test_a_signed_body_that_is_no_hook_is_a_400(sink: FlaskClient, body: str) -> None:
    assert send(sink, body=body) == 400


def test_a_body_that_is_too_long_is_a_413(sink: FlaskClient, log: Path) -> None:
    assert send(sink, body="x" * (2 * 1024 * 1024 + 1)) == 413
    assert "signature=invalid (the body is over 2097152 bytes)" in log.read_text()


@pytest.mark.parametrize("more,status", [(0, 401), (1, 413), (1000, 413)])
def test_a_chunked_body_that_is_too_long_is_a_413(sink: FlaskClient, more: int, status: int) -> None:
    answer = sink.post("/", input_stream=io.BytesIO(b"x" * (2 * 1024 * 1024 + more)),
                       environ_overrides={"wsgi.input_terminated": True, "CONTENT_LENGTH": ""})
    assert answer.status_code == status


def test_every_answer_is_one_line_without_html(sink: FlaskClient) -> None:
    refused = sink.get("/elsewhere")
    assert refused.status_code == 405 and refused.text == "Method Not Allowed\n" and "POST" in refused.headers["Allow"]
    assert sink.put("/").text == "Method Not Allowed\n"


def test_the_page_is_sealed_and_can_be_asked_for_its_head(sink: FlaskClient) -> None:
    page = sink.get("/")
    policy = page.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "script-src" not in policy
    assert page.headers["X-Content-Type-Options"] == "nosniff" and page.headers["Cache-Control"] == "no-store"
    assert '<html lang="en">' in page.text and "<caption>" not in page.text and "curl" in page.text
    head = sink.head("/")
    assert head.status_code == 200 and head.data == b"" and head.headers["Content-Type"].startswith("text/html")


def test_the_page_keeps_the_latest_and_counts_all(sink: FlaskClient) -> None:
    for number in range(205):
        send(sink, webhook_id=f"msg_{number}")
    send(sink, secret="whsec_" + "A" * 32)
    send(sink, body='{"job_id": "\\ud800\\u0000", "status": "\\u202e"}', webhook_id="msg_204")
    text = sink.get("/").text
    assert text.count('scope="row"') == 200 and "msg_5<" not in text and "msg_204<" in text
    assert re.findall(r"<dt>(\w+)</dt><dd>(\d+)</dd>", text) == [
        ("received", "207"), ("valid", "206"), ("invalid", "1"), ("duplicates", "1")]
    assert "\\ud800\\u0000" in text and "\u202e" not in text


def test_a_kept_secret_that_is_empty_verifies_nothing(
        log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CALLBACK_SECRETS")
    monkeypatch.setenv("VAR_DIR", str(tmp_path))
    sink = create_app().test_client()
    (tmp_path / "callback_secret").write_text("")
    assert send(sink) == 401 and "no secret is known" in log.read_text()


@pytest.mark.parametrize("name,value", [
    ("CALLBACK_SECRETS", "whsec_abc"), ("CALLBACK_SECRETS", "AAAA"), ("CALLBACK_SECRETS", "whsec_c2hvcnQ="),
    ("HOOK_LOG", "/proc/nowhere/hook.log"),
    ("HOOKSINK_PORT", "x"),
])
def test_a_wrong_setting_stops_the_start_with_one_line(name: str, value: str) -> None:
    ran = subprocess.run([sys.executable, "-m", "hooksink"], capture_output=True, text=True, timeout=60,
                         env={**os.environ, name: value})
    assert ran.returncode == 2 and len(ran.stderr.splitlines()) == 1 and "whsec_abc" not in ran.stderr
