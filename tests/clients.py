"""Clients of a storm: each submits with an idempotency key, repeats after errors, polls, cancels, and complains of
promises that are broken to it."""
from __future__ import annotations

import collections
import contextlib
import http.server
import json
import random
import threading
import time
from collections import Counter, defaultdict
from types import TracebackType
from typing import Any

import requests

from tests import receiver

FINAL = ("succeeded", "failed")
_PATIENCE = 60  # unfinished jobs of one client, before it waits for its oldest: a slow machine is not flooded
_CANCELLED = 0.05  # of all submissions, sooner or later
_PAUSE_SECONDS = 0.25  # between two submissions of one client: below what two workers of two processes can do


def count_hooks(told: receiver.Receiver) -> dict[str, Counter[str]]:
    """Makes the receiver refuse one in ten the first time; returns, a job, how often each webhook id came."""
    hooks: dict[str, Counter[str]] = defaultdict(Counter)

    def respond(handler: http.server.BaseHTTPRequestHandler, number: int) -> None:
        body = json.loads(told.hooks[number - 1].body)
        webhook_id = handler.headers["webhook-id"]
        hooks[body["job_id"]][webhook_id] += 1
        first = hooks[body["job_id"]][webhook_id] == 1
        receiver.status(503 if first and number % 10 == 0 else 204)(handler, number)

    told.respond = respond
    return hooks


class Clients:
    """Some clients at once, for the time of the block."""

    def __init__(self, api: str, callback_url: str, seed: int, number: int) -> None:
        self.api, self.callback_url, self.seed = api, callback_url, seed
        self.acknowledged: dict[str, str] = {}  # job id: its key
        self.submitted = 0
        self.slowest = 0.0  # 202, in seconds
        self.complaints: list[str] = []
        self.finals: dict[str, str] = {}  # job id: the final status that was seen
        self.cancelled: dict[str, bool] = {}  # job id: whether it was said that it will be
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._talk, args=(client,)) for client in range(number)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None,
    ) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def accepted(self) -> list[str]:
        with self._lock:
            return list(self.acknowledged)

    def submit_one(self) -> str:
        """A probe: the smallest job."""
        with requests.Session() as session:
            session.trust_env = False
            return self._submit(session, "/jobs", {"n": 10}, f"probe-{time.monotonic_ns()}")

    def _talk(self, client: int) -> None:
        chance = random.Random(f"{self.seed}-{client}")
        with requests.Session() as session:
            session.trust_env = False
            number, unfinished = 0, collections.deque[str]()
            while not self._over.wait(_PAUSE_SECONDS * chance.uniform(0.5, 1.5)):
                number += 1
                path, body = self._something(chance)
                job_id = self._submit(session, path, body, f"{client}-{number}", again=chance.random() < 0.2)
                if not job_id:
                    return  # the storm is over, and it was never accepted
                self._watch(session, job_id, chance.choice([0, 1, 4]))
                if chance.random() < _CANCELLED:
                    self._cancel(session, job_id)
                if self.finals:
                    self._watch(session, chance.choice(list(self.finals)), 1)
                unfinished.append(job_id)
                while len(unfinished) > _PATIENCE and not self._over.is_set():
                    if self._watch(session, unfinished[0], 1):
                        unfinished.popleft()

    def _something(self, chance: random.Random) -> tuple[str, dict[str, Any]]:
        path, body = chance.choice([
            ("/jobs", {"n": chance.randrange(10**5)}), ("/notes", {"text": f"note {chance.random()}"}),
            ("/jobs", {"kind": "trace", "seconds": round(chance.uniform(0, 1), 2)})])
        return path, {**body, **({"callback_url": self.callback_url} if chance.random() < 0.7 else {})}

    def _submit(
        self, session: requests.Session, path: str, body: dict[str, Any], key: str, again: bool = False,
    ) -> str:
        """Submits until it is accepted: an error is no answer, so the same key goes out again."""
        with self._lock:
            self.submitted += 1
        while (answer := self._post(session, path, body, key)) is None:
            if self._over.wait(0.2) and not key.startswith("probe"):
                return ""
        job_id = answer.json()["job_id"]
        with self._lock:
            if self.acknowledged.setdefault(job_id, key) != key:
                self.complaints.append(f"{job_id} was given to two keys")
        if again and (second := self._post(session, path, body, key)) is not None:
            if second.content != answer.content or "Idempotent-Replayed" not in second.headers:
                self.complaints.append(f"{key}: a repetition got another answer")
        return job_id

    def _post(self, session: requests.Session, path: str, body: dict[str, Any], key: str) -> requests.Response | None:
        began = time.monotonic()
        try:
            answer = session.post(self.api + path, json=body, headers={"Idempotency-Key": key}, timeout=40)
        except requests.RequestException:
            return None
        if answer.status_code == 202:
            self.slowest = max(self.slowest, time.monotonic() - began)
            return answer
        if answer.status_code != 503 or "Retry-After" not in answer.headers:
            self.complaints.append(f"{key}: {answer.status_code} {answer.text[:200]}")
        return None

    def _cancel(self, session: requests.Session, job_id: str) -> None:
        """Asks once: without an answer it may be cancelled or not."""
        self.cancelled[job_id] = False
        with contextlib.suppress(requests.RequestException):
            answer = session.post(f"{self.api}/jobs/{job_id}/cancel", timeout=40)
            self.cancelled[job_id] = answer.status_code == 200
            if answer.status_code not in (200, 409, 503):
                self.complaints.append(f"{job_id}: {answer.status_code} {answer.text[:200]}")

    def _watch(self, session: requests.Session, job_id: str, polls: int) -> bool:
        """Polls some times; returns whether the job has ended."""
        seen: list[str] = []
        for _ in range(polls):
            try:
                answer = session.get(f"{self.api}/jobs/{job_id}", timeout=40)
            except requests.RequestException:
                continue
            if answer.status_code == 503:
                continue
            if answer.status_code != 200:
                self.complaints.append(f"{job_id}: {answer.status_code} {answer.text[:200]}")
                return False
            seen.append(answer.json()["status"])
            threading.Event().wait(0.1)
        ends = [status for status in seen if status in FINAL]
        known = self.finals.get(job_id)
        if known is not None and any(status != known for status in seen):
            self.complaints.append(f"{job_id}: was {known}, then {seen}")
        if ends:
            self.finals[job_id] = ends[0]
        if ends and seen[-len(ends):] != [ends[0]] * len(ends):
            self.complaints.append(f"{job_id}: {seen}")
        return bool(ends)
