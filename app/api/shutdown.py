"""Whether this process has been asked to stop, for requests that wait: a server waits for their answers, and a
supervisor does not wait for long."""
from __future__ import annotations

import os
import select
import signal

_asked: list[int] = []  # the end of a pipe that can be read from then on


def listen() -> None:
    """From now on the first signal that this process handles ends every `wait`. For the main thread of a server's
    process; whatever handlers it sets stay its own."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    _asked[:] = [reading]


def wait(seconds: float) -> bool:
    """Waits so long; returns True at once when the process has been asked to stop."""
    return bool(select.select(_asked, [], [], seconds)[0])
