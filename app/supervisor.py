"""The Procfile's lines under honcho, for one machine: `make run`.

Unlike honcho alone it asks each line's own process to stop (honcho signals its children too, and a job that runs in one
would die), stops the broker last, starts a line again that has died, and leaves a line alone that was asked to stop.
"""
from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

import honcho.manager
import honcho.process
from honcho.printer import Message, Printer

CANNOT_START = 2  # the exit status of a line that has said why in one line: everything stops
_AGAIN_SECONDS = 1.0  # a line that dies at its start would take a processor otherwise
_LETS_GO_FIRST_SECONDS = 3.0  # the web answers after one or two; a line that never does holds up nobody for longer
_LOOK_SECONDS = 0.1  # each look is a request to a web that starts
_LAST = frozenset({"redis"})  # the others say goodbye to it


class _Group(honcho.process.Popen):
    """A line's own process; when it has ended, whatever it left in its group ends too (granian's workers would go on
    serving), as under any supervisor that knows groups."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        threading.Thread(target=self._end_rest, daemon=True).start()

    def _end_rest(self) -> None:
        self.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class _Line(honcho.process.Process):
    after: Callable[[], bool] = staticmethod(lambda: True)  # what it lets go first, for a moment

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._child_ctor = _Group

    def run(self, events: Any = None, ignore_signals: bool = False) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)  # forked with the supervisor's own handlers
        until = time.monotonic() + _LETS_GO_FIRST_SECONDS
        while not self.after() and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)
        super().run(events, ignore_signals)


class Supervisor(honcho.manager.Manager):
    """honcho's manager with the manners above; its event queue passes through `_Events`."""

    events: Any
    returncode: int | None

    def __init__(self, stop_seconds: float) -> None:
        """`stop_seconds`: what a line gets to stop by itself, before it is killed."""
        honcho.manager.KILL_WAIT = stop_seconds
        super().__init__(Printer(sys.stdout, prefix=True))
        self._process_ctor = _Line
        self.events = _Events(self, self.events)

    def let_go_first(self, first: Collection[str], done: Callable[[], bool]) -> None:
        """The other lines begin once this is done, or a moment later: on few processors all at once would hold up the
        first ones."""
        for name in self.names() - set(first):
            self._processes[name]["obj"].after = done

    @property
    def stopping(self) -> bool:
        return self._terminating

    def loop(self) -> None:
        """Runs the lines until they have stopped; `returncode` is then 0 after a stop that was asked for."""
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # the terminal was closed
        super().loop()
        asked_for = {known["rc"] for known in honcho.manager.SIGNALS.values()}
        self.returncode = 0 if self.returncode in asked_for | {None} else self.returncode

    def names(self) -> set[str]:
        return set(self._processes)

    def forget(self, name: str) -> None:
        """The line was asked to stop, by somebody else; the others run on."""
        del self._processes[name]

    def start_again(self, name: str) -> None:
        process = self._processes[name]
        process["pid"] = None
        process["process"] = multiprocessing.Process(
            name=name, target=process["obj"].run, args=(self.events.queue, True))
        process["process"].start()

    def stop_last_lines(self, stopped: set[str]) -> None:
        """Called when a line has stopped while all are being stopped."""
        left = self.names() - stopped
        if left and left <= _LAST:
            for name in left:
                self.signal(self._processes[name].get("pid"), signal.SIGTERM)

    def signal(self, pid: int | None, number: int) -> None:
        """Signals a line's own process; SIGKILL goes to all that it started, too."""
        with contextlib.suppress(ProcessLookupError):
            if pid is not None:
                (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)

    def _killall(self, force: bool = False) -> None:
        running = {name for name, process in self._processes.items() if "returncode" not in process}
        for name in running if force else running - _LAST or running:
            self.signal(self._processes[name].get("pid"), signal.SIGKILL if force else signal.SIGTERM)


class _Events:
    """The lines' events on their way to honcho, which would stop everything as soon as one line has stopped."""

    def __init__(self, supervisor: Supervisor, events: Any) -> None:
        self.queue = events
        self._supervisor = supervisor
        self._stopped: set[str] = set()
        self._again: list[tuple[float, str]] = []

    def __reduce__(self) -> Any:
        return _itself, (self.queue,)  # where processes are spawned, the lines get the plain queue

    def put(self, message: Message) -> None:
        self.queue.put(message)

    def get(self, timeout: float) -> Message:
        if self._again and (self._supervisor.stopping or time.monotonic() >= self._again[0][0]):
            _, name = self._again.pop(0)
            if self._supervisor.stopping:
                return self._stop(self._message("stop", name, {"returncode": 0}))
            self._supervisor.start_again(name)
        message = self.queue.get(timeout=timeout)
        if message.type == "start" and self._supervisor.stopping:
            self._supervisor.signal(message.data["pid"], signal.SIGTERM)
        if message.type == "stop":
            return self._stop(message)
        return message

    def _stop(self, message: Message) -> Message:
        code = message.data["returncode"]
        if self._supervisor.stopping or code == CANNOT_START:
            self._stopped.add(message.name)
            if self._supervisor.stopping:
                self._supervisor.stop_last_lines(self._stopped)
            return message
        if code == 0:
            self._supervisor.forget(message.name)
            return self._message("line", message.name, "stopped; the others run on\n")
        self._again.append((time.monotonic() + _AGAIN_SECONDS, message.name))
        return self._message("line", message.name, f"died (rc={code}); it is started again\n")

    def _message(self, kind: str, name: str, data: object) -> Message:
        return Message(type=kind, data=data, time=datetime.datetime.now(), name=name, colour=None)


def _itself(events: Any) -> Any:
    return events
