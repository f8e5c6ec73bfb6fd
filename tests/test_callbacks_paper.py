"""docs/callbacks.md: its receiver runs as it stands and gets real callbacks, its lines print what they say, its tables
are those of the code."""
from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import requests
from flask.testing import FlaskClient

from app import addresses, backoff, clock, config, db, deliveries, excerpts, kinds, ports
from hooksink import signature as receiving
from tasks import deliver_webhook, egress, run_job, signature
from tasks.egress import Answer, Unanswered
from tests import paper
from tests.asking import deliver_all, redeliver
from tests.conftest import World, one_database
from tests.processes import ROOT, Process
from tests.rawsink import rawsink
from tests.running import later, submit
from tests.servers import free_port, wait_until

TEXT = (ROOT / "docs" / "callbacks.md").read_text()
RECEIVER, LIBRARY = paper.blocks("python", TEXT)
BY_HAND, NEW_SECRET = paper.blocks("sh", TEXT)
HEAD, BODY = paper.blocks("http", TEXT)[0].removesuffix("\n").split("\n\n")
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OWN = re.findall(r"(?ms)^def verified.*?^    return False\n", RECEIVER)[0]
LIBRARYS = RECEIVER.replace(OWN, LIBRARY)


class Inbox:
    """The paper's receiver, or one made of it, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}/hooks"
        self.process: Process | None = None

    def start(self, program: str) -> None:
        """And kills the one before."""
        self.stop()
        (self.folder / "receiver.py").write_text(program)
        env = {**os.environ, "PORT": str(self.port), "CALLBACK_SECRETS": SECRET,
               "HOOKS_FILE": str(self.folder / "hooks.sqlite3"), "PYTHONUNBUFFERED": "1"}
        argv = [sys.executable, "-W", "error", str(self.folder / "receiver.py")]
        self.process = Process("receiver", argv, env, self.folder / "receiver.log")
        wait_until(lambda: not ports.is_free("127.0.0.1", self.port), what="the receiver listens")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()

    def rows(self, statement: str) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.folder / "hooks.sqlite3", timeout=10)) as file:
            return file.execute(statement).fetchall()

    def ended(self) -> list[tuple[Any, ...]]:
        """What its work wrote, once all that came is done."""
        wait_until(lambda: not self.rows("SELECT 1 FROM hooks WHERE NOT done"))
        return self.rows("SELECT job_id, status, result FROM ended")


@pytest.fixture
def inbox(world: World, tmp_path: Path) -> Iterator[Inbox]:
    made = Inbox(tmp_path)
    world.set(CALLBACK_ALLOW=f"127.0.0.1:{made.port}", CALLBACK_SECRETS=SECRET)
    try:
        yield made
    finally:
        made.stop()


def finish(api: FlaskClient, url: str, n: int = 5) -> tuple[str, str]:
    """Runs a job; returns its id and its delivery's."""
    job_id = submit(api, n=n, callback_url=url)
    run_job.run_once(job_id)
    with db.reading() as view:
        delivery = deliveries.latest_of_job(view, job_id)
    assert delivery is not None
    return job_id, delivery.id


def tell(delivery_id: str, **more: Any) -> tuple[str, int | None]:
    """One attempt; how the delivery stands then, and the answer."""
    after = deliver_webhook.run_once(delivery_id, **more)
    assert after is not None
    return after.state, after.last_response


# --- the receiver ---


@pytest.mark.parametrize("program", [RECEIVER, LIBRARYS], ids=["by itself", "with the library"])
@one_database
def test_the_receiver_takes_callbacks_once_and_refuses_the_others(
    api: FlaskClient, world: World, inbox: Inbox, program: str,
) -> None:
    inbox.start(program)
    job_id, delivery_id = finish(api, inbox.url)
    assert tell(delivery_id, post=and_lose_the_answer) == ("pending", None)
    assert tell(delivery_id, now=lambda: later(10)) == ("delivered", 204)  # a duplicate
    expected = [(job_id, "succeeded", '{"n": 5, "count": 3}')]
    assert inbox.ended() == expected and inbox.rows("SELECT webhook_id FROM hooks") == [(delivery_id,)]
    assert redeliver(api, job_id).status_code == 202 and deliver_all(later(1)) == []
    assert inbox.ended() == expected and len(inbox.rows("SELECT 1 FROM hooks")) == 2

    for post in (tampered, as_another, signed_at(-330), signed_at(330)):
        assert tell(finish(api, inbox.url)[1], post=post) == ("exhausted", 401)
    assert inbox.ended() == expected and len(inbox.rows("SELECT 1 FROM hooks")) == 2
    for seconds in (-270, 270):
        assert tell(finish(api, inbox.url)[1], post=signed_at(seconds)) == ("delivered", 204)
    assert len(inbox.ended()) == 3
    assert inbox.process is not None and "Traceback" not in inbox.process.output()


def and_lose_the_answer(*request: Any) -> Answer:
    assert egress.post(*request).code == 204
    raise Unanswered("lost")


def tampered(url: str, body: bytes, headers: dict[str, str], timeout: float) -> Answer:
    return egress.post(url, body.replace(b'"count": 3', b'"count": 4'), headers, timeout)


def as_another(url: str, body: bytes, headers: dict[str, str], timeout: float) -> Answer:
    return egress.post(url, body, {**headers, "webhook-id": headers["webhook-id"] + "x"}, timeout)


def signed_at(seconds: float) -> Callable[..., Answer]:
    """So many seconds from now."""
    def post(url: str, body: bytes, headers: dict[str, str], timeout: float) -> Answer:
        signed = signature.headers(headers["webhook-id"], later(seconds), body, [SECRET])
        return egress.post(url, body, signed, timeout)

    return post


@one_database
def test_the_receiver_answers_before_it_works_and_does_not_forget(
    api: FlaskClient, world: World, inbox: Inbox,
) -> None:
    inbox.start(RECEIVER.replace('    row = job["job_id"]', '    time.sleep(3600)\n    row = job["job_id"]'))
    job_id, delivery_id = finish(api, inbox.url)
    assert tell(delivery_id) == ("delivered", 204)
    assert inbox.rows("SELECT done FROM hooks") == [(0,)]
    inbox.start(RECEIVER)
    assert [row[0] for row in inbox.ended()] == [job_id]


@one_database
def test_work_that_fails_holds_up_nothing(api: FlaskClient, world: World, inbox: Inbox) -> None:
    fails = 'if job["result"]["n"] == 4: db.execute("INSERT INTO nowhere VALUES (1)")'
    inbox.start(RECEIVER.replace('    row = job["job_id"]', f'    {fails}\n    row = job["job_id"]'))
    jobs = {n: finish(api, inbox.url, n) for n in (4, 5)}
    assert [tell(delivery_id) for _, delivery_id in jobs.values()] == [("delivered", 204)] * 2
    wait_until(lambda: inbox.rows("SELECT job_id FROM ended") == [(jobs[5][0],)])
    assert inbox.rows("SELECT webhook_id FROM hooks WHERE NOT done") == [(jobs[4][1],)]
    inbox.start(RECEIVER)
    assert {row[0] for row in inbox.ended()} == {jobs[4][0], jobs[5][0]}


# --- verifying ---


def verified(program: str, *secrets: str) -> Callable[[Any, Any], bool]:
    """The paper's function of this name."""
    names: dict[str, Any] = {}
    imports = RECEIVER.split("\n\n")[0]
    tolerance = re.findall(r"(?m)^TOLERANCE_SECONDS.*$", RECEIVER)[0]
    exec(compile(f"{imports}\n{tolerance}\n{program}", "docs/callbacks.md", "exec"), names)
    names["SECRETS"] = secrets
    return names["verified"]


@pytest.mark.parametrize("program", [OWN, LIBRARY], ids=["by itself", "with the library"])
def test_whatever_strangers_write_is_refused_without_an_error(program: str) -> None:
    body = '{"é": 1.0}'.encode()
    headers = requests.structures.CaseInsensitiveDict(signature.headers("msg_1", clock.now(), body, [SECRET]))
    believed, given = verified(program, SECRET), headers["webhook-signature"]
    assert believed(headers, body) and believed({**headers, "webhook-signature": f"v1a,x {given}"}, body)
    for name, values in {
        "webhook-id": ("", "é", "msg_1 "),
        "webhook-timestamp": ("", "x", "nan", "1e9", "-1", "٣", "9" * 12, "9" * 5000),
        "webhook-signature": ("", "v1", "v1,", ",,", "v1,YQ", "v1,é", "v1,#", given[3:], f"v2,{given[3:]}", given[:-1]),
    }.items():
        assert [value for value in values if believed({**headers, name: value}, body)] == []
        assert not believed({other: value for other, value in headers.items() if other != name}, body)
    written_anew = json.dumps(json.loads(body)).encode()
    assert not any(believed(headers, other) for other in (b"", b"\xff", body + b"\n", written_anew))


@pytest.mark.parametrize("given,taken", [
    (SECRET, [SECRET]), (f"{SECRET},", [SECRET]), (f" {SECRET} , {SECRET[::-1]}", [SECRET, SECRET[::-1]]),
    ("", None), (",", None), ("whsec_", None), (f"{SECRET},whsec_", None)])
def test_the_receiver_takes_no_empty_secret(given: str, taken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CALLBACK_SECRETS", given)
    reads = re.findall(r"(?ms)^SECRETS = .*?(?=^FILE)", RECEIVER)[0]
    names: dict[str, Any] = {"os": os}
    if taken is None:
        with pytest.raises(SystemExit, match="CALLBACK_SECRETS"):
            exec(reads, names)
    else:
        exec(reads, names)
        assert names["SECRETS"] == taken


@one_database
def test_a_receiver_whose_file_was_locked_goes_on(api: FlaskClient, world: World, inbox: Inbox) -> None:
    inbox.start(RECEIVER.replace("timeout=10", "timeout=0.1").replace("news.wait(60)", "news.wait(0.1)"))
    with contextlib.closing(sqlite3.connect(inbox.folder / "hooks.sqlite3", isolation_level=None)) as file:
        file.execute("BEGIN EXCLUSIVE")
        process = inbox.process
        assert process is not None
        wait_until(lambda: "what came is left for later" in process.output(), what="its work has failed")
        file.execute("ROLLBACK")
    job_id, delivery_id = finish(api, inbox.url)
    assert tell(delivery_id) == ("delivered", 204) and [row[0] for row in inbox.ended()] == [job_id]


def test_what_the_paper_says_of_the_library_is_so() -> None:
    from standardwebhooks import Webhook, WebhookVerificationError

    body, hook = '{"é": 1.0}', Webhook(SECRET)
    headers = signature.headers("msg_1", clock.now(), body.encode(), [SECRET])
    for given in (body, body.encode()):
        assert hook.verify(given, {name.title(): value for name, value in headers.items()}) == {"é": 1.0}
    with pytest.raises(ValueError) as raised:
        hook.verify(body, {**headers, "webhook-signature": "v1"})
    assert not isinstance(raised.value, WebhookVerificationError)


def test_each_step_of_changing_the_secret_keeps_every_callback_believed() -> None:
    steps = list(paper.table("step", TEXT).values())
    old, new = SECRET, subprocess.check_output(["/bin/sh", "-c", NEW_SECRET], text=True).strip()
    config.check_secret(new)
    real = {"`$old`": [old], "`$new,$old`": [new, old], "`$new`": [new]}
    assert (steps[0], steps[-1]) == (["`$old`"] * 2, ["`$new`"] * 2)
    for before, after in zip(steps, steps[1:]):
        assert sum(one != other for one, other in zip(before, after)) == 1  # so there is no state in between
    for receiver, service in steps:
        headers = signature.headers("msg_1", clock.now(), b"{}", real[service])
        for program in (OWN, LIBRARY):
            assert verified(program, *real[receiver])(headers, b"{}")


# --- the example and the lines ---


def shell(folder: Path, body: bytes, program: str) -> str:
    (folder / "body").write_bytes(body)
    ran = subprocess.run(["/bin/sh", "-euc", program], cwd=folder, capture_output=True, text=True, timeout=30)
    assert (ran.stderr, ran.returncode) == ("", 0)
    return ran.stdout.strip()


def headers_of(head: str) -> dict[str, str]:
    return {name.lower(): value for name, value in (line.split(": ") for line in head.splitlines()[1:])}


def masked(head: str) -> str:
    head = re.sub(r"(?m)^Host: .*$", "Host: HOST", paper.masked(head))
    return re.sub(r"(?m)^(webhook-(?:timestamp|signature)): .*$", r"\1: VALUE", head)


@one_database
def test_the_example_is_a_real_one_and_can_be_checked_by_hand(
    api: FlaskClient, world: World, tmp_path: Path,
) -> None:
    shown = headers_of(HEAD)
    assert f"v1,{shell(tmp_path, BODY.encode(), BY_HAND)}" == shown["webhook-signature"]
    assert receiving.verify(shown, BODY.encode(), [SECRET], int(shown["webhook-timestamp"])) is None
    made = "whsec_" + subprocess.check_output(["openssl", "rand", "-base64", "64"], text=True).replace("\n", "")
    with rawsink() as sink:
        world.set(CALLBACK_ALLOW=sink.url.removeprefix("http://"), CALLBACK_SECRETS=made)
        tell(finish(api, f"{sink.url}/hooks", 100000)[1])
        (request,) = sink.came(1)
    assert masked(request.head.decode()) == masked(HEAD) and paper.masked(request.body.decode()) == paper.masked(BODY)
    own = BY_HAND.replace(SECRET, made)
    for name in ("webhook-id", "webhook-timestamp"):
        own = own.replace(shown[name], request.headers[name])
    assert f"v1,{shell(tmp_path, request.body, own)}" == request.headers["webhook-signature"]


# --- the tables ---


def test_the_table_of_answers_is_the_codes() -> None:
    told = {what: says for what, (says,) in paper.table("you answer", TEXT).items()}
    said: dict[int, str] = {}
    for what, says in told.items():
        for one in re.findall(r"\b(?:\dxx|\d{3})\b", what):
            codes = range(int(one[0]) * 100, int(one[0]) * 100 + 100) if one.endswith("xx") else [int(one)]
            said |= dict.fromkeys(codes, says)
    other = next(says for what, says in told.items() if what.startswith("anything else"))
    for code in range(200, 600):
        says, state = said.get(code, other), led_to(code)
        assert says.startswith("is tried again" if state == "pending" else f"is `{state}`"), code
    assert told[next(what for what in told if what.startswith("nothing, or not all"))] == "is tried again"
    assert led_to(None) == "pending" and led_to(None, refused=True) == "refused"
    assert f"{backoff.MAX_RETRY_AFTER_SECONDS / 3600:g} h at most" in TEXT


def held(attempts: int = 1) -> deliveries.Delivery:
    now = clock.now()
    return deliveries.Delivery("msg_1", "j", "http://h", "h:80", "e", "sending", attempts, None, now, None, now, None)


def led_to(code: int | None, refused: bool = False) -> str:
    now = datetime.now(timezone.utc)
    tried = deliveries.Attempt("msg_1", 1, now, code, None, 0.1, "")
    return deliver_webhook.decide(held(), tried, None, refused, 0.5, now).becomes


@one_database
def test_the_answers_whose_retry_after_counts_are_those_that_it_names(api: FlaskClient, world: World) -> None:
    (told,) = [what for what, (says,) in paper.table("you answer", TEXT).items() if "Retry-After" in says]
    counts = set()
    for code in (302, 408, 425, 429, 500, 502, 503, 504):
        _, delivery_id = finish(api, "http://93.184.215.14/")
        after = deliver_webhook.run_once(delivery_id, post=lambda *_: Answer(code, "86400000", b""))
        assert after is not None and after.next_attempt_at is not None
        if after.next_attempt_at > later(backoff.MAX_RETRY_AFTER_SECONDS - 60):
            counts.add(str(code))
        assert after.next_attempt_at < later(backoff.MAX_RETRY_AFTER_SECONDS + 60)
    assert counts == set(told.split(", "))


UNITS = {"s": 1, "min": 60, "h": 3600, "KiB": 1024, "bytes": 1, "": 1}


def amount(text: str) -> int:
    number, _, unit = text.partition(" ")
    return int(number) * UNITS[unit]


def test_the_schedule_and_the_bounds_are_the_defaults() -> None:
    defaults = {name: field.default for name, field in config.Settings.model_fields.items()}
    waits = paper.table("attempt", TEXT)["after the end, or the attempt before"]
    assert tuple(map(amount, waits)) == defaults["callback_schedule_seconds"]
    assert f"up to {backoff.JITTER:.0%}".replace("%", " %") in TEXT
    days = sum(defaults["callback_schedule_seconds"]) / 86_400
    assert 2.8 < days < 3.2 and "about\nthree days" in TEXT
    bounds = [(amount(most), setting.strip("`").lower()) for most, setting in paper.table("what", TEXT).values()]
    assert [most for most, setting in bounds if setting == "fixed"] == [
        addresses.LOOKUP_SECONDS, egress.CONNECT_SECONDS, egress.MAX_ANSWER_BYTES, excerpts.MAX_BYTES]
    assert {setting: most for most, setting in bounds if setting != "fixed"} == {
        name: defaults[name] for name in ("callback_timeout_seconds", "callback_per_host")}


def test_its_figures_are_those_of_the_code() -> None:
    assert f"A result has {kinds.MAX_RESULT_BYTES // 1024} KiB at most" in TEXT
    assert receiving.TOLERANCE_SECONDS == 300 and f"TOLERANCE_SECONDS = {receiving.TOLERANCE_SECONDS}\n" in RECEIVER
    assert "replay window is 5 minutes" in TEXT
    named = set(re.findall(r"`([A-Z]+(?:_[A-Z]+)+)`", TEXT))
    assert {name.lower() for name in named} <= set(config.Settings.model_fields) and len(named) >= 5
    assert {path for path in re.findall(r"`/([a-z]+)/\d+`", TEXT)} == {"flaky", "slow", "status"}
    config.Settings(_env_file=None, callback_allow=re.findall(r"`CALLBACK_ALLOW=(\S+)`", TEXT)[0])
