"""A courier that is asked to stop, with the Procfile's own processes."""
from __future__ import annotations

import subprocess
import sys

import pytest

from tests.processes import Site
from tests.receiver import Receiver
from tests.servers import wait_until


@pytest.mark.acceptance
def test_a_courier_that_is_asked_to_stop_has_nothing_reserved(site: Site, receiver: Receiver) -> None:
    """Whatever was sent is recorded, once, and what was not waits as it did."""
    site.env["CALLBACK_ALLOW"] = f"127.0.0.1:{receiver.port}"
    seed = [sys.executable, "-m", "bench.callbacks", "seed", receiver.url, "1500"]
    subprocess.run(seed, env=site.env, check=True, timeout=60)
    courier, beat = site.start_alone("courier"), site.start_alone("beat")
    wait_until(lambda: len(receiver.hooks) > 200, 30, "they are being made")
    assert courier.stop(15) == beat.stop(15) == 0
    ended = dict(site.sql("SELECT state, count(*) FROM deliveries GROUP BY state"))
    assert set(ended) == {"delivered", "pending"} and ended["delivered"] == len(receiver.hooks) < 1500
    assert len({hook.headers["webhook-id"] for hook in receiver.hooks}) == len(receiver.hooks)
    assert site.sql("SELECT count(*) FROM delivery_attempts") == [(len(receiver.hooks),)]
    assert site.sql("SELECT DISTINCT attempts FROM deliveries WHERE state = 'pending'") == [(0,)]
    assert site.sql("SELECT count(*) FROM outbox") != [(0,)]  # whoever starts next goes on
