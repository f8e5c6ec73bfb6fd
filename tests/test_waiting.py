"""A callback that waits for its next attempt is columns in SQL: it comes when it is due, whatever was stopped, emptied
or killed meanwhile. With the Procfile's own processes."""
from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
import redis

from tests import receiver as receivers
from tests.processes import Site
from tests.servers import wait_until

pytestmark = pytest.mark.acceptance

PATIENCE = 5  # seconds that the receiver asks for


class Doorstep:
    """A receiver that fails the first attempt to each path; `/hang` never answers it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.came: defaultdict[str, list[datetime]] = defaultdict(list)
        self.ids: defaultdict[str, set[str]] = defaultdict(set)
        self.jobs: dict[str, str] = {}
        self.due: dict[str, datetime] = {}
        self.over = threading.Event()
        self.url = ""

    def respond(self, handler: Any, _: int) -> None:
        path = handler.path
        self.came[path].append(datetime.now(timezone.utc))
        self.ids[path].add(handler.hook.headers["webhook-id"])
        if len(self.came[path]) > 1:
            receivers.status(204)(handler, 0)
        elif path == "/hang":
            self.over.wait(60)
        else:
            headers = {"Retry_After": str(PATIENCE)} if path == "/patience" else {}
            receivers.status(503, **headers)(handler, 0)

    def submit(self, path: str) -> None:
        self.jobs[path] = self.site.submit(n=5, callback_url=self.url + path)
        wait_until(lambda: self.came[path], 30, f"the first attempt to {path}")

    def wait_failed(self, path: str) -> None:
        """Waits until the next attempt is a row."""
        self.submit(path)
        shown = wait_until(lambda: self.shown(path).get("next_attempt_at") if self.shown(path)["attempts"] else None)
        self.due[path] = datetime.fromisoformat(shown)

    def shown(self, path: str) -> dict[str, Any]:
        return self.site.get(f"/jobs/{self.jobs[path]}").json()["callback"]

    def wait_told(self, path: str) -> None:
        wait_until(lambda: self.shown(path)["status"] == "delivered", 40, f"{path} is told")
        assert len(self.came[path]) == self.shown(path)["attempts"] == 2 and len(self.ids[path]) == 1
        if path in self.due:
            assert self.came[path][1] >= self.due[path]


@contextlib.contextmanager
def doorstep(site: Site) -> Iterator[Doorstep]:
    made = Doorstep(site)
    with receivers.receiver() as told:
        told.respond, made.url = made.respond, told.url
        site.env |= {"CALLBACK_ALLOW": f"127.0.0.1:{told.port}", "CALLBACK_SCHEDULE_SECONDS": "0,4,4",
                     "CALLBACK_TIMEOUT_SECONDS": "5"}
        try:
            yield made
        finally:
            made.over.set()


def wait_past(moment: datetime) -> None:
    wait_until(lambda: datetime.now(timezone.utc) > moment, 20)


def test_the_schedule_goes_on_whatever_stops(site: Site) -> None:
    with doorstep(site) as door:
        stack, courier, beat = site.start("web", "worker"), site.start_alone("courier"), site.start_alone("beat")
        site.wait_ready()

        door.submit("/hang")
        courier.kill()  # in mid-attempt
        courier = site.start_alone("courier")
        door.wait_failed("/patience")

        door.wait_failed("/flushed")
        with contextlib.closing(redis.Redis.from_url(site.env["REDIS_URL"])) as client:
            assert client.llen("callbacks") == 0  # it waits in SQL alone
            client.flushall()
        door.wait_told("/flushed")

        door.wait_failed("/beatless")
        beat.kill()
        wait_past(door.due["/beatless"] + timedelta(seconds=2))
        assert len(door.came["/beatless"]) == 1
        beat = site.start_alone("beat")
        door.wait_told("/beatless")

        door.wait_failed("/restarted")
        for process in (beat, courier, stack):
            process.popen.terminate()
        for process in (beat, courier, stack):
            assert process.popen.wait(30) == 0
        for lines in (("web", "worker"), ("courier", "beat")):
            site.start(*lines)
        site.wait_answering()
        door.wait_told("/restarted")

        door.wait_told("/patience")
        first, second = door.came["/patience"]
        assert (second - first).total_seconds() >= PATIENCE
        door.wait_told("/hang")
        rows = site.get(f"/jobs/{door.jobs['/hang']}/deliveries").json()["deliveries"]
        assert [(row["attempt"], row["response_code"]) for row in rows] == [(1, None), (2, 204)]
        assert rows[0]["error"].startswith("interrupted")
