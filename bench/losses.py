"""What `kill -9` loses: 200 accepted jobs, then web and store die before a worker has seen one of them; and a job whose
worker dies while it sleeps. All contenders at once: most of it is waiting."""
from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from bench import asking, fleet, stores
from bench.fleet import OURS, OURS_POSTGRESQL, PEERS
from bench.installations import Installation
from tests import servers
from tests.servers import wait_until

ACCEPTED = 200
_NAMES = (OURS, OURS_POSTGRESQL, *PEERS)
_NAP_SECONDS = 600  # it is killed long before
_WAIT_SECONDS = 45  # for a second run: a lease and a rescue of ours are 35


def measure() -> list[dict[str, Any]]:
    """A line for each contender."""
    with stores.postgres() as server, stores.postgres() as killed, ThreadPoolExecutor(1) as beside:
        again = beside.submit(_naps, server)
        kept = {name: _kept(name, killed) for name in _NAMES}
    return [{"contender": name, "accepted": ACCEPTED, "kept": kept[name], "again_seconds": again.result()[name],
             "waited_seconds": _WAIT_SECONDS} for name in _NAMES]


def _kept(name: str, server: servers.Postgres) -> int:
    """How many of the accepted jobs are worked off after web and store have died."""
    with contextlib.closing(fleet.install(name, server)) as installation:
        installation.start_web()
        asking.loaded(installation, "submit", count=ACCEPTED)
        installation.kill("web")
        installation.store.kill()
        installation.store.start_again()
        installation.accepted = installation.waiting()  # that is all that can still be worked off
        installation.start_web()
        installation.start_workers()
        wait_until(lambda: installation.unfinished() <= 0, 240, f"{name} works them off\n{installation.said()}")
        return installation.accepted


def _naps(server: servers.Postgres) -> dict[str, float | None]:
    """After how many seconds each has run the job of a killed worker again; None: not within the time."""
    with contextlib.ExitStack() as stack:
        up: dict[str, Installation] = {}
        for name in _NAMES:
            up[name] = fleet.install(name, server, JOB_MODULES="bench.peers.kinds")
            stack.callback(up[name].close)
        with ThreadPoolExecutor(len(up)) as pool:
            return dict(zip(up, pool.map(_nap, up.values())))


def _nap(installation: Installation) -> float | None:
    installation.start_web()
    installation.start_workers()
    file = installation.folder / "naps"
    _submit_nap(installation, file)
    wait_until(lambda: _begun(file) == 1, 60, f"the job sleeps\n{installation.said()}")
    installation.kill("workers")
    died = time.monotonic()
    installation.start_workers()
    while _begun(file) < 2:
        if time.monotonic() - died > _WAIT_SECONDS:
            return None
        time.sleep(0.2)
    return round(time.monotonic() - died, 1)


def _submit_nap(installation: Installation, file: Path) -> None:
    nap = {"file": str(file), "seconds": _NAP_SECONDS}
    path, more = ("/jobs", {"kind": "nap"}) if installation.ours else ("/naps", {})
    answer = requests.post(f"http://127.0.0.1:{installation.port}{path}", json={**more, **nap}, timeout=30)
    assert answer.status_code == 202, answer.text


def _begun(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0
