"""A real Chromium that reaches this machine only."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

from playwright.sync_api import Browser, sync_playwright

from tests import programs

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run",
          "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """The browser, for the time of a test; nothing of it is left."""
    path = programs.find("Chromium", *_NAMES)
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=path, args=_FLAGS) as started:
        yield started
