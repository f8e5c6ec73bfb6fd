"""Never a callback before the final state can be read: the receiver asks the moment that it is told, with the
Procfile's own processes, while Redis comes and goes."""
from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis
import requests

from tests import receiver as receivers
from tests import servers
from tests.processes import Site
from tests.servers import Valkey, wait_until

pytestmark = pytest.mark.acceptance

JOBS = 500  # with each database
_decoder = json.JSONDecoder()


def members(raw: str) -> dict[str, str]:
    """The members of a JSON object, each with its value as it is spelt."""
    found, at = {}, raw.index("{") + 1
    while True:
        name, at = _decoder.raw_decode(raw, _past(raw, at))
        begins = _past(raw, _past(raw, at) + 1)  # after the colon
        _, at = _decoder.raw_decode(raw, begins)
        found[name] = raw[begins:at]
        at = _past(raw, at)
        if raw[at] == "}":
            return found
        at += 1


def _past(raw: str, at: int) -> int:
    while raw[at] in " \t\r\n":
        at += 1
    return at


class Asking:
    """A receiver that reads the job before it answers, over a connection of its own, and keeps what does not fit."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.wrong: list[str] = []
        self.told: Counter[str] = Counter()  # callbacks by job
        self.ends: Counter[str] = Counter()  # jobs by how they ended
        self._lock = threading.Lock()

    def ask(self, raw: str) -> None:
        told = members(raw)
        job_id = json.loads(told["job_id"])
        flaw = self._flaw(job_id, told)
        with self._lock:
            self.wrong += flaw
            self.told[job_id] += 1
            if self.told[job_id] == 1:
                self.ends[json.loads(told.get("error", "{}")).get("code", "succeeded")] += 1

    def _flaw(self, job_id: str, told: dict[str, str]) -> list[str]:
        try:
            answer = requests.get(f"{self.site.api}/jobs/{job_id}", timeout=30, headers={"Connection": "close"})
        except requests.RequestException as error:
            return [f"no answer: {error!r}"]
        flaw = _flaw(told, answer)
        return [] if flaw is None else [f"{flaw}: told {told}, read {answer.status_code} {answer.text}"]


def _flaw(told: dict[str, str], answer: requests.Response) -> str | None:
    """What does not fit between a callback and the answer to whoever asks at once; None when all does."""
    if answer.status_code != 200 or "Retry-After" in answer.headers:
        return "not a finished job"
    read = members(answer.content.decode())
    if json.loads(read["status"]) not in ("succeeded", "failed"):
        return "not final"
    if json.loads(told["type"]) != "job." + json.loads(read["status"]) or told["timestamp"] != read["finished_at"]:
        return "another end"
    callback = json.loads(read.pop("callback"))
    if callback["status"] not in ("pending", "sending", "delivered"):
        return "another callback"
    told = {name: value for name, value in told.items() if name not in ("type", "timestamp")}
    return None if told == read else "other bytes"


def submit_all(site: Site, url: str, into: list[str]) -> None:
    """Of twenty jobs seventeen succeed, two fail, one is cancelled, at once or while it runs."""
    for number in range(JOBS):
        kind = ("motley", "unlucky", "heedful")[(number % 20 > 16) + (number % 20 > 18)]
        into.append(site.submit(kind=kind, callback_url=url, **({"seconds": 30} if kind == "heedful" else {})))
        if kind == "heedful":
            assert site.post(f"/jobs/{into[-1]}/cancel", None).status_code == 200


def disturb(own: Valkey, jobs: list[str]) -> None:
    """Redis is flushed, restarted, flushed and killed while jobs run and callbacks go out."""
    for part, disturbance in enumerate((flush, restart, flush, kill), 1):
        wait_until(lambda: len(jobs) >= part * JOBS // 5, 60, f"part {part} of the jobs")
        disturbance(own)


def flush(own: Valkey) -> None:
    with contextlib.closing(redis.Redis.from_url(own.url)) as client:
        client.flushall()


def restart(own: Valkey) -> None:
    own.stop()
    own.start()


def kill(own: Valkey) -> None:
    assert own.process is not None
    own.process.kill()
    own.start_again()


@contextlib.contextmanager
def read_only(own: Valkey) -> Iterator[None]:
    """As after a failover: it answers, and takes nothing. What it shows stays until its time is over."""
    with contextlib.closing(redis.Redis.from_url(own.url)) as client:
        client.config_set("min-replicas-to-write", 1)
        yield
        client.config_set("min-replicas-to-write", 0)


def test_whoever_is_told_reads_the_same_end_to_the_byte(site: Site) -> None:
    """Counted: each job's callback came, and each was asked about."""
    jobs: list[str] = []
    with servers.valkey() as own, receivers.receiver() as told:
        site.env |= {
            "REDIS_URL": own.url, "BROKER_URL": site.env["REDIS_URL"],  # messages go on while the view does not
            "CALLBACK_ALLOW": f"127.0.0.1:{told.port}", "CALLBACK_PER_HOST": "16"}
        asking = Asking(site)

        def respond(handler: Any, count: int) -> None:
            asking.ask(handler.hook.body.decode())
            receivers.status(204)(handler, count)

        told.respond = respond
        stack = site.start("web", "worker", "courier", "beat")
        site.wait_ready()
        submitting = threading.Thread(target=submit_all, args=(site, told.url, jobs))
        submitting.start()
        disturb(own, jobs)
        submitting.join()
        wait_until(lambda: not site.sql("SELECT id FROM jobs WHERE finished_at IS NULL"), 60, "all jobs end")
        late = [site.submit(kind="nap", seconds=1, callback_url=told.url) for _ in range(4)]
        with read_only(own):
            wait_until(lambda: set(late) <= set(asking.told) or asking.wrong, 60, "callbacks without a view")
        wait_until(lambda: len(asking.told) == JOBS + len(late) or asking.wrong, 90, "every callback")
        assert not asking.wrong, f"{len(asking.wrong)} of {asking.told.total()}\n" + "\n".join(asking.wrong[:5])
        assert set(asking.told) == {*jobs, *late} and asking.told.total() >= JOBS
        assert asking.ends == {
            "succeeded": JOBS * 17 // 20 + len(late), "exception": JOBS // 10, "cancelled": JOBS // 20}
        print(f"{asking.told.total()} callbacks, each asked about")
        stack.stop(60)
