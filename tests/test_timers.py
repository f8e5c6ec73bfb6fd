"""What a worker's own process keeps of jobs that are over, and of the broker."""
from __future__ import annotations

import time

from kombu import Connection
from kombu.asynchronous import Hub

from tasks import broker
from tests.servers import Valkey, wait_until


class Consumer(broker.Reconnecting):
    """Celery's consumer with an event loop, and nothing else."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self._events_due_at, self._flush_events = hub, 0.0, list


def test_the_time_limits_of_jobs_that_are_over_are_forgotten() -> None:
    hub, rang = Hub(), []
    limits = [hub.call_later(300, rang.append, "over") for _ in range(3000)]
    kept = [hub.call_later(seconds, rang.append, seconds) for seconds in (0.3, 0.1, 400, 0.2)]
    due = iter(hub.timer)
    assert next(due)[1] is None  # the loop goes through them all the while

    def loop() -> bool:
        _, entry = next(due)
        if entry is not None:
            entry()
        return len(rang) == 3

    for limit in limits:
        limit.cancel()
    Consumer(hub).on_send_event_buffered()
    assert len(hub.timer) == len(kept) + 1  # and the one that sends the events
    wait_until(loop, 10, "those that count ring")
    assert rang == [0.1, 0.2, 0.3]
    hub.close()


def test_time_limits_of_jobs_that_are_not_over_stay() -> None:
    hub = Hub()
    kept = [hub.call_at(time.monotonic() + 300, list) for _ in range(3000)]
    Consumer(hub).on_send_event_buffered()
    assert len(hub.timer) == len(kept) + 1
    hub.close()


def test_a_channel_has_one_client_until_its_connections_are_dropped(valkey: Valkey) -> None:
    with Connection(valkey.url) as connection, connection.channel() as channel:
        assert isinstance(channel, broker.Channel)
        first = channel._create_client()
        assert channel._create_client() is first and first.ping()
        assert channel._create_client(asynchronous=True) is not first
        channel._disconnect_pools()
        assert channel._create_client() is not first and channel._create_client().ping()
