"""A RabbitMQ on loopback with data of its own, where `rabbitmq-server` is installed."""
from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kombu import Connection

from tests.processes import Process
from tests.servers import free_port, wait_until

_QUEUES = ("q:jobs2", "relay", "callbacks")
_START_SECONDS = 60  # Erlang takes some ten of them on two busy cores


class RabbitMQ:
    """One that answers."""

    def __init__(self, port: int, process: Process) -> None:
        self.url, self.process = f"amqp://guest:guest@127.0.0.1:{port}//", process

    def empty(self) -> None:
        """Forgets the messages, so that the next installation finds none."""
        with Connection(self.url) as connection:
            for queue in _QUEUES:
                connection.default_channel.queue_delete(queue)


@contextlib.contextmanager
def running() -> Iterator[RabbitMQ | None]:
    """None where it is not installed. It and Erlang's port mapper end with the block."""
    script, mapper = _script(), shutil.which("epmd")
    if script is None or mapper is None:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="rabbitmq-"))
    port, names, others = (free_port() for _ in range(3))
    env = {
        "PATH": os.environ["PATH"], "HOME": str(folder), "ERL_EPMD_ADDRESS": "127.0.0.1", "ERL_EPMD_PORT": str(names),
        "RABBITMQ_NODENAME": f"bench{port}@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port), "RABBITMQ_DIST_PORT": str(others), "RABBITMQ_MNESIA_BASE": f"{folder}/data",
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "RABBITMQ_LOG_BASE": f"{folder}/log", "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/none",
        "RABBITMQ_CONFIG_FILE": f"{folder}/none", "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
    }
    begun = [Process("epmd", [mapper, "-address", "127.0.0.1", "-port", str(names)], env, folder / "epmd.log")]
    try:
        begun.append(Process("rabbitmq", [str(script)], env, folder / "rabbitmq.log"))
        wait_until(lambda: "completed with" in begun[-1].output(), _START_SECONDS, "RabbitMQ answers")
        yield RabbitMQ(port, begun[-1])
    finally:
        for process in reversed(begun):
            process.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _script() -> Path | None:
    """The server's own: what a distribution puts before it would change to another user and to its data."""
    if (found := shutil.which("rabbitmq-server")) is None:
        return None
    own = Path(found).resolve()
    return next(iter(sorted(own.parent.parent.glob("lib/rabbitmq_server-*/sbin/rabbitmq-server"))), own)
