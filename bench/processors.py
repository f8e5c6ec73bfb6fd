"""Who takes what of the processors, by psutil: unlike a rate it hardly depends on what else the machine does."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil

from bench import memory
from bench.rabbitmq import RabbitMQ


@contextlib.contextmanager
def idle(found: dict[str, float], name: str) -> Iterator[None]:
    """Notes which part of the processors nobody used during the block; whoever waits for the disk uses none."""
    before = psutil.cpu_times()
    yield
    after = psutil.cpu_times()
    passed = {field: getattr(after, field) - getattr(before, field) for field in after._fields}
    whole = sum(seconds for field, seconds in passed.items() if not field.startswith("guest"))  # which user has too
    found[name] = (passed["idle"] + passed.get("iowait", 0.0)) / whole


def used(up: Any, rabbit: RabbitMQ | None) -> dict[str, float]:
    """The processor seconds that each sort of process has had until now; the load's are those of what has ended."""
    ended = os.times()
    found = {"the load": ended.children_user + ended.children_system}
    own = [process for begun in up.processes.values() for one in begun for process in one.family()]
    own.append(psutil.Process(up.store.all[0].process.pid))
    for processes, told in (
        (own, memory.name_of), ([] if up.database is None else up.database.family(), lambda _: "postgres"),
        ([] if rabbit is None else rabbit.process.family(), lambda _: "rabbitmq"),
    ):
        _add(found, processes, told)
    return found


def _add(
    found: dict[str, float], processes: list[psutil.Process], told: Callable[[psutil.Process], str | None],
) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            name, times = told(process), process.cpu_times()
            if name is not None:
                name = "web" if name == "web child" else name
                found[name] = found.get(name, 0.0) + times.user + times.system
