"""What goes wrong: each fault is a function that does it to a town of running processes and returns when it is over."""
from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil
import redis
from pysqlite3 import dbapi2

from tests.processes import Process, Site
from tests.servers import Postgres, Valkey, wait_until

WORKER, COURIER, BEAT, WEB = "tasks worker", "tasks courier", "tasks beat", "-m app.api"


@dataclass
class Town:
    """A site whose lines run under two supervisors, as on two machines, with the servers behind them.

    `scale` shortens the faults that last: 1 is as long as it gets.
    """

    site: Site
    folder: Path
    random: Random
    lease_seconds: float
    scale: float = 1.0
    postgres: Postgres | None = None
    valkey: Valkey | None = None  # given: an outside server, which nobody but the fault starts again
    stacks: list[Process] = field(default_factory=list)

    def start(self) -> None:
        self.stacks = [
            self.site.start("redis", "web", "worker", "courier", "beat"), self.site.start("worker", "courier", "beat")]

    def stop(self) -> None:
        for stack in reversed(self.stacks):
            assert stack.stop(60) == 0

    def client(self) -> redis.Redis:
        """Patient enough for a server that stands still."""
        url = self.site.env.get("REDIS_URL") or f"redis://127.0.0.1:{(self.folder / 'redis.port').read_text().strip()}"
        return redis.Redis.from_url(url, socket_timeout=120, decode_responses=True)

    def server(self) -> psutil.Process:
        """The broker's process."""
        return psutil.Process(wait_until(lambda: self._server_pid(), 30, "Valkey answers"))

    def _server_pid(self) -> int:
        with contextlib.suppress(redis.RedisError), self.client() as client:
            return int(client.info("server")["process_id"])
        return 0

    def kill_server(self, and_its_data: bool = False) -> None:
        process = self.server()
        process.kill()
        if and_its_data:
            folder = self.folder / "redis" if self.valkey is None else self.valkey.folder
            shutil.rmtree(folder / "appendonlydir", ignore_errors=True)
        if self.valkey is not None:
            self.valkey.start_again()
        else:
            wait_until(lambda: not process.is_running(), what="the supervisor has noticed")

    def mains(self, words: str) -> list[psutil.Process]:
        """The processes that are started with these words, without their forks."""
        found = []
        for stack in self.stacks:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in _tree(psutil.Process(stack.popen.pid)):
                    if words in _command(process) and words not in _command(process.parent()):
                        found.append(process)
        return found

    def one(self, words: str) -> psutil.Process:
        return self.random.choice(wait_until(lambda: self.mains(words), 60, f"{words} runs"))

    def wait(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def last(self, seconds: float) -> None:
        """How long a fault lasts."""
        self.wait(seconds * self.scale)


def _command(process: psutil.Process | None) -> str:
    try:
        return "" if process is None else " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


# --- kill -9 ---


def kill_a_child_in_mid_job(town: Town) -> None:
    children = wait_until(lambda: _tree(town.one(WORKER))[1:], what="a worker has children")
    _signal([town.random.choice(children)], signal.SIGKILL)


def kill_a_whole_worker(town: Town) -> None:
    _signal(_tree(town.one(WORKER)), signal.SIGKILL)


def kill_a_workers_main_process(town: Town) -> None:
    _signal([town.one(WORKER)], signal.SIGKILL)


def kill_all_workers(town: Town) -> None:
    _signal([process for main in town.mains(WORKER) for process in _tree(main)], signal.SIGKILL)


def kill_a_courier(town: Town) -> None:
    _signal(_tree(town.one(COURIER)), signal.SIGKILL)


def kill_all_couriers_and_beats(town: Town) -> None:
    _signal([process for words in (COURIER, BEAT) for main in town.mains(words) for process in _tree(main)],
            signal.SIGKILL)


def kill_a_beat(town: Town) -> None:
    _signal([town.one(BEAT)], signal.SIGKILL)


def kill_web_in_mid_request(town: Town) -> None:
    _signal(_tree(town.one(WEB)), signal.SIGKILL)


def kill_the_broker(town: Town) -> None:
    town.kill_server()


# --- frozen ---


@contextlib.contextmanager
def _frozen(processes: list[psutil.Process]) -> Iterator[None]:
    _signal(processes, signal.SIGSTOP)
    try:
        yield
    finally:
        _signal(processes, signal.SIGCONT)


def freeze_a_worker_for_longer_than_its_lease(town: Town) -> None:
    with _frozen(_tree(town.one(WORKER))):
        town.wait(town.lease_seconds + 3)


def freeze_a_courier(town: Town) -> None:
    with _frozen(_tree(town.one(COURIER))):
        town.last(25)


def freeze_a_beat(town: Town) -> None:
    with _frozen([town.one(BEAT)]):
        town.last(30)


# --- the broker ---


def flush_the_broker(town: Town) -> None:
    town.client().flushall()


def restart_the_broker_empty(town: Town) -> None:
    town.kill_server(and_its_data=True)


def restart_the_broker_five_times(town: Town) -> None:
    for _ in range(5):
        town.kill_server()
        town.server()


def kill_the_brokers_connections(town: Town) -> None:
    client = town.client()
    for _ in range(10):
        for sort in ("normal", "pubsub"):
            client.execute_command("CLIENT", "KILL", "TYPE", sort, "SKIPME", "yes")
        town.last(1)


def pause_the_broker(town: Town) -> None:
    with _frozen([town.server()]):
        town.last(30)


def make_the_broker_read_only(town: Town) -> None:
    client = town.client()
    client.execute_command("REPLICAOF", "127.0.0.1", "1")
    town.last(20)
    client.execute_command("REPLICAOF", "NO", "ONE")


def let_the_broker_run_out_of_memory(town: Town) -> None:
    client = town.client()
    client.config_set("maxmemory", "1")
    town.last(20)
    client.config_set("maxmemory", "0")


def leave_a_mutex_behind(town: Town) -> None:
    town.client().set("unacked_mutex", "stuck")
    _signal(_tree(town.one(WORKER)), signal.SIGKILL)


# --- the database ---


def hold_the_database(town: Town) -> None:
    """SQLite: another writer. PostgreSQL: a lock on the jobs table."""
    if town.postgres is not None:
        with town.postgres.connect(town.site.env["DATABASE_URL"]) as connection:
            connection.execute("LOCK TABLE jobs IN ACCESS EXCLUSIVE MODE")
            town.last(60)
    else:
        with contextlib.closing(dbapi2.connect(town.folder / "jobs.sqlite3", timeout=60)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            town.last(10)
            connection.rollback()


def restart_the_database(town: Town) -> None:
    if town.postgres is not None:
        town.postgres.restart(town.random.choice(["fast", "immediate"]))


# --- asked to stop ---


def restart_half(town: Town) -> None:
    assert town.stacks[1].stop(60) == 0
    town.stacks[1] = town.site.start("worker", "courier", "beat")


def restart_everything(town: Town) -> None:
    town.stop()
    town.start()


Fault = Callable[[Town], None]
BROKER_FAULTS: tuple[Fault, ...] = (
    flush_the_broker, restart_the_broker_empty, restart_the_broker_five_times, kill_the_brokers_connections,
    pause_the_broker, make_the_broker_read_only, let_the_broker_run_out_of_memory, leave_a_mutex_behind,
)
FAULTS: tuple[Fault, ...] = (
    kill_a_child_in_mid_job, kill_a_whole_worker, kill_a_workers_main_process, kill_all_workers, kill_a_courier,
    kill_all_couriers_and_beats, kill_a_beat, kill_web_in_mid_request, kill_the_broker,
    freeze_a_worker_for_longer_than_its_lease, freeze_a_courier, freeze_a_beat,
    *BROKER_FAULTS, hold_the_database, restart_the_database, restart_half, restart_everything,
)
